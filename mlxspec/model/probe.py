"""Whether a layout computes mlx-lm's own logits, found by running both on three short prompts.

Rule: the probes do what serving does: ragged batches, prompts cut anywhere, drafts of which a part
is accepted.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, make_prompt_cache

from mlxspec.kernels import Packing
from mlxspec.model import recurrent
from mlxspec.model.pages import Pages
from mlxspec.model.runner import Runner
from mlxspec.types import Draft, Entry, Request, UnsupportedModel
from mlxspec.types import Sequence as Seq

PROMPTS = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9))
CONTINUATION = (2, 7, 1, 8)  # follows each prompt, partly as accepted drafts
REJECTED = 5  # a token that is not in CONTINUATION
DRAFTS = ((7, REJECTED), (7, 1), (REJECTED,))  # one for each prompt, after its first token
ACCEPTED = (1, 2, 0)
BLOCK, BLOCKS = 4, 16  # size and number of the blocks in the pools
TOLERANCE_FP32 = 1e-3  # root mean square error over the standard deviation of the logits
TOLERANCE_HALF = 0.1


def reference_logits(model: Module) -> tuple[list[mx.array], int]:
    """mlx-lm's logits [1 + len(CONTINUATION), vocab] for each prompt, from its last token on.

    Also the bytes that mlx-lm's own caches hold for one of them.
    """
    logits, cache_bytes = [], 0
    for prompt in PROMPTS:
        cache = make_prompt_cache(model)
        rows = [model(mx.array([prompt]), cache=cache)[0, -1]]
        for token in CONTINUATION:
            rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
        logits.append(mx.stack(rows))
        cache_bytes = bytes_of([layer.state for layer in cache])
    mx.eval(logits)
    return logits, cache_bytes


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    leaves: Any = tree_flatten(tree)
    return sum(int(array.nbytes) for _, array in leaves if isinstance(array, mx.array))


def probe_logits(runner: Runner) -> tuple[list[mx.array], int]:
    """The runner's logits for what `reference_logits` computes, all prompts in one batch.

    Also the bytes of one sequence's recurrent state.
    """
    seqs = [Seq(Request("probe", prompt, 1), tokens=list(prompt)) for prompt in PROMPTS]
    logits: dict[Seq, list[mx.array]] = {seq: [] for seq in seqs}
    first_block = 1
    for seq in seqs:
        end = first_block - (len(seq.tokens) + len(CONTINUATION)) // -BLOCK
        seq.table = list(range(first_block, end))
        first_block = end

    def step(plan: list[Entry], accepted: Sequence[int] = (0, 0, 0)) -> None:
        rows = runner.logits(plan)
        mx.eval(rows)
        runner.rollback(plan, [e.count + n for e, n in zip(plan, accepted, strict=False)])
        row = 0
        for entry, n in zip(plan, accepted, strict=False):
            if entry.samples:
                logits[entry.seq].append(rows[row : row + n + 1])
            row += entry.sampled
            entry.seq.tokens += entry.draft.tokens[:n]
            entry.seq.computed = entry.start + entry.count + n

    step([Entry(seq, 0, 2, False) for seq in seqs])
    step([Entry(seq, 2, len(seq.tokens) - 2, True) for seq in seqs])
    if runner.layout != "solo" and runner.states.rollback_supported:
        plan = []
        for seq, draft in zip(seqs, DRAFTS, strict=True):
            seq.tokens.append(CONTINUATION[0])
            plan.append(Entry(seq, seq.computed, 1, True, draft=Draft(draft, "probe")))
        step(plan, ACCEPTED)
    while True:
        plan = []
        for seq in seqs:
            generated = len(seq.tokens) - len(seq.request.prompt)
            if generated < len(CONTINUATION):
                seq.tokens.append(CONTINUATION[generated])
                plan.append(Entry(seq, seq.computed, 1, True))
        if not plan:
            break
        step(plan)
    state_bytes = recurrent.nbytes(seqs[0].state) if runner.states.layers else 0
    return [mx.concatenate(logits[seq]) for seq in seqs], state_bytes


def logits_error(logits: Sequence[mx.array], reference: Sequence[mx.array]) -> str:
    """How the logits differ by more than rounding explains, or ""."""
    for rows, expected in zip(logits, reference, strict=True):
        a, b = (np.array(x.astype(mx.float32)) for x in (rows, expected))
        allowed = ~np.isneginf(b)  # some models mask tokens with -inf
        if (allowed == np.isneginf(a)).any():
            return "other tokens are masked"
        rmse = np.sqrt(np.mean(np.square(a[allowed] - b[allowed])))
        error = float(rmse / max(b[allowed].std(), 1e-6))
        if not error <= (TOLERANCE_FP32 if expected.dtype == mx.float32 else TOLERANCE_HALF):
            return f"logits are off by {error:.2g} standard deviations"
    return ""


class _RoundingPages:
    """A layer's cache that quantizes and dequantizes K/V before they are stored unquantized."""

    def __init__(self, cache: Pages, bits: int) -> None:
        self._cache, self._bits = cache, bits

    def update_and_fetch(self, k: mx.array, v: mx.array) -> Any:
        k, v = (Packing(x.shape[-1], x.dtype, self._bits).round(x) for x in (k, v))
        return self._cache.update_and_fetch(k, v)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _rounding(cache: Any, bits: int) -> Any:
    if isinstance(cache, CacheList):
        inner = [_rounding(part, bits) for part in cache.caches]
        return CacheList(*inner)  # type: ignore[no-untyped-call]
    return _RoundingPages(cache, bits) if isinstance(cache, Pages) else cache


def quantized_runner(plain: Runner, bits: int) -> Runner:
    """The runner `plain` with K/V pools quantized to `bits`. Raises UnsupportedModel.

    Its logits must equal those of unquantized pools that store rounded K/V. Comparing with
    unrounded K/V would tell nothing: on meaningless prompts, rounding alone moves a good model's
    logits by more than their standard deviation.
    """
    if not plain.pages() and plain.layout != "solo":
        raise UnsupportedModel(f"kv_bits = {bits}: the model keeps no K/V; give 0")
    options: dict[str, Any] = {
        "trunk": plain.trunk,
        "lone": plain.lone,
        "rollback": plain.states.rollback_supported,
    }
    quantized = Runner(plain.model, plain.layout, BLOCK, BLOCKS, kv_bits=bits, **options)
    logits, _ = probe_logits(quantized)
    rounding = Runner(plain.model, plain.layout, BLOCK, BLOCKS, **options)
    rounding.caches = [_rounding(cache, bits) for cache in rounding.caches]
    if error := logits_error(logits, probe_logits(rounding)[0]):
        raise UnsupportedModel(
            f"kv_bits = {bits}: quantized K/V are not read back as stored: {error}; give 0"
        )
    return quantized

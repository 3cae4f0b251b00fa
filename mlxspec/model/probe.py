"""Whether a layout gives mlx-lm's own logits, found by running both on three short prompts.

Rule: what is served later is what is tried here: ragged batches, cut prompts, drafts that are
partly refused.
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
from mlxspec.types import Draft, Entry, Request, UnsupportedModel, UserError
from mlxspec.types import Sequence as Seq

PROBES = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9))
TAIL = (2, 7, 1, 8)  # tokens fed after each probe: one alone, then the others as drafts
WRONG = 5
# Drafts of the probes, and how many tokens of each stand: two go into one forward, one is refused
# whole.
DRAFTS = (((7, WRONG), 1), ((7, 1), 2), ((WRONG,), 0))
BLOCK, BLOCKS = 4, 16  # of the pools that are tried
TOLERANCE = {
    mx.float32: 1e-3
}  # root mean square error over the logits' deviation; half precision below
HALF = 0.1


def truth(model: Module) -> tuple[list[mx.array], int]:
    """mlx-lm's logits [1 + len(TAIL), vocab] after each probe and each token of the tail; and the
    bytes that mlx-lm's own caches hold for one of them."""
    found, held = [], 0
    for probe in PROBES:
        cache = make_prompt_cache(model)
        rows = [model(mx.array([probe]), cache=cache)[0, -1]]
        for token in TAIL:
            rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
        found.append(mx.stack(rows))
        held = bytes_of([c.state for c in cache])
    mx.eval(found)
    return found, held


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    leaves: Any = tree_flatten(tree)
    return sum(int(a.nbytes) for _, a in leaves if isinstance(a, mx.array))


def probe(runner: Runner) -> tuple[list[mx.array], int]:
    """Run the probes as one ragged batch: prompts, a decode, drafts of which a part stands, what is
    left. Logits as in `truth`, and the bytes that a sequence's recurrent layers carry."""
    seqs = [Seq(Request("probe", p, len(TAIL) + 1), tokens=list(p)) for p in PROBES]
    blocks = iter(range(1, 16))
    for seq in seqs:
        seq.table = [next(blocks) for _ in range(-(-(len(seq.tokens) + len(TAIL)) // 4))]
    got: dict[Seq, list[mx.array]] = {seq: [] for seq in seqs}

    def step(plan: list[Entry], kept: Sequence[int] = (0, 0, 0)) -> None:
        logits, at = runner.logits(plan), 0
        mx.eval(logits)
        runner.rollback(plan, [e.count + n for e, n in zip(plan, kept, strict=False)])
        for e, n in zip(plan, kept, strict=False):
            got[e.seq] += [logits[at : at + n + 1]] if e.samples else []
            at += e.sampled
            e.seq.tokens += list(e.draft.tokens[:n])
            e.seq.computed = e.start + e.count + n

    step(
        [Entry(s, 0, 2, False) for s in seqs]
    )  # the engine cuts prompts, so where it cuts must not matter
    step([Entry(s, 2, len(s.tokens) - 2, True) for s in seqs])
    for seq in seqs:
        seq.tokens.append(TAIL[0])
    if runner.layout != "solo" and runner.states.rollback_supported:
        plan = [
            Entry(s, s.computed, 1, True, draft=Draft(d, "probe"))
            for s, (d, _) in zip(seqs, DRAFTS, strict=True)
        ]
        step(plan, [n for _, n in DRAFTS])
    while open_ := [s for s in seqs if s.computed < len(s.request.prompt) + len(TAIL)]:
        for seq in open_:
            known = len(seq.tokens) - len(seq.request.prompt)
            if len(seq.tokens) == seq.computed:
                seq.tokens.append(TAIL[known])
        step([Entry(s, s.computed, len(s.tokens) - s.computed, True) for s in open_])
    carried = recurrent.nbytes(seqs[0].state) if runner.states.layers else 0
    return [mx.concatenate(got[s]) for s in seqs], carried


def differ(got: Sequence[mx.array], truth: Sequence[mx.array]) -> str:
    """How the logits differ by more than rounding explains; empty: they do not."""
    for rows, want in zip(got, truth, strict=True):
        a, b = (np.array(x.astype(mx.float32)) for x in (rows, want))
        open_ = ~np.isneginf(b)  # a model may rule tokens out
        if (open_ == np.isneginf(a)).any():
            return "other tokens are ruled out"
        error = float(np.sqrt(np.mean(np.square(a[open_] - b[open_]))) / max(b[open_].std(), 1e-6))
        if not error <= TOLERANCE.get(want.dtype, HALF):
            return f"logits are off by {error:.2g} of their deviation"
    return ""


class _Rounded:
    """Stands in for a layer's cache: K/V are quantized and back before they reach it."""

    def __init__(self, cache: Pages, bits: int) -> None:
        self._cache, self._bits = cache, bits

    def update_and_fetch(self, k: mx.array, v: mx.array) -> Any:
        rounded = (Packing(x.shape[-1], x.dtype, self._bits).round(x) for x in (k, v))
        return self._cache.update_and_fetch(*rounded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _rounded(cache: Any, bits: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_rounded(c, bits) for c in cache.caches))  # type: ignore[no-untyped-call]
    return _Rounded(cache, bits) if isinstance(cache, Pages) else cache


def packed(plain: Runner, bits: int, refused: Sequence[str]) -> Runner:
    """The runner with quantized pools, which must give what `plain`, found to be right, gives where
    K/V are rounded on their way in. How far the rounding moves the logits says nothing: on probes
    without a meaning a good model's move by more than they vary. Raises UnsupportedModel, with what
    was `refused` before."""
    how: dict[str, Any] = dict(
        trunk=plain.trunk, lone=plain.lone, rollback=plain.states.rollback_supported
    )
    if not plain.pages() and plain.layout != "solo":
        raise UnsupportedModel(f"kv_bits = {bits}: the model keeps no K/V; give 0")
    try:
        runner = Runner(plain.model, plain.layout, BLOCK, BLOCKS, kv_bits=bits, **how)
        got, _ = probe(runner)
        plain = Runner(plain.model, plain.layout, BLOCK, BLOCKS, **how)
        plain.caches = [_rounded(cache, bits) for cache in plain.caches]
        error = differ(got, probe(plain)[0])
    except UserError as reason:
        raise UnsupportedModel("; ".join((str(reason), *refused))) from reason
    if error:
        raise UnsupportedModel(
            f"kv_bits = {bits}: what is read back is not what was rounded: {error}; give 0"
        )
    return runner

"""Loads an mlx-lm model and finds the layout it runs in, by trying.

Rule: fail loud at load, never silently slow. A layout must reproduce mlx-lm's own logits on a ragged probe;
the first that does is used, and why the earlier ones were not is logged.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxspec.model import states
from mlxspec.model.runner import Layout, Rewind, Runner
from mlxspec.types import Draft, Entry, Request, Unfit
from mlxspec.types import Sequence as Seq

log = logging.getLogger("mlxspec")

PROBES = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9))
TAIL = (2, 7, 1, 8)  # tokens fed after each probe: one alone, then the others as drafts
WRONG = 5
# Drafts of the probes, and how many tokens of each stand: two go into one forward, one is refused whole.
DRAFTS = (((7, WRONG), 1), ((7, 1), 2), ((WRONG,), 0))
# In order of speed; alone: one sequence at a time.
WAYS: tuple[tuple[Layout, bool], ...] = (
    ("rows", False),
    ("rect", False),
    ("gather", False),
    ("rect", True),
    ("gather", True),
    ("solo", True),
)
TOLERANCE = {mx.float32: 1e-3}  # root mean square error over the logits' deviation; half precision below
HALF = 0.1
READ_AT_ONCE = 256 << 20  # bytes of weights; keeps the disk busy, and what a conversion holds twice small
TELL_S = 2.0
KV_STEP = 256  # tokens by which mlx-lm's own KV caches grow
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model runs here. `token_bytes` is the KV memory of one token in all layers that see everything,
    `windows` that of layers which see the last so many tokens, by these. `state_bytes` is the memory of one
    sequence's recurrent layers, and `rewind` how these take a draft back, if there are any."""

    layout: Layout
    trunk: bool
    lone: bool
    token_bytes: int
    windows: Mapping[int, int]
    vocab: int
    refused: tuple[str, ...] = ()
    state_bytes: int = 0
    rewind: Rewind | None = None

    @property
    def sharing(self) -> bool:
        """Whether what is known of a prefix can be handed on."""
        return self.layout != "solo"

    @property
    def drafts(self) -> int:
        """Up to how many known rows an entry may take a draft: what takes it back out of a state is recorded
        for, or fed again with, all rows of the entry."""
        return 0 if self.layout == "solo" else states.SHORT if self.state_bytes else 1 << 31

    def runner(
        self, model: Module, block_size: int, blocks: int, windows: Mapping[int, int] | None = None
    ) -> Runner:
        """`windows` are the blocks of each window that is to have its own."""
        how: dict[str, Any] = dict(trunk=self.trunk, lone=self.lone, rewind=self.rewind or "tape")
        return Runner(model, self.layout, block_size, blocks, windows=windows, **how)


def load(path: Path) -> tuple[Module, dict[str, Any]]:
    """The model and its config. The weights stay on disk until `read`. Raises Unfit with what is wrong."""
    try:
        model, config = load_model(path, lazy=True)
    except (ValueError, KeyError, FileNotFoundError, TypeError) as error:
        raise Unfit(f"mlx-lm cannot load {path}: {error}") from error
    except SystemExit as error:  # one of its models ends the process where a package is missing
        raise Unfit(f"mlx-lm cannot load {path}: it asks for a package; its line above says which") from error
    model.eval()
    return model, config


def context_of(config: dict[str, Any]) -> int:
    """The longest context the model was made for, in tokens; 8192 where its config does not say."""
    for part in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    log.warning("the model's config names no context length; 8192 tokens are assumed")
    return 8192


def weights(model: Module) -> int:
    """Bytes of the model's parameters."""
    return _bytes(model.parameters())


def geometry(model: Module) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """What the model's own caches keep, in bytes: of one token in its layers with full attention, as (window,
    bytes of one token) in those with a window, and of one sequence in recurrent ones. Found by a forward
    that is never evaluated, so that no weight is read; all 0 where the model's code does not run so."""
    token, state, windows = 0, 0, Counter[int]()
    try:
        caches = make_prompt_cache(model)
        model(mx.array([PROBES[0]]), cache=caches)
        for cache in (part for c in caches for part in getattr(c, "caches", (c,))):
            leaves: Any = tree_flatten(cache.state)
            arrays = [a for _, a in leaves if isinstance(a, mx.array)]
            if isinstance(cache, ArraysCache):
                state += sum(a.nbytes for a in arrays)
                continue
            size = sum(a.nbytes // a.shape[2] for a in arrays if a.ndim == 4)  # [B, heads, S, D]
            if isinstance(cache, RotatingKVCache):
                windows[cache.max_size] += size
            else:
                token += size
    except Exception as failed:  # whatever the model's own code raises; `fit` says it if it stays so
        log.info("what the model's caches take is not known before its weights are read: %s", failed)
        return 0, (), 0
    return token, tuple(sorted(windows.items())), state


def read(model: Module) -> None:
    """Bring the weights into memory, telling how far where that takes long. Raises Unfit where they cannot
    be read."""
    leaves: Any = tree_flatten(model.parameters())
    total, done, told = weights(model), 0, time.monotonic()
    batch: list[mx.array] = []
    for n, (_, array) in enumerate(leaves, 1):
        batch.append(array)
        if n < len(leaves) and sum(a.nbytes for a in batch) < READ_AT_ONCE:
            continue
        try:
            mx.eval(batch)
        except RuntimeError as error:
            raise Unfit(f"the weights cannot be read: {error}") from error
        done += sum(a.nbytes for a in batch)
        batch.clear()
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            log.info("%.1f of %.1f GiB of weights read", done / 2**30, total / 2**30)


def fit(model: Module, wanted: str = "auto") -> Fit:
    """Try the layouts in order of speed, or only `wanted`. Raises Unfit, naming each refusal."""
    try:
        truth, held = _truth(model)
    except Exception as failed:  # whatever the model's own code raises
        raise Unfit(f"mlx-lm itself cannot run this model here: {failed}") from failed
    refused: list[str] = []
    rewinds: tuple[Rewind, Rewind] = ("tape", "refeed")
    for (layout, lone), trunk, rewind in product(WAYS, (True, False), rewinds):
        if wanted not in ("auto", layout):
            continue
        way = layout + ", one sequence at a time" * (lone and layout != "solo")
        way += ", whole lm_head" * (not trunk)
        try:
            runner = Runner(model, layout, 4, 16, trunk=trunk, lone=lone, rewind=rewind)
            stateful = bool(runner.states.layers)
            if (trunk and not runner.trunk) or (rewind == "refeed" and not stateful):
                continue
            way += f", drafts taken back by {rewind}" * stateful
            error, carried = _probe(runner, truth)
        except Exception as failed:  # the model's own code decides what it raises
            error, carried = f"{type(failed).__name__}: {str(failed).partition(chr(10))[0]}", 0
        if error:
            refused += [reason] if (reason := f"{way}: {error}") not in refused else []
            continue
        sizes: dict[int | None, int] = {None: -(-held // KV_STEP) if layout == "solo" else 0}
        for pages in runner.pages():
            kept = sum(pool.nbytes for pool in pages.pools()) // (4 * 16)
            sizes[pages.window] = sizes.get(pages.window, 0) + kept
        windows = {w: size for w, size in sizes.items() if w}
        vocab, took = truth[0].shape[-1], rewind if stateful else None
        return Fit(layout, trunk, lone, sizes[None], windows, vocab, tuple(refused), carried, took)
    raise Unfit("no layout reproduces mlx-lm's logits for this model: " + "; ".join(refused))


def growth(work: Callable[[], None]) -> int:
    """Bytes that `work` takes at its peak beyond what MLX holds now. Ends with MLX's spare buffers freed."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    work()
    grown = mx.get_peak_memory() - before
    mx.clear_cache()
    return grown


def _truth(model: Module) -> tuple[list[mx.array], int]:
    """mlx-lm's logits [1 + len(TAIL), vocab] after each probe and each token of the tail; and the bytes that
    mlx-lm's own caches hold for one of them."""
    found, held = [], 0
    for probe in PROBES:
        cache = make_prompt_cache(model)
        rows = [model(mx.array([probe]), cache=cache)[0, -1]]
        for token in TAIL:
            rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
        found.append(mx.stack(rows))
        held = _bytes([c.state for c in cache])
    mx.eval(found)
    return found, held


def _bytes(tree: Any) -> int:
    leaves: Any = tree_flatten(tree)
    return sum(int(a.nbytes) for _, a in leaves if isinstance(a, mx.array))


def _probe(runner: Runner, truth: Sequence[mx.array]) -> tuple[str, int]:
    """Run the probes as one ragged batch: prompts, a decode, drafts of which a part stands, what is left. How
    the logits differ, "" if they do not, and the bytes that a sequence's recurrent layers carry."""
    seqs = [Seq(Request("probe", p, len(TAIL) + 1), tokens=list(p)) for p in PROBES]
    blocks = iter(range(1, 16))
    for seq in seqs:
        seq.table = [next(blocks) for _ in range(-(-(len(seq.tokens) + len(TAIL)) // 4))]
    got: dict[Seq, list[mx.array]] = {seq: [] for seq in seqs}

    def step(plan: list[Entry], kept: Sequence[int] = (0, 0, 0)) -> None:
        logits, at = runner.logits(plan), 0
        mx.eval(logits)
        runner.rewind(plan, [e.count + n for e, n in zip(plan, kept, strict=False)])
        for e, n in zip(plan, kept, strict=False):
            got[e.seq] += [logits[at : at + n + 1]] if e.samples else []
            at += e.sampled
            e.seq.tokens += list(e.draft.tokens[:n])
            e.seq.again = e.count + n if e.undone else 0
            e.seq.computed = e.start + e.count + n - e.seq.again

    step([Entry(s, 0, 2, False) for s in seqs])  # the engine cuts prompts, so where it cuts must not matter
    step([Entry(s, 2, len(s.tokens) - 2, True) for s in seqs])
    for seq in seqs:
        seq.tokens.append(TAIL[0])
    if runner.layout != "solo":  # its caches cannot take a draft back, so none is ever given to it
        plan = [
            Entry(s, s.computed, 1, True, draft=Draft(d, "probe"))
            for s, (d, _) in zip(seqs, DRAFTS, strict=True)
        ]
        step(plan, [n for _, n in DRAFTS])
    while open_ := [s for s in seqs if s.computed < len(s.request.prompt) + len(TAIL)]:
        for seq in open_:
            known = len(seq.tokens) - len(seq.request.prompt)
            if len(seq.tokens) == seq.computed + seq.again:
                seq.tokens.append(TAIL[known])
        step([Entry(s, s.computed, len(s.tokens) - s.computed, True) for s in open_])
    carried = states.size(seqs[0].state) if runner.states.layers else 0
    return _difference([mx.concatenate(got[s]) for s in seqs], truth), carried


def _difference(got: Sequence[mx.array], truth: Sequence[mx.array]) -> str:
    for rows, want in zip(got, truth, strict=True):
        a, b = (np.array(x.astype(mx.float32)) for x in (rows, want))
        open_ = ~np.isneginf(b)  # a model may rule tokens out
        if (open_ == np.isneginf(a)).any():
            return "other tokens are ruled out"
        error = float(np.sqrt(np.mean(np.square(a[open_] - b[open_]))) / max(b[open_].std(), 1e-6))
        if not error <= TOLERANCE.get(want.dtype, HALF):
            return f"logits are off by {error:.2g} of their deviation"
    return ""

"""Loads an mlx-lm model and finds the layout it runs in, by trying.

Rule: fail loud at load, never silently slow. A layout must reproduce mlx-lm's own logits on a ragged probe;
the first that does is used, and why the earlier ones were not is logged.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxspec.model.runner import LAYOUTS, Layout, Runner
from mlxspec.types import Draft, Entry, Request, Unfit
from mlxspec.types import Sequence as Seq

log = logging.getLogger("mlxspec")

PROBES = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9))
TAIL = (2, 7, 1)  # tokens fed after each probe: one alone, then the other two as a draft
TOLERANCE = {mx.float32: 1e-3}  # root mean square error over the logits' deviation; half precision below
HALF = 0.1
KV_STEP = 256  # tokens by which mlx-lm's own KV caches grow
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model runs here. `token_bytes` is the KV memory of one token in all layers that see everything,
    `windows` that of layers which see the last so many tokens, by these."""

    layout: Layout
    trunk: bool
    lone: bool
    token_bytes: int
    windows: Mapping[int, int]
    vocab: int
    refused: tuple[str, ...] = ()

    def runner(
        self, model: Module, block_size: int, blocks: int, windows: Mapping[int, int] | None = None
    ) -> Runner:
        """`windows` are the blocks of each window that is to have its own."""
        return Runner(
            model, self.layout, block_size, blocks, windows=windows, trunk=self.trunk, lone=self.lone
        )


def load(path: Path) -> tuple[Module, dict[str, Any]]:
    """The model with its weights in memory, and its config. Raises Unfit with what is wrong."""
    try:
        model, config = load_model(path)
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


def fit(model: Module, wanted: str = "auto") -> Fit:
    """Try the layouts in order of speed, or only `wanted`. Raises Unfit, naming each refusal."""
    try:
        truth, held = _truth(model)
    except Exception as failed:  # whatever the model's own code raises
        raise Unfit(f"mlx-lm itself cannot run this model here: {failed}") from failed
    refused: list[str] = []
    for layout in LAYOUTS if wanted == "auto" else [name for name in LAYOUTS if name == wanted]:
        for lone in (False, True) if layout == "gather" else (layout == "solo",):
            for trunk in (True, False):
                way = (
                    layout
                    + (", one sequence at a time" if lone else "")
                    + ("" if trunk else ", whole lm_head")
                )
                try:
                    runner = Runner(model, layout, 4, 16, trunk=trunk, lone=lone)
                    if trunk and not runner.trunk:
                        continue
                    if (error := _probe(runner, truth)) is not None:
                        refused.append(f"{way}: {error}")
                        continue
                except Exception as error:  # the model's own code decides what it raises
                    refused.append(f"{way}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                    continue
                sizes: dict[int | None, int] = {None: -(-held // KV_STEP) if layout == "solo" else 0}
                for pages in runner.pages():
                    kept = sum(pool.nbytes for pool in pages.pools()) // (4 * 16)
                    sizes[pages.window] = sizes.get(pages.window, 0) + kept
                windows = {w: size for w, size in sizes.items() if w}
                vocab = truth[0].shape[-1]
                return Fit(layout, trunk, lone, sizes[None], windows, vocab, tuple(refused))
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


def _probe(runner: Runner, truth: Sequence[mx.array]) -> str | None:
    """Run the probes as one ragged batch: prompts, a decode, a draft. None, or how the logits differ."""
    seqs = [Seq(Request("probe", p, len(TAIL) + 1), tokens=list(p)) for p in PROBES]
    blocks = iter(range(1, 16))
    for seq in seqs:
        seq.table = [next(blocks) for _ in range(-(-(len(seq.tokens) + len(TAIL)) // 4))]
    got: list[list[mx.array]] = [[] for _ in seqs]

    def step(count: Callable[[Seq], int], draft: tuple[int, ...] = (), samples: bool = True) -> None:
        plan = [Entry(s, s.computed, count(s), samples, draft=Draft(draft, "probe")) for s in seqs]
        logits, at = runner.logits(plan), 0
        mx.eval(logits)
        for e, rows in zip(plan, got, strict=True):
            rows += [logits[at : at + e.sampled]] if samples else []
            at += e.sampled
            e.seq.computed = e.end
            e.seq.tokens += draft

    step(lambda s: 2, samples=False)  # the engine cuts prompts, so where it cuts must not matter
    step(lambda s: len(s.tokens) - 2)
    for seq in seqs:
        seq.tokens.append(TAIL[0])
    if runner.layout == "solo":  # its caches cannot take a draft back, so none is ever given to it
        step(lambda s: 1)
        for token in TAIL[1:]:
            for seq in seqs:
                seq.tokens.append(token)
            step(lambda s: 1)
    else:
        step(lambda s: 1, TAIL[1:])
    for rows, want in zip(got, truth, strict=True):
        a, b = (np.array(x.astype(mx.float32)) for x in (mx.concatenate(rows), want))
        open_ = ~np.isneginf(b)  # a model may rule tokens out
        if (open_ == np.isneginf(a)).any():
            return "other tokens are ruled out"
        error = float(np.sqrt(np.mean(np.square(a[open_] - b[open_]))) / max(b[open_].std(), 1e-6))
        if not error <= TOLERANCE.get(want.dtype, HALF):
            return f"logits are off by {error:.2g} of their deviation"
    return None

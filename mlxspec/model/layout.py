"""Loads an mlx-lm model and finds the layout it runs in, by trying.

Rule: fail loudly at load, never run silently slow. The first layout that reproduces mlx-lm's own
logits is used; why the faster ones were refused is logged.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxspec.kernels import Packing
from mlxspec.model import quantized
from mlxspec.model.probe import (
    BLOCK,
    BLOCKS,
    PROMPTS,
    bytes_of,
    logits_error,
    probe_logits,
    quantized_runner,
    reference_logits,
)
from mlxspec.model.runner import Layout, Runner
from mlxspec.types import UnsupportedModel, blame, line_of

log = logging.getLogger("mlxspec")

# Fastest first; the flag: one sequence at a time.
LAYOUTS: tuple[tuple[Layout, bool], ...] = (
    ("rows", False),
    ("rect", False),
    ("gather", False),
    ("rect", True),
    ("gather", True),
    ("solo", True),
)
BATCH_BYTES = 256 << 20  # of weights read at once: keeps the disk busy, a dtype conversion small
LOG_EVERY_S = 2.0
KV_STEP = 256  # tokens by which mlx-lm's own KV caches grow
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
DEFAULT_CONTEXT = 8192


class CacheBytes(NamedTuple):
    """What a model caches, in bytes."""

    token: int  # for one token, in layers with full attention
    windows: tuple[tuple[int, int], ...]  # (window, bytes for one token), by window
    state: int  # for one sequence, in recurrent layers


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout of a model, and what its caches take there.

    `token_bytes` is the KV memory of one token in the layers with full attention, `windows` that
    in the layers of each sliding window, `state_bytes` one sequence's recurrent state.
    """

    layout: Layout
    trunk: bool  # lm_head runs on sampled rows only
    lone: bool  # one sequence at a time
    token_bytes: int
    windows: Mapping[int, int]
    vocab: int
    refused: tuple[str, ...] = ()  # faster layouts, each with the reason
    state_bytes: int = 0
    rollback: bool = True  # recurrent layers, if any, can drop rejected drafts
    kv_bits: int = 0
    sure: bool = True  # no layout was refused for what may have been lack of memory

    @property
    def cache_bytes(self) -> CacheBytes:
        """As `geometry`, measured by running the model."""
        return CacheBytes(self.token_bytes, tuple(sorted(self.windows.items())), self.state_bytes)

    @property
    def sharing(self) -> bool:
        """Whether sequences can share a cached prefix."""
        return self.layout != "solo"

    @property
    def drafts(self) -> bool:
        """Whether rejected drafts can be rolled back."""
        return self.layout != "solo" and self.rollback

    def runner(
        self, model: Module, block_size: int, blocks: int, windows: Mapping[int, int] | None = None
    ) -> Runner:
        """A runner with `blocks` in its pool, and `windows` in the pools of sliding windows."""
        return Runner(
            model,
            self.layout,
            block_size,
            blocks,
            windows=windows,
            trunk=self.trunk,
            lone=self.lone,
            rollback=self.rollback,
            kv_bits=self.kv_bits,
        )


def load(path: Path) -> tuple[Module, dict[str, Any]]:
    """The model and its config; the weights stay on disk until `load_weights`.

    Raises UnsupportedModel.
    """
    try:
        model, config = load_model(path, lazy=True)
    except Exception as error:  # foreign code reads foreign files
        raise UnsupportedModel(
            f"mlx-lm cannot load {path}: {blame(error)}; give a complete model directory"
        ) from error
    except SystemExit as error:  # some of its models exit where a package is missing
        raise UnsupportedModel(
            f"mlx-lm cannot load {path}: the package it names above is missing"
        ) from error
    # Each layer drew initial weights that nobody computes; MLX's random state would keep the graph
    # of all these draws.
    mx.eval(mx.random.state)
    model.eval()
    quantized.install(model)
    return model, config


def context_of(config: dict[str, Any]) -> int:
    """The longest context the model was trained for, in tokens; 8192 if its config has none."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    log.warning("config.json names no context length; assuming %d tokens", DEFAULT_CONTEXT)
    return DEFAULT_CONTEXT


def weights(model: Module) -> int:
    """Bytes of the model's parameters."""
    return bytes_of(model.parameters())


def geometry(model: Module, kv_bits: int = 0) -> CacheBytes:
    """What the model's caches take, quantized to `kv_bits` if not 0, before any weight is read.

    Found by a forward pass that is never evaluated; all 0 where the model's code cannot run so.
    """
    token, state, windows = 0, 0, Counter[int]()
    try:
        caches = make_prompt_cache(model)
        model(mx.array([PROMPTS[0]]), cache=caches)
        for cache in (part for c in caches for part in getattr(c, "caches", (c,))):
            leaves: Any = tree_flatten(cache.state)
            arrays = [array for _, array in leaves if isinstance(array, mx.array)]
            if isinstance(cache, ArraysCache):
                state += sum(array.nbytes for array in arrays)
                continue
            size = sum(_token_bytes(array, kv_bits) for array in arrays if array.ndim == 4)
            if isinstance(cache, RotatingKVCache):
                windows[cache.max_size] += size
            else:
                token += size
    except Exception as failure:  # the model's own code; `find_layout` reports it if it persists
        log.info("the size of the model's caches is unknown before it is loaded: %s", failure)
        return CacheBytes(0, (), 0)
    return CacheBytes(token, tuple(sorted(windows.items())), state)


def _token_bytes(kv: mx.array, kv_bits: int) -> int:
    """Bytes of one token in K or V [1, heads, tokens, dim]."""
    _, heads, _, dim = kv.shape
    row = 4 * Packing(dim, kv.dtype, kv_bits).width if kv_bits else dim * kv.dtype.size
    return heads * row


def load_weights(model: Module) -> None:
    """Read the weights into memory, logging progress. Raises UnsupportedModel."""
    leaves: Any = tree_flatten(model.parameters())
    total, done, logged = weights(model), 0, time.monotonic()
    batch: list[mx.array] = []
    for _, array in leaves:
        batch.append(array)
        done += array.nbytes
        if done < total and bytes_of(batch) < BATCH_BYTES:
            continue
        try:
            mx.eval(batch)
        except RuntimeError as error:
            raise UnsupportedModel(f"the weights cannot be read: {error}") from error
        batch.clear()
        if time.monotonic() - logged > LOG_EVERY_S:
            logged = time.monotonic()
            log.info("loaded %.1f of %.1f GiB of weights", done / 2**30, total / 2**30)


def find_layout(model: Module, wanted: str = "auto", kv_bits: int = 0) -> LayoutChoice:
    """The fastest layout, or `wanted`, that reproduces mlx-lm's logits; then with `kv_bits`.

    Raises UnsupportedModel, naming why each layout was refused.
    """
    reference, solo_bytes = _reference(model)
    refused: list[str] = []
    sure = True
    for (layout, lone), trunk, rollback in product(LAYOUTS, (True, False), (True, False)):
        if wanted not in ("auto", layout):
            continue
        name = _describe(layout, lone, trunk)
        try:
            runner = Runner(model, layout, BLOCK, BLOCKS, trunk=trunk, lone=lone, rollback=rollback)
            if runner.trunk != trunk or not (rollback or runner.states.layers):
                continue  # the same as a combination that was tried before
            if not rollback:
                name += ", without drafts"
            logits, state_bytes = probe_logits(runner)
            error = logits_error(logits, reference)
        except Exception as failure:  # the model's own code decides what it raises
            error = line_of(failure)
            sure = sure and not isinstance(failure, MemoryError | RuntimeError)
        if error:
            if f"{name}: {error}" not in refused:
                refused.append(f"{name}: {error}")
            continue
        if kv_bits:
            runner = quantized_runner(runner, kv_bits)
        sizes = Counter[int | None]()
        if layout == "solo":
            sizes[None] = -(-solo_bytes // KV_STEP)
        for pages in runner.pages():
            sizes[pages.window] += sum(p.nbytes for p in pages.pools()) // (BLOCK * BLOCKS)
        return LayoutChoice(
            layout,
            trunk,
            lone,
            token_bytes=sizes.pop(None, 0),
            windows={window: size for window, size in sizes.items() if window},
            vocab=reference[0].shape[-1],
            refused=tuple(refused),
            state_bytes=state_bytes,
            rollback=rollback,
            kv_bits=kv_bits,
            sure=sure,
        )
    raise UnsupportedModel(
        "no layout reproduces mlx-lm's logits for this model: " + "; ".join(refused)
    )


def _reference(model: Module) -> tuple[list[mx.array], int]:
    try:
        reference, cache_bytes = reference_logits(model)
    except Exception as failure:  # the model's own code decides what it raises
        raise UnsupportedModel(
            f"mlx-lm itself cannot run this model here: {line_of(failure)}"
        ) from failure
    if any(mx.isnan(rows).any().item() for rows in reference):
        raise UnsupportedModel("its logits are NaN: the weights are damaged; download them again")
    return reference, cache_bytes


def _describe(layout: Layout, lone: bool, trunk: bool) -> str:
    parts: list[str] = [layout]
    if lone and layout != "solo":
        parts.append("one sequence at a time")
    if not trunk:
        parts.append("whole lm_head")
    return ", ".join(parts)

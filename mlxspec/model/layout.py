"""Loads an mlx-lm model and finds the layout it runs in, by trying.

Rule: fail loud at load, never silently slow. A layout must reproduce mlx-lm's own logits on a
ragged probe; the first that does is used, and why the earlier ones were not is logged.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxspec.kernels import Packing
from mlxspec.model import quantized, recurrent
from mlxspec.model.probe import BLOCK, BLOCKS, PROBES, bytes_of, differ, packed, probe, truth
from mlxspec.model.runner import Layout, Runner
from mlxspec.types import UnsupportedModel, blame, line_of

log = logging.getLogger("mlxspec")

# In order of speed; alone: one sequence at a time.
WAYS: tuple[tuple[Layout, bool], ...] = (
    ("rows", False),
    ("rect", False),
    ("gather", False),
    ("rect", True),
    ("gather", True),
    ("solo", True),
)
READ_AT_ONCE = (
    256 << 20
)  # bytes of weights; keeps the disk busy, and what a conversion holds twice small
TELL_S = 2.0
KV_STEP = 256  # tokens by which mlx-lm's own KV caches grow
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

Kept = tuple[
    int, tuple[tuple[int, int], ...], int
]  # bytes: a token's, (window, a token's) each, the state's


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """How a model runs here. `token_bytes` is the KV memory of one token in all layers that see
    everything, `windows` that of layers which see the last so many tokens, by these. `state_bytes`
    is the memory of one sequence's recurrent layers, and without `rollback`
    these cannot drop rejected drafts: such a model decodes without drafts."""

    layout: Layout
    trunk: bool
    lone: bool
    token_bytes: int
    windows: Mapping[int, int]
    vocab: int
    refused: tuple[str, ...] = ()
    state_bytes: int = 0
    rollback: bool = True
    kv_bits: int = 0
    sure: bool = True  # no layout was refused for what may have been want of memory

    @property
    def kept(self) -> Kept:
        """As `geometry` would have it, found by running the model."""
        return self.token_bytes, tuple(sorted(self.windows.items())), self.state_bytes

    @property
    def sharing(self) -> bool:
        """Whether what is known of a prefix can be handed on."""
        return self.layout != "solo"

    @property
    def drafts(self) -> int:
        """Up to how many known rows an entry may take a draft; 0: no drafts."""
        return (
            0
            if self.layout == "solo" or not self.rollback
            else recurrent.MAX_RECORDED_ROWS
            if self.state_bytes
            else 1 << 31
        )

    def runner(
        self, model: Module, block_size: int, blocks: int, windows: Mapping[int, int] | None = None
    ) -> Runner:
        """`windows` are the blocks of each window that is to have its own."""
        how: dict[str, Any] = dict(trunk=self.trunk, lone=self.lone, rollback=self.rollback)
        how["kv_bits"] = self.kv_bits
        return Runner(model, self.layout, block_size, blocks, windows=windows, **how)


def load(path: Path) -> tuple[Module, dict[str, Any]]:
    """The model and its config. The weights stay on disk until `read`. Raises UnsupportedModel with
    what is wrong."""
    try:
        model, config = load_model(path, lazy=True)
    except Exception as error:  # whatever mlx-lm's models and MLX raise at such files
        raise UnsupportedModel(
            f"mlx-lm cannot load {path}: {blame(error)}; give a complete model directory"
        ) from error
    except SystemExit as error:  # one of its models ends the process where a package is missing
        raise UnsupportedModel(
            f"mlx-lm cannot load {path}: it asks for a package; its line above says which"
        ) from error
    # Each layer drew weights that are never computed; MLX's random state is the end of a chain of
    # such draws.
    mx.eval(mx.random.state)
    model.eval()
    quantized.install(model)
    return model, config


def context_of(config: dict[str, Any]) -> int:
    """The longest context the model was made for, in tokens; 8192 where its config does not say."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    log.warning("the model's config names no context length; 8192 tokens are assumed")
    return 8192


def weights(model: Module) -> int:
    """Bytes of the model's parameters."""
    return bytes_of(model.parameters())


def geometry(model: Module, kv_bits: int = 0) -> Kept:
    """What the model's own caches keep, in bytes: of one token in its layers with full attention,
    as (window, bytes of one token) in those with a window, and of one sequence in recurrent ones;
    quantized to `kv_bits`, if not 0. Found by a forward that is never evaluated, so that no weight
    is read; all 0 where the model's code does not run so."""
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
            size = sum(_row(a, kv_bits) for a in arrays if a.ndim == 4)
            if isinstance(cache, RotatingKVCache):
                windows[cache.max_size] += size
            else:
                token += size
    except (
        Exception
    ) as failed:  # whatever the model's own code raises; `fit` says it if it stays so
        log.info(
            "what the model's caches take is not known before its weights are read: %s", failed
        )
        return 0, (), 0
    return token, tuple(sorted(windows.items())), state


def _row(a: mx.array, kv_bits: int) -> int:
    """Bytes of one token in an array [1, heads, S, D] of K or V."""
    packed = Packing(a.shape[3], a.dtype, kv_bits)
    return a.shape[1] * (4 * packed.width if kv_bits else a.shape[3] * a.dtype.size)


def read(model: Module) -> None:
    """Bring the weights into memory, telling how far where that takes long. Raises UnsupportedModel
    where they cannot be read."""
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
            raise UnsupportedModel(f"the weights cannot be read: {error}") from error
        done += sum(a.nbytes for a in batch)
        batch.clear()
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            log.info("%.1f of %.1f GiB of weights read", done / 2**30, total / 2**30)


def fit(model: Module, wanted: str = "auto", kv_bits: int = 0) -> LayoutChoice:
    """Try the layouts in order of speed, or only `wanted`; the one that is found must do with
    `kv_bits`. Raises UnsupportedModel, naming each refusal."""
    try:
        want, held = truth(model)
    except Exception as failed:  # whatever the model's own code raises
        raise UnsupportedModel(
            f"mlx-lm itself cannot run this model here: {line_of(failed)}"
        ) from failed
    if any(mx.isnan(rows).any().item() for rows in want):
        raise UnsupportedModel(
            "its logits are not numbers: the weights are damaged; fetch them again"
        )
    refused: list[str] = []
    sure = True
    for (layout, lone), trunk, rollback in product(WAYS, (True, False), (True, False)):
        if wanted not in ("auto", layout):
            continue
        way = layout + ", one sequence at a time" * (lone and layout != "solo")
        way += ", whole lm_head" * (not trunk)
        try:
            runner = Runner(model, layout, BLOCK, BLOCKS, trunk=trunk, lone=lone, rollback=rollback)
            stateful = bool(runner.states.layers)
            if (trunk and not runner.trunk) or (not rollback and not stateful):
                continue
            if not rollback:
                way += ", without drafts"
            got, carried = probe(runner)
            error = differ(got, want)
        except Exception as failed:  # the model's own code decides what it raises
            error, carried = line_of(failed), 0
            sure = sure and not isinstance(failed, MemoryError | RuntimeError)
        if error:
            refused += [reason] if (reason := f"{way}: {error}") not in refused else []
            continue
        if kv_bits:
            runner = packed(runner, kv_bits, refused)
        sizes: dict[int | None, int] = {None: -(-held // KV_STEP) if layout == "solo" else 0}
        for pages in runner.pages():
            kept = sum(pool.nbytes for pool in pages.pools()) // (BLOCK * BLOCKS)
            sizes[pages.window] = sizes.get(pages.window, 0) + kept
        windows = {w: size for w, size in sizes.items() if w}
        vocab = want[0].shape[-1]
        return LayoutChoice(
            layout,
            trunk,
            lone,
            sizes[None],
            windows,
            vocab,
            tuple(refused),
            carried,
            rollback,
            kv_bits,
            sure,
        )
    raise UnsupportedModel(
        "no layout reproduces mlx-lm's logits for this model: " + "; ".join(refused)
    )

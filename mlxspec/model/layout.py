"""The layout in which an mlx-lm model runs, found by trial.

Rule: fail loudly at load, never run silently slow. The first layout that reproduces mlx-lm's own
logits is used, and the log says why faster ones were refused. A trial does what serving does:
ragged batches, prompts cut anywhere, partly accepted drafts; but no quantized K/V.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from mlxspec import log
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.trial import Case
from mlxspec.model import quantized
from mlxspec.model.pages import arrays_in, bytes_of, flat_caches
from mlxspec.model.parallel import ALONE, ProcessGroup
from mlxspec.model.probe import (
    BLOCK,
    BLOCKS,
    PROMPTS,
    logits_error,
    probe_logits,
    reference_logits,
)
from mlxspec.model.runner import Layout, Runner
from mlxspec.progress import progress
from mlxspec.types import CacheBytes, UnsupportedModel, line_of

# Fastest first; the flag: one sequence at a time.
LAYOUTS: tuple[tuple[Layout, bool], ...] = (
    ("rows", False),
    ("rect", False),
    ("gather", False),
    ("rect", True),
    ("gather", True),
    ("solo", True),
)
KV_STEP = 256  # tokens by which mlx-lm's own KV caches grow


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout of a model, and the size of its caches in it."""

    layout: Layout
    trunk: bool  # lm_head runs on sampled rows only
    lone: bool  # one sequence at a time
    cache_bytes: CacheBytes
    vocab: int
    refused: tuple[str, ...] = ()  # faster layouts, each with the reason
    rollback: bool = True  # recurrent layers, if any, can drop rejected drafts
    sure: bool = True  # no refusal may have been due to a lack of memory

    @property
    def sharing(self) -> bool:
        """Whether sequences can share a cached prefix."""
        return self.layout != "solo"

    @property
    def can_draft(self) -> bool:
        """Whether rejected drafts can be rolled back."""
        return self.sharing and self.rollback

    def runner(
        self,
        model: Module,
        block_size: int,
        blocks: int,
        make: Callable[..., Runner] = Runner,
        **options: Any,
    ) -> Runner:
        """A runner in this layout with `blocks` in its pool; `make` is its type, `options` are
        Runner's other arguments."""
        options |= {"lone": self.lone, "rollback": self.rollback}
        return make(model, self.layout, block_size, blocks=blocks, **options)

    def cases(self, model: Module, block_size: int, kv_bits: int = 0) -> list[Case]:
        """The kernels to verify for the model."""
        blocks = quantized.CASE_BLOCKS
        return quantized.kernel_cases(self.runner(model, block_size, blocks, kv_bits=kv_bits))


def geometry(model: Module, kv_bits: int = 0, group: ProcessGroup = ALONE) -> CacheBytes:
    """The size of the model's caches, quantized to `kv_bits` if not 0, before any weight is read:
    from a forward pass that is never evaluated. All 0 if the model's code cannot do that."""
    try:
        with group.together():
            caches = make_prompt_cache(model)
            model(mx.array([PROMPTS[0]]), cache=caches)
        return _measure(caches, kv_bits)
    except Exception as failure:  # the model's own code; `find_layout` reports it if it persists
        log.info("the size of the model's caches is unknown before it is loaded: %s", failure)
        return CacheBytes()


def bytes_of_layers(layers: int, run: Callable[[list[Any]], Any]) -> CacheBytes:
    """What `layers` layers with full attention cache; `run` builds a forward pass of them on the
    caches passed to it."""
    caches = [KVCache() for _ in range(layers)]  # type: ignore[no-untyped-call]
    run(caches)
    return _measure(caches, 0)


def _measure(caches: Iterable[Any], kv_bits: int) -> CacheBytes:
    """The size of mlx-lm's caches of one sequence, with K/V quantized to `kv_bits`."""
    state = 0
    sizes = Counter[int]()  # by window, 0: full attention
    for cache in flat_caches(caches):
        if cache.empty():  # a model may make caches that it never uses
            continue
        if isinstance(cache, ArraysCache):
            state += bytes_of(cache.state)
            continue
        for kv in arrays_in(cache.state):  # [1, heads, tokens, dim]
            _, heads, _, dim = kv.shape
            row = dim * kv.dtype.size
            if kv_bits:
                row = 4 * Packing(dim, kv.dtype, kv_bits).width
            sizes[getattr(cache, "max_size", 0)] += heads * row
    token = sizes.pop(0, 0)
    return CacheBytes(token, tuple(sorted(sizes.items())), state)


def find_layout(
    model: Module,
    wanted: str = "auto",
    kv_bits: int = 0,
    group: ProcessGroup = ALONE,
) -> LayoutChoice:
    """The fastest layout, or `wanted`, that reproduces mlx-lm's logits with K/V as computed;
    `cache_bytes` are those with `kv_bits`. Raises UnsupportedModel, naming why each layout was
    refused, or that K/V cannot be quantized."""
    refused: dict[str, None] = {}
    sure = True
    with progress("Checking how it can be batched") as report, group.together():
        report(0, 2 * len(LAYOUTS))
        reference, caches = reference_logits(model)
        for (layout, lone), rollback in product(LAYOUTS, (True, False)):
            report(1 + len(refused), 2 * len(LAYOUTS))
            if wanted not in ("auto", layout):
                continue
            try:
                runner = Runner(model, layout, BLOCK, blocks=BLOCKS, lone=lone, rollback=rollback)
                if not (rollback or runner.states.layers):
                    continue  # the same as with rollback
                with group.together():
                    error = logits_error(probe_logits(runner), reference)
            except Exception as failure:  # the model's own code decides what it raises
                error = line_of(failure)
                sure = sure and not isinstance(failure, RuntimeError)
            if error:
                alone = ", one sequence at a time" if lone and layout != "solo" else ""
                refused[f"{layout}{alone}: {error}"] = None
                continue
            return LayoutChoice(
                layout,
                runner.trunk is not None,
                lone,
                cache_bytes=_cache_bytes(runner, caches, kv_bits),
                vocab=reference[0].shape[-1],
                refused=tuple(refused),
                rollback=rollback,
                sure=sure,
            )
    raise UnsupportedModel(
        "no layout reproduces mlx-lm's logits for this model: " + "; ".join(refused),
    )


def _cache_bytes(runner: Runner, caches: Sequence[Any], kv_bits: int) -> CacheBytes:
    """The size of a runner's caches, measured on mlx-lm's `caches` of one sequence. Raises
    UnsupportedModel if K/V cannot be quantized to `kv_bits`."""
    if kv_bits and not runner.pages():
        raise UnsupportedModel(
            f"kv_bits = {kv_bits}: in the {runner.layout} layout this model has no K/V pools;"
            " give 0",
        )
    if runner.layout == "solo":
        size = bytes_of([cache.state for cache in caches])
        return CacheBytes(-(-size // KV_STEP))
    return _measure(caches, kv_bits)

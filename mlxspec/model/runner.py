"""Runs a plan through an unmodified mlx-lm model: fill the view, forward, sample, submit.

Rule: one code path per layout, chosen once at the first start. `rows` puts every token in its own
batch row, so prefill chunks, decodes and drafts are one forward; `rect` runs entries of equal rows
as [B, L], for layers that need the time axis; `gather` likewise, with K/V handed back dense;
`solo` keeps mlx-lm's own caches.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal
from weakref import WeakSet

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlxspec.model import attention, recurrent
from mlxspec.model.batch import (
    Step,
    bucket,
    build_inputs,
    drafts_of,
    owners_of,
    stage,
    starts_of,
)
from mlxspec.model.pages import DensePages, Pages, View, window_of
from mlxspec.model.recurrent import LayerState, RecurrentStates
from mlxspec.model.sampler import Sampled, rows_of, sample
from mlxspec.types import Entry, Tap, UnsupportedModel

FIRST_BLOCKS = 32  # of a pool that grows
GROWING: "WeakSet[Runner]" = WeakSet()

Layout = Literal["rows", "rect", "gather", "solo"]


def flat_caches(caches: Iterable[Any]) -> list[Any]:
    """The layers' caches, those inside a CacheList one by one."""
    return [each for cache in caches for each in getattr(cache, "caches", [cache])]


def owed() -> int:
    """Bytes by which pools of this process may still grow."""
    return sum(runner.owed() for runner in GROWING)


class Runner:
    """A model, its pages and their pools: of `blocks` blocks, and of `windows[w]` blocks for layers
    with a sliding window w; windows that are not named share the former. Engine thread only."""

    def __init__(
        self,
        model: Module,
        layout: Layout,
        block_size: int,
        blocks: int,
        *,
        windows: Mapping[int, int] | None = None,
        trunk: bool = True,
        lone: bool = False,
        rollback: bool = True,
        kv_bits: int = 0,
    ) -> None:
        """`trunk`: only sampled rows reach lm_head. `lone`: one sequence per forward.
        `rollback`: recurrent layers can drop rejected drafts. `kv_bits`: 8 or 4 bits per value in
        the pools; 0: as computed."""
        self.model, self.layout = model, layout
        self.lone = lone or layout == "solo"
        self.view = View(block_size, {None: blocks} | dict(windows or {}), kv_bits=kv_bits)
        self._given: Callable[[], Sequence[int]] | None = None
        self.caches: list[Any] = []
        if layout != "solo":
            attention.install(model)
            self.caches = [self._cache(c) for c in make_prompt_cache(model)]
        flat = flat_caches(self.caches)
        # Several caches in a layer: deepseek_v32 makes one wait for the other.
        self._several = len(flat) > len(self.caches)
        self._paged = [c for c in flat if isinstance(c, Pages)]
        self.states = RecurrentStates([c for c in flat if isinstance(c, LayerState)], rollback)
        if self.states.layers:
            recurrent.install(model)
        self.trunk = attention.graft(model, self.view) if trunk else None

    def tap(self, taps: Sequence[Tap]) -> None:
        """Hand out these hidden states of every row from now on. Raises UnsupportedModel."""
        if self.trunk:
            attention.tap(self.trunk, self.view, taps)
        elif taps:
            raise UnsupportedModel("this model's hidden states cannot be read")

    def _cache(self, cache: Any) -> Any:
        """Our counterpart of one of mlx-lm's caches. Raises UnsupportedModel if there is none."""
        if type(cache) is CacheList:
            return CacheList(*(self._cache(c) for c in cache.caches))  # type: ignore[no-untyped-call]
        if type(cache) is ArraysCache and self.layout != "rows":
            return LayerState(len(cache.cache))
        kind = DensePages if self.layout == "gather" else Pages
        return kind(self.view, window_of(cache))

    # ---- pools -------------------------------------------------------------------------------

    def pages(self) -> list[Pages]:
        """The pages that were written; a model may ask for caches that it never uses."""
        return [p for p in self._paged if p.keys is not None]

    def grow_on_demand(self, highest: Callable[[], Sequence[int]]) -> None:
        """Take memory only up to the `highest` block that was allocated, of each pool."""
        self._given = highest
        self.view.held = {pool: min(size, FIRST_BLOCKS) for pool, size in self.view.blocks.items()}
        GROWING.add(self)

    def grow(self) -> None:
        """Have memory for all allocated blocks, and half as many again (at most an eighth of the
        pool), so that it is rare. Layer by layer: a pool lies beside its copy meanwhile."""
        if self._given is None:
            return
        for (pool, size), highest in zip(self.view.blocks.items(), self._given(), strict=True):
            if highest < self.view.held[pool]:
                continue
            blocks = min(size, highest + 1 + min((highest + 1) // 2, -(-size // 8)))
            for pages in self.pages():
                if pages.pool == pool:
                    pages.grow(blocks)
                    mx.clear_cache()
            self.view.held[pool] = blocks  # last: if memory runs out on the way, it is retried

    def owed(self) -> int:
        """Bytes by which the pools may still grow."""
        held, blocks = self.view.held, self.view.blocks
        sizes = ((p.pool, sum(x.nbytes for x in p.pools())) for p in self.pages())
        return sum(size // held[pool] * (blocks[pool] - held[pool]) for pool, size in sizes)

    def addresses(self) -> tuple[int, ...]:
        """The addresses of the pools, all work on them done."""
        mx.eval(self._pools())
        pools = (np.array(pool.view(mx.uint8), copy=False) for pool in self._pools())
        return tuple(int(pool.__array_interface__["data"][0]) for pool in pools)

    def _pools(self) -> list[mx.array]:
        return [pool for pages in self.pages() for pool in pages.pools()]

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy whole blocks, (group, source, target) each. Waits for the step in flight."""
        if not copies:
            return
        self.grow()
        for group, pool in enumerate(self.view.blocks):
            sources = self.view.slots_of([source for of, source, _ in copies if of == group])
            targets = self.view.slots_of([target for of, _, target in copies if of == group])
            layers = [pages for pages in self.pages() if pages.pool == pool]
            # Read first, then write: a pool with a reader in flight is copied whole, not in place.
            held = [[each[:, sources] for each in pages.pools()] for pages in layers]
            mx.eval(held)
            for pages, (k, v) in zip(layers, held, strict=True):
                pages.put(targets, k, v)

    # ---- one step ----------------------------------------------------------------------------

    def forward(self, plan: Iterable[Entry], previous: Step | None) -> Step:
        """The plan's lazy forward, its entries sorted so that like ones are neighbours. `previous`
        is the step in flight, which holds pending tokens."""
        plan = sorted(plan, key=self._form)
        offsets = row_offsets = None
        if previous is not None and any(e.inflight_drafts for e in plan):
            offsets = previous.offsets(plan)
            row_offsets = offsets[owners_of(e.sampled for e in plan)]
        ids = build_inputs(plan, previous, offsets)
        logits, taps = self._forward(plan, ids, offsets)
        return Step(plan, ids, rows_of(plan), row_offsets, logits, taps)

    def sample(self, step: Step) -> Sampled | None:
        """Lazy samples of a forward's sampled rows; None where no entry samples."""
        if not step.rows:
            return None
        spans = [step.spans[row.entry.seq] for row in step.rows]
        drafts = drafts_of(step.plan)
        return sample(step.logits, step.rows, step.ids, spans, step.row_offsets, drafts)

    def submit(self, step: Step, sampled: Sampled | None) -> Step:
        """Start the step on the device, without waiting for it."""
        own = []
        if self.layout == "solo":
            leaves: Any = tree_flatten([c.state for e in step.plan for c in e.seq.state])
            own = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
        results = [*own, *step.taps.values()]
        if sampled:
            results += sampled.arrays()
            step.marker = sampled.tokens
        else:
            # Without samples, the last layer's K and V, or state, depend on all before.
            # MLX holds an array that is named until the whole step is done, and would copy a pool
            # that the next step writes before that: so new memory is named, not a pool.
            ends = own[-1:] or self._pools()[-2:] or step.plan[-1].seq.state[-1:]
            markers = [end.flatten()[:1] + 0 for end in ends]
            results += markers
            step.marker = markers[-1]
        step.sampled, step.logits = sampled, None
        began = time.perf_counter()
        mx.async_eval(step.marker, *results)
        step.submit_seconds = time.perf_counter() - began
        return step

    def rollback(self, plan: Sequence[Entry], kept_rows: Sequence[int]) -> None:
        """Drop rejected drafts from recurrent states: see RecurrentStates.rollback."""
        self.states.rollback(plan, kept_rows)

    def logits(self, plan: Iterable[Entry]) -> mx.array:
        """Lazy logits [R, vocab] of a plan whose tokens are all known; for warm-up."""
        logits: mx.array = self.forward(plan, None).logits
        return logits

    def forward_rows(
        self, plan: Sequence[Entry], ids: mx.array, offsets: mx.array | None
    ) -> mx.array:
        """Logits [R, vocab] of a plan in the rows layout with given tokens int32 [T], submitted at
        once, so that the next forward may write its pages in place. For draft models."""
        logits, _ = self._forward(plan, ids, offsets)
        mx.async_eval(logits)
        return logits

    def _form(self, e: Entry) -> tuple[Any, ...]:
        """Only entries that are equal in it share a forward [B, L]."""
        return bucket(e, self.view.block_size), self.states.form(e)

    def _forward(
        self, plan: Sequence[Entry], ids: mx.array, offsets: mx.array | None
    ) -> tuple[mx.array, dict[Tap, mx.array]]:
        """Logits [R, vocab] of the sampled rows, and taps [T, D] each, in plan order."""
        batches = [list(plan)]
        if self.lone:
            batches = [[e] for e in plan]
        elif self.layout != "rows":
            batches = [list(batch) for _, batch in groupby(plan, key=self._form)]
        self.states.begin_step(plan)
        logits: list[mx.array] = []
        taps: dict[Tap, list[mx.array]] = {tap: [] for tap in self.view.taps}
        row = 0
        for batch in batches:
            rows = sum(e.rows for e in batch)
            logits.append(self._forward_batch(batch, ids[row : row + rows], offsets))
            for tap in taps:
                taps[tap].append(self.view.tapped.pop(tap).flatten(0, 1))
            row += rows
        return mx.concatenate(logits), {tap: mx.concatenate(taps[tap]) for tap in taps}

    def _forward_batch(
        self, batch: Sequence[Entry], ids: mx.array, offsets: mx.array | None
    ) -> mx.array:
        """Logits [R, vocab] of one forward, [T, 1] in the rows layout and [B, L] in others."""
        view, caches = self.view, self.caches
        length = 1
        sampled: list[int] = []
        for e, start in starts_of(batch).items():
            sampled += range(start + e.rows - e.sampled, start + e.rows)
        index: Any = mx.array(sampled, mx.int32)
        if self.layout == "solo":
            seq = batch[0].seq
            caches = seq.state = seq.state or make_prompt_cache(self.model)
        else:
            self.grow()
            stage(view, batch, offsets)
        if self.layout != "rows":
            length = batch[0].rows
            at = np.array(sampled, np.int32)[:, None]
            index = mx.array(at // length), mx.array(at % length)
            view.positions = mx.array([e.start for e in batch])
        view.sampled = index
        try:
            self.states.load(batch)
            logits: mx.array = self.model(ids.reshape(-1, length), cache=caches)
            states = self.states.store(batch)
        finally:
            self.states.release()
            view.sampled = None
        if not self.trunk:
            logits = logits[index]
        if self.layout != "rows":
            # The next forward writes the pools that this one reads; in one graph MLX would copy
            # them. Naming them holds them until all is done, so only where the logits do not need
            # them all.
            mx.async_eval(logits, *states, *(self._pools() if self._several else ()))
        return logits[:, 0]

"""Runs a plan through an unmodified mlx-lm model: fill the view, forward, sample, submit.

Rule: one code path per layout, chosen once at the first start. `rows` puts every token in its own
batch row, so prefill chunks, decodes and drafts are one forward (under `exact`, a prompt's whole
chunks each get their own); `rect` runs [B, L], for layers that need the time axis: all decodes are
one forward, padded to the longest draft, and prompt chunks of equal rows are others; `gather`
likewise, with K/V handed back dense; `solo` keeps mlx-lm's own caches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.core import array as Array
from mlx.nn import Module
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlxspec.model import attention, invariant, recurrent
from mlxspec.model.batch import (
    Forward,
    NaNs,
    Shift,
    SpanT,
    bucket,
    build_inputs,
    fill_view,
    nans_of,
    padded_rows,
    runs_of,
    sampled_row_indices,
    starts_of,
    unpadded_rows,
)
from mlxspec.model.invariant import Invariance
from mlxspec.model.pages import Pages, View, arrays_in, flat_caches, pools_of, window_of
from mlxspec.model.recurrent import RecurrentStates
from mlxspec.model.sampler import Sampled, sample, sampled_row_specs
from mlxspec.model.trunk import install_taps, install_trunk
from mlxspec.model.vision.seam import Eyes
from mlxspec.sequences import Span, Spans
from mlxspec.types import FINAL_NORM, STATE, Tap

FIRST_BLOCKS = 32  # of a pool that grows
SPARE = 32  # a pool grows ahead by 1 / SPARE of its blocks; until full, it is moved as often
MAX_PADDED_SLOTS = 1 << 15  # that the gather layout copies for one forward of several sequences

Layout = Literal["rows", "rect", "gather", "solo"]


class Runner:
    """A model, its pages and their pools: of `blocks` blocks, and of `windows[w]` blocks for layers
    with a sliding window w; layers whose window is not in `windows` use the full-attention pool.
    Engine thread only."""

    def __init__(
        self,
        model: Module,
        layout: Layout,
        block_size: int,
        blocks: int,
        *,
        windows: Mapping[int, int] | None = None,
        lone: bool = False,
        rollback: bool = True,
        kv_bits: int = 0,
        invariance: Invariance | None = None,
    ) -> None:
        """`lone`: one sequence per forward. `rollback`: recurrent layers can drop rejected drafts.
        `kv_bits`: 8 or 4 bits per value in the pools; 0: as computed. `invariance`: how a row's
        bits are kept from depending on the other rows; None: they are not."""
        self.model = model
        self.layout = layout
        self.lone = lone or layout == "solo"
        pools = {None: blocks} | dict(windows or {})
        self.view = View(block_size, pools, dict(pools), dense=layout == "gather", kv_bits=kv_bits)
        self._split = False
        self.highest: Callable[[], Sequence[int]] = lambda: [0 for _ in pools]
        self.caches: list[Any] = []
        if layout != "solo":
            attention.install(model)
            self.caches = [self._cache(c) for c in make_prompt_cache(model)]
        flat = flat_caches(self.caches)
        # Several caches in a layer: deepseek_v32 makes one wait for the other.
        self._several = len(flat) > len(self.caches)
        self._paged = [c for c in flat if isinstance(c, Pages)]
        layers = [c for c in flat if isinstance(c, ArraysCache)]
        self.states = RecurrentStates(layers, rollback)
        if layers:
            recurrent.install(model)
        self.trunk = install_trunk(model, self.view)
        # A head's layers: the blocks hold their K and V as well, and all are grown, copied and
        # saved together.
        self.head_pages: Sequence[Pages] = ()
        self.complete = True  # False: a head has failed, and blocks lack its K and V
        self.eyes: Eyes | None = None  # of a model that sees images
        self.set_invariance(invariance)

    def set_invariance(self, invariance: Invariance | None) -> None:
        """Compute rows in this way from now on. Cached blocks were computed in another."""
        self.invariance = invariance
        self.view.invariant_by_kernel = invariance is not None and invariance.by_kernel
        invariant.install(self.model, self.view, invariance)

    def see(self, eyes: Eyes | None) -> None:
        """Let the model see images from now on."""
        self.eyes = eyes
        if eyes:
            eyes.attach(self.view)

    def tap(self, taps: Sequence[Tap]) -> None:
        """Hand out these hidden states of every row from now on. Without a trunk there are none;
        callers refuse that before."""
        if self.trunk:
            install_taps(self.trunk, self.view, taps)

    def _cache(self, cache: Any) -> Any:
        """Our counterpart of one of mlx-lm's caches. Raises UnsupportedModel if there is none."""
        if type(cache) is CacheList:
            inner = map(self._cache, cache.caches)
            return CacheList(*inner)  # type: ignore[no-untyped-call]
        if type(cache) is ArraysCache and self.layout != "rows":
            return ArraysCache(len(cache.cache))
        return Pages(self.view, window_of(cache))

    # ---- pools -------------------------------------------------------------------------------

    def pages(self) -> list[Pages]:
        """The pages that were written; a model may ask for caches that it never uses."""
        return [p for p in self._paged if p.keys is not None]

    def pages_of(self, pool: int) -> list[Pages]:
        """The pages whose K and V are in pool number `pool`."""
        window = list(self.view.num_blocks)[pool]
        written = [*self.pages(), *self.head_pages]
        return [p for p in written if p.window_key == window and p.keys is not None]

    def grow_on_demand(self, highest: Callable[[], Sequence[int]]) -> None:
        """Take memory only up to the `highest` block that was allocated, of each pool."""
        self.highest = highest
        for window, size in self.view.num_blocks.items():
            self.view.allocated[window] = min(size, FIRST_BLOCKS)

    def grow(self) -> None:
        """Have memory for all allocated blocks, and half as many again (at most 1 / SPARE of the
        pool), so that growth is rare. By layer, because the copy of a pool takes memory too."""
        view = self.view
        for pool, (window, size) in enumerate(view.num_blocks.items()):
            used = self.highest()[pool] + 1
            if used <= view.allocated[window]:
                continue
            blocks = min(size, used + min(used // 2, -(-size // SPARE)))
            for pages in self.pages_of(pool):
                pages.grow(blocks)
                mx.clear_cache()
            view.allocated[window] = blocks  # last: if memory runs out before, it is retried

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> list[Array]:
        """Lazy K and V of these blocks: [heads, len(blocks) * block_size, D] for each of the
        pool's layers."""
        slots = self.view.slots_of(blocks)
        return [kv[:, slots] for kv in pools_of(self.pages_of(pool))]

    def write_blocks(self, pool: int, blocks: Sequence[int], content: Sequence[Array]) -> None:
        """Write what `read_blocks` read, in place."""
        slots = self.view.slots_of(blocks)
        for pages, k, v in zip(self.pages_of(pool), content[::2], content[1::2], strict=True):
            pages.put(slots, k, v)

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy whole blocks, (pool, source, target) each. Waits for the step in flight."""
        if copies:
            self.grow()
        for pool in {pool for pool, _, _ in copies}:
            sources = [source for n, source, _ in copies if n == pool]
            targets = [target for n, _, target in copies if n == pool]
            # Read first, then write: a pool with a reader in flight is copied whole, not in place.
            content = self.read_blocks(pool, sources)
            mx.eval(content)
            self.write_blocks(pool, targets, content)

    # ---- blocks and recurrent states for the prefix cache, in memory and on disk ---------------

    def keep(self, state: Any) -> Any:
        """A copy of a recurrent state for the prefix cache."""
        return recurrent.copied(state)

    def export(self, pool: int, contents: Mapping[bytes, Any]) -> Sequence[Array]:
        """Start copying the K and V of blocks, by key on disk: [heads, blocks * block_size, D] for
        each of the pool's layers. For STATE: one recurrent state."""
        if pool == STATE:
            return next(iter(contents.values()))
        copies = self.read_blocks(pool, list(contents.values()))
        mx.async_eval(copies)
        return copies

    def host(self, exported: Sequence[Array]) -> dict[str, np.ndarray]:
        """The arrays of `export` on the host, as bytes [..., D]. The same bits come back."""
        return {str(i): np.array(a.view(mx.uint8), order="C") for i, a in enumerate(exported)}

    def start_read(self, key: bytes) -> None:
        """The run with this last key is being read from disk."""

    def all_read(self, keys: Sequence[bytes], seconds: float) -> bool:
        """Whether the run with these keys, which was read, can be placed; waits up to `seconds`."""
        return True

    def place(self, pool: int, blocks: Sequence[int], arrays: Any, which: Sequence[int]) -> Any:
        """Write blocks number `which` of an export into `blocks`; for STATE, return the recurrent
        state. Raises KeyError if an array is missing, before anything is written."""
        if pool == STATE:
            dtypes = enumerate(self.states.dtypes)
            return [mx.array(arrays[str(i)]).view(dtype) for i, dtype in dtypes]
        self.grow()
        source = np.array(self.view.slots_of(which))
        content = [
            mx.array(arrays[str(i)][:, source]).view(kv.dtype)
            for i, kv in enumerate(pools_of(self.pages_of(pool)))
        ]
        self.write_blocks(pool, blocks, content)
        mx.async_eval(pools_of(self.pages_of(pool)))

    def block_bytes(self, pool: int) -> int:
        """Bytes of one block in all layers of the pool."""
        allocated = list(self.view.allocated.values())[pool]
        return sum(kv.nbytes for kv in pools_of(self.pages_of(pool))) // allocated

    def close(self, seconds: float) -> None:
        """No step will follow."""

    # ---- one step ----------------------------------------------------------------------------

    def forward(self, plan: Sequence[SpanT], previous: Forward[SpanT] | None) -> Forward[SpanT]:
        """The forward of some spans, sorted so that like ones are neighbours: lazy in the rows
        layout without invariance; otherwise each forward is submitted at once. `previous` is the
        step in flight, which holds pending tokens."""
        # The K/V of all decodes, padded to the longest context, may be too much to gather: then
        # only similar contexts share a forward.
        ends = [e.end for e in plan if e.count == 1]
        slots = len(ends) * max(ends, default=0)
        self._split = self.view.dense and slots > MAX_PADDED_SLOTS
        plan = sorted(plan, key=self._sort_key)
        shift = row_shift = None
        if previous and any(e.inflight_drafts for e in plan):
            shift = previous.shift_of(plan)
            owners = [n for n, e in enumerate(plan) for _ in range(e.num_sampled)]
            row_shift = shift[mx.array(owners)]
        ids = build_inputs(plan, previous, shift, keep_image_ids=True)
        requested = self.view.taps
        pooling = [e for e in plan if e.state.pooling]
        if pooling:
            self.view.taps = {*requested, FINAL_NORM}
        nans: list[NaNs] = []
        try:
            logits, taps = self._forward(plan, ids, shift=shift, nans=nans)
        finally:
            self.view.taps = requested
        rows = sampled_row_specs(plan)
        step = Forward(plan, ids, rows, shift=row_shift, logits=logits, taps=taps, nans=nans)
        if pooling:
            first = starts_of(plan)
            for e in pooling:
                hidden = taps[FINAL_NORM][first[e] : first[e] + e.count]
                step.pooled[e] = hidden.astype(mx.float32)
        return step

    def sample(self, step: Forward[Any]) -> Sampled | None:
        """Lazy samples of a forward's sampled rows; None where no span samples."""
        if not step.sampled_rows:
            return None
        sampled = sample(step.logits, step.sampled_rows, step.ids, shift=step.shift)
        if sampled.accepted is not None:
            step.recordings = self.states.keep_accepted(sampled.accepted, step.first_row)
        return sampled

    def cut(self, step: Forward[SpanT], span: SpanT, rows: int) -> None:
        """Roll the recurrent state of a span that ended at a stop back to its first `rows` rows."""
        self.states.cut(step.recordings, span, rows)

    def submit(self, step: Forward[SpanT], sampled: Sampled | None) -> Forward[SpanT]:
        """Start the step on the device, without waiting for it."""
        states: list[Array] = []
        if self.layout == "solo":
            states = arrays_in([cache.state for e in step.plan for cache in e.state.recurrent])
        results: list[Any] = [states, step.taps, step.pooled, [mask for mask, _ in step.nans]]
        if sampled:
            results += sampled.logprobs, sampled.accepted
            step.marker = sampled.tokens
        else:
            # Without samples, the last layer's K and V, or state, depend on all before.
            # MLX holds an array passed here until the whole step is done, and would copy a pool
            # that the next step writes before that: so new memory is passed, not a pool.
            arrays = states or pools_of(self.pages()) or step.plan[-1].state.recurrent
            step.marker = [array.flatten()[:1] + 0 for array in arrays[-2:]]
        step.sampled = sampled
        step.logits = None
        mx.async_eval(step.marker, *results)
        return step

    def forward_rows(self, spans: Spans, ids: Array, shift: Shift) -> Array:
        """Logits [R, vocab] of spans in the rows layout with input tokens int32 [T], submitted at
        once, so that the next forward may write its pages in place. For draft models."""
        logits, _ = self._forward(spans, ids, shift=shift, nans=[])
        mx.async_eval(logits)
        return logits

    def _forward_key(self, e: Span) -> tuple[Any, ...]:
        """What spans must have in common to share a forward; decodes come first."""
        if self._is_whole(e):
            return True, id(e)
        if self.layout == "rows":
            return (False,)
        rows, context = bucket(e, self.view.block_size)
        if e.count == 1:
            rows, context = 0, context if self._split else 0
        fresh = bool(self.states.layers) and e.state.recurrent is None
        return False, fresh, rows, context

    def _is_whole(self, e: Span) -> bool:
        """Whether a span is a whole chunk of a prompt, which is a forward of its own."""
        chunk = self.invariance.chunk if self.invariance else 0
        return 0 < chunk == e.count and e.end <= e.state.whole_rows(chunk)

    def _sort_key(self, e: Span) -> tuple[Any, ...]:
        """Makes spans of one forward neighbours, and in it those of one attention group."""
        group = bucket(e, self.view.block_size)
        if self.layout == "rows":
            return self._is_whole(e), group
        return self._forward_key(e), group[1]

    def _forward(
        self,
        spans: Spans,
        ids: Array,
        shift: Shift,
        nans: list[NaNs],
    ) -> tuple[Array, dict[Tap, Array]]:
        """Logits [R, vocab] of the sampled rows, and taps [T, D] each, in the spans' order. Adds
        the checks of rows that are not sampled to `nans`."""
        key: Callable[[Span], Any] = id if self.lone else self._forward_key
        self.states.begin_step(spans)
        logits = []
        taps: dict[Tap, list[Array]] = {tap: [] for tap in self.view.taps}
        for batch, places, rows in runs_of(spans, key):
            part = None if shift is None else shift[places]
            logits.append(self._forward_batch(batch, ids[rows], shift=part, nans=nans))
            for tap, parts in taps.items():
                parts.append(self.view.tapped.pop(tap))
        return mx.concatenate(logits), {tap: mx.concatenate(taps[tap]) for tap in taps}

    def _forward_batch(self, batch: Spans, ids: Array, shift: Shift, nans: list[NaNs]) -> Array:
        """Logits [R, vocab] of one forward, [T, 1] in the rows layout and [B, L] in others; its
        taps [T, D] are left in the view."""
        view = self.view
        caches = self.caches
        length = 0  # rows of each span, where they are the same
        if self.layout != "rows":
            length = max(e.rows for e in batch)
        padded = len(batch) * length > len(ids)
        if padded:
            ids = ids[padded_rows(batch, length)]
        if self.layout == "solo":
            state = batch[0].state
            caches = state.recurrent = state.recurrent or make_prompt_cache(self.model)
        else:
            self.grow()
            fill_view(view, batch, shift, length=length)
            if self.eyes:
                self.eyes.look(batch, shift, length)
            if length:  # mlx-lm's layers ask for the first position of each sequence
                view.positions = view.positions[::length]
        view.sampled = sampled = sampled_row_indices(batch, length)
        view.invariant = self.invariance is not None and not self._is_whole(batch[0])
        recurrent.one_by_one.set(view.invariant)
        try:
            self.states.load(batch)
            logits: Array = self.model(ids.reshape(-1, length or 1), cache=caches)
            states = self.states.store(batch, view.tapped)
            nans += nans_of(batch, length, view.last_keys, self.states.last_layer())
        finally:
            self.states.release()
            view.sampled = view.last_keys = view.images = view.rope = None
            view.invariant = False
            recurrent.one_by_one.set(False)
        logits = logits.flatten(0, 1)
        if not self.trunk:
            logits = logits[sampled]
        for tap, hidden in view.tapped.items():
            rows = hidden.flatten(0, 1)
            view.tapped[tap] = rows[unpadded_rows(batch, length)] if padded else rows
        if self.layout != "rows" or self.invariance:
            # The next forward writes the pools that this one reads; in one graph MLX would copy
            # them. Passing them holds them until all is done: only if the logits need not all.
            pools = pools_of(self.pages()) if self._several else []
            mx.async_eval(logits, *states, *pools, [mask for mask, _ in nans])
        return logits

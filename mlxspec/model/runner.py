"""Runs a plan through an unmodified mlx-lm model: fills the view, forwards, returns the sampled
rows' logits.

Rule: one code path per layout, chosen once at warm-up. `rows` puts every token in its own batch
row, so prefill chunks, decodes and drafts are one forward; `rect` runs entries of equal rows as [B,
L], for layers that need the time axis; `gather` too, with K/V handed back dense; `solo` keeps
mlx-lm's caches.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, groupby, repeat
from typing import Any, Literal
from weakref import WeakSet

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlxspec.kernels import Group
from mlxspec.model import recurrent
from mlxspec.model.attention import graft, install, ungraft
from mlxspec.model.pages import DensePages, Pages, View, placed, window_of
from mlxspec.model.recurrent import LayerState, RecurrentStates
from mlxspec.model.sampler import Row, Sampled, drafts_of, read, rows_of, sample
from mlxspec.types import NULL_BLOCK, Entry, Logprob, UnsupportedModel
from mlxspec.types import Sequence as Seq

FIRST = 32  # blocks that a pool which grows begins with
MANY = 256  # rows of an entry, from which on numpy is faster than a list
GROWING: "WeakSet[Runner]" = WeakSet()

Layout = Literal["rows", "rect", "gather", "solo"]


def owed() -> int:
    """Bytes by which pools of this process may still grow."""
    return sum(runner.owed() for runner in GROWING)


class Step:
    """A submitted plan: its input tokens, its sampled rows with their lazy results, and where a
    sequence's first sampled row is, among the samples (`at`), the inputs (`spans`) and the sampling
    entries (`nth`). `kept` int32 [sampling entries] is how many drafted tokens stand; None where
    nothing was drafted."""

    __slots__ = (
        "at", "began", "held", "ids", "kept", "marker", "nth", "overlaps", "plan", "rows", "sampled", "spans",
    )  # fmt: skip

    def __init__(
        self,
        plan: Sequence[Entry],
        ids: mx.array,
        spans: Sequence[int],
        rows: list[Row],
        sampled: Sampled | None,
        marker: mx.array,
    ) -> None:
        self.plan, self.ids, self.rows, self.sampled, self.marker = plan, ids, rows, sampled, marker
        self.kept = sampled.kept if sampled else None
        self.began, self.overlaps = (
            0.0,
            False,
        )  # for whoever submits it: when, and whether one was in flight
        self.held = (
            0.0  # seconds that its submission took; it waits where the device lags far behind
        )
        self.at: dict[Seq, int] = {}
        for r, row in enumerate(rows):
            self.at.setdefault(row.entry.seq, r)
        self.nth = {seq: n for n, seq in enumerate(self.at)}
        self.spans = {e.seq: span for e, span in zip(plan, spans, strict=True) if e.samples}

    def read(self) -> tuple[list[int], list[list[Logprob]], list[int]]:
        """Wait for the step; the sampled rows' tokens and log-probabilities, and how many drafted
        tokens of each sampling entry stand."""
        mx.eval(self.marker)
        if not self.sampled:
            return [], [], []
        kept = [0] * len(self.at) if self.kept is None else np.array(self.kept).tolist()
        return *read(self.sampled, self.rows), kept

    def late(self, plan: Sequence[Entry]) -> mx.array:
        """int32 [entries]: how much later than their `start` the next plan's entries begin."""
        assert self.kept is not None
        kept = mx.concatenate([self.kept, mx.zeros((1,), mx.int32)])
        nobody = len(self.nth)
        return kept[mx.array([self.nth.get(e.seq, nobody) if e.spread else nobody for e in plan])]


class Runner:
    """A model, its pages and their pools: of `blocks` blocks, and of `windows[w]` for layers with a
    sliding window w; windows that are not named there share the former. Engine thread only."""

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
        shares: bool = False,
        rollback: bool = True,
        kv_bits: int = 0,
    ) -> None:
        """`shares`: shared blocks are written too, because what is written is the same whoever
        does. `rollback`: recurrent layers can
        drop rejected drafts. `kv_bits`: 8 or 4 bits for each
        value in the pools; 0: as computed."""
        self.model, self.layout, self.shares = model, layout, shares
        self.lone = lone or layout == "solo"  # one sequence per forward
        self.view = View(block_size, {None: blocks} | dict(windows or {}), kv_bits=kv_bits)
        self._given: Callable[[], Sequence[int]] = lambda: (
            [0] * len(self.view.blocks)
        )  # they have their size
        if kv_bits and layout == "solo":
            raise UnsupportedModel(
                f"kv_bits = {kv_bits}: mlx-lm's own caches (layout solo) are not quantized; give 0"
            )
        self.caches: list[Any] = []
        if layout != "solo":
            install(model)
            self.caches = [self._cache(c) for c in make_prompt_cache(model)]
        flat = [c for cache in self.caches for c in getattr(cache, "caches", [cache])]
        self._several = len(flat) > len(
            self.caches
        )  # in a layer; deepseek_v32 makes one wait for the other
        self._paged = [c for c in flat if isinstance(c, Pages)]
        self.states = RecurrentStates([c for c in flat if isinstance(c, LayerState)], rollback)
        if self.states.layers:
            recurrent.install(model)
        ungraft(model)  # a runner that was tried before this one
        self.trunk = trunk and graft(model, self.view)

    def pages(self) -> list[Pages]:
        """The pages that were written; a model may ask for caches that it never uses."""
        return [p for p in self._paged if p.keys is not None]

    def by_need(self, given: Callable[[], Sequence[int]]) -> None:
        """Take memory only for what is given out, up to the block that `given` tells, of each
        pool."""
        self._given = given
        self.view.held = {pool: min(size, FIRST) for pool, size in self.view.blocks.items()}
        GROWING.add(self)

    def grow(self) -> None:
        """Have memory for all blocks that were given out, and half as many again but no more than
        an eighth of all, so that it is rare. Layer by layer: the pool that is copied lies beside
        its copy."""
        for (pool, size), highest in zip(self.view.blocks.items(), self._given(), strict=True):
            if highest < self.view.held[pool]:
                continue
            blocks = min(size, highest + 1 + min((highest + 1) // 2, -(-size // 8)))
            for pages in self.pages():
                if pages.pool == pool:
                    pages.grow(blocks)
                    mx.clear_cache()
            self.view.held[pool] = (
                blocks  # last: where memory is short on the way, it is tried again
            )

    def owed(self) -> int:
        """Bytes by which the pools may still grow."""
        held, blocks = self.view.held, self.view.blocks
        sizes = ((p.pool, sum(x.nbytes for x in p.pools())) for p in self.pages())
        return sum(size // held[pool] * (blocks[pool] - held[pool]) for pool, size in sizes)

    def places(self) -> tuple[int, ...]:
        """The addresses of the pools, all work on them done."""
        mx.eval(self._pools())
        pools = (np.array(pool.view(mx.uint8), copy=False) for pool in self._pools())
        return tuple(int(pool.__array_interface__["data"][0]) for pool in pools)

    def _cache(self, cache: Any) -> Any:
        """What stands in for one of mlx-lm's caches. Raises UnsupportedModel for a memory that
        nothing here can be."""
        if type(cache) is CacheList:
            return CacheList(*(self._cache(c) for c in cache.caches))  # type: ignore[no-untyped-call]
        if type(cache) is ArraysCache and self.layout != "rows":
            return LayerState(len(cache.cache))
        return (DensePages if self.layout == "gather" else Pages)(self.view, window_of(cache))

    # ---- one step
    # -------------------------------------------------------------------------------------

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy whole blocks, (group, source, target) each; what the sources hold now counts, not
        what comes. Waits for the step in flight: once per prompt with a partial hit, the loop does
        not overlap."""
        if not copies:
            return
        self.grow()
        moves = {}
        for group, pool in enumerate(self.view.blocks):
            mine = [(source, target) for of, source, target in copies if of == group]
            moves[pool] = [self.view.slots_of([pair[i] for pair in mine]) for i in (0, 1)]
        # Read first, then write: a pool with a reader under way is copied whole instead of written
        # in place.
        held = [[pool[:, moves[pages.pool][0]] for pool in pages.pools()] for pages in self.pages()]
        mx.eval(held)
        for pages, (k, v) in zip(self.pages(), held, strict=True):
            pages.put(moves[pages.pool][1], k, v)

    def run(self, plan: Sequence[Entry], before: Step | None) -> Step:
        """Build the step's graph and submit it. `before` holds the tokens that are still
        pending."""
        rows = rows_of(plan)
        late = before.late(plan) if before is not None and any(e.spread for e in plan) else None
        ids, spans = self._inputs(plan, before, late)
        logits = self._forward(plan, ids, spans, late)
        sampled = None
        if rows:
            firsts = [s for e, s in zip(plan, spans, strict=True) for _ in range(e.sampled)]
            behind = late if late is None else _per_row(late, plan, lambda e: e.sampled)
            sampled = sample(logits, rows, ids, firsts, behind, drafts_of(plan, spans))
        # The samples need every pool; without any, K and V of the last layer rest on those of all
        # before it.
        # A pool that is named, MLX holds until all of the step is done, and copies where the next
        # writes it
        # before that. So what tells of a step is new memory, not a view of a pool.
        own = self._own(plan) if self.layout == "solo" else []
        ends = [] if sampled else own[-1:] or self._pools()[-2:] or list(plan[-1].seq.state[-1:])
        marks = [sampled.tokens] if sampled else [end.flatten()[:1] + 0 for end in ends]
        began = time.perf_counter()
        mx.async_eval(*marks, *(sampled.arrays() if sampled else ()), *own)
        step = Step(plan, ids, spans, rows, sampled, marks[-1])
        step.held = time.perf_counter() - began
        return step

    def _own(self, plan: Sequence[Entry]) -> list[mx.array]:
        """What mlx-lm's own caches hold."""
        leaves: Any = tree_flatten([c.state for e in plan for c in e.seq.state])
        return [a for _, a in leaves if isinstance(a, mx.array)]

    def _pools(self) -> list[mx.array]:
        return [pool for pages in self.pages() for pool in pages.pools()]

    def rollback(self, plan: Sequence[Entry], stands: Sequence[int]) -> None:
        """The plan's step was read, and of each entry's rows the first so many stand: see
        RecurrentStates.rollback."""
        if self.states.layers:
            self.states.rollback(plan, stands)

    def logits(self, plan: Sequence[Entry]) -> mx.array:
        """Lazy logits [R, vocab] of a plan whose tokens are all known. For warm-up."""
        return self._forward(plan, *self._inputs(plan, None, None), None)

    def forward(self, plan: Sequence[Entry], ids: mx.array, late: mx.array | None) -> mx.array:
        """Lazy logits [R, vocab] of a plan in the rows layout, its input tokens int32 [T] given;
        submits them, and with them the pages' new state, so that the next forward may write in
        place. `late` int32 [entries] is added to the entries' starts."""
        spans = [
            end - 1 - len(e.draft)
            for e, end in zip(plan, accumulate(e.rows for e in plan), strict=True)
        ]
        logits = self._forward(plan, ids, spans, late)
        mx.async_eval(logits)
        return logits

    def _inputs(
        self, plan: Sequence[Entry], before: Step | None, late: mx.array | None
    ) -> tuple[mx.array, list[int]]:
        """Input tokens int32 [T] in plan order, and each entry's first sampled row in it."""
        host: list[int] = []
        spans, holes, sources, owners, drafts = [], [], [], [], []
        for n, e in enumerate(plan):
            spans.append(len(host) + e.count - 1)
            if e.pending:
                holes.append(spans[-1])
                assert before is not None
                sources.append(before.at[e.seq])
                owners.append(n)
            known = [] if e.spread else e.seq.tokens[e.start : e.start + e.count]
            host += known + [0] * (e.count - len(known))
            if isinstance(e.draft.tokens, mx.array):
                drafts.append((len(host), e.draft.tokens))
                host += [0] * len(e.draft)
            else:
                host += e.draft.tokens
        if before is not None and before.sampled is not None and holes:
            if len(holes) == len(host) and sources == list(range(before.sampled.tokens.size)):
                return before.sampled.tokens, spans
            at = mx.array(sources) if late is None else mx.array(sources) + late[mx.array(owners)]
            ids = mx.array(host, mx.int32)
            ids[mx.array(holes)] = before.sampled.tokens[at]
        else:
            ids = mx.array(host, mx.int32)
        for first, tokens in drafts:
            ids[first : first + len(tokens)] = tokens
        return ids, spans

    def _forward(
        self, plan: Sequence[Entry], ids: mx.array, spans: Sequence[int], late: mx.array | None
    ) -> mx.array:
        """Logits [R, vocab] of the sampled rows in plan order."""
        if self.layout == "rows":
            return self._rows(plan, ids, spans, late)
        assert late is None, "only the rows layout goes on while a draft is in flight"
        return self._rect(plan, ids)

    def _rows(
        self, plan: Sequence[Entry], ids: mx.array, spans: Sequence[int], late: mx.array | None
    ) -> mx.array:
        size, view = self.view.block_size, self.view
        order = sorted(range(len(plan)), key=lambda i: _bucket(plan[i], size))
        starts = list(accumulate((e.rows for e in plan), initial=0))
        place = dict(zip(order, accumulate((plan[i].rows for i in order), initial=0), strict=False))
        if order != sorted(order):
            ids = ids[_joined(range(starts[i], starts[i + 1]) for i in order)]
            late = late if late is None else late[mx.array(order)]
        self._stage([plan[i] for i in order], late)
        firsts = [place[n] + span - starts[n] for n, span in enumerate(spans)]
        view.sampled = _joined(
            range(at, at + e.sampled) for at, e in zip(firsts, plan, strict=True)
        )
        logits: mx.array = self.model(ids[:, None], cache=self.caches)[:, 0]
        return logits if self.trunk else logits[view.sampled]

    def _stage(self, plan: Sequence[Entry], late: mx.array | None = None) -> None:
        """Positions, slots and groups of entries that lie in bucket order."""
        self.grow()
        size, view = self.view.block_size, self.view
        view.positions = _joined(range(e.start, e.end) for e in plan)
        if late is not None:
            view.positions = view.positions + _per_row(late, plan, lambda e: e.rows)
        for group, pool in enumerate(view.blocks):
            slots = list(chain.from_iterable(self._slots(e, group) for e in plan))
            if late is None:
                view.slots[pool] = placed(slots)
            else:
                unknown = _joined(repeat(e.spread > 0, e.rows) for e in plan) > 0
                found = _late_slots(plan, group, view.positions, size)
                view.slots[pool] = mx.where(unknown, found, mx.array(slots, mx.int32))
        view.groups, lo, first = [], 0, 0
        for _, members in groupby(plan, key=lambda e: _bucket(e, size)):
            batch = list(members)
            length = batch[0].rows
            hi = lo + length * len(batch)
            starts = [e.start for e in batch]
            spread = max(e.spread for e in batch)
            behind = late[first : first + len(batch)] if late is not None and spread else None
            tables = {pool: [e.seq.tables[i] for e in batch] for i, pool in enumerate(view.blocks)}
            view.groups.append(Group(lo, hi, length, starts, tables, size, behind, spread))
            lo, first = hi, first + len(batch)

    def _slots(self, entry: Entry, group: int) -> list[int]:
        """Where the entry's rows write; positions in shared blocks go to the null block."""
        table, size, rows = (
            entry.seq.tables[group],
            self.view.block_size,
            range(entry.start, entry.end),
        )
        shared = 0 if self.shares else entry.seq.shared
        if entry.rows >= MANY:
            at, first = np.arange(entry.start, entry.end), entry.start // size
            found = np.array(table[first:])[at // size - first] * size + at % size
            return np.where(at >= shared, found, NULL_BLOCK).tolist()  # type: ignore[no-any-return]
        return [table[at // size] * size + at % size if at >= shared else NULL_BLOCK for at in rows]

    def _rect(self, plan: Sequence[Entry], ids: mx.array) -> mx.array:
        """One forward per group of entries with equal rows, or per entry where the model cannot
        batch."""
        size, view = self.view.block_size, self.view
        starts = np.cumsum([0, *(e.rows for e in plan)])
        found: dict[int, mx.array] = {}
        self.states.begin_step(plan)
        forms = [(*_bucket(e, size), self.states.form(e)) for e in plan]
        order = sorted(range(len(plan)), key=forms.__getitem__)
        caches: Any = self.caches
        for _, members in groupby(order, key=lambda i: i if self.lone else forms[i]):
            batch = list(members)
            entries = [plan[i] for i in batch]
            index = np.stack([np.arange(starts[i], starts[i + 1]) for i in batch])
            tokens = ids[mx.array(index)]  # [B, L]
            if self.layout == "solo":
                seq = entries[0].seq
                caches = seq.state = seq.state or make_prompt_cache(self.model)
            else:
                self._stage(entries)
                view.positions = mx.array([e.start for e in entries])
            most = max(e.sampled for e in entries)
            view.sampled = (slice(None), slice(entries[0].rows - most, None))
            try:
                recorder = self.states.load(entries)
                logits = self.model(tokens, cache=caches)
                left = self.states.store(entries, recorder)
            finally:
                self.states.release()
            logits = logits if self.trunk else logits[view.sampled]
            # The next forward writes the pools that this one reads; in one graph MLX would copy
            # them. To name
            # them would hold them until all is done, so it is left out where the logits need all of
            # them.
            mx.async_eval(logits, *left, *(self._pools() if self._several else ()))
            for i, e, row in zip(batch, entries, logits, strict=True):
                if e.samples:
                    found[i] = row[most - e.sampled :]
        picked = [found[i] for i in sorted(found)]
        return mx.concatenate(picked) if picked else mx.zeros((0, 1))


def _bucket(entry: Entry, size: int) -> tuple[int, int]:
    """Entries of equal rows and alike context share one gather; padding at most doubles it."""
    return entry.rows, (-(-entry.end // size) - 1).bit_length()


def _per_row(late: mx.array, plan: Sequence[Entry], rows: Callable[[Entry], int]) -> mx.array:
    """`late` [entries] repeated for each of an entry's `rows`."""
    return late[_joined(repeat(n, rows(e)) for n, e in enumerate(plan))]


def _joined(some: Iterable[Iterable[int]]) -> mx.array:
    """int32: what each entry of a plan has for its rows, one after the other, without Python's
    loop."""
    return mx.array(list(chain.from_iterable(some)), mx.int32)


def _late_slots(plan: Sequence[Entry], group: int, positions: mx.array, size: int) -> mx.array:
    """Where rows write whose `positions` [T] the host does not know. They lie behind everything
    shared."""
    held = [e.seq.tables[group] for e in plan]
    width = max(map(len, held))
    tables = mx.array([table + [NULL_BLOCK] * (width - len(table)) for table in held], mx.int32)
    owners = _joined(repeat(n, e.rows) for n, e in enumerate(plan))
    return tables[owners, positions // size] * size + positions % size

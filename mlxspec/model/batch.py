"""From a plan to the arrays of a forward: input tokens, positions, slots, groups of like entries.

Rule: the host builds plain lists, which is faster for few rows than numpy; only what depends on a
step in flight is lazy.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import Group
from mlxspec.model.pages import View, placed
from mlxspec.model.sampler import Row, Sampled, read
from mlxspec.types import Entry, Logprob, Plan, Seq, Tap

# int32 [entries]: how many drafted tokens of the step in flight were accepted. Entries with drafts
# in flight begin so much later than their `start`. None: all are 0.
Offsets = mx.array | None
Result = tuple[list[int], list[Logprob]]  # of one entry


@dataclass(slots=True, eq=False)
class Step:
    """A plan's lazy forward, and its results once it is submitted; all in plan order.

    `ids` int32 [T] are the input tokens, `rows` the sampled rows, `row_offsets` int32 [R] their
    entries' offsets if not all 0, `logits` [R, vocab] theirs until the step is submitted, `taps`
    the hidden states [T, D] that drafters asked for. For each sequence that samples, `spans` is the
    index of its first sampled row among all rows, `first_row` among the sampled rows.
    """

    plan: Plan
    ids: mx.array
    rows: list[Row]
    row_offsets: mx.array | None
    logits: Any
    taps: dict[Tap, mx.array]
    spans: dict[Seq, int] = field(default_factory=dict)
    first_row: dict[Seq, int] = field(default_factory=dict)
    sampled: Sampled | None = None  # None: no entry samples
    marker: Any = None  # an array that is computed last
    number: int = 0
    began: float = 0.0
    overlaps: bool = False
    submit_seconds: float = 0.0

    def __post_init__(self) -> None:
        row = sampled = 0
        for e in self.plan:
            if e.samples:
                self.spans[e.seq] = row + e.count - 1
                self.first_row[e.seq] = sampled
            row += e.rows
            sampled += e.sampled

    def read(self) -> list[Result]:
        """Wait for the step; for each entry its accepted drafts and the token sampled behind them,
        with their log-probabilities if they were asked for."""
        mx.eval(self.marker)
        if self.sampled is None:
            return [([], []) for _ in self.plan]
        tokens, logprobs = read(self.sampled, self.rows)
        accepted = np.zeros(len(self.first_row), int)
        if self.sampled.accepted is not None:
            accepted = np.array(self.sampled.accepted)
        counts = iter(accepted.tolist())
        results: list[Result] = []
        for e in self.plan:
            first = stop = self.first_row.get(e.seq, 0)
            if e.samples:
                stop += next(counts) + 1
            asked = [logprob for logprob in logprobs[first:stop] if logprob]
            results.append((tokens[first:stop], asked))
        return results

    def offsets(self, plan: Plan) -> mx.array:
        """int32 [entries]: how much later than their `start` the next plan's entries begin."""
        assert self.sampled is not None and self.sampled.accepted is not None
        accepted = mx.pad(self.sampled.accepted, (0, 1))
        places = {seq: n for n, seq in enumerate(self.first_row)}
        found = []
        for e in plan:
            place = len(places)  # of the 0 behind them
            if e.inflight_drafts:
                place = places[e.seq]
            found.append(place)
        return accepted[mx.array(found)]


def build_inputs(
    plan: Plan,
    previous: Step | None,
    offsets: Offsets,
) -> mx.array:
    """Input tokens int32 [T] in plan order. Tokens in flight are taken lazily from `previous`."""
    host: list[int] = []  # with a 0 for each token in flight and each lazy draft
    lazy: list[tuple[int, mx.array]] = []  # drafts, and where they begin
    pending: list[int] = []  # entries whose last known token is in flight,
    targets: list[int] = []  # and where it goes
    for n, e in enumerate(plan):
        host += e.seq.tokens[e.start : e.start + e.count]
        if e.pending:
            pending.append(n)
            targets.append(len(host))
            host.append(0)
        drafted = e.draft.tokens
        if isinstance(drafted, mx.array):
            lazy.append((len(host), drafted))
            drafted = [0] * len(drafted)
        host += drafted
    ids = mx.array(host, mx.int32)
    if pending and previous is not None and previous.sampled is not None:
        sampled = previous.sampled.tokens
        sources = [previous.first_row[plan[n].seq] for n in pending]
        if len(pending) == len(host) and sources == list(range(sampled.size)):
            return sampled  # the common case: the same sequences decode, without drafts
        rows = mx.array(sources)
        if offsets is not None:
            rows = rows + offsets[mx.array(pending)]
        ids[mx.array(targets)] = sampled[rows]
    for first, tokens in lazy:
        ids[first : first + len(tokens)] = tokens
    return ids


def bucket(entry: Entry, block_size: int) -> tuple[int, int]:
    """Entries of equal rows and similar context share one gather; padding at most doubles it."""
    return entry.rows, (-(-entry.end // block_size) - 1).bit_length()


def stage(
    view: View,
    plan: Plan,
    offsets: Offsets,
) -> None:
    """Fill the view with positions, slots and groups. Neighbours of one bucket are a group."""
    view.positions = joined(range(e.start, e.end) for e in plan)
    chosen: mx.array | None = None  # the slot of each row, of those of all its possible positions
    if offsets is not None:
        shift = offsets[owners_of(e.rows for e in plan)]
        view.positions = view.positions + shift
        parts = []
        first = 0
        for e in plan:
            parts.append(range(first, first + e.rows))
            first += e.rows + e.inflight_drafts
        chosen = joined(parts) + shift
    for i, pool in enumerate(view.blocks):
        slots = _slots(plan, i, view.block_size)
        if chosen is None:
            view.slots[pool] = placed(slots)
        else:
            view.slots[pool] = mx.array(slots, mx.int32)[chosen]
    view.groups = _groups(view, plan, offsets)


def _slots(plan: Plan, pool: int, size: int) -> list[int]:
    """The slots of all positions that each entry's rows may have, in pool number `pool`."""
    slots: list[int] = []
    for e in plan:
        table = e.seq.tables[pool]
        for position in range(e.start, e.end + e.inflight_drafts):
            block = table[position // size]
            slots.append(block * size + position % size)
    return slots


def _groups(
    view: View,
    plan: Plan,
    offsets: Offsets,
) -> list[Group]:
    size = view.block_size
    groups = []
    row = first = 0
    for (rows, _), members in groupby(plan, key=lambda e: bucket(e, size)):
        entries = list(members)
        last = first + len(entries)
        end = row + rows * len(entries)
        starts = [e.start for e in entries]
        tables = {}
        for i, pool in enumerate(view.blocks):
            tables[pool] = [e.seq.tables[i] for e in entries]
        max_shift = max(e.inflight_drafts for e in entries)
        shift = None
        if offsets is not None and max_shift:
            shift = offsets[first:last]
        group = Group(
            row,
            end,
            rows,
            starts,
            tables,
            size,
            shift,
            max_shift,
        )
        groups.append(group)
        row, first = end, last
    return groups


def starts_of(plan: Plan) -> dict[Entry, int]:
    """The index of each entry's first row among all rows."""
    starts, row = {}, 0
    for e in plan:
        starts[e] = row
        row += e.rows
    return starts


def sampled_rows(plan: Plan) -> mx.array:
    """int32 [R]: the indices of the sampled rows among all rows."""
    rows: list[int] = []
    end = 0
    for e in plan:
        end += e.rows
        rows += range(end - e.sampled, end)
    return mx.array(rows, mx.int32)


def drafts_of(plan: Plan) -> list[tuple[int, int]]:
    """(index of its first row among all rows, length) of each sampling entry's draft; [] if nothing
    was drafted."""
    if not any(len(e.draft) for e in plan):
        return []
    starts = starts_of(plan)
    return [(starts[e] + e.count, len(e.draft)) for e in plan if e.samples]


def owners_of(counts: Iterable[int]) -> mx.array:
    """int32: the index of each row's owner, of which number n has `counts[n]` rows."""
    return joined([n] * count for n, count in enumerate(counts))


def joined(parts: Iterable[Iterable[int]]) -> mx.array:
    """int32: the parts one after the other."""
    return mx.array(list(chain.from_iterable(parts)), mx.int32)

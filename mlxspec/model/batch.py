"""From a plan to the arrays of a forward: input tokens, positions, slots, groups of like entries.

Rule: the host builds plain lists, which is faster for few rows than numpy; only what depends on a
step in flight is lazy. `offsets` int32 [entries] is how many drafted tokens of the step in flight
were accepted: entries with drafts in flight begin so much later than their `start`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import Group
from mlxspec.model.pages import View, placed
from mlxspec.model.sampler import Row, Sampled, read
from mlxspec.types import Entry, Logprob, Tap
from mlxspec.types import Sequence as Seq


@dataclass(slots=True, eq=False)
class Step:
    """A plan's lazy forward, and its results once it is submitted; all in plan order.

    `ids` int32 [T] are the input tokens, `rows` the sampled rows, `row_offsets` int32 [R] their
    entries' offsets if not all 0, `logits` [R, vocab] theirs until the step is submitted, `taps`
    the hidden states [T, D] that drafters asked for. For each sequence that samples, `spans` is the
    index of its first sampled row among all rows, `first_row` among the sampled rows.
    """

    plan: Sequence[Entry]
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
        row = 0
        for e, start in starts_of(self.plan).items():
            if e.samples:
                self.spans[e.seq] = start + e.count - 1
                self.first_row[e.seq] = row
                row += e.sampled

    def read(self) -> list[tuple[list[int], list[Logprob]]]:
        """Wait for the step; for each entry its accepted drafts and the token sampled behind them,
        with their log-probabilities if they were asked for."""
        mx.eval(self.marker)
        if not self.sampled:
            return [([], []) for _ in self.plan]
        tokens, logprobs = read(self.sampled, self.rows)
        accepted = [0 for _ in self.first_row]
        if self.sampled.accepted is not None:
            accepted = np.array(self.sampled.accepted).tolist()
        counts = dict(zip(self.first_row, accepted, strict=True))
        results: list[tuple[list[int], list[Logprob]]] = []
        for e in self.plan:
            first = self.first_row.get(e.seq, 0)
            stop = first
            if e.samples:
                stop += 1 + counts[e.seq]
            asked = [logprob for logprob in logprobs[first:stop] if logprob]
            results.append((tokens[first:stop], asked))
        return results

    def offsets(self, plan: Sequence[Entry]) -> mx.array:
        """int32 [entries]: how much later than their `start` the next plan's entries begin."""
        assert self.sampled is not None and self.sampled.accepted is not None
        accepted = mx.concatenate([self.sampled.accepted, mx.zeros((1,), mx.int32)])
        places = {seq: n for n, seq in enumerate(self.first_row)}
        nothing = len(places)
        found = []
        for e in plan:
            found.append(places.get(e.seq, nothing) if e.inflight_drafts else nothing)
        return accepted[mx.array(found)]


def build_inputs(
    plan: Sequence[Entry], previous: Step | None, offsets: mx.array | None
) -> mx.array:
    """Input tokens int32 [T] in plan order. Tokens in flight are taken lazily from `previous`."""
    host: list[int] = []  # with a 0 for each token in flight and each lazy draft
    for e in plan:
        known = e.seq.tokens[e.start : e.start + e.count]
        drafted = e.draft.tokens
        if isinstance(drafted, mx.array):
            drafted = [0] * len(drafted)
        host += [*known, *([0] * (e.count - len(known))), *drafted]
    ids = mx.array(host, mx.int32)
    starts = starts_of(plan)
    pending = [e for e in plan if e.pending]
    if pending and previous is not None and previous.sampled is not None:
        sampled = previous.sampled.tokens
        sources = [previous.first_row[e.seq] for e in pending]
        if len(pending) == len(host) and sources == list(range(sampled.size)):
            return sampled  # the common case: the same sequences decode, without drafts
        rows = mx.array(sources)
        if offsets is not None:
            rows = rows + offsets[mx.array([n for n, e in enumerate(plan) if e.pending])]
        ids[mx.array([starts[e] + e.count - 1 for e in pending])] = sampled[rows]
    for e in plan:
        if isinstance(e.draft.tokens, mx.array):
            first = starts[e] + e.count
            ids[first : first + len(e.draft)] = e.draft.tokens
    return ids


def bucket(entry: Entry, block_size: int) -> tuple[int, int]:
    """Entries of equal rows and similar context share one gather; padding at most doubles it."""
    return entry.rows, (-(-entry.end // block_size) - 1).bit_length()


def stage(view: View, plan: Sequence[Entry], offsets: mx.array | None) -> None:
    """Fill the view with positions, slots and groups. Neighbours of one bucket are a group."""
    size = view.block_size
    where: mx.array | None = None  # of each row's slot, among those of all possible positions
    view.positions = joined(range(e.start, e.end) for e in plan)
    if offsets is not None:
        moved = offsets[owners_of(e.rows for e in plan)]
        view.positions = view.positions + moved
        begins = accumulate((e.rows + e.inflight_drafts for e in plan), initial=0)
        where = joined(range(at, at + e.rows) for at, e in zip(begins, plan, strict=False)) + moved
    for i, pool in enumerate(view.blocks):
        slots: list[int] = []
        for e in plan:
            table = e.seq.tables[i]
            for at in range(e.start, e.end + e.inflight_drafts):
                slots.append(table[at // size] * size + at % size)
        view.slots[pool] = placed(slots) if where is None else mx.array(slots, mx.int32)[where]
    view.groups = []
    row, first = 0, 0
    for (rows, _), members in groupby(plan, key=lambda e: bucket(e, size)):
        group = list(members)
        end, last = row + rows * len(group), first + len(group)
        starts = [e.start for e in group]
        tables = {pool: [e.seq.tables[i] for e in group] for i, pool in enumerate(view.blocks)}
        spread = max(e.inflight_drafts for e in group)
        late = None
        if offsets is not None and spread:
            late = offsets[first:last]
        view.groups.append(Group(row, end, rows, starts, tables, size, late, spread))
        row, first = end, last


def starts_of(plan: Iterable[Entry]) -> dict[Entry, int]:
    """The index of each entry's first row among all rows."""
    starts, row = {}, 0
    for e in plan:
        starts[e] = row
        row += e.rows
    return starts


def drafts_of(plan: Sequence[Entry]) -> list[tuple[int, int]]:
    """(index of its first row among all rows, length) of each sampling entry's draft; [] if nothing
    was drafted."""
    starts = starts_of(plan)
    drafts = [(starts[e] + e.count, len(e.draft)) for e in plan if e.samples]
    return drafts if any(length for _, length in drafts) else []


def owners_of(counts: Iterable[int]) -> mx.array:
    """int32: the index of each row's owner, of which number n has `counts[n]` rows."""
    return joined([n] * count for n, count in enumerate(counts))


def joined(parts: Iterable[Iterable[int]]) -> mx.array:
    """int32: the parts one after the other."""
    return mx.array(list(chain.from_iterable(parts)), mx.int32)

"""From a plan to the arrays of a forward: input tokens, positions, slots, groups of like entries.

Rule: the host builds plain lists, which is faster for few rows than numpy; only what depends on a
step in flight is lazy.
"""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import Group
from mlxspec.kernels.reference import block_array
from mlxspec.model.pages import View, slot_index
from mlxspec.model.sampler import Sampled, SampledRow, read
from mlxspec.types import Entry, Logprob, Plan, Seq, Tap

# int32, by entry or by row: how far positions shift by accepted drafts of the step in flight, which
# the host has not read. None: all are 0.
Shift = mx.array | None
Result = tuple[list[int], list[Logprob]]  # of one entry


@dataclass(slots=True, eq=False)
class Step:
    """A plan's forward, and its results once it is submitted; all in plan order.

    `ids` int32 [T] are the input tokens, `rows` the sampled rows, `shift` [R] the shift of their
    positions, `logits` [R, vocab] theirs until the step is submitted, `taps` the hidden states
    [T, D] that drafters asked for. `first_row` is the index in `rows` of the first sampled row of
    each sequence that samples.
    """

    plan: Plan
    ids: mx.array
    rows: list[SampledRow]
    shift: Shift
    logits: Any
    taps: dict[Tap, mx.array]
    first_row: dict[Seq, int] = field(init=False)
    sampled: Sampled | None = None  # None: no entry samples
    marker: Any = None  # an array that is computed last
    number: int = 0
    began: float = 0.0
    overlaps: bool = False
    submit_seconds: float = 0.0

    def __post_init__(self) -> None:
        rows = enumerate(self.rows)
        self.first_row = {row.entry.seq: r for r, row in rows if row.ordinal == 1}

    def read(self) -> list[Result]:
        """Wait for the step; for each entry its accepted drafts and the token sampled after them,
        with their log-probabilities if they were asked for."""
        mx.eval(self.marker)
        if self.sampled is None:
            return [([], []) for _ in self.plan]
        tokens, logprobs = read(self.sampled, self.rows)
        accepted = dict.fromkeys(self.first_row, 0)
        if self.sampled.accepted is not None:
            counts = np.array(self.sampled.accepted).tolist()
            accepted = dict(zip(accepted, counts, strict=True))
        results: list[Result] = []
        for e in self.plan:
            first = stop = 0
            if e.samples:
                first = self.first_row[e.seq]
                stop = first + accepted[e.seq] + 1
            asked = [logprob for logprob in logprobs[first:stop] if logprob]
            results.append((tokens[first:stop], asked))
        return results

    def shift_of(self, plan: Plan) -> mx.array:
        """int32 [entries]: the shift of the next plan's entries, once this step is submitted."""
        assert self.sampled is not None and self.sampled.accepted is not None
        accepted = mx.pad(self.sampled.accepted, (0, 1))  # with 0 for entries without drafts
        places = {seq: n for n, seq in enumerate(self.first_row)}
        found = [places[e.seq] if e.inflight_drafts else -1 for e in plan]
        return accepted[mx.array(found)]


def build_inputs(
    plan: Plan,
    previous: Step | None,
    shift: Shift,
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
        if shift is not None:
            rows = rows + shift[mx.array(pending)]
        ids[mx.array(targets)] = sampled[rows]
    for first, tokens in lazy:
        ids[first : first + len(tokens)] = tokens
    return ids


def bucket(
    entry: Entry,
    block_size: int,
) -> tuple[int, int]:
    """Entries of equal rows and similar context share one gather; padding at most doubles it."""
    return entry.rows, (-(-entry.end // block_size) - 1).bit_length()


def fill_view(
    view: View,
    plan: Plan,
    shift: Shift,
) -> None:
    """Fill the view with positions, slots and groups. Neighbours of one bucket are a group. With
    drafts in flight, positions and slots are lazy."""
    size = view.block_size
    positions: list[int] = []
    owners: list[int] = []  # the number of each row's entry
    for n, e in enumerate(plan):
        positions += range(e.start, e.end)
        owners += [n] * e.rows
    view.positions = mx.array(positions, mx.int32)
    if shift is not None:
        view.positions = view.positions + shift[mx.array(owners)]
    for i, window in enumerate(view.num_blocks):
        tables = [e.seq.tables[i] for e in plan]
        if shift is None:
            slots = []
            for n, position in zip(owners, positions, strict=True):
                block = tables[n][position // size]
                slots.append(block * size + position % size)
            view.slots[window] = slot_index(slots)
        else:
            width = max(map(len, tables))
            blocks = block_array(tables, width)[mx.array(owners), view.positions // size]
            view.slots[window] = blocks * size + view.positions % size
    view.groups = _groups(view, plan, shift)


def _groups(
    view: View,
    plan: Plan,
    shift: Shift,
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
        for i, window in enumerate(view.num_blocks):
            tables[window] = [e.seq.tables[i] for e in entries]
        group = Group(
            row,
            end,
            rows,
            starts,
            tables,
            size,
        )
        max_shift = max(e.inflight_drafts for e in entries)
        if shift is not None and max_shift:
            group.shift, group.max_shift = shift[first:last], max_shift
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

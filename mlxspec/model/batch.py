"""From a plan to the arrays of a forward: input tokens, positions, slots, groups of like entries.

Rule: the host builds plain lists, which is faster for few rows than numpy; only what depends on a
step in flight is lazy. `offsets` int32 [entries] is how many drafted tokens of the step in flight
were accepted: entries with drafts in flight begin so much later than their `start`.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, groupby, repeat

import mlx.core as mx

from mlxspec.kernels import Group
from mlxspec.model.pages import View, placed
from mlxspec.model.sampler import Row, Sampled, read
from mlxspec.types import NULL_BLOCK, Entry, Logprob, Tap
from mlxspec.types import Sequence as Seq


class Step:
    """A submitted plan and its lazy results. `ids` int32 [T] are its input tokens, `rows` its
    sampled rows, `taps` the hidden states [T, D] that drafters asked for, all in plan order.
    `accepted` int32 [sampling entries] counts accepted drafts; None: nothing was drafted."""

    __slots__ = (
        "_nth",
        "accepted",
        "began",
        "first_row",
        "ids",
        "marker",
        "number",
        "overlaps",
        "plan",
        "rows",
        "sampled",
        "spans",
        "submit_seconds",
        "taps",
    )

    def __init__(
        self,
        plan: Sequence[Entry],
        ids: mx.array,
        spans: Sequence[int],
        rows: list[Row],
        sampled: Sampled | None,
        marker: mx.array,
        taps: dict[Tap, mx.array],
    ) -> None:
        self.plan, self.ids, self.rows, self.sampled = plan, ids, rows, sampled
        self.marker, self.taps = marker, taps
        self.accepted = sampled.accepted if sampled else None
        self.number, self.began, self.overlaps, self.submit_seconds = 0, 0.0, False, 0.0
        self.first_row: dict[Seq, int] = {}  # of each sampling sequence, among the sampled rows
        for r, row in enumerate(rows):
            self.first_row.setdefault(row.entry.seq, r)
        self._nth = {seq: n for n, seq in enumerate(self.first_row)}
        self.spans = {e.seq: span for e, span in zip(plan, spans, strict=True) if e.samples}

    def read(self) -> list[tuple[list[int], list[Logprob]]]:
        """Wait for the step; for each entry its accepted drafts and the token sampled behind them,
        with their log-probabilities if they were asked for."""
        mx.eval(self.marker)
        if not self.sampled:
            return [([], []) for _ in self.plan]
        tokens, logprobs = read(self.sampled, self.rows)
        counts: list[int] | None = None if self.accepted is None else self.accepted.tolist()  # type: ignore[assignment]
        results: list[tuple[list[int], list[Logprob]]] = []
        row = 0
        for e in self.plan:
            stop = row
            if e.samples:
                stop += 1 + (counts[self._nth[e.seq]] if counts else 0)
            results.append((tokens[row:stop], [lp for each in logprobs[row:stop] for lp in each]))
            row += e.sampled
        return results

    def offsets(self, plan: Sequence[Entry]) -> mx.array:
        """int32 [entries]: how much later than their `start` the next plan's entries begin."""
        assert self.accepted is not None
        accepted = mx.concatenate([self.accepted, mx.zeros((1,), mx.int32)])
        none = len(self._nth)
        return accepted[
            mx.array([self._nth.get(e.seq, none) if e.inflight_drafts else none for e in plan])
        ]


def build_inputs(
    plan: Sequence[Entry], previous: Step | None, offsets: mx.array | None
) -> tuple[mx.array, list[int]]:
    """Input tokens int32 [T] in plan order, and the index of each entry's first sampled row. Tokens
    in flight are taken lazily from `previous`."""
    host: list[int] = []
    spans: list[int] = []
    pending: list[tuple[int, int, int]] = []  # index in ids, sampled row of `previous`, entry
    drafts: list[tuple[int, mx.array]] = []
    for n, e in enumerate(plan):
        spans.append(len(host) + e.count - 1)
        if e.pending:
            assert previous is not None
            pending.append((spans[-1], previous.first_row[e.seq], n))
        known = [] if e.inflight_drafts else e.seq.tokens[e.start : e.start + e.count]
        host += known
        host += [0] * (e.count - len(known))
        if isinstance(e.draft.tokens, mx.array):
            drafts.append((len(host), e.draft.tokens))
            host += [0] * len(e.draft)
        else:
            host += e.draft.tokens
    if pending and previous is not None and previous.sampled is not None:
        holes, sources, owners = (list(column) for column in zip(*pending, strict=True))
        sampled = previous.sampled.tokens
        if len(holes) == len(host) and sources == list(range(sampled.size)):
            return sampled, spans  # the common case: the same sequences decode, without drafts
        rows = mx.array(sources)
        if offsets is not None:
            rows = rows + offsets[mx.array(owners)]
        ids = mx.array(host, mx.int32)
        ids[mx.array(holes)] = sampled[rows]
    else:
        ids = mx.array(host, mx.int32)
    for first, tokens in drafts:
        ids[first : first + len(tokens)] = tokens
    return ids, spans


def bucket(entry: Entry, block_size: int) -> tuple[int, int]:
    """Entries of equal rows and similar context share one gather; padding at most doubles it."""
    return entry.rows, (-(-entry.end // block_size) - 1).bit_length()


def stage(
    view: View, plan: Sequence[Entry], offsets: mx.array | None = None, write_shared: bool = False
) -> None:
    """Fill the view with positions, slots and groups of entries that lie in bucket order."""
    size = view.block_size
    view.positions = joined(range(e.start, e.end) for e in plan)
    if offsets is not None:
        view.positions = view.positions + per_row(offsets, plan, lambda e: e.rows)
    for group, pool in enumerate(view.blocks):
        slots = list(chain.from_iterable(_slots(e, group, size, write_shared) for e in plan))
        if offsets is None:
            view.slots[pool] = placed(slots)
        else:
            unknown = joined(repeat(e.inflight_drafts > 0, e.rows) for e in plan) > 0
            lazy = _lazy_slots(plan, group, view.positions, size)
            view.slots[pool] = mx.where(unknown, lazy, mx.array(slots, mx.int32))
    groups, low, first = [], 0, 0
    for _, members in groupby(plan, key=lambda e: bucket(e, size)):
        batch = list(members)
        high = low + batch[0].rows * len(batch)
        most = max(e.inflight_drafts for e in batch)
        late = None
        if offsets is not None and most:
            late = offsets[first : first + len(batch)]
        tables = {pool: [e.seq.tables[i] for e in batch] for i, pool in enumerate(view.blocks)}
        starts = [e.start for e in batch]
        groups.append(Group(low, high, batch[0].rows, starts, tables, size, late, most))
        low, first = high, first + len(batch)
    view.groups = groups


def _slots(entry: Entry, group: int, size: int, write_shared: bool) -> list[int]:
    """Where the entry's rows write; positions in shared blocks go to the null block."""
    table = entry.seq.tables[group]
    shared = 0 if write_shared else entry.seq.shared
    return [
        table[at // size] * size + at % size if at >= shared else NULL_BLOCK
        for at in range(entry.start, entry.end)
    ]


def _lazy_slots(plan: Sequence[Entry], group: int, positions: mx.array, size: int) -> mx.array:
    """Where rows write whose `positions` [T] depend on drafts in flight; never in shared blocks."""
    tables = [e.seq.tables[group] for e in plan]
    width = max(map(len, tables))
    padded = mx.array([t + [NULL_BLOCK] * (width - len(t)) for t in tables], mx.int32)
    owners = joined(repeat(n, e.rows) for n, e in enumerate(plan))
    return padded[owners, positions // size] * size + positions % size


def per_row(offsets: mx.array, plan: Sequence[Entry], rows: Callable[[Entry], int]) -> mx.array:
    """`offsets` [entries] repeated for each of an entry's `rows`."""
    return offsets[joined(repeat(n, rows(e)) for n, e in enumerate(plan))]


def joined(parts: Iterable[Iterable[int]]) -> mx.array:
    """int32: the parts one after the other."""
    return mx.array(list(chain.from_iterable(parts)), mx.int32)


def spans_of(plan: Sequence[Entry]) -> list[int]:
    """The index of each entry's first sampled row among all rows of the plan."""
    ends = accumulate(e.rows for e in plan)
    return [end - 1 - len(e.draft) for e, end in zip(plan, ends, strict=True)]

"""From a plan to the arrays of a forward: input tokens, positions, slots, groups of like entries.

Rule: the host builds plain lists, which is faster for few rows than numpy; only what depends on a
step in flight is lazy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from math import ceil
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from mlxspec.kernels.inputs import Group, block_array
from mlxspec.model.pages import View, slot_index
from mlxspec.model.recurrent import StateRecorder, by_span
from mlxspec.model.sampler import Sampled, SampledRow, read
from mlxspec.sequences import Entry, LazyTokens, SeqState, Span, Spans
from mlxspec.types import NOT_FINITE, NULL_BLOCK, Logprob, Tap

# int32, by entry or by row: how far positions shift by accepted drafts of the step in flight, which
# the host has not read. None: all are 0.
Shift = Array | None
Result = tuple[list[int], list[Logprob]]  # of one entry
SpanT = TypeVar("SpanT", bound=Span)
# bool [n]: which rows or states are NaN, and the slices of them that belong to each span.
NaNs = tuple[Array, Sequence[tuple[Span, slice]]]


@dataclass(slots=True, eq=False)
class Forward(Generic[SpanT]):
    """A forward of some spans, and its results once it is submitted, all in the spans' order.

    `ids` int32 [T] are the input tokens, `sampled_rows` the rows that are sampled, `shift` [R] the
    shift of their positions, `logits` [R, vocab] their logits until the step is submitted, `taps`
    the hidden states [T, D] that drafters asked for. `nans` check the rows that are not sampled.
    `first_row`: for each sequence that samples, the index of its first row in `sampled_rows`.
    `marker`: an array that is computed last, or two; `read` waits for it.

    The engine sets the last three: `number` counts its steps from 1; `began` is the time on
    time.perf_counter() when it began to plan this one; `overlaps`: the step before was unread then.
    """

    plan: Sequence[SpanT]
    ids: Array
    sampled_rows: list[SampledRow]
    shift: Shift
    logits: Any
    taps: dict[Tap, Array]
    nans: Sequence[NaNs] = ()
    pooled: dict[Span, Array] = field(default_factory=dict)  # float32 [count, D], for embeddings
    first_row: dict[SeqState, int] = field(init=False)
    sampled: Sampled | None = None  # None: no entry samples
    recordings: Sequence[StateRecorder] = ()  # of recurrent layers, where there are drafts
    marker: Any = None
    number: int = 0
    began: float = 0.0
    overlaps: bool = False

    def __post_init__(self) -> None:
        rows = enumerate(self.sampled_rows)
        self.first_row = {row.span.state: r for r, row in rows if row.ordinal == 1}

    def read(self) -> list[Result]:
        """Wait for the step. Returns the accepted drafts of each span and the token sampled after
        them, with log-probabilities if requested. NOT_FINITE replaces a token whose numbers are not
        finite, or all tokens of the span."""
        mx.eval(self.marker)
        broken = _broken(self.nans) | self._pool()
        if self.sampled is None:
            return [([NOT_FINITE] if e in broken else [], []) for e in self.plan]
        tokens, logprobs = read(self.sampled, self.sampled_rows)
        accepted: Iterator[int] = repeat(0)
        if self.sampled.accepted is not None:
            accepted = iter(np.array(self.sampled.accepted).tolist())
        results: list[Result] = []
        for e in self.plan:
            first = stop = 0
            if e.samples:
                first = self.first_row[e.state]
                stop = first + next(accepted) + 1
            requested = [logprob for logprob in logprobs[first:stop] if logprob]
            results.append(([NOT_FINITE] if e in broken else tokens[first:stop], requested))
        return results

    def _pool(self) -> set[Span]:
        """Add the rows to the embeddings of their sequences. Returns the spans whose embeddings
        are not finite. The sum of all rows has the direction of their mean."""
        broken = set[Span]()
        for e, hidden in self.pooled.items():
            rows = np.array(hidden)
            if e.state.pooling == "last":
                rows = rows[-1:]
            elif e.start:  # 0: it begins, again after a preemption
                rows[0] += e.state.embedding
            e.state.embedding = rows.sum(axis=0)
            if not np.isfinite(e.state.embedding).all():
                broken.add(e)
        return broken

    def shift_of(self, spans: Spans) -> Array:
        """int32 [spans]: the shift of the next step's spans, once this one is submitted."""
        assert self.sampled is not None and self.sampled.accepted is not None
        return by_span(self.sampled.accepted, self.first_row, spans)


Step = Forward[Entry]  # of a plan


def build_inputs(
    spans: Spans,
    previous: Forward[SpanT] | None,
    shift: Shift,
    keep_image_ids: bool = False,
) -> Array:
    """Input tokens int32 [T] of the spans. Tokens in flight are taken lazily from `previous`. With
    `keep_image_ids` the rows of images keep their ids, which are below 0; else these are 0, which
    any model can embed."""
    host: list[int] = []  # with a 0 for each token that it has not read
    # Arrays with lazy tokens, each with the places of these in `host` and in the array.
    lazy: dict[int, tuple[Array, list[int], list[int]]] = {}
    pending: list[int] = []  # spans whose last known token is in flight,
    targets: list[int] = []  # and where it goes
    for n, e in enumerate(spans):
        known = e.tokens[e.start : e.start + e.count]
        if e.state.images and not keep_image_ids:
            known = [max(0, token) for token in known]
        host += known
        if e.pending:
            pending.append(n)
            targets.append(len(host))
            host.append(0)
        drafted = e.draft.tokens
        if isinstance(drafted, LazyTokens):
            _, at, places = lazy.setdefault(id(drafted.array), (drafted.array, [], []))
            at += range(len(host), len(host) + len(drafted))
            places += drafted.places
            drafted = [0 for _ in drafted.places]
        host += drafted
    ids = mx.array(host, mx.int32)
    if pending and previous and previous.sampled:
        sampled = previous.sampled.tokens
        sources = [previous.first_row[spans[n].state] for n in pending]
        if len(pending) == len(host) and sources == list(range(sampled.size)):
            return sampled  # the common case: the same sequences decode, without drafts
        rows = mx.array(sources)
        if shift is not None:
            rows = rows + shift[mx.array(pending)]
        ids[mx.array(targets)] = sampled[rows]
    for array, at, places in lazy.values():
        ids[mx.array(at)] = array[mx.array(places)]
    return ids


def nans_of(
    batch: Spans,
    length: int,
    keys: Array | None,
    states: Iterable[Array],
) -> Iterator[NaNs]:
    """What tells whether rows of a forward that are not sampled are finite: what it has written
    last, `keys` and recurrent `states`, since NaN in a row's hidden state stays there in all layers
    after."""
    parts = unsampled(batch, length)
    if not parts:
        return
    if keys is not None:
        yield mx.isnan(keys).any(axis=(1, 3)).flatten(), parts
    places = {e: n for n, e in enumerate(batch)}
    for array in states:
        found = mx.isnan(array.reshape(len(batch), -1)).any(axis=1)
        yield found, [(e, slice(places[e], places[e] + 1)) for e, _ in parts]


def bucket(span: Span, block_size: int, length: int = 0) -> tuple[int, int]:
    """Spans of equal rows and similar context share one gather; padding at most doubles it.
    `length`: rows of each span with padding, 0: no padding."""
    rows = length or span.rows
    return rows, (-(-(span.start + rows) // block_size) - 1).bit_length()


def runs_of(
    spans: Sequence[SpanT],
    key: Callable[[SpanT], Any],
    length: int = 0,
) -> Iterator[tuple[list[SpanT], slice, slice]]:
    """Runs of neighbours with the same key, each with its slice of the spans and of their rows;
    `length`: rows of each span with padding, 0: no padding."""
    first = row = 0
    for _, members in groupby(spans, key):
        run = list(members)
        last = first + len(run)
        end = row + sum([length or e.rows for e in run])
        yield run, slice(first, last), slice(row, end)
        first, row = last, end


def fill_view(view: View, spans: Spans, shift: Shift, length: int = 0) -> None:
    """Fill the view with positions, slots and groups: a single group if it is dense, else one for
    each run of neighbours in the same bucket. With drafts in flight, positions and slots are lazy.

    Each span has `length` rows with padding, 0: no padding. What padding rows write is overwritten
    before it is read, or is in the null block.
    """
    size = view.block_size
    positions: list[int] = []
    owners: list[int] = []  # the number of each row's span
    for n, e in enumerate(spans):
        span_positions = range(e.start, e.start + (length or e.rows))
        positions += span_positions
        owners += [n] * len(span_positions)
    view.positions = mx.array(positions, mx.int32)
    if shift is not None:
        view.positions = view.positions + shift[mx.array(owners)]
    all_tables: dict[int | None, list[list[int]]] = {}
    for i, window in enumerate(view.num_blocks):
        if length:
            tables = [_padded_table(e, i, length, size=size) for e in spans]
        else:
            tables = [e.tables[i] for e in spans]
        all_tables[window] = tables
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
    view.groups = []
    view.kernel_only = {}
    for run, places, rows in runs_of(
        spans,
        lambda e: view.dense or bucket(e, size, length),
        length,
    ):
        group = Group(
            rows.start,
            rows.stop,
            length or run[0].rows,
            starts=[e.start for e in run],
            tables={window: tables[places] for window, tables in all_tables.items()},
            block_size=size,
            first=view.first,
        )
        max_shift = max([e.inflight_drafts for e in run])
        if shift is not None and max_shift:
            group.shift, group.max_shift = shift[places], max_shift
        view.groups.append(group)


def _padded_table(e: Span, pool: int, length: int, size: int) -> list[int]:
    """A span's block table in pool number `pool`, with null blocks for its padding."""
    table = e.tables[pool]
    end = e.start + e.inflight_drafts + length
    if end <= len(table) * size:
        return table
    return table + [NULL_BLOCK for _ in range(len(table), ceil(end / size))]


def starts_of(spans: Sequence[SpanT], length: int = 0) -> dict[SpanT, int]:
    """The index of each span's first row, with spans padded to `length` rows; 0: no padding."""
    starts, row = {}, 0
    for e in spans:
        starts[e] = row
        row += length or e.rows
    return starts


def unsampled(spans: Sequence[SpanT], length: int = 0) -> list[tuple[SpanT, slice]]:
    """The spans with rows that are not sampled, and the slice of each one's rows; `length` as for
    `starts_of`."""
    some = [e for e in spans if e.count > 1 or not e.samples]
    if not some:  # as in most steps
        return []
    starts = starts_of(spans, length)
    return [(e, slice(starts[e], starts[e] + e.rows)) for e in some]


def _broken(nans: Sequence[NaNs]) -> set[Span]:
    """The spans that have a NaN."""
    broken = set[Span]()
    for mask, parts in nans:
        values = np.array(mask)
        broken |= {e for e, part in parts if values[part].any()}
    return broken


def sampled_row_indices(spans: Spans, length: int = 0) -> Array:
    """int32 [R]: the indices of the sampled rows among all rows; `length` as for `starts_of`."""
    rows: list[int] = []
    for e, first in starts_of(spans, length).items():
        rows += range(first + e.rows - e.num_sampled, first + e.rows)
    return mx.array(rows, mx.int32)


def joined(parts: Sequence[Array], axis: int = 0) -> Array:
    """The parts in one array; [0, 0] if there are none."""
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate(list(parts), axis) if parts else mx.zeros((0, 0))


def padded_rows(spans: Spans, length: int) -> Array:
    """int32 [B * length]: for each row of a padded batch its index among the spans' rows; padding
    repeats the span's last row."""
    rows: list[int] = []
    for e, first in starts_of(spans).items():
        rows += [first + min(i, e.rows - 1) for i in range(length)]
    return mx.array(rows, mx.int32)


def unpadded_rows(spans: Spans, length: int) -> Array:
    """int32 [T]: the indices of the spans' rows among those of a padded batch."""
    rows: list[int] = []
    for e, first in starts_of(spans, length).items():
        rows += range(first, first + e.rows)
    return mx.array(rows, mx.int32)

"""Entries and spans as tests make them."""

from collections.abc import Sequence
from typing import Any

from mlxspec.sequences import Entry, Seq, SeqState, Span


def entry(seq: Seq, start: int, count: int, samples: bool, **more: Any) -> Entry:
    """A sequence's share of a step, as the scheduler makes it."""
    return Entry(
        seq=seq,
        state=seq.state,
        tables=seq.tables,
        tokens=seq.tokens,
        start=start,
        count=count,
        samples=samples,
        **more,
    )


def span(
    table: Sequence[int],
    tokens: Sequence[int],
    start: int,
    count: int,
    samples: bool = True,
    state: SeqState | None = None,
    **more: Any,
) -> Span:
    """Rows of a model without windows."""
    tables = [list(table)]
    return Span(state or SeqState(), tables, list(tokens), start, count, samples, **more)

"""Which rows of a table of parameters `make test` runs; `make test-slow` runs them all."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def chosen(axes: tuple[list[Any], ...], quick: Callable[[tuple[int, ...]], bool]) -> list[Any]:
    """The product of the axes, slow but for the rows whose places on their axes are `quick`. A row
    is the values of its axes in one tuple."""
    rows = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        row = []
        for axis, i in zip(axes, places, strict=True):
            row += axis[i] if isinstance(axis[i], tuple) else [axis[i]]
        rows.append(pytest.param(*row, marks=[] if quick(places) else [pytest.mark.slow]))
    return rows


def rotated(*axes: list[Any]) -> list[Any]:
    """The product of the axes, slow but for one row of each value of the first, with the others'
    combinations in rotation."""
    turns = [*itertools.product(*(range(len(axis)) for axis in axes[1:]))]
    return chosen(axes, lambda places: places[1:] == turns[places[0] % len(turns)])


def in_turn(*axes: list[Any], every: int = 2) -> list[Any]:
    """The product of the axes, slow but for every `every`-th row, as on a chessboard: any value of
    one axis meets those of the others in turn."""
    return chosen(axes, lambda places: sum(places) % every == 0)


def diagonal(*axes: list[Any], every: int = 1) -> list[Any]:
    """The product of the axes, slow but for as many rows as the longest axis has values: each value
    of each axis is in one of them. Of these again every `every`-th."""
    longest = max(len(axis) for axis in axes)
    first, *others = (len(axis) for axis in axes)
    line = {
        (i % first, *(i // every % length for length in others)) for i in range(0, longest, every)
    }
    return chosen(axes, line.__contains__)


def only(values: Iterable[Any], *quick: int) -> list[Any]:
    """The values as rows, slow but for those at the places `quick`."""
    return chosen(([*values],), lambda places: places[0] in quick)


def fewer(rows: list[Any], every: int, *places: int) -> list[Any]:
    """The rows, of whose quick ones those stay so that stand at `places` in each `every` of them; by
    default the first."""
    quick = [row for row in rows if not row.marks]
    kept = [row for i, row in enumerate(quick) if i % every in (places or (0,))]
    return [
        row if row.marks or row in kept else pytest.param(*row.values, marks=pytest.mark.slow)
        for row in rows
    ]

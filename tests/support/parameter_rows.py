"""Which rows of a table of parameters `make test` runs; `make test-slow` runs them all."""

import itertools
from typing import Any

import pytest


def rotated(first: list[Any], *axes: list[Any]) -> list[Any]:
    """The product of the axes, slow but for one row of each value of the first, with the others'
    combinations in rotation."""
    rows = []
    combinations = list(itertools.product(*axes))
    for i, value in enumerate(first):
        for j, others in enumerate(combinations):
            row = [*(value if isinstance(value, tuple) else [value]), *others]
            marks = [pytest.mark.slow] if i % len(combinations) != j else []
            rows.append(pytest.param(*row, marks=marks))
    return rows


def in_turn(*axes: list[Any], every: int = 2) -> list[Any]:
    """The product of the axes, slow but for every `every`-th row, as on a chessboard: any value of
    one axis meets those of the others in turn. A row is the values of its axes in one tuple."""
    rows = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, places, strict=True)]
        row = []
        for value in values:
            row += value if isinstance(value, tuple) else [value]
        marks = [pytest.mark.slow] if sum(places) % every else []
        rows.append(pytest.param(*row, marks=marks))
    return rows

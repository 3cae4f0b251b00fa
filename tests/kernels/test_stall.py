"""A step that hangs parks the kernels in use, and nothing else does."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxspec.kernels.kept import Shelf
from mlxspec.kernels.proven import VERDICTS, Verdict
from mlxspec.kernels.stall import LEAST_S, MOST_ROWS, ROUNDS, WINDOW, Stalls

kept: dict[str, Verdict] = {}


@pytest.fixture(autouse=True)
def used() -> Iterator[None]:
    kept.clear()
    VERDICTS.clear()
    VERDICTS["a 1"] = Verdict("matrix", 1, 16)
    VERDICTS["b 1"] = Verdict(why="slow")
    yield
    VERDICTS.clear()


def stalls(rounds: int = ROUNDS, rows: int = 5, seconds: float = 0.02) -> Stalls:
    made = Stalls(kept.__setitem__)
    for _ in range(rounds):
        made.took(rows, seconds)
    return made


def test_a_stall_parks_what_is_used_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = stalls()
    watch.took(5, 105.0)
    verdict = VERDICTS["a 1"]
    assert verdict.parked and not verdict.takes(5) and kept == {"a 1": verdict}
    assert verdict.why.startswith("a step of 5 rows took 105.0 s, 5250 times as long as usual, while matrix")
    assert VERDICTS["b 1"] == Verdict(why="slow")
    watch.took(5, 105.0)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize(
    ("rounds", "usual", "rows", "seconds", "meanwhile"),
    [
        (ROUNDS, 0.02, 5, LEAST_S * 0.99, 0),  # what another program can do
        (ROUNDS, 0.2, 5, 1.9, 0),  # a large model, not ten times
        (ROUNDS - 1, 0.02, 5, 105.0, 0),  # too early: kernels compile
        (ROUNDS, 0.02, 6, 105.0, 0),  # never seen with so many rows
        (ROUNDS, 0.02, 5, 105.0, 9),  # one never seen was built beside it
    ],
)
def test_what_is_no_stall(rounds: int, usual: float, rows: int, seconds: float, meanwhile: int) -> None:
    stalls(rounds, 5, usual).took(rows, seconds, meanwhile)
    assert VERDICTS["a 1"].takes(5) and not kept


def test_it_is_bounded() -> None:
    watch = Stalls(kept.__setitem__)
    for rows in range(1, 300):
        for _ in range(2 * WINDOW):
            watch.took(rows, 0.01)
    assert len(watch._past) == MOST_ROWS and all(len(past) == WINDOW for past in watch._past.values())


def test_the_next_start_finds_it(tmp_path: Path) -> None:
    facts = {"chip": "x"}
    watch = Stalls(Shelf(tmp_path, facts).save)
    for _ in range(ROUNDS):
        watch.took(1, 0.02)
    watch.took(1, 30.0)
    found = Shelf(tmp_path, facts).load("a 1", True)
    assert found is not None and found.parked and not found.way and "30.0 s" in found.why

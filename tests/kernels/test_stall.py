"""A step that hangs parks the kernels in use, and nothing else does."""

import logging
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.kernels.kept import Shelf
from mlxspec.kernels.proven import VERDICTS, Verdict
from mlxspec.kernels.stall import (
    ABSURD_S,
    FIRST_S,
    LEAST_S,
    MOST_ROWS,
    ROUNDS,
    WINDOW,
    HangDetector,
)

kept: dict[str, tuple[Verdict, Verdict]] = {}


def keep(name: str, used: Verdict, parked: Verdict) -> bool:
    kept[name] = used, parked
    return False


@pytest.fixture(autouse=True)
def used() -> Iterator[None]:
    kept.clear()
    use()
    yield
    VERDICTS.clear()
    mx.enable_compile()


def use() -> None:
    VERDICTS.clear()
    VERDICTS["a 1"] = Verdict("matrix", 1, 16, why="plain: slower")
    VERDICTS["b 1"] = Verdict(why="slow")


def stalls(rounds: int = ROUNDS, rows: int = 5, seconds: float = 0.02) -> HangDetector:
    made = HangDetector(keep)
    for _ in range(rounds):
        made.took(rows, seconds, seconds)
    return made


def test_a_stall_parks_what_is_used_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = stalls()
    watch.took(5, 9.0, 9.0)
    verdict = VERDICTS["a 1"]
    assert verdict.parked and not verdict.takes(5)
    why = "a step of 5 rows waited 9.0 s for the GPU, 450 times as long as one usually takes"
    assert verdict.why == f"{why}, while matrix was in use"
    before, parked = kept["a 1"]
    assert before == Verdict("matrix", 1, 16, why=f"plain: slower; once, {why}")
    assert (
        parked.parked
        and not parked.way
        and parked.why.startswith(why)
        and "mlxspec tune" in parked.why
    )
    assert VERDICTS["b 1"] == Verdict(why="slow")
    watch.took(5, 9.0, 9.0)
    [said] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "1 kernels are parked" in said and "until this process ends; for 0 of them" in said


@pytest.mark.parametrize(
    ("rounds", "usual", "rows", "waited", "meanwhile"),
    [
        (ROUNDS, 0.02, 5, LEAST_S * 0.99, 0),  # what another program can do
        (ROUNDS, 0.2, 5, 1.9, 0),  # a large model, not ten times
        (ROUNDS - 1, 0.02, 5, ABSURD_S * 0.99, 0),  # too early to compare
        (ROUNDS, 0.02, 6, FIRST_S * 0.99, 0),  # never seen with so many rows: it compiles
        (ROUNDS, 0.02, 5, FIRST_S * 0.99, 9),  # one never seen was built beside it
    ],
)
def test_what_is_no_stall(
    rounds: int, usual: float, rows: int, waited: float, meanwhile: int
) -> None:
    stalls(rounds, 5, usual).took(rows, waited, waited, meanwhile)
    assert VERDICTS["a 1"].takes(5) and not kept


@pytest.mark.parametrize(
    ("seconds", "steps"), [(105.0, 1), (FIRST_S, 1), (FIRST_S * 0.99, 2), (ABSURD_S, 2)]
)
def test_what_stalls_from_its_first_use_on(seconds: float, steps: int) -> None:
    watch, count = stalls(200, 1), 0
    while VERDICTS["a 1"].takes(8):
        watch.took(8, seconds, seconds, 8)
        count += 1
    assert count == steps


def test_where_every_third_step_stalls() -> None:
    watch = HangDetector(keep)
    for seconds in (0.04, 0.04, 105.0):
        assert VERDICTS["a 1"].takes(8)
        watch.took(8, seconds, seconds)
    assert VERDICTS["a 1"].parked


def test_time_in_which_nobody_waits_is_no_stall() -> None:
    """The host's own, and hidden by the host's: where it is slow, the usual step is too."""
    stalls().took(5, 300.0, 0.9)
    watch = HangDetector(keep)
    for _ in range(ROUNDS):
        watch.took(1, 1.5, 0.0)
    watch.took(1, 1.5, 1.4)
    assert VERDICTS["a 1"].takes(5) and not kept


def test_what_is_compiled_is_given_up_with_its_kernels() -> None:
    traced = []
    f = mx.compile(lambda x: (traced.append(VERDICTS["a 1"].takes(5)), x + 1)[1])
    x = mx.zeros(3)
    watch = stalls()
    for _ in range(2):
        f(x)
    assert traced == [True], "what is compiled asks once"
    watch.took(5, 105.0, 105.0)
    f(x)
    assert traced == [True, False]


def test_it_is_bounded() -> None:
    watch = HangDetector(keep)
    for rows in range(1, 300):
        for _ in range(2 * WINDOW):
            watch.took(rows, 0.01, 0.01, rows + 1)
    assert len(watch._past) == MOST_ROWS and all(
        len(past) == WINDOW for past in watch._past.values()
    )


def test_the_second_time_is_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one process it happens once, whatever is loaded."""
    shelf = Shelf(tmp_path, {"chip": "x"})
    shelf.save("a 1", VERDICTS["a 1"])
    watch = HangDetector(shelf.stalled)
    watch.took(1, 105.0, 105.0)
    watch.took(1, 105.0, 105.0)
    found = shelf.load("a 1", True)
    assert (
        found is not None
        and found.takes(5)
        and "once, a step of 1 rows waited 105.0 s" in found.why
    )
    VERDICTS["a 1"] = found  # as the next start does
    HangDetector(shelf.stalled).took(1, 105.0, 105.0)
    found = shelf.load("a 1", True)
    assert (
        found is not None
        and found.parked
        and not found.way
        and "not for the first time" in found.why
    )
    assert "; for 0 of them" in caplog.messages[0] and "; for 1 of them" in caplog.messages[1]
    shelf.mark("a 1")  # mlxspec tune
    assert not shelf.stalled("a 1", Verdict("plain"), Verdict()), "the mark stays"
    shelf.save("a 1", Verdict("matrix", 1, 16))
    assert not shelf.stalled("a 1", Verdict("matrix", 1, 16), Verdict()), "it counts afresh"


def test_without_a_folder_it_is_for_this_process() -> None:
    assert not Shelf(None, {}).stalled("a 1", Verdict("plain"), Verdict())

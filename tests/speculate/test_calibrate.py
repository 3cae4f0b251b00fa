"""What a step costs: measured within its time, and not again where it is known."""

import logging
from typing import Any

import pytest

from mlxspec.model.recurrent import RecurrentStates
from mlxspec.model.runner import Runner
from mlxspec.speculate import calibrate as module
from mlxspec.speculate.calibrate import (
    FEW,
    FIRST_ROWS,
    LONG_ROWS,
    TURNS,
    calibrate,
    contexts_in,
)
from mlxspec.speculate.controller import GRID
from tests import tiny

SIZE = 16
CONTEXTS = (64, 12 * SIZE - 33)


@pytest.fixture
def runner() -> Runner:
    return Runner(tiny.model("llama"), "rows", SIZE, 16)


def table(blocks: int = 12) -> list[int]:
    return list(range(1, blocks + 1))


def test_all_rows_at_two_contexts(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    costs = calibrate(runner, table(), CONTEXTS)
    assert tuple(costs.rows) == GRID and costs.contexts == (64, 12 * SIZE - 33)
    assert all(0 < low <= high < 5 for low, high in zip(*costs.measured, strict=True))
    assert "with 32 rows" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "contexts"), [(12 * SIZE, (64, 159)), (5000, (64, 2048)), (90, (57, 57)), (20, None)]
)
def test_contexts_follow_from_the_room(tokens: int, contexts: tuple[int, int] | None) -> None:
    found = contexts_in(tokens)
    assert found == contexts if contexts else found[1] < 1


def test_a_slow_model_is_measured_once_at_few_points(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over at once; all is known all the same, and a longer context is never
    cheaper."""
    asked: list[Any] = []
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(
        module, "time_step", lambda r, t, context, rows: asked.append((context, rows)) or rows / 8
    )
    costs = calibrate(runner, table(), CONTEXTS)
    points = [(64, rows) for rows in FIRST_ROWS] + [(159, rows) for rows in LONG_ROWS]
    often = [point for point in points if point[1] <= FEW] * (TURNS - 1)
    assert asked[0] == (64, 1) and sorted(asked[1:]) == sorted(points + often)
    assert list(costs.rows) == list(GRID)
    # What lies between is interpolated.
    assert all(times == pytest.approx([r / 8 for r in GRID]) for times in costs.measured)


def test_a_disturbed_measurement_makes_no_others_dear(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(
        module,
        "time_step",
        lambda r, t, context, rows: {(64, 2): 9.0}.get((context, rows), rows + context / 64),
    )
    low, high = calibrate(runner, table(), CONTEXTS).measured
    by_rows = dict(zip(GRID, low, strict=True))
    assert (by_rows[1], by_rows[2], by_rows[4], by_rows[8]) == (2.0, 5.0, 5.0, 9.0)
    assert all(a <= b for a, b in zip(low, high, strict=True))


def test_a_step_of_recurrent_layers_chooses_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tiny.model("qwen3_next"), "rect", SIZE, 16)
    keep, asked = RecurrentStates.keep_accepted, []

    def kept(self: Any, accepted: Any, samplers: Any) -> Any:
        found = keep(self, accepted, samplers)
        asked.extend(recorder.entries[0].rows for recorder in found)
        return found

    monkeypatch.setattr(RecurrentStates, "keep_accepted", kept)
    calibrate(runner, table(), CONTEXTS)
    assert {2, 8, 32} <= set(asked)

"""What a step costs: measured within its time, and not again where it is known."""

import logging
from typing import Any

import numpy as np
import pytest

from mlxspec.model.recurrent import RecurrentStates
from mlxspec.model.runner import Runner
from mlxspec.speculate import calibrate as module
from mlxspec.speculate.calibrate import (
    FEW,
    FIRST_ROWS,
    LONG_ROWS,
    TURNS,
    Calibration,
    contexts_in,
)
from mlxspec.speculate.controller import GRID
from tests.support import tiny

SIZE = 16
CONTEXTS = (64, 12 * SIZE - 33)


@pytest.fixture
def runner() -> Runner:
    return Runner(tiny.model("llama"), "rows", SIZE, 16)


def table(blocks: int = 12) -> list[int]:
    return list(range(1, blocks + 1))


def test_all_rows_at_two_contexts(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    costs = Calibration(runner, CONTEXTS).run(table())
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
    costs = Calibration(runner, CONTEXTS).run(table())
    points = [(64, rows) for rows in FIRST_ROWS] + [(159, rows) for rows in LONG_ROWS]
    often = [point for point in points if point[1] <= FEW] * (TURNS - 1)
    assert asked[0] == (64, 1) and sorted(asked[1:]) == sorted(points + often)
    assert list(costs.rows) == list(GRID)
    # What lies between is interpolated.
    assert all(times == pytest.approx([r / 8 for r in GRID]) for times in costs.measured)


@pytest.mark.parametrize("context", [64, 159])
@pytest.mark.parametrize("rows", FIRST_ROWS)
def test_a_disturbed_measurement_makes_no_more_rows_dear(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, rows: int, context: int
) -> None:
    def took(runner: Runner, table: list[int], context: int, rows: int) -> float:
        return rows + context / 64

    def disturbed(runner: Runner, table: list[int], at: int, **how: int) -> float:
        here = (at, how["rows"]) == (context, rows)
        return 99.0 if here else took(runner, table, at, **how)

    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(module, "time_step", took)
    true = np.array(Calibration(runner, CONTEXTS).run(table()).measured)
    monkeypatch.setattr(module, "time_step", disturbed)
    found = np.array(Calibration(runner, CONTEXTS).run(table()).measured)
    assert (found >= true[0, 0]).all()
    assert (np.diff(found, axis=0) >= 0).all() and (np.diff(found, axis=1) >= 0).all()
    if rows < GRID[-1]:  # else nothing says that it was disturbed
        assert (found <= true[:, -1:]).all()


def test_a_step_of_recurrent_layers_chooses_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tiny.model("qwen3_next"), "rect", SIZE, 16)
    keep, asked = RecurrentStates.keep_accepted, []

    def kept(self: Any, accepted: Any, samplers: Any) -> Any:
        found = keep(self, accepted, samplers)
        asked.extend(recorder.spans[0].rows for recorder in found)
        return found

    monkeypatch.setattr(RecurrentStates, "keep_accepted", kept)
    Calibration(runner, CONTEXTS).run(table())
    assert {2, 8, 32} <= set(asked)

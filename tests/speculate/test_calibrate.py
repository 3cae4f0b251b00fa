"""What a step costs: measured within its time, and not again where it is known."""

import logging
from typing import Any

import pytest

from mlxspec.model.recurrent import RecurrentStates
from mlxspec.model.runner import Runner
from mlxspec.speculate import calibrate as module
from mlxspec.speculate.calibrate import calibrate
from mlxspec.speculate.controller import GRID
from tests import tiny

SIZE = 16


@pytest.fixture
def runner() -> Runner:
    return Runner(tiny.model("llama"), "rows", SIZE, 16)


def table(blocks: int = 12) -> list[int]:
    return list(range(1, blocks + 1))


def test_all_rows_at_two_contexts(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    costs = calibrate(runner, table())
    assert costs is not None
    assert tuple(costs.rows) == GRID and costs.contexts == (64, 12 * SIZE - 33)
    assert all(0 < low <= high < 5 for low, high in zip(*costs.measured, strict=True))
    assert "with 32 rows" in caplog.text


def test_what_is_known_is_not_measured_again(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = calibrate(runner, table())
    monkeypatch.setattr(module, "time_step", None)  # measuring again would fail
    assert first is not None and calibrate(runner, table(), first) is first
    with pytest.raises(TypeError):
        calibrate(runner, table(11), first)


def test_a_slow_model_is_measured_once_at_each_point(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over at once; all is known all the same, and a longer context is never
    cheaper."""
    asked: list[Any] = []
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(
        module, "time_step", lambda r, t, context, rows: asked.append((context, rows)) or rows / 8
    )
    costs = calibrate(runner, table())
    assert asked[0] == (64, 1) and sorted(asked[1:]) == [(c, r) for c in (64, 159) for r in GRID]
    assert costs is not None and list(costs.rows) == list(GRID)
    assert costs.measured == ([r / 8 for r in GRID],) * 2


def test_a_pool_that_is_too_small(runner: Runner) -> None:
    assert calibrate(runner, table(2)) is None


def test_a_step_of_recurrent_layers_chooses_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tiny.model("qwen3_next"), "rect", SIZE, 16)
    keep, asked = RecurrentStates.keep_accepted, []

    def kept(self: Any, accepted: Any, samplers: Any) -> Any:
        found = keep(self, accepted, samplers)
        asked.extend(recorder.entries[0].rows for recorder in found)
        return found

    monkeypatch.setattr(RecurrentStates, "keep_accepted", kept)
    costs = calibrate(runner, table())
    assert costs is not None and {2, 8, 32} <= set(asked)

"""The budget finds what fits into the time, whatever a row costs."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxspec.engine.budget import MAX_ROWS, MIN_ROWS, PrefillBudget


@given(fixed=st.floats(1e-4, 0.1), row=st.floats(1e-5, 0.05))
@example(fixed=0.001953125, row=0.024837688102819066)  # once settled at 250.3 ms
def test_a_step_beside_decodes_stays_inside_the_gap(fixed: float, row: float) -> None:
    pace = PrefillBudget(gap=0.25)
    for _ in range(60):
        rows = pace.rows(decoding=True)
        pace.learn(rows, True, fixed + row * rows)
    rows = pace.rows(decoding=True)
    assert fixed + row * rows <= 0.25 or rows == MIN_ROWS
    assert fixed + row * rows * 1.5 > 0.15 or rows == MAX_ROWS, "far below what would fit"


def test_small_fast_steps_teach_nothing_and_a_fixed_budget_stays() -> None:
    pace = PrefillBudget()
    pace.learn(10, True, 0.01)
    pace.learn(1, True, 10.0)  # its one row is not what took so long
    assert pace.rows(True) == PrefillBudget().rows(True)
    fixed = PrefillBudget(fixed=7)
    fixed.learn(7, True, 10.0)
    assert fixed.rows(True) == fixed.rows(False) == 7


def test_a_budget_learned_in_a_fast_moment_is_unlearned() -> None:
    pace = PrefillBudget(gap=0.25, shared=256)
    for _ in range(20):
        pace.learn(120, True, 2.0)
    assert pace.rows(True) <= 16


@pytest.mark.parametrize("decoding", [True, False])
def test_bounds(decoding: bool) -> None:
    pace = PrefillBudget()
    for _ in range(50):
        pace.learn(pace.rows(decoding), decoding, 1e-6)
    assert pace.rows(decoding) <= MAX_ROWS
    for _ in range(50):
        pace.learn(pace.rows(decoding), decoding, 100.0)
    assert pace.rows(decoding) == MIN_ROWS

"""The chance that shared noise picks the same token: the formula against draws, and its bounds."""

import numpy as np
import pytest

from bench.coupling import _figure, _rows, shared

rng = np.random.default_rng(5)
PAIRS = [tuple(rng.dirichlet(np.full(12, a), 2)) for a in (0.2, 1.0, 5.0)]


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_the_formula_is_what_draws_give(p: np.ndarray, q: np.ndarray) -> None:
    n = 200_000
    noise = rng.gumbel(size=(n, len(p)))
    same = ((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)).mean()
    assert abs(same - shared(p, q)) < 5 * (same * (1 - same) / n) ** 0.5


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_it_lies_between_its_bounds(p: np.ndarray, q: np.ndarray) -> None:
    common = np.minimum(p, q).sum()
    assert common / (2 - common) - 1e-12 <= shared(p, q) <= common + 1e-12
    assert shared(p, p) == pytest.approx(1)
    assert shared(p, q) == pytest.approx(shared(q, p))


def test_a_row_has_every_rule_over_the_tokens_of_both() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.6, 0.1])
    wide = np.array([[*2.0 * np.log(q), 9.0]])  # at temperature 2, and one column of padding
    (row,) = _rows(2.0 * np.log(p)[None], wide, 2.0)
    assert row == pytest.approx((0.3 + 0.2 + 0.1, shared(p, q), 0.2, 0.21 + 0.12 + 0.01))


def test_the_error_is_of_whole_tasks() -> None:
    tasks = [
        np.full(10, 0.4),
        np.full(10, 0.6),
    ]  # 20 positions, but two tasks: the error of two figures
    assert _figure(tasks) == "0.5000 ± 0.1000"
    assert _figure(tasks[:1]) == "0.4000"

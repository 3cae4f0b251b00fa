"""The controller on its own: the table's figures are those of the simulation."""

import pytest
from rich.console import Console

from bench.synthetic import expected, outcome, synthetic


def test_expected_tokens() -> None:
    assert expected(0.0, 5) == 1 and expected(1.0, 5) == 6
    assert expected(0.5, 2) == pytest.approx(1.75)


def test_outcomes() -> None:
    good = outcome(0.9, lambda rows: 1 + 0.05 * (rows - 1), 0.0, seeds=(0,))
    assert good.rate >= 0.97 * good.best > 3 * good.plain and good.depth > 4
    bad = outcome(0.05, lambda rows: float(rows), 0.1, seeds=(0,))
    assert bad.best_depth == 0 and bad.depth < 0.1 and bad.rate >= 0.97


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    synthetic(0.7, 0.05, 0.1, Console(width=120))
    out = capsys.readouterr().out
    assert (
        "acceptance 0.7" in out and "the controller" in out and "57." in out
    )  # plain, of the best

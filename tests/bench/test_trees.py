"""What first-mac says of trees."""

import pytest

from bench.trees import GAINS, ROW_COSTS, verdict


def steps(row: float) -> dict[int, float]:
    return {rows: 20.0 * (1 + row * (rows - 1)) for rows in (1, 2, 5, 9, 17)}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (0.0, "worth building"),
        (0.01, "worth building"),
        (0.05, "stay chains"),
        (0.3, "0 to 0 %"),
        (-0.1, "0.0% of a step"),
    ],
)
def test_the_verdict(row: float, said: str) -> None:
    assert said in verdict(steps(row))


def test_dearer_rows_gain_less() -> None:
    for gains in GAINS.values():
        assert len(gains) == len(ROW_COSTS) and list(gains) == sorted(gains, reverse=True)

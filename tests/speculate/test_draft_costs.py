"""What a draft costs, measured and learned: it is linear in its depth."""

import pytest

from mlxspec.speculate.chain import DraftCosts

FIXED, TOKEN = 3e-3, 2e-3  # seconds


def seconds(depth: int) -> float:
    return FIXED + depth * TOKEN


@pytest.mark.parametrize("longest", [2, 3, 8])
def test_both_parts_are_measured(longest: int) -> None:
    """In spite of a first draft that compiles, and of others that something held up."""
    asked: list[int] = []

    def timed(depth: int) -> float:
        asked.append(depth)
        late = {1: 10.0, 3: 1.0, 6: 1.0}  # by the number of the draft
        return seconds(depth) + late.get(len(asked), 0.0)

    costs = DraftCosts()
    costs.measure(timed, longest)
    assert (costs.fixed, costs.token) == (pytest.approx(FIXED), pytest.approx(TOKEN))
    assert set(asked) == {1, longest}


def test_a_head_of_one_token_costs_a_draft() -> None:
    costs = DraftCosts()
    costs.measure(seconds, 1)
    assert costs.fixed + costs.token == pytest.approx(seconds(1))


@pytest.mark.parametrize("slope", [0.0, -1e-3])
def test_a_deeper_draft_that_takes_no_longer(slope: float) -> None:
    """One pass for all tokens, or noise: costs stay positive."""
    costs = DraftCosts()
    costs.measure(lambda depth: FIXED + depth * slope, 3)
    assert 0 < costs.token < 1e-6
    assert costs.fixed == pytest.approx(FIXED + slope, rel=1e-5)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_what_drafts_take_later_is_learned(factor: float) -> None:
    """Their sum, at any depth; the share of a token stays as it was measured."""
    costs = DraftCosts()
    costs.measure(seconds, 4)
    costs.learn(seconds(2) * factor, 2)
    between = sorted((1.0, factor))
    assert between[0] < costs.token / TOKEN < between[1], "one draft says little"
    for n in range(300):
        depth = 1 + n % 4
        costs.learn(seconds(depth) * factor, depth)
    assert costs.token == pytest.approx(TOKEN * factor, rel=0.02)
    assert costs.fixed == pytest.approx(FIXED * factor, rel=0.02)


def test_one_draft_that_was_held_up_hardly_counts() -> None:
    costs = DraftCosts()
    costs.measure(seconds, 4)
    costs.learn(1000 * seconds(4), 4)
    assert costs.fixed + 4 * costs.token < 2 * seconds(4)

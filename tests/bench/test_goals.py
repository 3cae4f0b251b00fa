"""A goal is met or missed by the median of the rounds' ratios, against the peer that was best."""

import pytest

from bench.goals import BEST, COPYING, GOALS, Goal, verdict, verdicts
from bench.rows import Rows
from bench.servers import SERVERS

FAST = Goal("speed", "chat", "tokens_per_s", BEST, 2.0)
SHORT = Goal("gap", "chat", "gap_s", "b", 0.5, least=False)


def rows(metric: str, **values: list[float]) -> Rows:
    made = Rows()
    for server, found in values.items():
        for round, value in enumerate(found):
            made.add(server, "chat", metric, round, value)
    return made


def test_the_best_peer_is_the_one_with_the_best_median() -> None:
    v = verdict(FAST, rows("tokens_per_s", mlxspec=[8, 9, 10], a=[9, 3, 3], b=[4, 4, 4]))
    assert v.peer == "b" and v.found is not None and (v.found.median, v.found.high) == (2.25, 2.5)
    assert v.met and v.said == "met"


def test_the_best_copying_peer_is_one_that_copies() -> None:
    goal = Goal("edit", "chat", "tokens_per_s", COPYING, 1.5)
    found = {"mlxspec": [9.0], "mlx_lm.server": [8.0], "rapid-mlx-suffix": [6.0]}
    v = verdict(goal, rows("tokens_per_s", **found))
    assert v.peer == "rapid-mlx-suffix" and v.met
    del found["rapid-mlx-suffix"]
    assert verdict(goal, rows("tokens_per_s", **found)).said == "not measured"


@pytest.mark.parametrize(("ours", "met"), [(2.0, False), (2.001, True)])
def test_above_is_more_than_equal(ours: float, met: bool) -> None:
    goal = Goal("rounds", "chat", "tokens_per_round", BEST, 1.0, above=True)
    v = verdict(goal, rows("tokens_per_round", mlxspec=[ours], a=[2.0]))
    assert v.met is met and goal.sign == ">"


@pytest.mark.parametrize(
    ("ours", "met", "said"),
    [(1.0, True, "met"), (1.01, False, "missed: 1.01 times the bound"), (0.1, True, "met")],
)
def test_less_is_better_where_it_says_so(ours: float, met: bool, said: str) -> None:
    v = verdict(SHORT, rows("gap_s", mlxspec=[ours], a=[0.01], b=[2.0]))
    assert (v.met, v.said, v.peer) == (met, said, "b")


def test_missed_by_how_much() -> None:
    assert (
        verdict(FAST, rows("tokens_per_s", mlxspec=[3], a=[2])).said == "missed: 0.75 of the bound"
    )
    assert (
        verdict(Goal("t", "chat", "torch", "", 0, False), rows("torch", mlxspec=[1])).said
        == "missed"
    )
    assert (
        verdict(Goal("t", "chat", "torch", "", 0, False), rows("torch", mlxspec=[0])).said == "met"
    )


def test_what_was_not_measured_is_not_met() -> None:
    assert {v.said for v in verdicts(Rows())} == {"not measured"}
    v = verdict(FAST, rows("tokens_per_s", mlxspec=[3]))
    assert v.met is None and v.found is None


def test_goals_speak_of_what_is_measured() -> None:
    assert all(g.against in ("", BEST, COPYING, *SERVERS) for g in GOALS)
    assert len({g.text for g in GOALS}) == len(GOALS)

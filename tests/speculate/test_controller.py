"""The controller: costs, sharing rows, and decisions near the best fixed depth in the long run."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.speculate.controller import (
    GRID,
    INNOVATION,
    PRIOR,
    PROBE_SHARE,
    AcceptanceRates,
    Controller,
    Costs,
    Key,
    Proposal,
    choose_depths,
    pick,
    probe_every,
)  # fmt: skip
from tests.support.examples import examples
from tests.support.parameter_rows import in_turn

DEPTH = 8
SLOPES, QUADS, DRAFTS = (0.0, 0.03, 0.1, 0.24, 0.6, 1.0), (0.0, 0.01, 0.05), (0.0, 0.1, 0.35)
CHANCES = (0.0, 0.05, 0.2, 0.4, 0.6, 0.75, 0.85, 0.95, 1.0)
Cost = Callable[[int], float]


def curve(slope: float, quad: float) -> Cost:
    return lambda r: 1 + slope * (r - 1) + quad * (r - 1) ** 2


def table(cost: Cost) -> Costs:
    seconds = [cost(r) for r in GRID]
    return Costs((64, 65), GRID, (seconds, seconds))


# ---- costs
# ------------------------------------------------------------------------------------------------


def test_costs_lie_between_what_was_measured_and_go_on_behind_it() -> None:
    costs = Costs((100, 1100), (1, 3, 5), ((1.0, 2.0, 4.0), (2.0, 3.0, 5.0)))
    assert costs.curve(7, 100).tolist() == [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert costs.curve(3, 600).tolist() == [1.5, 2.0, 2.5]
    assert costs.curve(1, 2100).tolist() == [3.0]
    assert costs.curve(1, 0).tolist() == [1.0], "less context than measured is no cheaper"
    falling = Costs((1, 2), (1, 2), ((2.0, 1.0), (0.0, 0.0)))
    assert falling.curve(4, 1).tolist() == [2.0, 1.0, 1.0, 1.0], "noise is not carried on"
    assert (falling.curve(4, 50) > 0).all()


@given(st.floats(0.05, 20), st.integers(1, 20), st.integers(1, 2000))
def test_costs_follow_what_steps_take_each_way_apart(truth: float, rows: int, context: int) -> None:
    costs = table(curve(0.1, 0.01))
    before = costs.step(rows, context, "synced")
    for _ in range(200):
        costs.learn(rows, context, "synced", truth * float(before))
    assert costs.step(rows, context, "synced") == pytest.approx(truth * before, rel=0.02)
    assert costs.step(rows, context, "overlap") == pytest.approx(before)


def test_one_slow_step_moves_a_cost_a_little() -> None:
    costs = table(curve(0.1, 0.01))
    costs.learn(1, 64, "synced", 1000.0)
    assert 1.0 < costs.step(1, 64, "synced") <= 1 + INNOVATION


# ---- chances
# ----------------------------------------------------------------------------------------------


def test_the_rates_of_all_are_computed_once_a_round() -> None:
    """However many sequences start from them, and each position from the one before it."""
    keys = [("model", n + 1) for n in range(32)]
    asked = []

    def prior(key: Key) -> float:
        asked.append(key)
        return 0.5 if key == keys[0] else ctl.overall(("model", key[1] - 1))

    ctl = Controller(table(curve(0.1, 0.0)), prior)
    stats = [ctl.begin() for _ in range(16)]
    first = [[each.of(key) for key in keys] for each in stats]
    assert sorted(asked) == keys
    ctl.learn(stats[0], keys[:2], 1)
    second = [[each.of(key) for key in keys] for each in stats]
    assert sorted(asked) == sorted(2 * keys)
    assert second[1][0] > first[1][0] == 0.5 > second[1][1] == second[1][31]


def test_a_chance_starts_at_its_prior_follows_what_happens_and_returns() -> None:
    chance = AcceptanceRates(lambda key: 0.25)
    assert chance.of("k") == 0.25
    chance.learn("k", True)
    assert chance.of("k") == pytest.approx((1 + PRIOR * 0.25) / (1 + PRIOR))
    rng = random.Random(0)
    for _ in range(2000):
        chance.round += 1
        chance.learn("k", rng.random() < 0.8)
    assert chance.of("k") == pytest.approx(0.8, abs=0.12) and chance.of("other") == 0.25
    chance.round += 3000
    assert chance.of("k") == pytest.approx(0.25, abs=0.01)


# ---- sharing rows
# -----------------------------------------------------------------------------------------


def brute(options: list[Proposal | None], seconds: np.ndarray, plain: float) -> float:
    """The best tokens per second over all ragged allocations that the curve has rows for."""
    base, best = len(options), len(options) / plain
    for depths in itertools.product(*(range(len(o.rates) + 1 if o else 1) for o in options)):
        if 0 < sum(depths) <= len(seconds) - base:
            best = max(best, rate(options, depths, seconds))
    return best


def rate(options: list[Proposal | None], depths, seconds: np.ndarray) -> float:
    tokens, models = float(len(options)), [0.0]
    for option, depth in zip(options, depths, strict=True):
        if option and depth:
            tokens += float(np.cumprod(option.rates)[:depth].sum())
            models.append(option.seconds * depth)
    return tokens / (float(seconds[len(options) + sum(depths) - 1]) + max(models))


chance = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
convex = st.builds(
    lambda slope, quad, n: np.array([curve(slope, quad)(r) for r in range(1, n)]),
    st.floats(0, 1), st.floats(0, 0.1), st.integers(6, 18),
)  # fmt: skip


@settings(max_examples=examples(300))
@given(st.data(), convex, st.floats(0, 1), st.floats(0.8, 1.3))
def test_sharing_equals_the_best_of_all_allocations(
    data, seconds, each: float, plain: float
) -> None:
    """Free copies beside drafts of one model, and sequences that have neither."""
    one = st.builds(
        lambda chances, model: Proposal("m", chances, each) if model else Proposal("c", chances),
        st.lists(chance, min_size=1, max_size=4), st.booleans(),
    )  # fmt: skip
    options = data.draw(st.lists(st.one_of(st.none(), one), min_size=1, max_size=4))
    depths = choose_depths(options, seconds, plain)
    assert all(0 <= d <= (len(o.rates) if o else 0) for d, o in zip(depths, options, strict=True))
    got = rate(options, depths, seconds) if any(depths) else len(options) / plain
    assert got == pytest.approx(brute(options, seconds, plain), rel=1e-9)


@settings(max_examples=examples(200))
@given(st.data(), convex, st.floats(0, 1), st.floats(0.8, 1.3))
def test_padded_drafts_are_the_best_of_all_allocations(
    data, seconds, each: float, plain: float
) -> None:
    """Where each further token of the longest draft is a row of every sequence; one kind of drafts
    and sequences that have none."""
    one = st.builds(Proposal, st.just("m"), st.lists(chance, min_size=1, max_size=4))
    options = data.draw(st.lists(st.one_of(st.none(), one), min_size=1, max_size=3))
    for option in filter(None, options):
        option.seconds = each
    base = len(options)

    def speed(depths: Sequence[int]) -> float:
        if not any(depths):
            return base / plain
        tokens = float(base)
        for option, depth in zip(options, depths, strict=True):
            tokens += sum(np.cumprod(option.rates[:depth])) if option else 0.0
        return tokens / (seconds[base - 1 + max(depths)] + each * max(depths))

    depths = choose_depths(options, seconds, plain, padded=True)
    most = len(seconds) - base  # tokens whose rows have a known cost
    every = [range(1 + min(most, len(option.rates) if option else 0)) for option in options]
    best = max(speed(depths) for depths in itertools.product(*every))
    assert speed(depths) == pytest.approx(best, rel=1e-9)


@settings(max_examples=examples(200))
@given(st.data(), convex, st.floats(0, 1), st.integers(1, 4))
def test_the_fastest_option_is_picked(data, seconds, each: float, base: int) -> None:
    """Alone among `base` sequences, at its best depth."""
    one = st.builds(
        lambda chances, model: Proposal("m", chances, each, each) if model else Proposal("c", chances),
        st.lists(chance, min_size=1, max_size=4), st.booleans(),
    )  # fmt: skip
    options = data.draw(st.lists(one, min_size=1, max_size=3))

    def speed(option: Proposal) -> float:
        made, best = float(base), 0.0
        for depth, right in enumerate(np.cumprod(option.rates), 1):
            if base + depth <= len(seconds):
                made += right
                took = seconds[base + depth - 1] + option.fixed + depth * option.seconds
                best = max(best, made / took)
        return best

    [found, none, alone] = pick([options, [], options[:1]], seconds, base)
    assert speed(found) == pytest.approx(max(map(speed, options)), rel=1e-9)
    assert none is None and alone is options[0]


def test_the_better_sequence_gets_more_rows() -> None:
    options = [Proposal("c", [p] * DEPTH) for p in (0.5, 0.9, 0.7, 0.0)]
    depths = choose_depths(options, np.array([curve(0.1, 0)(r) for r in range(1, 40)]), 1.3)
    assert depths[1] > depths[2] > depths[0] > depths[3] == 0


def test_rows_that_cost_nothing_are_all_used() -> None:
    """Four sequences, every draft right: each drafts as deep as it may."""
    ctl = Controller(table(lambda r: 1.0), lambda key: 1.0)
    options = [[Proposal("model", [1.0] * DEPTH)] for _ in range(4)]
    decided = ctl.decide([ctl.begin() for _ in range(4)], options, 64, "synced")
    assert [depth for depth, _ in decided] == [DEPTH] * 4


def test_the_best_of_a_sequences_options_is_taken() -> None:
    ctl = Controller(table(curve(0.05, 0)), lambda key: 0.5)
    copy, model = Proposal("lookup", [0.9] * 8), Proposal("model", [0.9] * 8, 0.2)
    for options, want in [
        ([copy, model], copy),
        ([Proposal("lookup", [0.1] * 8), model], model),
        ([], None),
    ]:
        ((depth, picked),) = ctl.decide([ctl.begin()], [options], 64, "synced")
        assert picked is want and bool(depth) == bool(want)


def test_a_probe_takes_its_share_of_the_time_and_none_where_nothing_can_be_won() -> None:
    seconds = np.array([curve(0.3, 0.0)(r) for r in range(1, 10)])
    pays, dear = Proposal("m", [0.1] * 8, 0.05), Proposal("m", [0.1] * 8, 0.8)
    every, never = probe_every([pays, dear], seconds, 1.0, 1)
    assert every == pytest.approx(0.35 / PROBE_SHARE, abs=1) and never == 0
    assert probe_every([Proposal("c", [0.1] * 8)], seconds * 3, 1.0, 1) == [0]


# ---- in the long run
# --------------------------------------------------------------------------------------


@dataclass
class Run:
    """Rounds of sequences that are right with probability `at(i, round)` at every position."""

    cost: Cost
    draft: float
    at: Callable[[int, int], float]
    sequences: int = 1
    seed: int = 0
    believed: Cost | None = None  # what was measured, where it is not what steps cost

    def rounds(self, n: int) -> list[tuple[float, float, list[int]]]:
        """(expected tokens given the depths that were chosen, seconds, depths) of each."""
        rng = random.Random(self.seed)

        def first(key: Key) -> float:
            return 0.6 if key[1] == 1 else ctl.rate.of(("model", key[1] - 1))

        ctl = Controller(table(self.believed or self.cost), first)
        pilots = [ctl.begin() for _ in range(self.sequences)]
        keys = [("model", i) for i in range(1, DEPTH + 1)]
        made = []
        for r in range(n):
            options = [[Proposal("model", [p.of(k) for k in keys], self.draft)] for p in pilots]
            depths = [depth for depth, _ in ctl.decide(pilots, options, 64, "synced")]
            tokens = 0.0
            for i, (pilot, depth) in enumerate(zip(pilots, depths, strict=True)):
                p = self.at(i, r)
                kept = next((d for d in range(depth) if rng.random() >= p), depth)
                ctl.learn(pilot, keys[:depth], kept)
                tokens += sum(p**d for d in range(depth + 1))
            rows = self.sequences + sum(depths)
            how = "synced" if any(depths) else "overlap"
            ctl.costs.learn(rows, 64, how, self.cost(rows) * rng.uniform(0.9, 1.1))
            made.append(
                (tokens, self.cost(self.sequences + sum(depths)) + self.draft * max(depths), depths)
            )
        return made


def speed(rounds) -> float:
    return sum(r[0] for r in rounds) / sum(r[1] for r in rounds)


def best_fixed(p: float, cost: Cost, draft: float) -> float:
    return max(
        sum(p**i for i in range(k + 1)) / (cost(k + 1) + draft * k) for k in range(DEPTH + 1)
    )


def ratios(slope: float, quad: float, draft: float, p: float) -> tuple[float, float]:
    """Speed over 1600 rounds as a part of the best fixed depth's and of plain decoding's."""
    cost = curve(slope, quad)
    mean = np.mean(
        [speed(Run(cost, draft, lambda i, r: p, seed=s).rounds(2000)[400:]) for s in range(2)]
    )
    return float(mean) / best_fixed(p, cost, draft), float(mean) / (1 / cost(1))


FEW = [
    (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0), (0.0, 0.05, 0.1, 0.4), (0.0, 0.0, 0.35, 0.4),
    (0.03, 0.0, 0.0, 0.2), (0.03, 0.01, 0.1, 0.6), (0.03, 0.0, 0.35, 0.95), (0.03, 0.05, 0.0, 0.85),
    (0.1, 0.0, 0.0, 0.05), (0.1, 0.01, 0.0, 0.75), (0.1, 0.05, 0.35, 0.6), (0.1, 0.0, 0.1, 1.0),
    (0.24, 0.0, 0.1, 0.4), (0.24, 0.05, 0.0, 0.4), (0.24, 0.0, 0.1, 0.75), (0.24, 0.0, 0.35, 0.05),
    (0.24, 0.01, 0.1, 0.85), (0.24, 0.0, 0.0, 0.2), (0.6, 0.0, 0.0, 0.0), (0.6, 0.01, 0.0, 0.75),
    (0.6, 0.0, 0.1, 0.85), (0.6, 0.05, 0.35, 0.95), (1.0, 0.0, 0.0, 0.6), (1.0, 0.01, 0.1, 1.0),
    (1.0, 0.0, 0.35, 0.05),
]  # fmt: skip
SOME = [f if i % 20 == 0 else pytest.param(*f, marks=pytest.mark.slow) for i, f in enumerate(FEW)]


@pytest.mark.parametrize("slope, quad, draft, p", SOME)
def test_decisions_are_near_the_best_fixed_depth(
    slope: float, quad: float, draft: float, p: float
) -> None:
    of_best, of_plain = ratios(slope, quad, draft, p)
    assert of_best >= 0.97 and of_plain >= 0.97


@pytest.mark.slow
@settings(max_examples=4)
@given(st.floats(0, 1.5), st.floats(0, 0.1), st.floats(0, 0.5), st.floats(0, 1))
def test_any_acceptance_on_any_curve(slope: float, quad: float, draft: float, p: float) -> None:
    assert min(ratios(slope, quad, draft, p)) >= 0.97


@pytest.mark.slow
@settings(max_examples=25)
@given(st.floats(0, 1.5), st.floats(0, 0.1), st.floats(0, 0.5), st.floats(0, 1))
def test_any_acceptance_on_many_curves(slope: float, quad: float, draft: float, p: float) -> None:
    assert min(ratios(slope, quad, draft, p)) >= 0.97


@pytest.mark.parametrize(
    "slope, quad, draft, p, off",
    in_turn(
        [(0.1, 0.0, 0.1, 0.8), (0.6, 0.0, 0.0, 0.2), (0.03, 0.01, 0, 0.9)], [0.5, 2.0], every=6
    ),
)
def test_costs_that_were_measured_wrong_are_corrected(slope, quad, draft, p, off: float) -> None:
    """All of a step takes `off` times what was measured: the decisions do not suffer once steps
    told so."""
    cost = curve(slope, quad)
    run = Run(cost, draft, lambda i, r: p, believed=lambda r: cost(r) / off)
    assert speed(run.rounds(2000)[400:]) >= 0.96 * best_fixed(p, cost, draft)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("quad", QUADS)
@pytest.mark.parametrize("slope", SLOPES)
def test_the_whole_grid(slope: float, quad: float, draft: float) -> None:
    found = {p: ratios(slope, quad, draft, p) for p in CHANCES}
    assert not {p: f for p, f in found.items() if min(f) < 0.97}


CURVES = [(0.03, 0.01, 0.1), (0.1, 0.0, 0.0), (0.24, 0.0, 0.1), (0.24, 0.01, 0.0)]


@pytest.mark.parametrize(
    "slope, quad, draft, before, after",
    in_turn(CURVES, [(0.0, 0.9), (0.95, 0.1), (0.2, 0.95), (0.9, 0.5)], every=8),
)
def test_a_change_is_followed_within_200_rounds(
    slope, quad, draft, before: float, after: float
) -> None:
    cost = curve(slope, quad)
    at = lambda i, r: before if r < 1000 else after  # noqa: E731
    speeds = [speed(Run(cost, draft, at, seed=s).rounds(1400)[1200:]) for s in range(3)]
    assert np.mean(speeds) >= 0.95 * best_fixed(after, cost, draft)


def test_in_a_batch_each_sequence_gets_what_it_earns() -> None:
    chances = (0.1, 0.5, 0.8, 0.95)
    rounds = Run(curve(0.1, 0.002), 0.0, lambda i, r: chances[i], sequences=4).rounds(800)[400:]
    mean = np.mean([depths for _, _, depths in rounds], axis=0)
    assert (np.diff(mean) > 0).all() and mean[3] > 3 * mean[1]
    plain = 4 / curve(0.1, 0.002)(4)
    assert speed(rounds) > plain


@pytest.mark.parametrize("n, p", in_turn([1, 4, 8], [0.0, 0.2], every=6))
def test_a_losing_batch_is_parked(n: int, p: float) -> None:
    cost = curve(0.6, 0.0)
    rounds = Run(cost, 0.1, lambda i, r: p, sequences=n).rounds(1400)[400:]
    assert speed(rounds) >= 0.97 * n / cost(n)
    assert sum(any(depths) for _, _, depths in rounds) < 60

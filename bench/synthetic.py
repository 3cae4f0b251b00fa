"""Measures the controller alone, with a given acceptance rate and given costs. `python -m
bench.synthetic ACCEPTANCE`.

Rule: the tokens are counted by their expectation under the depth that was chosen, so that the table
shows decisions, not luck.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from mlxspec import blas

blas.load()

from mlxspec.speculate.controller import GRID, Controller, Costs, Key, Proposal  # noqa: E402
from mlxspec.speculate.draft_model import MAX_CHAIN as MODEL_DEPTH  # noqa: E402
from mlxspec.speculate.proposer import FIRST_TOKEN as FIRST_MODEL  # noqa: E402

SOURCE = "model"
ROUNDS = 2000
SETTLED = 400  # rounds that are not counted
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Expected tokens per plain step: of the controller, of the best fixed depth and of plain
    decoding."""

    rate: float
    best: float
    best_depth: int
    plain: float
    depth: float  # that was chosen, on average


def expected(p: float, depth: int) -> float:
    """Tokens of a round that drafts `depth` tokens, each accepted with chance `p` if those before
    it were."""
    return sum(p**i for i in range(depth + 1))


def simulate(
    p: Callable[[int], float],
    cost: Callable[[int], float],
    draft: float,
    rounds: int = ROUNDS,
    seed: int = 0,
    streams: int = 1,
) -> list[tuple[float, float, float]]:
    """(expected tokens, cost, mean depth) of each round. `p(round)` is the chance, `cost(rows)`
    that of a step, `draft` that of one drafted token."""
    rng = random.Random(seed)
    line = [cost(r) for r in GRID]

    def first(key: Key) -> float:
        assert isinstance(key, tuple)
        return FIRST_MODEL if key[1] == 1 else control.rate.of((SOURCE, key[1] - 1))

    control = Controller(Costs((64, 65), GRID, (line, line)), first)
    pilots = [control.begin() for _ in range(streams)]
    keys: list[Key] = [(SOURCE, i) for i in range(1, MODEL_DEPTH + 1)]
    made = []
    for n in range(rounds):
        chance = p(n)
        options = [[Proposal(SOURCE, [pilot.of(k) for k in keys], draft)] for pilot in pilots]
        depths = [depth for depth, _ in control.decide(pilots, options, 64, "exact")]
        for pilot, depth in zip(pilots, depths, strict=True):
            kept = next((i for i in range(depth) if rng.random() >= chance), depth)
            control.learn(pilot, keys[:depth], kept)
        spent = cost(streams + sum(depths)) + draft * max(depths)
        made.append((sum(expected(chance, d) for d in depths), spent, sum(depths) / streams))
    return made


def outcome(
    p: float, cost: Callable[[int], float], draft: float, seeds: Sequence[int] = SEEDS
) -> Outcome:
    """Of one stream, after it has settled, over all seeds."""
    counted = [r for seed in seeds for r in simulate(lambda n: p, cost, draft, seed=seed)[SETTLED:]]
    rates = [expected(p, k) / (cost(1 + k) + k * draft) for k in range(MODEL_DEPTH + 1)]
    best = max(range(len(rates)), key=lambda k: rates[k])
    tokens, spent, depth = (sum(column) for column in zip(*counted, strict=True))
    return Outcome(tokens / spent, rates[best], best, rates[0], depth / len(counted))


def synthetic(p: float, row_cost: float, draft_cost: float, console: Console) -> None:
    """Print what the controller makes of a drafter that is right with chance `p`."""
    found = outcome(p, lambda rows: 1 + row_cost * (rows - 1), draft_cost)
    console.print(
        f"acceptance {p:g}; a row costs {row_cost:.0%} of a step, a draft {draft_cost:.0%}"
    )
    names = ("depth", "tokens per step's time", "of the best")
    made = Table("", *(Column(name, justify="right") for name in names))
    for name, depth, rate in (
        ("plain", "0", found.plain),
        ("best fixed depth", str(found.best_depth), found.best),
        ("the controller", f"{found.depth:.2f}", found.rate),
    ):
        made.add_row(name, depth, f"{rate:.3f}", f"{rate / found.best:.1%}")
    console.print(made)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.synthetic", description=__doc__)
    parser.add_argument("acceptance", type=float, help="of a drafted token, 0 to 1")
    parser.add_argument("--row-cost", type=float, default=0.05, help="of a row, in plain steps")
    parser.add_argument("--draft-cost", type=float, default=0.0, help="of a drafted token")
    args = parser.parse_args()
    synthetic(args.acceptance, args.row_cost, args.draft_cost, Console())


if __name__ == "__main__":
    main()

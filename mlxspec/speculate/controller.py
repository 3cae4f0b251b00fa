"""How many tokens to draft for each sequence of a step, for the most expected tokens per second.

Rule: rows are the scarce resource. Drafted positions compete, by their chance to be accepted, for
the number of rows that is worth its measured cost in a step. A bad drafter, a high temperature or a
large batch need no rule of their own: they lower a rate or raise a cost.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # rows whose cost is measured
MAX_ROWS = 256  # drafted in one step, over all sequences
MEMORY = 100  # observations that an acceptance rate remembers
FORGETTING = 0.995  # of an observation's weight, each round
PRIOR = 4.0  # observations that a starting estimate is worth
PROBE_SHARE = 0.01  # of the time, at most, for probing whether a parked drafter would pay now
PROBE_INTERVALS = (8, 128)  # rounds, shortest and longest: a wrong cost is found in time
INNOVATION = 0.25  # one observed time moves a cost by this part at most
CORRECTION = 0.1  # weight of one observed time

# (source, how its tokens are sampled, position); for a copy (source, bucket of matching tokens)
Key = tuple[Any, ...]
Curve = Sequence[float]  # seconds by rows, or rates by depth
Floats = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Proposal:
    """What one drafter could draft for one sequence.

    `rate_keys` say what each token's acceptance rate depends on, `rates` are these rates, each on
    condition that the tokens before it were accepted. `seconds` is the cost of one more token,
    `fixed` that of drafting at all: copies have neither, a chain of passes has the first, a block
    that is drafted in one pass the second. `tokens` are set if they are known already; `sampling`
    is how a model samples them, `drafter` is set by the Proposer.
    """

    source: str
    rates: Curve = ()
    seconds: float = 0.0
    fixed: float = 0.0
    rate_keys: Sequence[Key] = ()
    tokens: Sequence[int] = ()
    sampling: str = ""
    drafter: Any = None

    @property
    def cumulative(self) -> list[float]:
        """For each token the chance that it and those before it are accepted."""
        return list(accumulate(self.rates, mul))


@dataclass(slots=True)
class AcceptanceRate:
    """How often a drafted token is accepted, by key. `prior(key)` is where an estimate starts, and
    where it returns to while its key is not tried: a position that looked bad is tried again.
    `idle` counts the rounds since the last draft; it is infinite if that was right."""

    prior: Callable[[Key], float]
    round: int = 0
    idle: float = 0.0
    _seen: dict[Key, tuple[float, float, int]] = field(default_factory=dict)  # hits, tries, round

    def of(self, key: Key) -> float:
        hits, tries = self._faded(key)
        return (hits + PRIOR * self.prior(key)) / (tries + PRIOR)

    def learn(self, key: Key, accepted: bool) -> None:
        hits, tries = self._faded(key)
        fade = 1 - 1 / MEMORY
        hits = hits * fade + accepted
        tries = tries * fade + 1
        self._seen[key] = hits, tries, self.round

    def _faded(self, key: Key) -> tuple[float, float]:
        hits, tries, last = self._seen.get(key, (0.0, 0.0, 0))
        fade = FORGETTING ** (self.round - last)
        return hits * fade, tries * fade


@dataclass(slots=True)
class Costs:
    """Seconds of a step by its rows and its context, as measured, corrected by what steps took.

    `measured[i][j]` is a step of `rows[j]` rows with `contexts[i]` tokens of context over all its
    sequences; between these it is interpolated, beyond them the last slope continues. `factors`
    correct it, by mode: "synced" steps waited for the tokens before them, "overlap" steps did not.
    """

    contexts: tuple[int, int]
    rows: Sequence[int]
    measured: tuple[Curve, Curve]
    factors: dict[str, float] = field(default_factory=dict)

    def curve(self, rows: int, context: float, mode: str) -> Floats:
        """[rows]: seconds of a step with 1, 2, ... rows."""
        low, high = map(np.array, self.measured)
        short, long = self.contexts
        position = max(0, context - short) / max(1, long - short)
        measured = low + position * (high - low)
        *_, before, last = self.rows
        rise = max(0.0, measured[-1] - measured[-2])  # more rows are never cheaper
        counts = np.arange(1.0, rows + 1)
        beyond = np.maximum(0.0, counts - last) * (rise / (last - before))
        forward = np.interp(counts, self.rows, measured) + beyond
        seconds: Floats = np.maximum(forward, 1e-9)
        return seconds * self.factors.get(mode, 1.0)

    def step(self, rows: int, context: float, mode: str) -> float:
        """Seconds of a step with `rows` rows."""
        return float(self.curve(rows, context, mode)[-1])

    def learn(self, rows: int, context: float, mode: str, seconds: float) -> None:
        """A step of `rows` rows took `seconds`."""
        expected = self.step(rows, context, mode)
        factor = self.factors.get(mode, 1.0)
        self.factors[mode] = factor * corrected(seconds / expected)


def corrected(ratio: float) -> float:
    """The factor for an estimate after one measurement of `ratio` times its value."""
    change = max(-INNOVATION, min(INNOVATION, ratio - 1))
    return 1 + CORRECTION * change


@dataclass
class Controller:
    """Decides from measured `costs`, which must be set before it decides, and learned rates;
    `prior(key)` is the rate of a key that was never tried. `padded`: in a step, all sequences have
    as many rows as the longest draft."""

    costs: Costs | None
    prior: Callable[[Key], float]
    padded: bool = False

    def __post_init__(self) -> None:
        self.rate = AcceptanceRate(self.prior)
        self.overall = cache(self.rate.of)  # until the next round is learned

    def begin(self) -> AcceptanceRate:
        """The rates of one sequence, which start from those of all."""
        return AcceptanceRate(self.overall)

    def decide(
        self,
        stats: Sequence[AcceptanceRate],
        options: Sequence[Sequence[Proposal]],
        context: float,
        mode: str,
    ) -> list[tuple[int, Proposal | None]]:
        """For each sequence how many tokens to draft, and by which of its options. `context` counts
        the tokens of all sequences, `mode` is how a step with drafts runs."""
        assert self.costs
        base = len(stats)
        curve = self.costs.curve(base + MAX_ROWS, context, mode).tolist()
        plain = self.costs.step(base, context, "overlap")
        if self.padded:  # each further token of the longest draft is a row of every sequence
            curve = curve[: base - 1] + curve[base - 1 :: base]

        def speed(option: Proposal) -> float:
            return tokens_per_second(option, curve, base)

        picked = [max(some, key=speed, default=None) for some in options]
        depths = share(picked, curve, plain, padded=self.padded)
        if not any(depths):
            for i, option in enumerate(picked):
                if option is None:
                    continue
                every = probe_every(option, curve, plain, base=base)
                if every and stats[i].idle >= every * base:
                    depths[i] = 1
                    break
        return list(zip(depths, picked, strict=True))

    def learn(self, stats: AcceptanceRate, keys: Sequence[Key], accepted: int) -> None:
        """`keys` are the rate keys of the drafted tokens, none for a plain round; the first
        `accepted` were accepted, the next was rejected, those after it were not reached."""
        self.overall.cache_clear()
        stats.idle += 1
        if keys:
            stats.idle = math.inf if accepted else 0.0
        for rate in (self.rate, stats):
            rate.round += 1
            for i, key in enumerate(keys[: accepted + 1]):
                rate.learn(key, i < accepted)


def tokens_per_second(option: Proposal, curve: Curve, base: int) -> float:
    """The most expected tokens per second of a step in which one of `base` sequences drafts by
    `option`."""
    best = 0.0
    tokens = float(base)
    for depth, (chance, step) in enumerate(zip(option.cumulative, curve[base:], strict=False), 1):
        tokens += chance
        seconds = step + option.fixed + option.seconds * depth
        best = max(best, tokens / seconds)
    return best


def share(
    options: Sequence[Proposal | None],
    curve: Curve,
    plain: float,
    padded: bool = False,
) -> list[int]:
    """How many tokens to draft for each sequence, for the most expected tokens per second.

    `plain` are the seconds of a step without drafts, `curve[r - 1]` those of a drafting one with r
    rows; each sequence takes one row anyway. If `padded`, shorter drafts may as well be as long as
    the longest, and all tokens of a depth count as one row of the curve. A model drafts for all
    sequences at once: one token more costs its seconds once, and its fixed cost is paid once.
    """
    base = len(options)
    positions = []  # (order, depth, cumulative chance, sequence, a model's passes)
    seconds = fixed = 0.0
    for i, option in enumerate(options):
        if option is None:
            continue
        seconds = max(seconds, option.seconds)
        fixed = max(fixed, option.fixed)
        for depth, chance in enumerate(option.cumulative, 1):
            passes = depth if option.seconds or option.fixed else 0
            order = depth if padded else -chance
            positions.append((order, depth, chance, i, passes))
    positions.sort()
    best = [0 for _ in options]
    best_speed = base / plain
    for passes in sorted({needed for *_, needed in positions}):
        drafting = fixed + seconds * passes if passes else 0.0
        depths = [0 for _ in options]
        tokens = float(base)
        rows = base
        for _, depth, chance, i, needed in positions:
            row = base + depth if padded else rows + 1
            if needed > passes or row > len(curve):
                continue
            rows = row
            depths[i] += 1
            tokens += chance
            speed = tokens / (curve[rows - 1] + drafting)
            if speed > best_speed:
                best = depths.copy()
                best_speed = speed
    return best


def probe_every(option: Proposal, curve: Curve, plain: float, base: int) -> int:
    """Rounds between two probes of a drafter that does not pay now, so that they take PROBE_SHARE
    of the time; 0 where it could not pay if every token were accepted."""
    sure = replace(option, rates=[1.0 for _ in option.rates])
    if tokens_per_second(sure, curve, base) <= base / plain:
        return 0
    extra = curve[base] + option.fixed + option.seconds - plain
    every = math.ceil(extra / plain / PROBE_SHARE)
    shortest, longest = PROBE_INTERVALS
    return max(shortest, min(longest, every))

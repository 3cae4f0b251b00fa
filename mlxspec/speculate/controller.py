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
SOONEST, LATEST = 8, 128  # rounds between two probes: a wrong cost is found in time
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
class AcceptanceRates:
    """How often a drafted token is accepted, by key. `prior(key)` is where an estimate starts, and
    where it returns to while its key is not tried: a position that looked bad is tried again.
    `idle` counts the rounds since the last draft; it is infinite if that was right."""

    prior: Callable[[Key], float]
    round: int = 0
    idle: float = 0.0
    _seen: dict[Key, tuple[float, float, int]] = field(default_factory=dict)  # hits, tries, round

    def of(self, key: Key) -> float:
        return self.all_of((key,))[0]

    def all_of(self, keys: Sequence[Key]) -> list[float]:
        """The rate of each key."""
        rates = {}
        for key in dict.fromkeys(keys):
            hits, tries, last = self._seen.get(key, (0.0, 0.0, 0))
            fade = FORGETTING ** (self.round - last)
            started = PRIOR * self.prior(key)
            rates[key] = (hits * fade + started) / (tries * fade + PRIOR)
        return [rates[key] for key in keys]

    def learn(self, key: Key, accepted: bool) -> None:
        hits, tries, last = self._seen.get(key, (0.0, 0.0, 0))
        fade = FORGETTING ** (self.round - last) * (1 - 1 / MEMORY)
        self._seen[key] = hits * fade + accepted, tries * fade + 1, self.round


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

    def curve(self, rows: int, context: float) -> Floats:
        """[rows]: seconds of a step with 1, 2, ... rows, before a mode's factor."""
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
        return seconds

    def factor(self, mode: str) -> float:
        """What the measured seconds are multiplied by."""
        return self.factors.get(mode, 1.0)

    def step(self, rows: int, context: float, mode: str) -> float:
        """Seconds of a step with `rows` rows."""
        return float(self.curve(rows, context)[-1]) * self.factor(mode)

    def learn(self, rows: int, context: float, mode: str, seconds: float) -> None:
        """A step of `rows` rows took `seconds`."""
        expected = self.step(rows, context, mode)
        self.factors[mode] = self.factor(mode) * corrected(seconds / expected)


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
        self.rate = AcceptanceRates(self.prior)
        self.overall = cache(self.rate.of)  # until the next round is learned

    def begin(self) -> AcceptanceRates:
        """The rates of one sequence, which start from those of all."""
        return AcceptanceRates(self.overall)

    def decide(
        self,
        stats: Sequence[AcceptanceRates],
        options: Sequence[Sequence[Proposal]],
        context: float,
        mode: str,
    ) -> list[tuple[int, Proposal | None]]:
        """For each sequence how many tokens to draft, and by which of its options. `context` counts
        the tokens of all sequences, `mode` is how a step with drafts runs."""
        assert self.costs
        base = len(stats)
        measured = self.costs.curve(base + MAX_ROWS, context)
        curve = measured * self.costs.factor(mode)
        plain = float(measured[base - 1]) * self.costs.factor("overlap")
        if self.padded:  # each further token of the longest draft is a row of every sequence
            curve = np.concatenate([curve[: base - 1], curve[base - 1 :: base]])
        picked = pick(options, curve, base)
        depths = choose_depths(picked, curve, plain, padded=self.padded)
        if not any(depths):
            rested = {
                i: option
                for i, option in enumerate(picked)
                if option and stats[i].idle >= SOONEST * base
            }
            intervals = probe_every([*rested.values()], curve, plain, base)
            for i, every in zip(rested, intervals, strict=True):
                if every and stats[i].idle >= every * base:
                    depths[i] = 1
                    break
        return list(zip(depths, picked, strict=True))

    def learn(self, stats: AcceptanceRates, keys: Sequence[Key], accepted: int) -> None:
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


def cumulative_rates(options: Sequence[Proposal]) -> tuple[Any, Any]:
    """[options, longest draft] each: the chance that a token and those before it are accepted, and
    whether there is such a token."""
    lengths = [len(option.rates) for option in options]
    rates = np.zeros((len(options), max(lengths)))
    for row, option in zip(rates, options, strict=True):
        row[: len(option.rates)] = option.rates
    chances = np.cumprod(rates, axis=1)
    return chances, np.arange(max(lengths)) < np.array(lengths)[:, None]


def tokens_per_second(options: Sequence[Proposal], curve: Floats, base: int) -> Floats:
    """[options]: the most expected tokens per second of a step in which one of `base` sequences
    drafts by this option."""
    chances, drafted = (each[:, : len(curve) - base] for each in cumulative_rates(options))
    depths = np.arange(1, chances.shape[1] + 1)
    passes = np.array([option.seconds for option in options])[:, None] * depths
    fixed = np.array([option.fixed for option in options])[:, None]
    seconds = curve[base : base + len(depths)] + fixed + passes
    speeds = (base + np.cumsum(chances, axis=1)) / seconds
    best: Floats = speeds.max(axis=1, initial=0.0, where=drafted)
    return best


def pick(
    options: Sequence[Sequence[Proposal]],
    curve: Floats,
    base: int,
) -> list[Proposal | None]:
    """The fastest option of each sequence; the first of equals."""
    several = [option for some in options if len(some) > 1 for option in some]
    speeds = iter(tokens_per_second(several, curve, base).tolist() if several else ())
    picked = []
    for some in options:
        speed = {option: next(speeds) for option in some} if len(some) > 1 else {}
        picked.append(max(some, key=lambda option: speed.get(option, 0.0), default=None))
    return picked


def choose_depths(
    options: Sequence[Proposal | None],
    curve: Floats,
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
    best = [0 for _ in options]
    best_speed = base / plain
    places = [i for i, option in enumerate(options) if option and option.rates]
    some = [option for option in options if option and option.rates]
    if not some:
        return best
    seconds = max(option.seconds for option in some)
    fixed = max(option.fixed for option in some)
    chances, drafted = cumulative_rates(some)
    depth, which = np.nonzero(drafted.T)  # positions, by depth
    chance = chances[which, depth]
    if not padded:  # by chance; of equals the less deep one, then the first
        order = np.argsort(-chance, kind="stable")
        depth, which, chance = depth[order], which[order], chance[order]
    passes = np.array([bool(option.seconds or option.fixed) for option in some])[which]
    passes = passes * (depth + 1)
    for most in sorted({*passes.tolist()}):
        held = passes <= most
        chosen, added = which[held], chance[held]
        rows = depth[held] if padded else np.arange(len(added))  # beyond `base`, less one
        known = int(np.count_nonzero(rows < len(curve) - base))
        drafting = fixed + seconds * most if most else 0.0
        spent = curve[base:][rows[:known]] + drafting
        speeds = (base + np.cumsum(added[:known])) / spent
        if known and speeds.max() > best_speed:
            at = int(speeds.argmax())
            best_speed = float(speeds[at])
            counts = np.bincount(chosen[: at + 1], minlength=len(some)).tolist()
            best = [0 for _ in options]
            for i, count in zip(places, counts, strict=True):
                best[i] = count
    return best


def probe_every(
    options: Sequence[Proposal],
    curve: Floats,
    plain: float,
    base: int,
) -> list[int]:
    """For each drafter that does not pay now the rounds between two probes, so that they take
    PROBE_SHARE of the time; 0 where it could not pay if every token were accepted."""
    if not options:
        return []
    sure = [replace(option, rates=[1.0 for _ in option.rates]) for option in options]
    pays = tokens_per_second(sure, curve, base) > base / plain
    every = []
    for option, could_pay in zip(options, pays.tolist(), strict=True):
        extra = float(curve[base]) + option.fixed + option.seconds - plain
        rounds = max(SOONEST, min(LATEST, math.ceil(extra / plain / PROBE_SHARE)))
        every.append(rounds if could_pay else 0)
    return every

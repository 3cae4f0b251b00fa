"""How many tokens to draft, for every sequence of a step: the most expected tokens per millisecond.

Rule: rows are the scarce resource. Every drafted position competes with its chance to survive for a
number of rows that the measured cost of a step makes worth while. A losing drafter, a temperature
or a large batch need no rule of their own: they lower a chance or raise a cost.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # rows whose cost is measured
MOST_ROWS = 256  # drafted in one step, over all sequences
MEMORY = 100  # observations that a chance remembers
FORGETTING = 0.995  # of an observation's weight, each round
PRIOR = 4.0  # observations that a new estimate's starting point is worth
HYSTERESIS = (
    1.02  # who drafts goes on until plain steps are this much faster: little is lost, much learned
)
PROBE_SHARE = 0.01  # of the time, at most, for asking whether a parked drafter would pay now
SLOWEST_PROBE = 128  # rounds between two questions, however dear they are
INNOVATION = 0.25  # one observed time moves a cost by this part at most
CORRECTION = 0.1  # weight of one observed time

Key = Hashable
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class AcceptanceRate:
    """How often a drafted token is accepted, by key. `prior(key)` is where an estimate starts, and
    where it goes back to while its key is not reached: a position that looked bad early on is tried
    again."""

    prior: Callable[[Key], float]
    round: int = 0
    _seen: dict[Key, tuple[float, float, int]] = field(
        default_factory=dict
    )  # accepted, tried, round

    def of(self, key: Key) -> float:
        hits, tries, _ = self._now(key)
        return (hits + PRIOR * self.prior(key)) / (tries + PRIOR)

    def learn(self, key: Key, accepted: bool) -> None:
        hits, tries, _ = self._now(key)
        fade = 1 - 1 / MEMORY
        self._seen[key] = (hits * fade + accepted, tries * fade + 1, self.round)

    def _now(self, key: Key) -> tuple[float, float, int]:
        hits, tries, last = self._seen.get(key, (0.0, 0.0, self.round))
        fade = FORGETTING ** (self.round - last)
        return hits * fade, tries * fade, last


@dataclass(slots=True)
class Costs:
    """Seconds of a step by its rows and its context, as measured, corrected by what steps took.

    `measured[i][j]` is a step of `rows[j]` rows, of which there are two at least, with
    `contexts[i]` tokens of context over all its sequences. Between these it is interpolated; beyond
    them it goes on with the last slope. `sampling` is what drawing a row's token takes beyond a
    greedy one, by Sampling.kind. `factors` correct it all, by how a step ran: "exact" waited for
    the tokens before it, "overlap" did not."""

    contexts: tuple[int, int]
    rows: Sequence[int]
    measured: tuple[Sequence[float], Sequence[float]]
    sampling: Mapping[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)

    def curve(self, rows: int, context: float, how: str, draw: float = 0.0) -> Floats:
        """[rows]: seconds of a step with 1, 2, ... `rows` rows; `draw` are those of sampling one of
        them."""
        low, high = (self._extended(m, rows) for m in self.measured)
        at = max(0.0, (context - self.contexts[0]) / max(1, self.contexts[1] - self.contexts[0]))
        steps = np.maximum(low + at * (high - low), 1e-9) + draw * np.arange(1, rows + 1)
        return np.asarray(steps * self.factors.get(how, 1.0))

    def step(self, rows: int, context: float, how: str, draw: float = 0.0) -> float:
        """The last of `curve`, without numpy: several are asked for in a step."""
        low, high = (self._one(m, rows) for m in self.measured)
        at = max(0.0, (context - self.contexts[0]) / max(1, self.contexts[1] - self.contexts[0]))
        return (max(low + at * (high - low), 1e-9) + draw * rows) * self.factors.get(how, 1.0)

    def draw(self, kinds: Sequence[str]) -> float:
        """Seconds of sampling a row, on average over sequences of these kinds."""
        return sum(self.sampling.get(kind, 0.0) for kind in kinds) / max(1, len(kinds))

    def learn(self, rows: int, context: float, how: str, seconds: float, draw: float = 0.0) -> None:
        """A step of `rows` rows took `seconds`."""
        expected = self.step(rows, context, how, draw)
        self.factors[how] = self.factors.get(how, 1.0) * corrected(seconds / expected)

    def _one(self, measured: Sequence[float], rows: int) -> float:
        known, n = self.rows, bisect_left(self.rows, rows)
        if n == 0:
            return measured[0]
        i = min(n, len(known) - 1)
        slope = (measured[i] - measured[i - 1]) / (known[i] - known[i - 1])
        return measured[i] + (max(0.0, slope) if n > i else slope) * (rows - known[i])

    def _extended(self, measured: Sequence[float], rows: int) -> Floats:
        at = np.arange(1, rows + 1, dtype=np.float64)
        inside = np.interp(at, self.rows, measured)
        slope = max(0.0, (measured[-1] - measured[-2]) / (self.rows[-1] - self.rows[-2]))
        return inside + slope * np.maximum(0.0, at - self.rows[-1])


def corrected(ratio: float) -> float:
    """What an estimate is to be multiplied with, when the truth was once `ratio` times as large."""
    return 1 + CORRECTION * (min(1 + INNOVATION, max(1 - INNOVATION, ratio)) - 1)


@dataclass(slots=True)
class Option:
    """What could be drafted for one sequence: the chance of each token given those before it, and
    the seconds of one more token (a model's; 0: copying costs nothing)."""

    source: str
    chances: Sequence[float]
    seconds: float = 0.0

    def expected(self) -> float:
        """Tokens that would be accepted if all were drafted."""
        return float(np.cumprod(self.chances).sum())


@dataclass(slots=True)
class SequenceStats:
    """One sequence's experience: its own chances, which start from everybody's, and when it last
    drafted."""

    chance: AcceptanceRate
    idle: int = 0  # rounds without a draft
    again: bool = False  # the last draft was right: a question may follow at once


@dataclass(slots=True)
class Controller:
    """Decides from measured `costs` and learned chances; `first(key)` is one that nothing is known
    of yet."""

    costs: Costs
    first: Callable[[Key], float]
    chance: AcceptanceRate = field(init=False)

    def __post_init__(self) -> None:
        self.chance = AcceptanceRate(self.first)

    def pilot(self) -> SequenceStats:
        return SequenceStats(AcceptanceRate(self.chance.of))

    def decide(
        self,
        pilots: Sequence[SequenceStats],
        options: Sequence[Sequence[Option]],
        context: float,
        how: str,
        draw: float = 0.0,
    ) -> list[tuple[int, Option | None]]:
        """For each sequence of a step how many tokens to draft, and which of its options. `context`
        counts the tokens of all sequences; `how` a step with drafts runs; `draw` are the seconds of
        sampling a row."""
        base = len(pilots)
        room = sum(max((len(o.chances) for o in some), default=0) for some in options)
        if not room:
            return [(0, None)] * base
        curve = self.costs.curve(base + min(room, MOST_ROWS), context, how, draw)
        plain = self.costs.step(base, context, "overlap", draw)
        picked = [_best(some, curve, base) for some in options]
        active = any(pilot.idle == 0 for pilot in pilots)
        depths = share(picked, curve, plain * (HYSTERESIS if active else 1.0))
        if not any(depths):
            for i, (pilot, option) in enumerate(zip(pilots, picked, strict=True)):
                every = probe_every(option, curve, plain, base) if option else 0
                if every and (pilot.again or pilot.idle >= every * base):
                    depths[i] = 1
                    # one question at a time, and a batch asks no more often than one sequence
                    break
        return list(zip(depths, picked, strict=True))

    def judge(self, pilot: SequenceStats, keys: Sequence[Key], kept: int) -> None:
        """`keys` are those of the drafted tokens, none for a plain round; the first `kept` were
        accepted, the next was refused, those behind it were not reached."""
        pilot.idle, pilot.again = (0, kept > 0) if keys else (pilot.idle + 1, False)
        self.chance.round += 1
        pilot.chance.round += 1
        for i, key in enumerate(keys[: kept + 1]):
            self.chance.learn(key, i < kept)
            pilot.chance.learn(key, i < kept)


def _best(options: Sequence[Option], curve: Floats, base: int) -> Option | None:
    """The option that brings the most tokens per second beside `base` rows."""
    if len(options) < 2:
        return options[0] if options else None

    def rate(option: Option) -> float:
        n = min(len(option.chances), len(curve) - base)
        gained = base + np.cumsum(np.cumprod(option.chances[:n]))
        return float(
            (gained / (curve[base : base + n] + option.seconds * np.arange(1, n + 1))).max()
        )

    return max(options, key=rate)


def share(options: Sequence[Option | None], curve: Floats, plain: float) -> list[int]:
    """How many tokens to draft for each sequence, for the most expected tokens per second of the
    step.

    `curve[r - 1]` are the seconds of a drafting step with r rows, `plain` those of one that drafts
    nothing; each sequence takes one row anyway. Model drafts are made for all sequences at once, so
    one token more costs its seconds once."""
    base = len(options)
    room = len(curve) - base
    best_rate, best = base / plain, [0] * base
    slots = sorted(
        (
            (survival, i, depth)
            for i, option in enumerate(options)
            if option
            for depth, survival in enumerate(np.cumprod(option.chances).tolist(), 1)
        ),
        key=lambda s: (-s[0], s[2]),
    )
    models = [o for o in options if o and o.seconds]
    each = max((o.seconds for o in models), default=0.0)
    free = {i for i, o in enumerate(options) if o and not o.seconds}
    for deepest in range(max((len(o.chances) for o in models), default=0) + 1):
        taken = [s for s in slots if s[1] in free or s[2] <= deepest][:room]
        if taken:
            gained = base + np.cumsum([s[0] for s in taken])
            rates = gained / (curve[base : base + len(taken)] + each * deepest)
            at = int(np.argmax(rates))
            if rates[at] > best_rate:
                best_rate, best = float(rates[at]), [0] * base
                for _, i, _ in taken[: at + 1]:
                    best[i] += 1
    return best


def probe_every(option: Option, curve: Floats, plain: float, base: int) -> int:
    """Rounds between two probes of a drafter that does not pay now, so that they take PROBE_SHARE
    of the time; 0 where it could not pay if every token were accepted."""
    n = min(len(option.chances), len(curve) - base)
    depths = np.arange(1, n + 1)
    perfect = (base + depths) / (curve[base : base + n] + depths * option.seconds)
    if not n or perfect.max() <= base / plain:
        return 0
    extra = float(curve[base] + option.seconds - plain) / plain
    return max(8, min(SLOWEST_PROBE, math.ceil(extra / PROBE_SHARE)))

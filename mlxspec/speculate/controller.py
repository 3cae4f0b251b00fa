"""How many tokens to draft, for every sequence of a step: the most expected tokens per second.

Rule: rows are the scarce resource. Every drafted position competes, by its chance to be accepted,
for a number of rows that the measured cost of a step makes worth while. A bad drafter, a high
temperature or a large batch need no rule of their own: they lower a rate or raise a cost.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # rows whose cost is measured
MAX_ROWS = 256  # drafted in one step, over all sequences
MEMORY = 100  # observations that an acceptance rate remembers
FORGETTING = 0.995  # of an observation's weight, each round
PRIOR = 4.0  # observations that a starting estimate is worth
HYSTERESIS = 1.02  # drafting goes on until plain steps are this much faster
PROBE_SHARE = 0.01  # of the time, at most, for probing whether a parked drafter would pay now
MAX_PROBE_INTERVAL = 128  # rounds
INNOVATION = 0.25  # one observed time moves a cost by this part at most
CORRECTION = 0.1  # weight of one observed time

Key = Hashable
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Proposal:
    """What one drafter could draft for one sequence.

    `keys` say by token what its acceptance rate depends on, `rates` are these rates, each given
    that the tokens before it were accepted. `seconds` is the cost of one more token, `fixed` that
    of drafting at all (copies: 0; a chain of passes: per token; a block in one pass: fixed).
    `tokens` are there if they are known already.
    """

    source: str
    rates: Sequence[float] = ()
    seconds: float = 0.0
    fixed: float = 0.0
    keys: Sequence[Key] = ()
    tokens: Sequence[int] = ()

    @property
    def free(self) -> bool:
        return not (self.seconds or self.fixed)


@dataclass(slots=True)
class AcceptanceRate:
    """How often a drafted token is accepted, by key. `prior(key)` is where an estimate starts, and
    where it returns to while its key is not tried: a position that looked bad is tried again."""

    prior: Callable[[Key], float]
    round: int = 0
    _seen: dict[Key, tuple[float, float, int]] = field(default_factory=dict)  # hits, tries, round

    def of(self, key: Key) -> float:
        hits, tries = self._now(key)
        return (hits + PRIOR * self.prior(key)) / (tries + PRIOR)

    def learn(self, key: Key, accepted: bool) -> None:
        hits, tries = self._now(key)
        fade = 1 - 1 / MEMORY
        self._seen[key] = (hits * fade + accepted, tries * fade + 1, self.round)

    def _now(self, key: Key) -> tuple[float, float]:
        hits, tries, last = self._seen.get(key, (0.0, 0.0, self.round))
        fade = FORGETTING ** (self.round - last)
        return hits * fade, tries * fade


@dataclass(slots=True)
class Costs:
    """Seconds of a step by its rows and its context, as measured, corrected by what steps took.

    `measured[i][j]` is a step of `rows[j]` rows with `contexts[i]` tokens of context over all its
    sequences; between these it is interpolated, beyond them the last slope goes on. `sampling` is
    the time of drawing a row's token beyond a greedy one, by Sampling.kind. `factors` correct it
    all, by mode: "exact" steps waited for the tokens before them, "overlap" steps did not.
    """

    contexts: tuple[int, int]
    rows: Sequence[int]
    measured: tuple[Sequence[float], Sequence[float]]
    sampling: Mapping[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)

    def curve(self, rows: int, context: float, mode: str, draw: float = 0.0) -> Floats:
        """[rows]: seconds of a step with 1, 2, ... rows; `draw` are those of sampling a row."""
        low, high = (self._extended(m, rows) for m in self.measured)
        steps = np.maximum(low + self._position(context) * (high - low), 1e-9)
        steps = steps + draw * np.arange(1, rows + 1)
        return np.asarray(steps * self.factors.get(mode, 1.0))

    def step(self, rows: int, context: float, mode: str, draw: float = 0.0) -> float:
        """The last value of `curve`, without numpy: asked for several times in a step."""
        low, high = (self._one(m, rows) for m in self.measured)
        seconds = max(low + self._position(context) * (high - low), 1e-9)
        return (seconds + draw * rows) * self.factors.get(mode, 1.0)

    def draw(self, kinds: Sequence[str]) -> float:
        """Seconds of sampling a row, on average over sequences of these kinds."""
        return sum(self.sampling.get(kind, 0.0) for kind in kinds) / max(1, len(kinds))

    def learn(
        self, rows: int, context: float, mode: str, seconds: float, draw: float = 0.0
    ) -> None:
        """A step of `rows` rows took `seconds`."""
        ratio = seconds / self.step(rows, context, mode, draw)
        self.factors[mode] = self.factors.get(mode, 1.0) * corrected(ratio)

    def _position(self, context: float) -> float:
        short, long = self.contexts
        return max(0.0, (context - short) / max(1, long - short))

    def _one(self, measured: Sequence[float], rows: int) -> float:
        at = bisect_left(self.rows, rows)
        if at == 0:
            return measured[0]
        i = min(at, len(self.rows) - 1)
        slope = (measured[i] - measured[i - 1]) / (self.rows[i] - self.rows[i - 1])
        if at > i:  # beyond what was measured, more rows are never cheaper
            slope = max(0.0, slope)
        return measured[i] + slope * (rows - self.rows[i])

    def _extended(self, measured: Sequence[float], rows: int) -> Floats:
        at = np.arange(1, rows + 1, dtype=np.float64)
        slope = max(0.0, (measured[-1] - measured[-2]) / (self.rows[-1] - self.rows[-2]))
        beyond = np.maximum(0.0, at - self.rows[-1])
        return np.interp(at, self.rows, measured) + slope * beyond


def corrected(ratio: float) -> float:
    """The factor for an estimate whose truth was once `ratio` times as large."""
    return 1 + CORRECTION * (min(1 + INNOVATION, max(1 - INNOVATION, ratio)) - 1)


@dataclass(slots=True)
class SequenceStats:
    """Acceptance rates of one sequence, initialised from the global ones, and its idle rounds."""

    rate: AcceptanceRate
    idle: int = 0  # rounds without a draft
    promising: bool = False  # the last draft was right: the next probe may follow at once


@dataclass(slots=True)
class Controller:
    """Decides from measured `costs` and learned rates; `prior(key)` is a rate nothing is known
    of."""

    costs: Costs
    prior: Callable[[Key], float]
    rate: AcceptanceRate = field(init=False)

    def __post_init__(self) -> None:
        self.rate = AcceptanceRate(self.prior)

    def begin(self) -> SequenceStats:
        return SequenceStats(AcceptanceRate(self.rate.of))

    def decide(
        self,
        stats: Sequence[SequenceStats],
        options: Sequence[Sequence[Proposal]],
        context: float,
        mode: str,
        draw: float = 0.0,
    ) -> list[tuple[int, Proposal | None]]:
        """For each sequence how many tokens to draft, and by which of its options. `context` counts
        the tokens of all sequences, `mode` is how a step with drafts runs, `draw` the seconds of
        sampling a row."""
        base = len(stats)
        room = sum(max((len(o.rates) for o in some), default=0) for some in options)
        if not room:
            return [(0, None) for _ in stats]
        curve = self.costs.curve(base + min(room, MAX_ROWS), context, mode, draw)
        plain = self.costs.step(base, context, "overlap", draw)
        picked = [_best(some, curve, base) for some in options]
        drafting = any(s.idle == 0 for s in stats)
        depths = share(picked, curve, plain * HYSTERESIS if drafting else plain)
        if not any(depths):
            self._probe(depths, stats, picked, curve, plain)
        return list(zip(depths, picked, strict=True))

    def _probe(
        self,
        depths: list[int],
        stats: Sequence[SequenceStats],
        picked: Sequence[Proposal | None],
        curve: Floats,
        plain: float,
    ) -> None:
        """Draft one token for one sequence now and then, to see whether drafting would pay."""
        base = len(stats)
        for i, (each, option) in enumerate(zip(stats, picked, strict=True)):
            every = probe_every(option, curve, plain, base) if option else 0
            if every and (each.promising or each.idle >= every * base):
                depths[i] = 1
                return

    def judge(self, stats: SequenceStats, keys: Sequence[Key], accepted: int) -> None:
        """`keys` are those of the drafted tokens, none for a plain round; the first `accepted` were
        accepted, the next was rejected, those behind it were not reached."""
        stats.idle = 0 if keys else stats.idle + 1
        stats.promising = bool(keys) and accepted > 0
        for rate in (self.rate, stats.rate):
            rate.round += 1
            for i, key in enumerate(keys[: accepted + 1]):
                rate.learn(key, i < accepted)


def _best(options: Sequence[Proposal], curve: Floats, base: int) -> Proposal | None:
    """The option that brings the most tokens per second beside `base` rows."""
    if len(options) < 2:
        return options[0] if options else None

    def tokens_per_second(option: Proposal) -> float:
        n = min(len(option.rates), len(curve) - base)
        tokens = base + np.cumsum(np.cumprod(option.rates[:n]))
        seconds = curve[base : base + n] + option.fixed + option.seconds * np.arange(1, n + 1)
        return float((tokens / seconds).max())

    return max(options, key=tokens_per_second)


def share(options: Sequence[Proposal | None], curve: Floats, plain: float) -> list[int]:
    """How many tokens to draft for each sequence, for the most expected tokens per second.

    `curve[r - 1]` are the seconds of a drafting step with r rows, `plain` those of one without
    drafts; each sequence takes one row anyway. A model drafts for all sequences at once: one token
    more costs its seconds once, and its fixed cost is paid once.
    """
    base = len(options)
    room = len(curve) - base
    best_rate, best = base / plain, [0] * base
    positions = []  # (chance that it is reached and accepted, sequence, depth)
    for i, option in enumerate(options):
        if option:
            reached = np.cumprod(option.rates).tolist()
            positions += [(chance, i, depth) for depth, chance in enumerate(reached, 1)]
    positions.sort(key=lambda p: (-p[0], p[2]))
    models = [o for o in options if o and not o.free]
    per_token = max((o.seconds for o in models), default=0.0)
    fixed = max((o.fixed for o in models), default=0.0)
    free = {i for i, o in enumerate(options) if o and o.free}
    for deepest in range(max((len(o.rates) for o in models), default=0) + 1):
        taken = [p for p in positions if p[1] in free or p[2] <= deepest][:room]
        if not taken:
            continue
        drafting = fixed + per_token * deepest if deepest else 0.0
        tokens = base + np.cumsum([chance for chance, *_ in taken])
        rates = tokens / (curve[base : base + len(taken)] + drafting)
        at = int(np.argmax(rates))
        if rates[at] > best_rate:
            best_rate, best = float(rates[at]), [0] * base
            for _, i, _ in taken[: at + 1]:
                best[i] += 1
    return best


def probe_every(option: Proposal, curve: Floats, plain: float, base: int) -> int:
    """Rounds between two probes of a drafter that does not pay now, so that they take PROBE_SHARE
    of the time; 0 where it could not pay if every token were accepted."""
    n = min(len(option.rates), len(curve) - base)
    depths = np.arange(1, n + 1)
    seconds = curve[base : base + n] + option.fixed + depths * option.seconds
    if not n or ((base + depths) / seconds).max() <= base / plain:
        return 0
    extra = float(seconds[0] - plain) / plain
    return max(8, min(MAX_PROBE_INTERVAL, math.ceil(extra / PROBE_SHARE)))

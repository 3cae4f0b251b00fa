"""How many prompt rows a step gets: the smallest chunk near peak throughput; while answers run, at
most what fits into `gap` seconds, unless that would cut throughput below BESIDE of its peak.

Rule: a step takes a fixed time, plus a time for each row and for each pair of a row and a token
before it. These three coefficients are learned from measured steps by recursive least squares.
"""

from dataclasses import dataclass, field

import numpy as np

from mlxspec.sequences import Plan

MIN_ROWS = 8  # a prefill always makes progress
MAX_ROWS = 2048  # bounds a step's memory, but for a larger image that is not cut
CHOICES = np.r_[8:64:8, 64 : MAX_ROWS + 1 : 64]  # rows of prompts in a step: whole tiles of kernels
FIRST_ROWS = 64  # of the first step
LONGEST = 4.0  # seconds of a step when nothing decodes: a cancel or an arrival waits for it
ALONE, BESIDE = 0.99, 0.6  # of the best rate: aimed at when nothing decodes; minimum beside decodes
MARGIN = 0.9  # aims below a bound: steps vary
READ = 4  # rows whose attention takes as long as reading the K/V that they all attend to
# Seconds of a step, a row and a pair: before anything is known, and at least.
GUESS, LEAST = np.array([1e-3, 1e-5, 1e-9]), np.array([1e-5, 1e-7, 1e-11])
# The standard deviations of a guess, of a step's time, and of a coefficient's change from step to
# step, all as parts of the value.
UNKNOWN, NOISE, DRIFT = 1e4, 0.1, 0.03
SURPRISE = 3.0  # a measured time is clipped to the expected one times or divided by this


@dataclass(slots=True)
class PrefillBudget:
    """`rows` plans the prompt rows of a step, `learn` takes the time of one. `fixed` rows, if not
    0, override the clock. `largest` is the most prompt rows that a step had.

    The coefficients, in seconds, and their covariance are the state of a Kalman filter (1960), a
    step's time is its measurement: x' = x + k (t - h x), k = P h' / (h P h' + r), with h = (1,
    rows, pairs)."""

    gap: float = 0.25  # seconds
    fixed: int = 0
    largest: int = 0
    coefficients: np.ndarray = field(default_factory=GUESS.copy, compare=False)
    _covariance: np.ndarray = field(
        default_factory=lambda: np.diag((UNKNOWN * GUESS) ** 2),
        compare=False,
    )

    def rows(self, plan: Plan, context: int, decoding: bool) -> int:
        """How many rows of a prompt a step may add to its `plan`: at most twice as many as any step
        had. `context` tokens of the prompt are computed already. `decoding`: a running answer waits
        for the step."""
        prompt = _prompt_rows(plan)
        if self.fixed:
            return max(0, self.fixed - prompt)
        rows, pairs = _work(plan)
        choices = CHOICES[max(FIRST_ROWS, 2 * self.largest) >= CHOICES]
        more = np.maximum(0, choices - prompt)
        fixed, row, pair = self.coefficients
        seconds = fixed + row * (rows + more) + pair * (pairs + (more + READ) * context)
        durations = seconds + pair / 2 * more**2
        longer = np.append(durations[1:], np.inf)  # with the next larger choice
        # Without the attention inside the chunk, which costs the same however a prompt is cut.
        rate = (prompt + more) / seconds
        allowed = np.count_nonzero(durations <= MARGIN * LONGEST)
        best = rate[: max(1, allowed)].max()
        enough = rate >= ALONE * best
        if decoding:
            enough |= (rate >= BESIDE * best) & (longer > MARGIN * self.gap)
        return int(more[np.argmax(enough)])

    def learn(self, plan: Plan, seconds: float) -> None:
        """Update the coefficients with the time of a step; 0: unknown."""
        prompt = _prompt_rows(plan)
        if seconds <= 0 or self.fixed or not prompt:
            return
        coefficients, h = self.coefficients, np.array([1, *_work(plan)])
        expected = h @ coefficients
        if self.largest:
            seconds = np.clip(seconds, expected / SURPRISE, expected * SURPRISE)
        spread = self._covariance + np.diag((DRIFT * coefficients) ** 2)
        gain = spread @ h / (h @ spread @ h + (NOISE * max(seconds, expected)) ** 2)
        self._covariance = spread - np.outer(gain, h @ spread)
        self.coefficients = np.maximum(LEAST, coefficients + gain * (seconds - expected))
        self.largest = max(self.largest, prompt)


def _prompt_rows(plan: Plan) -> int:
    return sum(e.count for e in plan if e.count > 1 or not e.samples)


def _work(plan: Plan) -> tuple[int, float]:
    """The rows of a step, and their pairs with a token before them, counted as if each entry had
    READ rows more."""
    rows = sum(e.rows for e in plan)
    pairs = sum((e.rows + READ) * e.start + e.rows**2 / 2 for e in plan)
    return rows, pairs

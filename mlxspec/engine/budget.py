"""How many rows of prompts a step has: as few as read them at nearly the best rate, and beside
running answers only what fits into `gap` seconds, where that is not far too slow.

Rule: a step takes a fixed time, and some for each row and for each pair of a row with a token
before it. These three are learned from what steps took, by recursive least squares.
"""

from dataclasses import dataclass, field

import numpy as np

from mlxspec.sequences import Plan

MIN_ROWS = 8  # a prefill always makes progress
MAX_ROWS = 2048  # bounds a step's memory
CHOICES = np.r_[8:64:8, 64 : MAX_ROWS + 1 : 64]  # rows of prompts in a step: whole tiles of kernels
FIRST_ROWS = 64  # of the first step
LONGEST = 4.0  # seconds of a step when nothing decodes: a cancel or an arrival waits for it
ALONE, BESIDE = 0.99, 0.6  # of the best rate: aimed at when nothing decodes; least beside decodes
MARGIN = 0.9  # aims below a bound: steps vary
READ = 4  # rows whose attention takes as long as reading the K/V that they all attend to
# Seconds of a step, a row and a pair: before anything is known, and at least.
GUESS, LEAST = np.array([1e-3, 1e-5, 1e-9]), np.array([1e-5, 1e-7, 1e-11])
# The standard deviations of a guess, of a step's time, and of a coefficient's change from step to
# step, all as parts of the value.
UNKNOWN, NOISE, DRIFT = 1e4, 0.1, 0.03
SURPRISE = 3.0  # times as long or as short as expected: what is beyond counts as that


@dataclass(slots=True)
class PrefillBudget:
    """`rows` is what a step still takes of a prompt, `learn` what a step took. `fixed` rows, if not
    0, override the clock. `largest` are the most rows that a step had.

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
        """How many rows of a prompt, of which `context` tokens are computed, a step may have beside
        its `plan`: at most twice as many as any step had. `decoding`: a running answer waits for
        it."""
        prompt = _prompt_rows(plan)
        if self.fixed:
            return max(0, self.fixed - prompt)
        rows, pairs = _work(plan)
        choices = CHOICES[max(FIRST_ROWS, 2 * self.largest) >= CHOICES]
        more = np.maximum(0, choices - prompt)
        fixed, row, pair = self.coefficients
        seconds = fixed + row * (rows + more) + pair * (pairs + (more + READ) * context)
        took = seconds + pair / 2 * more**2
        longer = np.append(took[1:], np.inf)  # with the next larger choice
        # However a prompt is cut, its rows attend to as many tokens: that is no loss of rate.
        rate = (prompt + more) / seconds
        tried = np.count_nonzero(took <= MARGIN * LONGEST)
        best = rate[: max(1, tried)].max()
        enough = rate >= ALONE * best
        if decoding:
            enough |= (rate >= BESIDE * best) & (longer > MARGIN * self.gap)
        return int(more[np.argmax(enough)])

    def learn(self, plan: Plan, seconds: float) -> None:
        """A step took `seconds`, 0: unknown."""
        prompt = _prompt_rows(plan)
        if seconds <= 0 or self.fixed or not prompt:
            return
        known, h = self.coefficients, np.array([1, *_work(plan)])
        expected = h @ known
        if self.largest:
            seconds = np.clip(seconds, expected / SURPRISE, expected * SURPRISE)
        spread = self._covariance + np.diag((DRIFT * known) ** 2)
        gain = spread @ h / (h @ spread @ h + (NOISE * max(seconds, expected)) ** 2)
        self._covariance = spread - np.outer(gain, h @ spread)
        self.coefficients = np.maximum(LEAST, known + gain * (seconds - expected))
        self.largest = max(self.largest, prompt)


def _prompt_rows(plan: Plan) -> int:
    return sum(e.count for e in plan if e.count > 1 or not e.samples)


def _work(plan: Plan) -> tuple[int, float]:
    """The rows of a step, and their pairs with a token before them, READ rows more than there
    are."""
    rows = sum(e.rows for e in plan)
    pairs = sum((e.rows + READ) * e.start + e.rows**2 / 2 for e in plan)
    return rows, pairs

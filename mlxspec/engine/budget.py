"""How many rows of prompts a step has: as few as read them at nearly the best rate, and beside
running answers only what fits into `gap` seconds, where that is not far too slow.

Rule: rows follow from what steps took, by their rows and their context. READ and GROWTH alone are
assumed of the machine. The first long prompts are read in steps of ever more rows, which shows what
each number costs.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxspec.types import Plan

MIN_ROWS = 8  # a prefill always makes progress
MAX_ROWS = 2048  # bounds a step's memory
CHOICES = np.r_[8:64:8, 64 : MAX_ROWS + 1 : 64]  # rows of prompts in a step: whole tiles of kernels
GRID = MIN_ROWS * 2 ** np.arange(9)  # rows whose cost is kept
LONGEST = 4.0  # seconds of a step when nothing decodes: a cancel or an arrival waits for it
ALONE, BESIDE = 0.99, 0.6  # of the best rate: aimed at when nothing decodes; least beside decodes
MARGIN = 0.9  # aims below a bound: steps vary
RATE = 0.5  # of an error, as a logarithm, that one step corrects
READ = 4  # rows whose attention takes as long as reading the K/V that they all attend to
ATTENTION = 1e-7  # of a step of MAX_ROWS, for a row and a token before it: at least
LEAST = 1e-3  # seconds of a step
# Times as long takes a step with twice the rows: less than 2, so that it is tried; more is noise.
GROWTH, STEEPEST = 1.87, 2.2
DOUBT = 10.0  # times as sure is what rows cost as what attention does
SLOW = 0.7  # seconds of a step, behind which no more rows are tried for their own sake
BEGINNING = 3  # times the rows to try are the most tokens before them: more hide what rows cost

Took = list[tuple[float, float]]  # seconds


@dataclass(slots=True)
class PrefillBudget:
    """`rows` is what a step still takes of a prompt. A step takes `factor` times the `seconds` that
    were measured for its rows, those of GRID, and `attention` for each row and token before it;
    `learn` corrects both by what steps took. `fixed` rows, if not 0, override the clock.

    `measured` is what the first two steps of a prompt took with each of the first rows of GRID;
    `keep` gets it whenever it grows. `largest` are the most rows that a step had."""

    gap: float = 0.25  # seconds
    fixed: int = 0
    measured: Took = field(default_factory=list)
    keep: Callable[[Took], object] = lambda measured: None
    seconds: tuple[float, ...] = field(init=False)
    attention: float = field(init=False)
    factor: float = 1.0
    largest: int = 0
    # Of the first of two steps that are measured: the tokens before it, its seconds.
    _first: tuple[int, float] = (-1, 0.0)

    def __post_init__(self) -> None:
        if self.measured:
            self.largest = int(GRID[len(self.measured) - 1])
        self.seconds, self.attention = prefill_costs(self.measured)

    def rows(self, plan: Plan, context: int, decoding: bool, left: int = 0) -> int:
        """How many rows of a prompt, of which `context` tokens are computed and `left` are not, a
        step may have beside its `plan`: at most twice as many as any step had. `decoding`: a
        running answer waits for it."""
        prompt = _prompt_rows(plan)
        if self.fixed:
            return max(0, self.fixed - prompt)
        size = self._to_try()
        if size <= left and context <= BEGINNING * size and not (plan or decoding):
            return size
        rows, pairs = _work(plan)
        choices = CHOICES[max(MIN_ROWS, 2 * self.largest) >= CHOICES]
        more = np.maximum(0, choices - prompt)
        seconds = self._cost(rows + more, pairs + (more + READ) * context)
        took = seconds + self.attention / 2 * more**2
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
        self.largest = max(self.largest, prompt)
        self._measure(plan, seconds)
        rows, pairs = _work(plan)
        expected = self._cost(rows, pairs)
        own = self._cost(rows, 0) / expected  # the part that is not attention
        rest = DOUBT * (1 - own)
        gain = RATE / (own + rest)
        ratio = seconds / expected
        self.factor *= ratio ** (gain * own)
        self.attention *= ratio ** (gain * rest)

    def _to_try(self) -> int:
        """The rows of GRID whose cost is to be measured next; too many for any prompt: none."""
        known = len(self.measured)
        if known == len(GRID) or (known and min(self.measured[-1]) > SLOW):
            return sys.maxsize
        return int(GRID[known])

    def _measure(self, plan: Plan, seconds: float) -> None:
        """Note the times of a step with the rows to try and of another one behind it. What that
        would take is computed if there is none, because the prompt is too short."""
        size = self._to_try()
        (start, before), self._first = self._first, (-1, 0.0)
        tried = len(plan) == 1 and plan[0].rows == size
        second = tried and plan[0].start == start + size
        if start < 0:
            if tried:
                self._first = plan[0].start, seconds
            return
        more = seconds - before if second else self.attention * (size + READ) * size
        began = max(LEAST, before - max(0.0, more) * start / size)
        self.measured.append((began, began + more))
        self.seconds, self.attention = prefill_costs(self.measured)
        self.factor = 1.0
        self.keep(self.measured)

    def _cost(self, rows: Any, pairs: Any) -> Any:
        """Seconds of a step, or of several in arrays."""
        own = self.factor * np.interp(rows, GRID, self.seconds)
        return own + self.attention * pairs


def prefill_costs(took: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], float]:
    """`seconds` and `attention` of a PrefillBudget. `took` has the seconds of two adjacent steps
    with each of the first rows of GRID; what follows grows as these last did, within GROWTH and
    STEEPEST."""
    first, second = np.array(took or [(LEAST, LEAST)]).T
    rows = GRID[: len(first)]
    each = np.maximum(LEAST, np.minimum(first, second))  # a first one may compile
    attention = max(0.0, second[-1] - first[-1]) / ((rows[-1] + READ) * rows[-1])
    own = np.maximum.accumulate(np.maximum(each / 2, each - attention / 2 * rows**2))
    growth = np.clip(own[-1] / own[-2:][0], GROWTH, STEEPEST)
    guessed = own[-1] * growth ** np.arange(1, 1 + len(GRID) - len(own))
    seconds = np.append(own, guessed)
    return tuple(seconds.tolist()), max(attention, ATTENTION * seconds[-1])


def _prompt_rows(plan: Plan) -> int:
    return sum(e.count for e in plan if e.count > 1 or not e.samples)


def _work(plan: Plan) -> tuple[int, float]:
    """The rows of a step, and their pairs with a token before them, READ rows more than there
    are."""
    rows = sum(e.rows for e in plan)
    pairs = sum((e.rows + READ) * e.start + e.rows**2 / 2 for e in plan)
    return rows, pairs

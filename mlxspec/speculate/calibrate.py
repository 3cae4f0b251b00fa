"""Measures what a step costs on this machine, by its rows and its context; once for each model.

Rule: measuring ends after SECONDS, but not before the steps of FIRST_ROWS. Costs in between are
interpolated, and the controller corrects them by the steps that follow.
"""

import time
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxspec import log
from mlxspec.model.runner import Runner
from mlxspec.progress import Report
from mlxspec.sequences import Draft, SeqState, Span
from mlxspec.speculate.controller import GRID, Costs
from mlxspec.types import NULL_BLOCK, Check

SECONDS = 1.0
TURNS = 4
CONTEXTS = (64, 2048)  # tokens; less where the pool is smaller
FIRST_ROWS = (1, 2, 4, 8, 32)
FEW = 4  # rows of most steps: measured TURNS times, as a disturbed measurement would park drafts
LONG_ROWS = (1, 8, 32)  # measured with the long context too: its extra cost is linear in between
MORE = GRID[-1] + 1  # tokens of room that a measurement needs after a context
MEASURED = CONTEXTS[1] + MORE


def contexts_in(capacity: int) -> tuple[int, int]:
    """The contexts to measure in blocks for `capacity` tokens; the second is below 1 if these are
    too few."""
    short, long = CONTEXTS
    long = min(long, capacity - MORE)
    return min(short, long), long


@dataclass(slots=True)
class Calibration:
    """Measures the cost of a step of one sequence with 1 to 32 rows after so many tokens. It can be
    interrupted between two steps and continues there."""

    runner: Runner
    contexts: tuple[int, int]
    _steps: list[tuple[int, int]] = field(init=False)  # (rows, index of its context)
    _least: int = 0  # of these are measured, however long they take
    _done: int = 0
    _seconds: float = 0.0
    # Seconds [contexts, rows of GRID], the best of each.
    _best: np.ndarray = field(default_factory=lambda: np.full((2, len(GRID)), np.inf))

    def __post_init__(self) -> None:
        first = 2 if mx.metal.is_available() else 1  # kernels are compiled at their first use
        each_once = dict.fromkeys(FIRST_ROWS + GRID)
        points = [(rows, TURNS if rows <= FEW else first) for rows in each_once]
        points += [(rows, 1) for _ in range(first, TURNS) for rows in GRID if rows > FEW]
        self._steps = []
        for n, (rows, times) in enumerate(points):
            for i in range(2 if rows in LONG_ROWS else 1):
                self._steps += [(rows, i) for _ in range(times)]
            if n + 1 == len(FIRST_ROWS):
                self._least = len(self._steps)

    def run(
        self,
        table: list[int],
        check: Check = lambda: None,
        report: Report = lambda done, total: None,
    ) -> Costs:
        """Go on measuring; `table` are unused blocks. Calls `check` before each step, and raises
        what it raises."""
        if not self._done:
            time_step(self.runner, table, self.contexts[0], rows=1)
        for rows, i in self._steps[self._done :]:
            if self._done >= self._least and self._seconds > SECONDS:
                break
            check()
            report(self._done, len(self._steps))
            seconds = time_step(self.runner, table, self.contexts[i], rows=rows)
            at = i, GRID.index(rows)
            self._best[at] = min(self._best[at], seconds)
            self._seconds += seconds
            self._done += 1
        return self._costs()

    def _costs(self) -> Costs:
        low = _filled(np.minimum(*self._best))
        times = np.array([low, low + _filled(self._best[1] - low)])
        # More rows and more context are never cheaper: a step slower than a larger one is noise.
        times = times[::-1, ::-1]
        for axis in range(2):
            times = np.minimum.accumulate(times, axis)
        high, low = times[:, ::-1].tolist()
        few, many = 1e3 * low[0], 1e3 * low[-1]
        log.info("a step takes %.1f ms with 1 row, %.1f ms with 32 rows", few, many)
        return Costs(self.contexts, GRID, (low, high))


def _filled(values: np.ndarray) -> np.ndarray:
    """By rows of GRID, with values between measured ones interpolated."""
    measured = np.isfinite(values)
    return np.array(np.interp(GRID, np.array(GRID)[measured], values[measured]))


def time_step(runner: Runner, table: list[int], context: int, rows: int) -> float:
    """Seconds of a step with `rows` rows after `context` tokens, sampled at temperature 1, with a
    draft that is nearly always rejected. The content of blocks and state does not matter."""
    span = unused_span(runner, table, context)
    span.draft = Draft([0 for _ in range(rows - 1)])
    began = time.perf_counter()
    sampled = runner.sample(runner.forward([span], None))
    assert sampled is not None
    mx.eval(sampled.tokens, sampled.accepted)
    if runner.states.layers:
        mx.eval(span.state.recurrent)
    return time.perf_counter() - began


def unused_span(runner: Runner, table: list[int], context: int) -> Span:
    """A row after `context` tokens, in blocks that nobody uses."""
    passed = [NULL_BLOCK for _ in table]
    return Span(
        SeqState(),
        tables=[table, *[passed for _ in runner.view.num_blocks][1:]],
        tokens=[0 for _ in range(context + 1)],
        start=context,
        count=1,
        samples=True,
    )

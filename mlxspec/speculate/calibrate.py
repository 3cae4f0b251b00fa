"""Measures what a step costs on this machine, by its rows and its context; once for each model.

Rule: the measurement takes SECONDS, or as long as it takes to measure FIRST_ROWS; what lies
between is interpolated, and the controller corrects it by the steps that follow.
"""

import time

import mlx.core as mx
import numpy as np

from mlxspec import log
from mlxspec.model.runner import Runner
from mlxspec.progress import Report
from mlxspec.speculate.controller import GRID, Costs
from mlxspec.types import NULL_BLOCK, Draft, Entry, Request, Seq

SECONDS = 1.0
TURNS = 4
CONTEXTS = (64, 2048)  # tokens; less where the pool is smaller
FIRST_ROWS = (1, 2, 4, 8, 32)
FEW = 4  # rows of most steps: they are measured TURNS times, as one that was disturbed parks drafts
LONG_ROWS = (1, 8, 32)  # measured with the long one: what it adds grows evenly in between
MORE = GRID[-1] + 1  # tokens behind a context that a measurement needs room for
MEASURED = CONTEXTS[1] + MORE


def contexts_in(capacity: int) -> tuple[int, int]:
    """The contexts to measure in blocks for so many tokens; the second is below 1 if they are too
    few."""
    short, long = CONTEXTS
    long = min(long, capacity - MORE)
    return min(short, long), long


def calibrate(
    runner: Runner,
    table: list[int],
    contexts: tuple[int, int],
    report: Report = lambda done, total: None,
) -> Costs:
    """The cost of a step of one sequence with 1 to 32 rows after so many tokens; `table` are unused
    blocks."""
    times = _measure(runner, table, contexts, report)
    # More rows and more context are never cheaper. What says so was disturbed, which adds time.
    times = times[::-1, ::-1]
    for axis in range(2):
        times = np.minimum.accumulate(times, axis)
    high, low = times[:, ::-1].tolist()
    log.info("a step takes %.1f ms with 1 row, %.1f ms with 32 rows", 1e3 * low[0], 1e3 * low[-1])
    return Costs(contexts, GRID, (low, high))


def _measure(
    runner: Runner,
    table: list[int],
    contexts: tuple[int, int],
    report: Report,
) -> np.ndarray:
    """Seconds [contexts, rows of GRID], the best of as many turns as there is time for; at least
    one of FIRST_ROWS, two where kernels are compiled at their first use, TURNS of FEW."""
    until = time.perf_counter() + SECONDS
    first = 2 if mx.metal.is_available() else 1
    each_once = dict.fromkeys(FIRST_ROWS + GRID)
    points = [(rows, TURNS if rows <= FEW else first) for rows in each_once]
    points += [(rows, 1) for _ in range(first, TURNS) for rows in GRID if rows > FEW]
    best = np.full((2, len(GRID)), np.inf)
    time_step(runner, table, contexts[0], 1)
    for done, (rows, times) in enumerate(points):
        report(done, len(points))
        if done >= len(FIRST_ROWS) and time.perf_counter() > until:
            break
        at = GRID.index(rows)
        for i, context in enumerate(contexts):
            if i == 0 or rows in LONG_ROWS:
                took = [time_step(runner, table, context, rows) for _ in range(times)]
                best[i, at] = min(best[i, at], *took)
    low = _filled(np.minimum(*best))
    return np.array([low, low + _filled(best[1] - low)])


def _filled(values: np.ndarray) -> np.ndarray:
    """By rows of GRID, with what lies between two measured ones."""
    known = np.isfinite(values)
    return np.array(np.interp(GRID, np.array(GRID)[known], values[known]))


def time_step(
    runner: Runner,
    table: list[int],
    context: int,
    rows: int,
) -> float:
    """Seconds of a step with `rows` rows after `context` tokens, sampled at temperature 1, whose
    draft is nearly always rejected. What the blocks and the state hold does not matter."""
    entry = Entry(unused_seq(runner, table, context), context, 1, True)
    entry.draft = Draft([0 for _ in range(rows - 1)])
    began = time.perf_counter()
    sampled = runner.sample(runner.forward([entry], None))
    assert sampled is not None
    mx.eval(sampled.tokens, sampled.accepted)
    if runner.states.layers:
        mx.eval(entry.seq.state)
    return time.perf_counter() - began


def unused_seq(runner: Runner, table: list[int], context: int) -> Seq:
    """A sequence of a token more than `context`, in blocks that nobody uses."""
    seq = Seq(Request("measure", (0,), 1), table=table)
    seq.tokens = [0 for _ in range(context + 1)]
    passed = [NULL_BLOCK for _ in table]
    seq.windows = [passed for _ in runner.view.num_blocks][1:]
    return seq

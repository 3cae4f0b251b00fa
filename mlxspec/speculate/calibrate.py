"""Measures what a step costs on this machine, by its rows and its context; once for each model.

Rule: the measurement takes SECONDS, or as long as it takes to measure each once; the controller
corrects it by the steps that follow.
"""

import time
from itertools import product

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
MORE = GRID[-1] + 1  # tokens behind a context that a measurement needs room for


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
    blocks. Each is the best of as many turns as there is time for; of two at least where kernels
    are compiled at their first use."""
    until = time.perf_counter() + SECONDS
    least = 2 if mx.metal.is_available() else 1
    points = list(product(range(len(contexts)), range(len(GRID))))
    times = np.full((len(contexts), len(GRID)), np.inf)
    time_step(runner, table, contexts[0], 1)
    for turn in range(TURNS):
        if turn >= least and time.perf_counter() > until:
            break
        for done, (i, j) in enumerate(points):
            report(turn * len(points) + done, TURNS * len(points))
            times[i, j] = min(times[i, j], time_step(runner, table, contexts[i], GRID[j]))
    # More rows and more context are never cheaper: what says so is noise.
    for axis in range(2):
        times = np.maximum.accumulate(times, axis)
    low, high = times.tolist()
    ms = 1e3 * times[0]
    log.info("a step takes %.1f ms with 1 row, %.1f ms with 32 rows", ms[0], ms[-1])
    return Costs(contexts, GRID, (low, high))


def time_step(
    runner: Runner,
    table: list[int],
    context: int,
    rows: int,
) -> float:
    """Seconds of a step with `rows` rows after `context` tokens, sampled at temperature 1, half of
    whose draft is rejected. What the blocks and the state hold does not matter."""
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

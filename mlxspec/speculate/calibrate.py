"""Measures what a step costs on this machine, by its rows and its context; once for each model.

Rule: the measurement takes SECONDS, or as long as it takes to measure each point once; the
controller corrects it by the steps that follow.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlxspec.model.runner import Runner
from mlxspec.model.sampler import SampledRow, sample
from mlxspec.speculate.controller import GRID, Costs
from mlxspec.types import NULL_BLOCK, Draft, Entry, Request, Sampling, Seq

log = logging.getLogger("mlxspec")

SECONDS = 1.7
TURNS = 4
CONTEXTS = (64, 2048)  # tokens; less where the pool is smaller
MEASURED = CONTEXTS[1] + max(GRID) + 1  # tokens that the blocks of a measurement should hold
SAMPLED_ROWS = 2  # that are drawn to measure sampling
HISTORY = 1024  # tokens that penalties count while sampling is measured
SAMPLINGS = (
    Sampling(),
    Sampling(top_p=0.9),
    Sampling(top_k=20),
    Sampling(temperature=0),
)

Report = Callable[[int, int], None]


def calibrate(
    runner: Runner,
    vocab: int,
    table: list[int],
    known: Costs | None = None,
    report: Report = lambda done, total: None,
) -> Costs | None:
    """The cost of a step of one sequence with 1 to 32 rows; None if `table`, unused blocks, is too
    small. `known` is an earlier measurement, valid for equal contexts."""
    short, long = CONTEXTS
    long = min(long, len(table) * runner.view.block_size - GRID[-1] - 1)
    if long < 1:
        return None
    contexts = min(short, long), long
    if known and known.contexts == contexts:
        return known
    times = _measure(runner, table, contexts, report)
    # More rows and more context are never cheaper: what says so is noise.
    for axis in range(2):
        times = np.maximum.accumulate(times, axis)
    low, high = times.tolist()
    milliseconds = 1e3 * low[0], 1e3 * low[-1]
    log.info("a step takes %.1f ms with 1 row, %.1f ms with 32 rows", *milliseconds)
    return Costs(contexts, GRID, (low, high), sampling(vocab))


def one_row(runner: Runner, table: list[int]) -> float:
    """Seconds of a step with one row behind a short context. The first compiles, so it is left
    out."""
    context = min(CONTEXTS[0], len(table) * runner.view.block_size - 2)
    _, *times = [_time(runner, table, context, 1) for _ in range(4)]
    return min(times)


def sampling(vocab: int) -> dict[str, float]:
    """Seconds of drawing a row's token beyond a greedy one, by Sampling.kind."""
    logits = mx.zeros((SAMPLED_ROWS, vocab))
    inputs = mx.zeros((1,), mx.int32)
    penalized = [replace(params, presence_penalty=0.1) for params in SAMPLINGS]
    times = {}
    costs = {}
    for params in (*SAMPLINGS, *penalized):
        entry = _entry(HISTORY - 1)
        row = SampledRow(entry, params, HISTORY)
        for _ in range(2):  # the first compiles
            began = time.perf_counter()
            sampled = sample(logits, [row, row], inputs)
            mx.eval(sampled.tokens)
            times[params.kind] = time.perf_counter() - began
    for kind, seconds in times.items():
        beyond = seconds - times["greedy"]
        costs[kind] = max(0.0, beyond) / SAMPLED_ROWS
    return costs


def _measure(
    runner: Runner,
    table: list[int],
    contexts: tuple[int, int],
    report: Report,
) -> np.ndarray:
    """Seconds [contexts, rows of GRID], the best of as many turns as there is time for; at least
    two where kernels are compiled at their first use."""
    until = time.perf_counter() + SECONDS
    least = 2 if mx.metal.is_available() else 1
    best = np.full((2, len(GRID)), np.inf)
    _time(runner, table, contexts[0], 1)
    for turn in range(TURNS):
        for j, rows in enumerate(GRID):
            report(turn * len(GRID) + j, TURNS * len(GRID))
            for i, context in enumerate(contexts):
                if turn >= least and time.perf_counter() > until:
                    return best
                seconds = _time(runner, table, context, rows)
                best[i, j] = min(best[i, j], seconds)
    return best


def _entry(context: int) -> Entry:
    """One row behind `context` tokens."""
    tokens = np.zeros(context + 1, int).tolist()
    seq = Seq(Request("measure", (0,), 1), tokens=tokens)
    return Entry(seq, context, 1, True)


def _time(runner: Runner, table: list[int], context: int, rows: int) -> float:
    """Seconds of a step with `rows` rows behind `context` tokens, half of whose draft is rejected.
    What the blocks and the state hold does not matter."""
    entry = _entry(context)
    entry.draft = Draft(np.zeros(rows - 1, int).tolist())
    entry.seq.table = table
    unused = [NULL_BLOCK for _ in table]
    entry.seq.windows = [unused for _ in runner.view.num_blocks][1:]
    began = time.perf_counter()
    mx.eval(mx.argmax(runner.forward([entry], None).logits, axis=-1))
    runner.rollback([entry], [1 + (rows - 1) // 2])
    if runner.states.layers:
        mx.eval(entry.seq.state)
    return time.perf_counter() - began

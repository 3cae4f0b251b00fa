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
from mlxspec.model.sampler import Row, sample
from mlxspec.speculate.controller import GRID, Costs
from mlxspec.types import NULL_BLOCK, Draft, Entry, Request, Sampling, Sequence

log = logging.getLogger("mlxspec")

SECONDS = 1.7
TURNS = 4
CONTEXTS = (64, 2048)  # tokens; less where the pool is smaller
MEASURED = CONTEXTS[1] + max(GRID) + 1  # tokens that the blocks of a measurement should hold
SAMPLED_ROWS = 2  # that are drawn to measure sampling
HISTORY = 1024  # tokens that penalties count while sampling is measured
SAMPLINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_k=20),
    Sampling(temperature=0),
)


def calibrate(
    runner: Runner,
    vocab: int,
    table: list[int],
    known: Costs | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Costs | None:
    """The cost of a step of one sequence with 1 to 32 rows; None if `table`, unused blocks, is too
    small. `known` is an earlier measurement, valid for equal contexts."""
    high = min(CONTEXTS[1], len(table) * runner.view.block_size - max(GRID) - 1)
    if high < 1:
        return None
    contexts = (min(CONTEXTS[0], high), high)
    if known and known.contexts == contexts:
        return known
    times = _measure(runner, _sequence(runner, table, high), contexts, report)
    # More rows and more context are never cheaper: what says so is noise.
    times = np.maximum.accumulate(times, axis=0)
    low, top = np.maximum.accumulate(times, axis=1).tolist()
    log.info(
        "a step takes %.1f ms with 1 row, %.1f ms with %d rows",
        1e3 * low[0],
        1e3 * low[-1],
        GRID[-1],
    )
    return Costs(contexts, GRID, (low, top), sampling(vocab))


def one_row(runner: Runner, table: list[int]) -> float:
    """Seconds of a step with one row behind a short context. The first compiles, so it is left
    out."""
    context = min(CONTEXTS[0], len(table) * runner.view.block_size - 2)
    seq = _sequence(runner, table, context)
    _time(runner, seq, context, 1)
    return min(_time(runner, seq, context, 1) for _ in range(3))


def sampling(vocab: int) -> dict[str, float]:
    """Seconds of drawing a row's token beyond a greedy one, by Sampling.kind."""
    logits = mx.zeros((SAMPLED_ROWS, vocab))
    inputs = mx.zeros((1,), mx.int32)
    times = {}
    for params in [*SAMPLINGS, *(replace(each, presence_penalty=0.1) for each in SAMPLINGS)]:
        tokens = np.zeros(HISTORY, int).tolist()
        seq = Sequence(Request("measure", (0,), 1, params), tokens=tokens)
        row = Row(Entry(seq, HISTORY - 1, 1, True), params, HISTORY, 1)
        for _ in range(2):  # the first compiles
            began = time.perf_counter()
            sampled = sample(logits, [row, row], inputs, [0, 0])
            mx.eval(sampled.tokens)
            times[params.kind] = time.perf_counter() - began
    return {kind: max(0.0, t - times["greedy"]) / SAMPLED_ROWS for kind, t in times.items()}


def _measure(
    runner: Runner,
    seq: Sequence,
    contexts: tuple[int, int],
    report: Callable[[int, int], None],
) -> np.ndarray:
    """Seconds [contexts, rows of GRID], the best of as many turns as there is time for; at least
    two where kernels are compiled at their first use."""
    until = time.perf_counter() + SECONDS
    least = 2 if mx.metal.is_available() else 1
    best = np.full((len(contexts), len(GRID)), np.inf)
    _time(runner, seq, contexts[0], 1)
    for turn in range(TURNS):
        for j, rows in enumerate(GRID):
            report(turn * len(GRID) + j, TURNS * len(GRID))
            for i, context in enumerate(contexts):
                if turn >= least and time.perf_counter() > until:
                    return best
                seconds = _time(runner, seq, context, rows)
                best[i, j] = min(best[i, j], seconds)
    return best


def _sequence(runner: Runner, table: list[int], context: int) -> Sequence:
    unused = [NULL_BLOCK for _ in table]
    return Sequence(
        Request("measure", (0,), 1),
        tokens=np.zeros(context + 1, int).tolist(),
        table=table,
        windows=[unused for _ in list(runner.view.blocks)[1:]],
    )


def _time(runner: Runner, seq: Sequence, context: int, rows: int) -> float:
    """Seconds of a step with `rows` rows behind `context` tokens, half of whose draft is rejected.
    What the blocks and the state hold does not matter."""
    draft = Draft(np.zeros(rows - 1, int).tolist())
    entry = Entry(seq, context, 1, True, draft=draft)
    began = time.perf_counter()
    mx.eval(mx.argmax(runner.logits([entry]), axis=-1))
    runner.rollback([entry], [1 + (rows - 1) // 2])
    if runner.states.layers:
        mx.eval(seq.state)
    return time.perf_counter() - began

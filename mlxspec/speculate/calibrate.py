"""Measures what a step costs on this machine, by its rows and its context; once for each model.

Rule: the measurement takes SECONDS, or as long as it takes to measure each point once; the
controller corrects it by the steps that follow.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlxspec.model.runner import Runner
from mlxspec.model.sampler import Row, sample
from mlxspec.speculate.controller import GRID, Costs
from mlxspec.types import NULL_BLOCK, Draft, Entry, Request, Sampling
from mlxspec.types import Sequence as Seq

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
    began = time.perf_counter()
    times = _measure(runner, _sequence(runner, table, high), contexts, began + SECONDS, report)
    # More rows and more context are never cheaper: what says so is noise.
    low = np.maximum.accumulate([times[contexts[0], rows] for rows in GRID])
    top = np.maximum.accumulate(np.maximum(low, [times[high, rows] for rows in GRID]))
    ratios = ", ".join(f"{t / low[0]:.2f}x for {rows}" for rows, t in zip(GRID, low, strict=True))
    log.info(
        "a step of 1 row takes %.1f ms at %d tokens of context; by rows: %s; measured in %.1f s",
        low[0] * 1e3,
        contexts[0],
        ratios,
        time.perf_counter() - began,
    )
    return Costs(contexts, GRID, (low.tolist(), top.tolist()), sampling(vocab))


def one_row(runner: Runner, table: list[int]) -> float:
    """Seconds of a step with one row behind a short context. The first compiles, so it is left
    out."""
    context = min(CONTEXTS[0], len(table) * runner.view.block_size - 2)
    seq = _sequence(runner, table, context)
    return min([_time(runner, seq, context, 1) for _ in range(4)][1:])


def sampling(vocab: int) -> dict[str, float]:
    """Seconds of drawing a row's token beyond a greedy one, by Sampling.kind."""
    logits, none = mx.zeros((SAMPLED_ROWS, vocab)), mx.zeros((1,), mx.int32)
    times = {}
    for params in [*SAMPLINGS, *(replace(each, presence_penalty=0.1) for each in SAMPLINGS)]:
        tokens = [0 for _ in range(HISTORY)]
        seq = Seq(Request("measure", tuple(tokens), 1, params), tokens=tokens)
        row = Row(Entry(seq, HISTORY - 1, 1, True), params, HISTORY, 1)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            mx.eval(sample(logits, [row, row], none, [0, 0]).tokens)
            seconds.append(time.perf_counter() - began)
        times[params.kind] = min(seconds)
    return {kind: max(0.0, t - times["greedy"]) / SAMPLED_ROWS for kind, t in times.items()}


def _measure(
    runner: Runner,
    seq: Seq,
    contexts: Sequence[int],
    until: float,
    report: Callable[[int, int], None],
) -> dict[tuple[int, int], float]:
    """Seconds by (context, rows), the best of as many turns as there is time for; at least two
    where kernels are compiled at their first use."""
    points = [(context, rows) for rows in GRID for context in contexts]
    least = 2 if mx.metal.is_available() else 1
    times: dict[tuple[int, int], float] = {}
    _time(runner, seq, contexts[0], 1)
    for turn in range(TURNS):
        for n, (context, rows) in enumerate(points):
            report(turn * len(points) + n, TURNS * len(points))
            if time.perf_counter() > until and turn >= least:
                return times
            seconds = _time(runner, seq, context, rows)
            times[context, rows] = min(seconds, times.get((context, rows), seconds))
    return times


def _sequence(runner: Runner, table: list[int], context: int) -> Seq:
    windows = [[NULL_BLOCK for _ in table] for _ in list(runner.view.blocks)[1:]]
    tokens = [0 for _ in range(context + 1)]
    return Seq(Request("measure", (0,), 1), tokens=tokens, table=table, windows=windows)


def _time(runner: Runner, seq: Seq, context: int, rows: int) -> float:
    """Seconds of a step with `rows` rows behind `context` tokens, half of whose draft is rejected.
    What the blocks and the state hold does not matter."""
    entry = Entry(seq, context, 1, True, draft=Draft([0 for _ in range(rows - 1)]))
    began = time.perf_counter()
    mx.eval(mx.argmax(runner.logits([entry]), axis=-1))
    runner.rollback([entry], [1 + (rows - 1) // 2])
    if runner.states.layers:
        mx.eval(seq.state)
    return time.perf_counter() - began

"""What a step costs here, by its rows and its context: measured once, at the first start.

Rule: the measurement takes SECONDS, longer only until each point was measured, and says what it
found; whatever it gets wrong, the controller corrects from the steps that follow.
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
TUNING = 20.0  # seconds, where somebody asked for it
TURNS = 4
CONTEXTS = (64, 2048)  # tokens; less where the pool is smaller
MEASURED = CONTEXTS[1] + max(GRID) + 1  # tokens that the blocks for a measurement should hold
DRAWN = 2  # rows that are sampled to tell what one takes
HISTORY = 1024  # tokens that penalties count, in this
Tell = Callable[[int, int], None]
_ONE = Sampling(temperature=1.0)
SAMPLINGS = (_ONE, replace(_ONE, top_p=0.9), replace(_ONE, top_k=20), Sampling(temperature=0))


def calibrate(
    runner: Runner,
    vocab: int,
    table: list[int],
    known: Costs | None = None,
    again: bool = False,
    tell: Tell = lambda done, of: None,
) -> Costs | None:
    """The cost of a step of one sequence with 1 to 32 rows. `table` are blocks that nobody uses,
    `known` is what was measured before, which holds where the contexts are the same; `again`:
    whatever it is, and longer. `tell` is told how far it is. None where there are too few blocks to
    measure."""
    high = min(CONTEXTS[1], len(table) * runner.view.block_size - max(GRID) - 1)
    if high < 1:
        return None
    contexts = (min(CONTEXTS[0], high), high)
    if known and known.contexts == contexts and not again:
        return known
    began = time.perf_counter()
    until = began + (TUNING if again else SECONDS)
    # Where kernels are compiled at their first use, a first turn says little.
    least = 2 if again or mx.metal.is_available() else 1
    times = _measure(runner, _one(runner, table, high), contexts, until, least, tell)
    low = [times[contexts[0], r] for r in GRID]
    top = [max(s, times[high, r]) for r, s in zip(GRID, low, strict=True)]
    low, top = (
        np.maximum.accumulate(each).tolist() for each in (low, top)
    )  # no row is cheaper than fewer
    log.info(
        "a step costs %.1f ms for 1 row and %s at %d tokens of context; measured in %.1f s",
        low[0] * 1e3,
        ", ".join(
            f"{t / low[0]:.2f} times that for {r}" for r, t in zip(GRID[1:], low[1:], strict=True)
        ),
        contexts[0],
        time.perf_counter() - began,
    )
    return Costs(contexts, GRID, (low, top), sampling(vocab))


def one_row(runner: Runner, table: list[int]) -> float:
    """Seconds of a step with one row behind a short context; the first is left out, because it
    compiles."""
    context = min(CONTEXTS[0], len(table) * runner.view.block_size - 2)
    seq = _one(runner, table, context)
    return min([_time(runner, seq, context, 1) for _ in range(4)][1:])


def sampling(vocab: int) -> dict[str, float]:
    """Seconds that drawing a row's token takes beyond a greedy one, by Sampling.kind."""
    logits = mx.zeros((DRAWN, vocab))
    times = {}
    for each in SAMPLINGS:
        for kept in (each, replace(each, presence_penalty=0.1)):
            seq = Seq(Request("measure", (0,) * HISTORY, 1, kept), tokens=[0] * HISTORY)
            rows = [Row(Entry(seq, HISTORY - 1, 1, True), kept, HISTORY, 1)] * DRAWN
            took = []
            for _ in range(2):
                began = time.perf_counter()
                mx.eval(sample(logits, rows, mx.zeros((1,), mx.int32), [0] * DRAWN).tokens)
                took.append(time.perf_counter() - began)
            times[kept.kind] = min(took)
    return {kind: max(0.0, t - times["greedy"]) / DRAWN for kind, t in times.items()}


def _measure(
    runner: Runner, seq: Seq, contexts: Sequence[int], until: float, least: int, tell: Tell
) -> dict[tuple[int, int], float]:
    """Seconds by (context, rows), the best of as many turns as there is time for, `least` at least.
    One step goes first."""
    order = [(c, r) for r in GRID for c in contexts]
    times: dict[tuple[int, int], float] = {}
    _time(runner, seq, contexts[0], 1)
    for turn in range(TURNS):
        for n, (context, rows) in enumerate(order):
            tell(turn * len(order) + n, TURNS * len(order))
            if time.perf_counter() > until and turn >= least:
                return times
            took = _time(runner, seq, context, rows)
            times[context, rows] = min(took, times.get((context, rows), took))
    return times


def _one(runner: Runner, table: list[int], context: int) -> Seq:
    windows = [[NULL_BLOCK] * len(table) for _ in list(runner.view.blocks)[1:]]
    return Seq(
        Request("measure", (0,), 1), tokens=[0] * (context + 1), table=table, windows=windows
    )


def _time(runner: Runner, seq: Seq, context: int, rows: int) -> float:
    """Seconds of a step with `rows` rows behind `context` tokens, half of whose draft is taken
    back; what the blocks and the state hold does not matter."""
    entry = Entry(seq, context, 1, True, draft=Draft([0] * (rows - 1)))
    began = time.perf_counter()
    mx.eval(mx.argmax(runner.logits([entry]), axis=-1))
    runner.rollback([entry], [1 + (rows - 1) // 2])
    if runner.states.layers:
        mx.eval(seq.state)
    return time.perf_counter() - began

"""What a step costs here, by its rows and its context: measured once at the start, kept on disk.

Rule: the measurement takes SECONDS, longer only until each point was measured, and says what it found;
whatever it gets wrong, the controller corrects from the steps that follow.
"""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxspec import __version__
from mlxspec.kernels.proven import VERDICTS
from mlxspec.model.runner import Runner
from mlxspec.model.sample import Row, sample
from mlxspec.speculate.depth import GRID, Costs
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
    path: Path,
    cache: Path | None,
    again: bool = False,
    tell: Tell = lambda done, of: None,
) -> Costs | None:
    """The cost of a step of one sequence with 1 to 32 rows. `table` are blocks that nobody uses, `path` is
    the model, `cache` a directory for what was measured, `again`: whatever is there, and
    longer. `tell` is told how far it is. None where there are too few blocks to measure."""
    high = min(CONTEXTS[1], len(table) * runner.view.block_size - max(GRID) - 1)
    if high < 1:
        return None
    contexts = (min(CONTEXTS[0], high), high)
    name = _name(runner, path, contexts)
    file = cache / f"{name}.json" if cache else None
    if not again and (known := file and _load(file)):
        return known
    began = time.perf_counter()
    until = began + (TUNING if again else SECONDS)
    # Where kernels are compiled at their first use, a first turn says little.
    least = 2 if again or mx.metal.is_available() else 1
    times = _measure(runner, _one(runner, table, high), contexts, until, least, tell)
    rows = list(GRID)
    low = [times[contexts[0], r] for r in rows]
    top = [max(s, times[high, r]) for r, s in zip(rows, low, strict=True)]
    low, top = (np.maximum.accumulate(each).tolist() for each in (low, top))  # no row is cheaper than fewer
    log.info(
        "a step costs %.1f ms for 1 row and %s at %d tokens of context; measured in %.1f s",
        low[0] * 1e3,
        ", ".join(f"{t / low[0]:.2f} times that for {r}" for r, t in zip(rows[1:], low[1:], strict=True)),
        contexts[0],
        time.perf_counter() - began,
    )
    costs = Costs(contexts, rows, (low, top), sampling(vocab))
    if file:
        _save(file, costs)
    return costs


def one_row(runner: Runner, table: list[int]) -> float:
    """Seconds of a step with one row behind a short context; the first is left out, because it compiles."""
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
    """Seconds by (context, rows), the best of as many turns as there is time for, `least` at least. One step
    goes first."""
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
    return Seq(Request("measure", (0,), 1), tokens=[0] * (context + 1), table=table, windows=windows)


def _time(runner: Runner, seq: Seq, context: int, rows: int) -> float:
    """Seconds of a step with `rows` rows behind `context` tokens, half of whose draft is taken back; what the
    blocks and the state hold does not matter."""
    entry = Entry(seq, context, 1, True, draft=Draft([0] * (rows - 1)))
    began = time.perf_counter()
    mx.eval(mx.argmax(runner.logits([entry]), axis=-1))
    runner.rewind([entry], [1 + (rows - 1) // 2])
    if runner.states.layers:
        mx.eval(seq.state)
    return time.perf_counter() - began


def _name(runner: Runner, path: Path, contexts: Sequence[int]) -> str:
    """Of the machine, the model and the versions: a file name."""
    stamps = [(f.name, f.stat().st_size, int(f.stat().st_mtime)) for f in sorted(path.glob("*.safetensors"))]
    machine = (platform.node(), platform.machine(), platform.processor(), os.cpu_count())
    versions = (version("mlx"), version("mlx-lm"), __version__)
    device = str(mx.default_device()), os.environ.get("OPENBLAS_NUM_THREADS", "")
    how = (runner.layout, runner.states.taped, runner.view.block_size, runner.view.kv_bits)
    used = sorted((name, v.way, v.least, v.most) for name, v in VERDICTS.items() if v.way)
    facts = (used, machine, versions, device, str(path), stamps, how, contexts)
    return "costs-" + hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _load(file: Path) -> Costs | None:
    try:
        found = json.loads(file.read_text("utf-8"))
        low, top = found["seconds"]
        contexts, rows = found["contexts"], found["rows"]
        sane = 0 < min(*low, *top) <= max(*low, *top) < math.inf
        if sane and len(low) == len(top) == len(rows) > 0 and rows == sorted(set(rows)):
            drawn = {str(kind): float(s) for kind, s in found["sampling"].items()}
            costs = Costs((int(contexts[0]), int(contexts[1])), rows, (low, top), drawn)
            if math.isfinite(sum(costs.curve(2, costs.contexts[1], "exact", costs.draw([*drawn])))):
                return costs
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        pass  # not there yet, or not ours: it is measured again
    return None


def _save(file: Path, costs: Costs) -> None:
    known = {
        "contexts": costs.contexts,
        "rows": costs.rows,
        "seconds": costs.measured,
        "sampling": costs.sampling,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(known), "utf-8")
        made.replace(file)
    except OSError as error:
        log.warning("%s: %s; what a step costs will be measured again", file, error.strerror)

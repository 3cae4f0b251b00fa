"""Our own Python per step, and mlx-lm's beside it, in process: `python -m bench.steps MODEL`.

Everything up to the submission builds a lazy graph, so the time of a call is the time of its Python.
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS

from mlxspec.engine.start import Options, start  # noqa: E402
from mlxspec.model import attention, runner  # noqa: E402
from mlxspec.model.caches import Pages  # noqa: E402
from mlxspec.types import Request, Sampling  # noqa: E402

STEPS = 24


class Clock:
    """Adds up the seconds spent in the functions it wraps, per step."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.now[name] = self.now.get(name, 0.0) + time.perf_counter() - began

        return timed


def measure(model: Path, streams: int) -> dict[str, float]:
    """Median milliseconds per decode step of `streams` greedy streams: `ours` (plan, rows, sampling, commit),
    `seam` (our page writes and attention inside mlx-lm's layers), `graph` (mlx-lm's own Python), `run` (the
    whole step)."""
    engine, _ = start(model, "bench", Options(max_sequences=streams))
    clock = Clock()
    with ExitStack() as stack:
        forward = engine.runner._forward
        patches = [
            (engine.runner, "_forward", clock.wrap("forward", forward)),
            (engine.runner, "model", clock.wrap("model", engine.runner.model)),
            (Pages, "update_and_fetch", clock.wrap("seam", Pages.update_and_fetch)),
            (attention, "paged_attention", clock.wrap("seam", attention.paged_attention)),
            (runner, "sample", clock.wrap("sample", runner.sample)),
            (mx, "async_eval", clock.wrap("submit", mx.async_eval)),
        ]
        for owner, name, wrapped in patches:
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        for i in range(streams):
            prompt = tuple(100 + 7 * i + j for j in range(64))
            engine.add(Request(f"r{i}", prompt, STEPS + 8, Sampling(temperature=0)))
        while engine.busy:
            clock.now = {}
            began = time.perf_counter()
            engine.step()
            took = time.perf_counter() - began
            t = engine.timing
            flight = engine._flight[-1][1] if engine._flight else None
            if flight and len(flight.rows) == streams and all(e.count == 1 for e in flight.plan):
                c = clock.now
                building = t.build - c["submit"] - c["model"]
                clock.steps.append(
                    {
                        "ours": t.plan + t.book + building,
                        "seam": c["seam"],
                        "graph": c["model"] - c["seam"],
                        "run": took,
                    }
                )
    kept = clock.steps[4:-2]
    return {k: 1000 * statistics.median(s[k] for s in kept) for k in kept[0]}


def main() -> None:
    model = Path(sys.argv[1])
    for streams in (1, 8):
        ms = measure(model, streams)
        print(
            f"Python in a step of {streams} stream(s): {ms['ours']:.2f} ms ours, {ms['seam']:.2f} ms pages"
            f" and attention in the layers, {ms['graph']:.2f} ms mlx-lm's graph; the step {ms['run']:.1f} ms"
        )


if __name__ == "__main__":
    main()

"""What a step costs by its rows, in plain steps: as measured on a CPU, as predicted for Macs. `python -m
bench.costs MODEL` measures it here.

Rule: figures for Macs are the roofline's bytes with rows as others measured them; none was measured
by this project.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import numpy as np  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from bench.chips import CURVES  # noqa: E402
from bench.roofline import CONFIGS, sized  # noqa: E402
from mlxspec.speculate.controller import GRID  # noqa: E402

SHORT = 64  # tokens before a step that is measured
CONTEXT = 4096  # tokens before a step of the Macs' tables
# (model, curve of rows) of the Macs' tables; weights in 4 bits
MACS = (
    ("qwen3.8-27b", "m5max-4bit"),
    ("qwen3.8-27b", "m4pro-4bit"),
    ("qwen3.8-27b", "m3max-4bit"),
    ("qwen3.8-27b", "m3ultra-4bit"),
    ("qwen3.8-27b", "linear"),
    ("qwen3.8-27b", "m4pro-dspark"),
    ("qwen3.8-27b", "tile-of-8"),
    ("qwen3.8-27b", "ideal"),
    ("qwen3.6-35b-a3b", "ideal"),
)


@dataclass(frozen=True, slots=True)
class Costs:
    """`steps[r - 1]`: what a step with r rows costs, in plain steps; unknown beyond the last. `path`:
    what each path of a tree beside the first adds, whose recurrent state is read and written."""

    name: str
    steps: Sequence[float]
    path: float = 0.0


def _line(points: Sequence[tuple[int, float]]) -> list[float]:
    """Linear between measured points."""
    made = []
    for (r0, c0), (r1, c1) in pairwise(points):
        made += [c0 + (c1 - c0) * (r - r0) / (r1 - r0) for r in range(r0, r1)]
    return [*made, points[-1][1]]


# What `python -m bench.costs` printed of SmolLM2-135M in fp32 on a 2-core x86-64 with OpenBLAS, one
# thread, mlx 0.32.4, on 2026-11-23.
CPU_POINTS = (
    (1, 1.0),
    (2, 1.05),
    (3, 1.27),
    (8, 1.27),
    (12, 1.38),
    (16, 1.5),
    (24, 1.84),
    (32, 2.25),
)
CPU = Costs("this CPU", _line(CPU_POINTS))


def macs() -> list[Costs]:
    """The tables of MACS."""
    made = []
    for name, rows in MACS:
        model = sized(json.loads((CONFIGS / f"{name}.json").read_text("utf-8")), 4)
        curve = CURVES[rows]
        plain = model.read(1, CONTEXT, curve)
        known = range(1, min(32, curve.points[-1][0]) + 1)
        steps = [model.read(r, CONTEXT, curve) / plain for r in known]
        made.append(Costs(f"{name}, {rows}", steps, 2 * model.state / plain))
    return made


def measure(path: Path, turns: int) -> list[tuple[int, float]]:
    """(rows, plain steps) of mlx-lm's forward on this machine after a short context: seconds of one
    BLAS thread's CPU, which do not count others on the machine; the best of some turns."""
    model = load_model(path)[0]
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, SHORT), mx.int32), cache=cache))
    best = dict.fromkeys(GRID, float("inf"))
    for _ in range(turns):
        for rows in GRID:
            began = time.process_time()
            mx.eval(model(mx.zeros((1, rows), mx.int32), cache=cache))
            best[rows] = min(best[rows], time.process_time() - began)
            trim_prompt_cache(cache, rows)
    seconds = np.maximum.accumulate([best[rows] for rows in GRID])  # less for more is noise
    return [(rows, s / seconds[0]) for rows, s in zip(GRID, seconds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__)
    parser.add_argument("model", type=Path, help="a directory in mlx-lm's format")
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    found = measure(args.model, args.turns)
    print(", ".join(f"({rows}, {cost:.2f})" for rows, cost in found))


if __name__ == "__main__":
    main()

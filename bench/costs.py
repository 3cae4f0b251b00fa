"""What a step of mlx-lm's costs by its rows, in plain steps, on this machine. `python -m bench.costs
MODEL`.
"""

import argparse
import time
from pathlib import Path

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import numpy as np  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from mlxspec.speculate.controller import GRID  # noqa: E402

SHORT = 64  # tokens before a step that is measured


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

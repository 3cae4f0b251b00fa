"""Lookahead decoding (arXiv 2402.02057): a model guesses some tokens further in every step and keeps the n-grams
that come of it as drafts. `python -m bench.lookahead MODEL RECORDING`.

Rule: the window is really run, with what its rows see in the paper; what would be accepted is known
from the recorded greedy answer. A step is charged its window's rows and those of the n-grams that
it verifies.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import numpy as np  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from bench.costs import CPU, Costs, macs  # noqa: E402
from bench.dense import KV, Dense  # noqa: E402
from bench.replay import Recording, read  # noqa: E402


@dataclass(frozen=True, slots=True)
class Shape:
    """`width` guesses side by side, n-grams of `size` tokens, at most `most` verified in a step."""

    width: int
    size: int
    most: int

    @property
    def levels(self) -> int:
        return self.size - 1


@dataclass(slots=True)
class Window:
    """Guesses [level][column]; the one at (l, c) stands for the token l + c + 1 after the newest."""

    shape: Shape
    guesses: list[list[int]]
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)

    def candidates(self, token: int) -> list[tuple[int, ...]]:
        """What followed a token in the latest n-grams, the latest first."""
        return self.pool.get(token, [])[: self.shape.most]

    def learn(self, new: Sequence[int]) -> None:
        """`new` are the model's guesses after the last level: n-grams for the pool."""
        for column, token in enumerate(new):
            first, *rest = (*(level[column] for level in self.guesses), token)
            known = self.pool.setdefault(first, [])
            if tuple(rest) in known:
                known.remove(tuple(rest))
            known.insert(0, tuple(rest))
        self.guesses = [*self.guesses[1:], list(new)]


def visible(shape: Shape) -> np.ndarray:
    """bool [rows, rows] of the window: a guess sees the first level up to its column, and the
    levels up to its own in its column."""
    level, column = (x.ravel() for x in np.indices((shape.levels, shape.width)))
    first = (level[None] == 0) & (column[None] <= column[:, None])
    own = (column[None] == column[:, None]) & (level[None] <= level[:, None])
    return first | own


def steps_of(model: Dense, recorded: Recording, shape: Shape, seed: int) -> list[tuple[int, int]]:
    """(rows, tokens) of each step of an answer."""
    tokens, rng = [*recorded.prompt, *recorded.output], random.Random(seed)
    kept = model.read(tokens)[1]
    guesses = [rng.choices(recorded.prompt, k=shape.width) for _ in range(shape.levels)]
    window, own = Window(shape, guesses), visible(shape)
    level, column = np.indices((shape.levels, shape.width))
    ahead = (level + column + 1).ravel()
    newest, end, made = len(recorded.prompt), len(tokens) - 1, []
    while newest < end:
        before: list[KV | None] = [(k[:, :, : newest + 1], v[:, :, : newest + 1]) for k, v in kept]
        context = np.ones((len(own), newest + 1), bool)
        flat = [token for some in window.guesses for token in some]
        mask = mx.array(np.concatenate([context, own], axis=1))
        logits, _ = model(flat, (newest + ahead).tolist(), mask, before)
        tried = window.candidates(tokens[newest])
        following = tokens[newest + 1 :]
        right = [common(n_gram, following) for n_gram in tried]
        new = min(max(right, default=0) + 1, end - newest)
        made.append((1 + len(own) + len(tried) * shape.levels, new))
        window.learn(mx.argmax(logits[-shape.width :], axis=-1).tolist())
        newest += new
    return made


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def speed(steps: Sequence[tuple[int, int]], costs: Costs) -> float | None:
    """Tokens per plain step; None where the cost of so many rows is not known."""
    if max(rows for rows, _ in steps) > len(costs.steps):
        return None
    return sum(new for _, new in steps) / sum(costs.steps[rows - 1] for rows, _ in steps)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lookahead", description=__doc__)
    parser.add_argument("model", type=Path, help="a directory in mlx-lm's format")
    parser.add_argument("files", nargs="+", type=Path, help="recordings of greedy answers")
    parser.add_argument("--answers", type=int, default=3, help="of each recording")
    parser.add_argument(
        "--shapes", nargs="+", default=["2,3,2", "3,3,3", "5,4,3"], help="width, n-gram, n-grams"
    )
    args = parser.parse_args()
    model = Dense(load_model(args.model)[0])
    tables = [CPU, *macs()]
    made = Table(box=MARKDOWN)
    for name in ("recording", "shape", "tokens/step", "rows/step", *(t.name for t in tables)):
        made.add_column(name, no_wrap=True)
    for file in args.files:
        recorded = [r for r in read(file) if len(r.output) > 1][: args.answers]
        for text in args.shapes:
            shape = Shape(*map(int, text.split(",")))
            steps = [s for i, r in enumerate(recorded) for s in steps_of(model, r, shape, i)]
            rows, new = np.mean(steps, axis=0)
            cells = [file.stem, text, f"{new:.2f}", f"{rows:.1f}"]
            for costs in tables:
                found = speed(steps, costs)
                cells.append("" if found is None else f"{found:.2f}")
            made.add_row(*cells)
    console = Console(width=500)
    console.print("tokens per plain step; plain decoding is 1")
    console.print(made)


if __name__ == "__main__":
    main()

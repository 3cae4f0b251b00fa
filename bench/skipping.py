"""A model that drafts for itself with some of its layers left out (SWIFT, arXiv 2410.06916). `python -m
bench.skipping MODEL RECORDING`.

Rule: drafts read the K/V that the whole model left of the text, as they would in a server; what to
leave out is chosen on half of the answers and counted on the others.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
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
from bench.dense import KV, Dense, Sublayer  # noqa: E402
from bench.replay import Recording, read  # noqa: E402

DEPTH = 4
CANDIDATES, TOGETHER = 6, 2  # sublayers that are tried at a time, and that are left out of them


@dataclass(frozen=True, slots=True)
class Text:
    """A greedy answer with the K/V of the whole model; `start` is the answer's first position."""

    tokens: list[int]
    start: int
    kept: list[KV]


def text_of(model: Dense, recorded: Recording) -> Text:
    tokens = [*recorded.prompt, *recorded.output]
    return Text(tokens, len(recorded.prompt), model.read(tokens)[1])


def drafted(model: Dense, text: Text, skip: frozenset[Sublayer], depth: int) -> list[int]:
    """Behind each token of the answer but the last: how many tokens of a draft are right."""
    starts = np.arange(text.start, len(text.tokens) - 1)
    count, length = len(starts), len(text.tokens)
    before: list[KV | None] = list(text.kept)
    newest = [text.tokens[i] for i in starts]
    context = np.arange(length)[None] < starts[:, None]
    own = np.eye(count, dtype=bool)
    kept = np.zeros(count, int)
    right = np.ones(count, bool)
    for level in range(depth):
        mask = mx.array(np.concatenate([context, *(own for _ in range(level + 1))], axis=1))
        logits, made = model(newest, (starts + level).tolist(), mask, before, skip)
        newest = mx.argmax(logits, axis=-1).tolist()
        before = [_joined(a, b) for a, b in zip(before, made, strict=True)]
        for row, i in enumerate(starts + level + 1):
            right[row] &= i < length and newest[row] == text.tokens[i]
        kept += right
    return kept.tolist()


def _joined(a: KV | None, b: KV | None) -> KV | None:
    if a is None or b is None:
        return a
    return mx.concatenate([a[0], b[0]], axis=2), mx.concatenate([a[1], b[1]], axis=2)


def first(model: Dense, texts: Sequence[Text], skip: frozenset[Sublayer]) -> float:
    """The share of first drafts that are right."""
    kept = [n for text in texts for n in drafted(model, text, skip, 1)]
    return sum(kept) / len(kept)


def search(model: Dense, texts: Sequence[Text], most: int, say) -> list[frozenset[Sublayer]]:
    """Growing sets of sublayers, each with the two more that cost the least acceptance of the few
    that cost the least when they were last tried."""
    scores = {}
    for sub in model.sublayers:
        scores[sub] = first(model, texts, frozenset([sub]))
    chosen: frozenset[Sublayer] = frozenset()
    found = []
    while len(chosen) < most:
        left = sorted((s for s in scores if s not in chosen), key=lambda s: -scores[s])
        for sub in left[:CANDIDATES]:
            scores[sub] = first(model, texts, chosen | {sub})
        left.sort(key=lambda s: -scores[s])
        chosen |= set(left[:TOGETHER])
        found.append(chosen)
        say(f"without {len(chosen)}: {first(model, texts, chosen):.2f}")
    return found


def speed(kept: Sequence[Sequence[int]], costs: Costs, token: float) -> tuple[float, int, float]:
    """(tokens per plain step, depth, tokens per round) at the best depth; `kept` has for each
    answer how many drafts are right behind each token, a draft costs `token` plain steps."""
    found = []
    for depth in range(1, DEPTH + 1):
        tokens = rounds = 0
        for some in kept:
            i = 0
            while i < len(some):
                new = min(some[i], depth) + 1
                tokens += min(new, len(some) - i)
                rounds += 1
                i += new
        cost = costs.steps[depth] + depth * token
        found.append((tokens / rounds / cost, depth, tokens / rounds))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.skipping", description=__doc__)
    parser.add_argument("model", type=Path, help="a directory in mlx-lm's format")
    parser.add_argument("files", nargs="+", type=Path, help="recordings of greedy answers")
    parser.add_argument("--answers", type=int, default=2, help="of each recording, for each half")
    parser.add_argument("--most", type=float, default=0.5, help="of the sublayers, left out")
    args = parser.parse_args()
    console = Console(width=500)
    model = Dense(load_model(args.model)[0])
    halves: list[list[Text]] = [[], []]
    for file in args.files:
        recorded = [r for r in read(file) if len(r.output) > DEPTH]
        for half, texts in enumerate(halves):
            texts += [text_of(model, r) for r in recorded[half::2][: args.answers]]
    subs = model.sublayers
    sets = search(model, halves[0], int(len(subs) * args.most), Console(stderr=True).print)
    layers = len(model.layers)
    last = [
        frozenset(s for s in subs if s[0] >= n) for n in (layers - 2, layers * 3 // 4, layers // 2)
    ]
    tables = [CPU, *macs()]
    made = Table(box=MARKDOWN)
    names = ("left out", "bytes", "right, depth 1", f"tokens/round, depth {DEPTH}")
    for name in (*names, *(t.name for t in tables)):
        made.add_column(name, no_wrap=True)
    for what, chosen in (("of the chosen", sets), ("at the end", last)):
        for skip in chosen:
            kept = [drafted(model, text, skip, DEPTH) for text in halves[1]]
            share = model.share(skip)
            right = np.mean([n > 0 for some in kept for n in some])
            rounds = np.mean([n + 1 for some in kept for n in some])
            cells = [
                f"{len(skip)} of {len(subs)} {what}",
                f"{share:.0%}",
                f"{right:.0%}",
                f"{rounds:.2f}",
            ]
            for costs in tables:
                ratio, depth, _ = speed(kept, costs, share)
                cells.append(f"{ratio:.2f} ({depth})")
            made.add_row(*cells)
    console.print("tokens per plain step at the best depth, in brackets; plain decoding is 1")
    console.print(made)


if __name__ == "__main__":
    main()

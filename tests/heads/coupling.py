"""Tokens a round of the trained tiny pair with an MTP head, by temperature, depth and how its drafts
are drawn, beside mlx-vlm's own loop, whose server drafts the likeliest tokens.

    python -m tests.heads.coupling --ways drawn 3 likeliest mlx-vlm

`drawn`: with the target's noise; a number b: with this noise at a b-th of the temperature;
`likeliest`: greedily; `mlx-vlm`: by its loop, where it is installed. A figure is followed by its
ratio to the first way's with a 95 % interval, by resampling the prompts.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from mlxspec import blas

blas.load()

import numpy as np  # noqa: E402  after BLAS
from tokenizers import Tokenizer  # noqa: E402
from tqdm import tqdm  # noqa: E402

from mlxspec.sequences import Entry  # noqa: E402
from mlxspec.speculate.heads import drafter  # noqa: E402
from mlxspec.types import Sampling  # noqa: E402
from tests.heads import oracle, runs  # noqa: E402
from tests.heads.language import Language  # noqa: E402
from tests.heads.packagings import SIDECAR, TARGET  # noqa: E402

MLX_VLM = "mlx-vlm"
AT_ONCE = 8  # prompts of ours
RESAMPLED = 2000

Tokens = list[int]
Kept = list[list[int]]  # of each prompt, how many drafts each full round kept


def held_out(count: int) -> list[Tokens]:
    """Prompts in the target's language that it was not trained on."""
    r, language = random.Random(5000), Language(0)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = (language.text(r, r.randint(8, 16)) for _ in range(count))
    return [tokenizer.encode(text).ids[: -r.randint(1, 6)] for text in texts]


def sharpened(way: str) -> Callable[[Entry], Sampling]:
    def sampling_of(e: Entry) -> Sampling:
        sampling = e.state.sampling
        if way == "likeliest":
            return replace(sampling, temperature=0.0)
        by = 1.0 if way == "drawn" else float(way)
        return replace(sampling, temperature=sampling.temperature / by)

    return sampling_of


def ours(way: str, depth: int, prompts: list[Tokens], sampling: Sampling) -> Iterator[list[int]]:
    engine, head = runs.engine(head=SIDECAR)
    with patch.object(drafter, "sampling_of", sharpened(way)):
        for n in range(0, len(prompts), AT_ONCE):
            some = prompts[n : n + AT_ONCE]
            yield from runs.run(engine, head, depth, some, sampling, together=True).kept(depth)


def theirs(depth: int, prompts: list[Tokens], sampling: Sampling) -> Iterator[list[int]]:
    head = oracle.load_drafter(SIDECAR)
    with tempfile.TemporaryDirectory() as folder:
        target = oracle.load_target(TARGET, Path(folder, "target"))
        sampler = oracle.sampler(sampling.temperature, sampling.seed or 0)
        for prompt in prompts:
            yield oracle.rounds(target, head, prompt, depth, "mtp", sampler)[1]


def replay(way: str, depth: int, temperature: float, prompts: list[Tokens], seeds: int) -> Kept:
    kept: Kept = [[] for _ in prompts]
    name = f"T = {temperature}, depth {depth}, {way}"
    total = seeds * len(prompts)
    with tqdm(total=total, desc=name, leave=False, disable=not sys.stderr.isatty()) as bar:
        for seed in range(seeds):
            sampling = Sampling(temperature=temperature, seed=seed)
            found = (
                theirs(depth, prompts, sampling)
                if way == MLX_VLM
                else ours(way, depth, prompts, sampling)
            )
            for i, more in enumerate(found):
                kept[i] += more
                bar.update()
    return kept


def shown(kept: Kept, first: Kept) -> str:
    """Tokens a round, and their ratio to the first way's."""
    sums = [np.array([(sum(each), len(each)) for each in some], float) for some in (kept, first)]
    mean = 1 + sums[0][:, 0].sum() / sums[0][:, 1].sum()
    if kept is first:
        return f"{mean:.3f}"
    chosen = np.random.default_rng(0).integers(len(kept), size=(RESAMPLED, len(kept)))
    rates = [1 + one[chosen, 0].sum(1) / one[chosen, 1].sum(1) for one in sums]
    low, high = np.quantile(rates[0] / rates[1], (0.025, 0.975))
    other = 1 + sums[1][:, 0].sum() / sums[1][:, 1].sum()
    return f"{mean:.3f} {mean / other:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.5, 0.8, 1.0])
    parser.add_argument("--ways", nargs="+", default=["drawn", "3", "likeliest"])
    args = parser.parse_args()
    prompts = held_out(args.prompts)
    print("temperature", "depth", *args.ways, sep="\t")
    for temperature in args.temperatures:
        for depth in args.depths:
            seeds = args.seeds if temperature else 1  # greedy answers have no seed
            found = [replay(way, depth, temperature, prompts, seeds) for way in args.ways]
            print(temperature, depth, *(shown(k, found[0]) for k in found), sep="\t", flush=True)


if __name__ == "__main__":
    main()

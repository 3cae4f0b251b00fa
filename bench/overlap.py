"""Would drafting on the CPU while the GPU verifies be faster? Two streams that share the memory. `python -m
bench.overlap`.

Rule: every doubt is decided for the CPU: it reads as fast beside the GPU as the memory allows, its
arithmetic, its threads and the way between the two cost nothing, and its draft is as good. What does
not win here cannot win on a Mac.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS

from bench.chips import CHIPS, CURVES, Curve  # noqa: E402
from bench.heads import REACHED, mtp, small  # noqa: E402
from bench.roofline import CONFIGS, Model, sized  # noqa: E402

GPU_SMALL = (
    0.65  # with a small one: Qwen3-0.6B in bf16, 80.8 tok/s on an M3 Pro (SGLang's RFC 32321)
)
# Of the bandwidth that all CPU cores reach: 243 of 400 GB/s on an M1 Max (AnandTech's review, 2021);
# assumed for the others.
CPU = 0.6
ROUNDS = 4000
DEPTHS = range(9)
# (chip, rows of MLX's own kernels there)
MACS = (
    ("M1 Max", "linear"),
    ("M2 Ultra", "linear"),
    ("M3 Max", "m3max-4bit"),
    ("M3 Ultra", "m3ultra-4bit"),
    ("M4 Pro", "m4pro-4bit"),
    ("M5 Pro", "m5max-4bit"),
    ("M5 Max", "m5max-4bit"),
)


@dataclass(frozen=True, slots=True)
class Drafter:
    """Drafts one token after the other and reads `size` bytes for each; `p` is the chance that a
    token is accepted if those before it were. `reached` of the bandwidth on the GPU."""

    name: str
    size: float
    p: float
    reached: float


@dataclass(frozen=True, slots=True)
class Mac:
    """`width` is the memory's bandwidth, `cpu` what the CPU reads at most, in bytes/s; `gpu` the part
    of it that the GPU reaches with the model."""

    width: float
    cpu: float
    gpu: float
    model: Model
    curve: Curve
    context: int

    def verify(self, depth: int) -> float:
        """Bytes of a step that verifies `depth` tokens."""
        return self.model.read(depth + 1, self.context, self.curve)


def alone(mac: Mac, drafter: Drafter, depth: int) -> float:
    """Tokens/s where the GPU drafts, then verifies."""
    seconds = mac.verify(depth) / (mac.gpu * mac.width)
    seconds += depth * drafter.size / (drafter.reached * mac.width)
    return sum(drafter.p**i for i in range(depth + 1)) / seconds


def ahead(mac: Mac, drafter: Drafter, depth: int, guess: float, seed: int = 0) -> float:
    """Tokens/s where the CPU drafts the next round during a verification, for the case that all is
    accepted; where something is rejected it has the right token with chance `guess`, else the GPU
    waits for a new draft."""
    rng = random.Random(seed)
    tokens = seconds = 0.0
    ready = 0
    # Together at most the whole bandwidth; the GPU, which has the longer way, comes first.
    beside = min(mac.cpu, (1 - mac.gpu) * mac.width)
    verify = mac.verify(depth) / (mac.gpu * mac.width)
    drafted = int(verify * beside / drafter.size)
    for _ in range(ROUNDS):
        seconds += verify + max(0, depth - ready) * drafter.size / mac.cpu
        kept = next((i for i in range(depth) if rng.random() >= drafter.p), depth)
        tokens += kept + 1
        chance = drafter.p if kept == depth else guess
        ready = min(depth, max(0, drafted - 1)) if rng.random() < chance else 0
    return tokens / seconds


def best(mac: Mac, some: Sequence[Drafter], guess: float | None) -> tuple[float, str]:
    """Tokens/s of the best drafter at its best depth, or of plain decoding, and its name; with the
    GPU alone where `guess` is None."""
    found = [(alone(mac, some[0], 0), "none")]
    for drafter in some:
        for depth in DEPTHS[1:]:
            if depth < mac.curve.points[-1][0]:
                speed = alone(mac, drafter, depth)
                if guess is not None:
                    speed = ahead(mac, drafter, depth, guess)
                found.append((speed, f"{drafter.name}, {depth}"))
    return max(found)


def drafters(target: str, text: dict) -> list[Drafter]:
    """Those of a target. The chances are assumed, near those that bench/heads.py has sources for."""
    if target.startswith("gemma"):
        return [Drafter("assistant", small(0.24e9).token, 0.75, GPU_SMALL)]
    return [
        Drafter("MTP", mtp(text).token, 0.8, REACHED[target]),
        Drafter("0.8B", small(0.8e9).token, 0.75, GPU_SMALL),
        Drafter("2B", small(2e9).token, 0.8, GPU_SMALL),
    ]


def table(target: str, curves: Sequence[str], context: int, cpu: float) -> Table:
    config = json.loads((CONFIGS / f"{target}.json").read_text("utf-8"))
    model = sized(config, 4)
    some = drafters(target, config["text_config"])
    made = Table(box=MARKDOWN)
    for name in ("chip", "rows", "GPU alone", "CPU drafts", "", "and guesses half", ""):
        made.add_column(name, no_wrap=True)
    for chip, stock in MACS:
        width = CHIPS[chip][0] * 1e9
        for name in dict.fromkeys((stock, *curves)):
            mac = Mac(
                width, cpu * 1e9 or CPU * width, REACHED[target], model, CURVES[name], context
            )
            gpu, which = best(mac, some, None)
            cells = [f"{gpu:.1f} ({which})"]
            for guess in (0.0, 0.5):
                speed, which = best(mac, some, guess)
                cells += [f"{speed:.1f} ({which})", f"{speed / gpu - 1:+.0%}"]
            made.add_row(chip, name, *cells)
    return made


def reading(dtype: mx.Dtype, turns: int = 6) -> float:
    """GB/s of 4-bit weights that MLX's matrix-vector product reads on this CPU, in one thread's
    time; scales and vector are of `dtype`."""
    weights = mx.random.normal((8192, 4096))
    packed, *scales = mx.quantize(weights, 64, 4)
    made = [packed, *(each.astype(dtype) for each in scales)]
    x = mx.random.normal((1, 4096)).astype(dtype)
    mx.eval(made, x)
    best = float("inf")
    for _ in range(turns):
        began = time.process_time()
        mx.eval(mx.quantized_matmul(x, *made, transpose=True, group_size=64, bits=4))
        best = min(best, time.process_time() - began)
    return sum(a.nbytes for a in made) / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__)
    targets = [name for name in REACHED if name != "gpt-oss-20b"]  # for which no draft pays
    parser.add_argument("--target", choices=targets, default=targets[0])
    parser.add_argument("--rows", nargs="*", choices=CURVES, default=["tile-of-8"])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument(
        "--cpu",
        type=float,
        default=0.0,
        help="GB/s that the CPU reads; default: 60 %% of the memory's",
    )
    parser.add_argument("--measure", action="store_true", help="what MLX reads on this CPU instead")
    args = parser.parse_args()
    console = Console(width=200)
    if args.measure:
        for dtype in (mx.float32, mx.bfloat16):
            console.print(f"{dtype}: {reading(dtype):.2f} GB/s")
        return
    console.print(f"{args.target} in 4 bits, tokens/s: a PREDICTION from a formula")
    console.print(table(args.target, args.rows, args.context, args.cpu))


if __name__ == "__main__":
    main()

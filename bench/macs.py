"""Which models fit which Mac, what drafts for them, and how fast both would be.

Rule: a prediction, and named so wherever it is printed: memory by the sum that mlxspec does before
it loads a model, speed by the roofline. Nothing here was run on a Mac.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.chips import CHIPS, CURVES, STOCK
from bench.formula import Model, batch_speed, head_speed
from bench.heads import HALF, REACHED, WEIGHT, Pairing, pairings
from bench.sizes import read_config, target
from bench.tables import empty, show
from mlxspec.engine.memory import HEADROOM, HEADROOM_PART
from mlxspec.load.plan import LEAST_CONTEXT
from mlxspec.model.cards import head_of

GB = 1 << 30
SIZES = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128)  # GB of Macs
# Of a Mac's memory, what a model may take. macOS recommends to a GPU 10.7 to 11.8 of 16 GB (exo
# #1672, llmfit #754) and 17.8 of 24 (sglang #29949); but with 64 % of 32 GB, 1 GB of a 32 GB Mac's
# memory was swapped (Rapid-MLX #1634, a model with the sizes of Qwen3.6-35B-A3B).
PART = 0.6
PLAIN = {**REACHED, "qwen3-1.7b": REACHED["qwen3-4b"]}  # of the bandwidth; assumed: the 4B's
COLUMNS = ("M1 Pro", "M2 Pro", "M3 Max", "M4", "M4 Pro", "M4 Max", "M5", "M5 Pro", "M5 Max")


@dataclass(frozen=True, slots=True)
class Choice:
    """A model by its hub id; its sizes are those of `config` with weights of `bits`, but for those
    of which the config says otherwise. `head`: what to give as --draft, published in 16 bits; "":
    nothing, because the model's card names a head in 4 bits that comes with it, or none is predicted
    to pay. `drafts`: the pairing in bench/heads.py whose tokens a round has."""

    id: str
    config: str
    bits: int
    head: str = ""
    drafts: str = ""


CHOICES = (
    Choice("mlx-community/Qwen3-1.7B-4bit", "qwen3-1.7b", 4),
    Choice(
        "mlx-community/Qwen3-4B-4bit",
        "qwen3-4b",
        4,
        "deepseek-ai/dspark_qwen3_4b_block7",
        "DSpark",
    ),
    Choice(
        "mlx-community/Qwen3-8B-4bit",
        "qwen3-8b",
        4,
        "deepseek-ai/dspark_qwen3_8b_block7",
        "DSpark",
    ),
    Choice(
        "mlx-community/gemma-4-12B-it-4bit",
        "gemma-4-12b",
        4,
        "google/gemma-4-12B-it-assistant",
        "assistant, worst",
    ),
    Choice("mlx-community/gpt-oss-20b-MXFP4-Q8", "gpt-oss-20b", 8),
    Choice("mlx-community/Qwen3.8-27B-4bit", "qwen3.8-27b", 4, drafts="MTP"),
    Choice("mlx-community/Qwen3.6-35B-A3B-4bit", "qwen3.6-35b-a3b", 4, drafts="MTP"),
    Choice("mlx-community/Qwen3.8-27B-8bit", "qwen3.8-27b", 8, drafts="MTP"),
)


def needed(model: Model, machine: int, head: float = 0.0) -> float:
    """Bytes that have to be free on a Mac with `machine` bytes before the model is loaded: weights,
    those of its `head`, headroom, and twice the caches of one sequence (docs/memory.md)."""
    one = model.cached(LEAST_CONTEXT) + model.state
    return model.weights + head + max(HEADROOM, machine // HEADROOM_PART) + 2 * one


def smallest(model: Model, head: float = 0.0) -> int:
    """GB of the smallest Mac on which the model fits into PART of the memory; 0: none of SIZES."""
    fits = (size for size in SIZES if needed(model, size * GB, head) <= PART * size * GB)
    return next(fits, 0)


def by_memory(models: dict[Choice, Model]) -> Table:
    """A line for each model, smallest Mac first."""
    made = empty(("Mac*", "model", "weights", "head", "what speeds it up"), 2)
    rows = []
    for choice, model in models.items():
        head = max((p.head.weights for p in drafters(choice)), default=0.0)
        sizes = f"{model.weights / GB:.1f} GB", f"{head / GB:.1f} GB" if head else "-"
        rows.append((smallest(model, head), f"`{choice.id}`", *sizes, drafting(choice)))
    for size, *row in sorted(rows, key=lambda row: row[0]):
        made.add_row(f"{size} GB", *row)
    made.columns[-1].justify = "left"
    return made


def drafters(choice: Choice) -> list[Pairing]:
    """What is known of the model's head, by depth."""
    texts = {}
    for each in CHOICES:
        config = read_config(each.config)
        texts[each.config] = config.get("text_config", config)
    found = pairings(texts, HALF if choice.head else WEIGHT)
    own = [p for p in found if (p.target, p.bits) == (choice.config, choice.bits)]
    return [p for p in own if choice.drafts and p.name == choice.drafts]


def drafting(choice: Choice) -> str:
    """What drafts for a model, beside prompt lookup."""
    if choice.head:
        return f"`--draft {choice.head}`"
    return "its MTP head, fetched with it" if head_of(choice.id) else "prompt lookup only"


def by_chip(models: dict[Choice, Model], chips: Sequence[str], context: int) -> Table:
    """A line for each model: tokens/s of one chat on each chip, without a head and with it."""
    made = empty(("model", *(f"{chip}*" for chip in chips)), 1)
    for choice, model in models.items():
        cells = [cell(model, choice, drafters(choice), chip, context) for chip in chips]
        made.add_row(choice.id.partition("/")[2], *cells)
    return made


def cell(model: Model, choice: Choice, heads: Sequence[Pairing], chip: str, context: int) -> str:
    """Tokens/s without a head, and with it where its rows were measured on such a chip."""
    width = CHIPS[chip][0] * 1e9 * PLAIN[choice.config]
    text = f"{batch_speed(model, 1, width, context, CURVES['ideal']):.0f}"
    if not heads:
        return text
    rows = STOCK.get((chip.split()[0], choice.bits))
    if not rows:
        return f"{text} / ?"
    best = max(head_speed(model, p, width, context, CURVES[rows]) for p in heads)
    return f"{text} / {best:.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.macs", description=__doc__)
    parser.add_argument("--speeds", action="store_true", help="tokens/s instead of memory")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=COLUMNS)
    parser.add_argument("--context", type=int, default=4096, help="tokens before the step")
    args = parser.parse_args(argv)
    models = {choice: target(choice.config, choice.bits) for choice in CHOICES}
    made = by_chip(models, args.chips, args.context) if args.speeds else by_memory(models)
    show(made)


if __name__ == "__main__":
    main()

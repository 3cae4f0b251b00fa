"""Predicts tokens per second on Apple's chips from a model's config.json, by depth and acceptance
of drafts.

Rule: a prediction, and named so wherever it is printed. A step takes as long as reading what it
needs at the chip's whole bandwidth; nothing here was run on a Mac.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from rich.table import Table

from bench.chips import CHIPS, CURVES, PUBLISHED, Curve
from bench.formula import Model, batch_speed, expected, head_speed, speed
from bench.heads import REACHED, Pairing, pairings
from bench.kernels import before_after, ours, with_kernels
from bench.macs import COLUMNS
from bench.peers import beside_peers, long_prompts
from bench.sizes import read_config, sized, target, title
from bench.tables import empty, show

HEAD_CHIPS = ("M1 Max", "M2 Ultra", "M3 Max", "M4 Pro", "M5 Pro", "M5 Max")
OURS = "ours"


def curve(text: str) -> Curve | None:
    """One of CURVES by its name, or points measured elsewhere, as 1:1,2:1.03,8:2.7; None for OURS,
    which depends on the chip. Raises ValueError."""
    if text == OURS:
        return None
    if text in CURVES:
        return CURVES[text]
    rows, costs = zip(*(point.split(":") for point in text.split(",")), strict=True)
    points = tuple(zip(map(int, rows), map(float, costs), strict=True))
    if (
        points[0] != (1, 1)
        or points != tuple(sorted(dict(points).items()))
        or any(c < 1 for _, c in points)
    ):
        raise ValueError
    return Curve(points, False, f"given: {text}")


def table(model: Model, args: argparse.Namespace, bits: int) -> Table:
    """A line for each chip and acceptance, a column for each depth."""
    made = empty(("chip", "GB/s", "kept", *(f"depth {d}" for d in args.depths)), 1)
    for chip, p in product(args.chips, args.acceptance):
        width, cells = CHIPS[chip][0], []
        rows = args.rows or ours(chip, bits)
        for d in args.depths:
            how = (expected(p, d), rows, args.draft, args.reached)
            cells.append(f"{speed(model, width, args.context, d, *how):.1f}")
        made.add_row(chip, f"{width:g}", f"{p:.0%}", *cells)
    return made


def compared() -> Table:
    """Each published speed beside what is predicted for it; "part" is published plain /
    predicted."""
    names = ("model", "chip", "context", "plain*", "published", "part")
    made = empty((*names, "tokens/round", "ideal*", "stock rows*", "published"), 2)
    for p in PUBLISHED:
        model = sized(read_config(p.config), p.bits)
        width = CHIPS[p.chip][0]
        plain = speed(model, width, p.context, 0, 1, CURVES["ideal"])
        cells = [
            f"{p.config}, {p.bits} bits",
            p.chip,
            f"{p.context}",
            f"{plain:.1f}",
            f"{p.plain:.1f}",
        ]
        cells.append(f"{p.plain / plain:.0%}")
        if p.drafted:
            how = (model, width, p.context, p.depth, p.tokens)
            rates = [f"{speed(*how, CURVES[c]):.1f}" if c else "" for c in ("ideal", p.curve)]
            cells += [f"{p.tokens:.2f}", *rates, f"{p.drafted:.1f}"]
        made.add_row(*cells)
    return made


def with_heads(chips: Sequence[str], context: int) -> Table:
    """A line for each head and target, for each chip two speeds: with the rows of MLX's own kernels
    where these were measured on such chips, and with our kernels."""
    names = {name: read_config(name) for name in REACHED}
    found = pairings({name: c.get("text_config", c) for name, c in names.items()})
    columns = ("target", "head", "tokens/round", "draft GB", "matrices")
    made = empty((*columns, *(f"{chip}*" for chip in chips), "published"), 2)
    models: dict[tuple[str, int], Model] = {}
    for p in found:
        key = p.target, p.bits
        if key not in models:
            model = models[key] = target(p.target, p.bits)
            plain_gb = model.read(1, context, CURVES["ideal"]) / 1e9
            cells = [f"{_plain(model, p, chip, context):.0f}" for chip in chips]
            name = title(p.target, p.bits)
            read = f"({plain_gb:.1f})", f"({model.matrices})"
            made.add_row(name, "none", "1", *read, *cells, "")
        guess = "?" if p.source.startswith("assumed") else ""
        about = "", f"{p.name}, {p.depth}", f"{p.tokens:.2f}{guess}"
        draft = f"{p.head.draft(p.depth) / 1e9:.2f}", f"{p.head.matrices(p.depth)}"
        cells = [_both(models[key], p, chip, context) for chip in chips]
        made.add_row(*about, *draft, *cells, p.published)
    return made


def _width(p: Pairing, chip: str) -> float:
    return CHIPS[chip][0] * 1e9 * REACHED[p.target]


def _plain(model: Model, p: Pairing, chip: str, context: int) -> float:
    return batch_speed(model, 1, _width(p, chip), context, CURVES["ideal"])


def _both(model: Model, p: Pairing, chip: str, context: int) -> str:
    plain = _plain(model, p, chip, context)
    return before_after(
        chip,
        p.bits,
        plain,
        partial(head_speed, model, p, _width(p, chip), context),
        model.mode,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/roofline", description=__doc__)
    parser.add_argument(
        "config", nargs="?", help="a config.json in mlx-lm's format; default: compare published"
    )
    parser.add_argument(
        "--bits", type=int, default=0, choices=(0, 4, 8, 16), help="instead of the config's"
    )
    parser.add_argument(
        "--chips",
        nargs="+",
        choices=CHIPS,
        default=["M1 Max", "M2 Ultra", "M3 Ultra", "M4 Pro", "M5 Max"],
    )
    parser.add_argument(
        "--rows",
        type=curve,
        default="ideal",
        help=f"one of docs/roofline.md, or points as 1:1,4:1.3; {OURS}: our kernels on each chip",
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens before the step")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[0, 1, 2, 3, 5, 7], help="drafted tokens"
    )
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[0.6, 0.8], help="chance of each, 0 to 1"
    )
    parser.add_argument(
        "--draft", type=float, default=0.0, help="plain steps that a drafted token costs"
    )
    parser.add_argument(
        "--reached", type=float, default=1.0, help="part of the bandwidth that is reached"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--heads", action="store_true", help="predict trained heads for some targets instead"
    )
    instead.add_argument(
        "--kernels", action="store_true", help="predict our kernels for the README's models instead"
    )
    instead.add_argument(
        "--peers", action="store_true", help="ours beside others' few-row kernels instead"
    )
    instead.add_argument(
        "--long", action="store_true", help="ours beside others after 16K tokens instead"
    )
    args = parser.parse_args(argv)
    try:
        show(*_made(args))
    except (ValueError, KeyError, TypeError, OSError) as error:
        parser.error(
            f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        )


def _made(args: argparse.Namespace) -> tuple[Table, str]:
    """A table, and the line above it."""
    context = f"tokens/s at {args.context} tokens of context"
    both = "* is predicted, rows of MLX's own kernels / our kernels too"
    if args.heads:
        note = f"{context}; {both}; published figures are others'."
        return with_heads(HEAD_CHIPS, args.context), note
    if args.kernels:
        return with_kernels(COLUMNS, args.context), f"{context}; {both}."
    if args.peers:
        return beside_peers(), "* is predicted, other figures are others'."
    if args.long:
        return long_prompts(), "tokens/s, reading / answering; ours answering; * is predicted."
    if not args.config:
        return compared(), "tokens/s; * is predicted, published figures are others'."
    config = json.loads(Path(args.config).read_text("utf-8"))
    model = sized(config, args.bits)
    plain = model.read(1, args.context, CURVES["ideal"]) / 1e9
    rows = args.rows.source if args.rows else "our kernels, counted for each chip"
    note = f"{context}; a plain step reads {plain:.2f} GB.\nRows: {rows}"
    bits = args.bits or config.get("quantization", {}).get("bits", 16)
    return table(model, args, bits), note


if __name__ == "__main__":
    main()

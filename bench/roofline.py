"""Predicts tokens per second on Apple's chips from a model's config.json, by depth and acceptance
of drafts.

Rule: a prediction, and named so wherever it is printed. A step takes as long as reading what it
needs at the chip's whole bandwidth; nothing here was run on a Mac.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from mlx import nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # noqa: E402
from mlx_lm.utils import _get_classes  # noqa: E402
from rich.box import MARKDOWN  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.chips import CHIPS, CURVES, PUBLISHED, STOCK, Curve  # noqa: E402
from bench.heads import REACHED, Head, Pairing, pairings  # noqa: E402
from mlxspec.model.layout import geometry  # noqa: E402

CONFIGS = Path(__file__).parent / "configs"
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
HEAD_CHIPS = ("M1 Max", "M2 Ultra", "M3 Max", "M4 Pro", "M5 Pro", "M5 Max")
NOTE = "A PREDICTION from a formula. Nothing of it was run on these chips."


@dataclass(frozen=True, slots=True)
class Model:
    """What steps read, in bytes: `dense` weights by every step; `experts` weights in all, of which
    a row takes `chosen` (part of 1); K/V of one `token` in layers with full attention, and (window
    in tokens, bytes of one token) in those with a window; `state` of one sequence in recurrent
    ones."""

    dense: int
    token: int
    experts: int = 0
    chosen: float = 0.0
    windows: tuple[tuple[int, int], ...] = ()
    state: int = 0
    matrices: int = field(default=0, compare=False)  # of weights that a step multiplies with
    weights: int = field(default=0, compare=False)  # bytes in memory, those of embeddings too

    def read(self, rows: int, context: int, curve: Curve) -> float:
        """Bytes that a step with `rows` rows of one sequence after `context` tokens is charged
        for. K/V are read once for all rows; a state is read and written."""
        part = 1 - (1 - self.chosen) ** rows if curve.shared else self.chosen * rows
        kept = self.cached(context) + 2 * self.state
        return self.dense * curve.at(rows) + self.experts * part + kept

    def cached(self, context: int) -> int:
        """Bytes of one sequence's K/V."""
        windows = sum(size * min(context, window) for window, size in self.windows)
        return self.token * context + windows


def speed(
    model: Model,
    bandwidth: float,
    context: int,
    depth: int,
    tokens: float,
    curve: Curve,
    draft: float = 0.0,
    reached: float = 1.0,
) -> float:
    """Tokens per second where a round drafts `depth` tokens and gives `tokens`. `bandwidth` in
    GB/s, `reached` the part of it that is; a drafted token costs `draft` plain steps. Raises
    ValueError for what cannot be."""
    if not 1 <= tokens <= depth + 1:
        raise ValueError(f"a round that drafts {depth} gives 1 to {depth + 1} tokens, not {tokens}")
    if bandwidth <= 0 or not 0 < reached <= 1 or context < 0 or draft < 0:
        raise ValueError(
            "bandwidth and its part must be above 0, the part at most 1, context and draft not below 0"
        )
    read = model.read(depth + 1, context, curve) + depth * draft * model.read(1, context, curve)
    return tokens * bandwidth * 1e9 * reached / read


def sized(config: dict[str, Any], bits: int = 0) -> Model:
    """A model's bytes, from mlx-lm's own code of it, built without weights. `bits` (4, 8; 16: none)
    replaces the config's quantization, in groups of 64. Raises ValueError where the config does not
    say enough."""
    text = config | (config.get("text_config") or {})
    if bits:
        config = {
            k: v for k, v in config.items() if k not in ("quantization", "quantization_config")
        }
        if bits != 16:
            config["quantization"] = {"group_size": 64, "bits": bits}
    classes = _get_classes(config)
    model = classes[0](classes[1].from_dict(config))
    model.set_dtype(getattr(mx, text.get("torch_dtype") or text.get("dtype") or "bfloat16"))
    # A table of embeddings is read row by row, but wholly where it is the output too: where nothing
    # else is.
    found = dict(model.named_modules())
    tables = {n: m.weight.shape for n, m in found.items() if isinstance(m, nn.Embedding)}
    outputs = {m.weight.shape for m in found.values() if isinstance(m, nn.Linear)}
    rows_only = {
        n for n, s in tables.items() if s in outputs or s[1] != text.get("hidden_size", s[1])
    }
    _quantize(model, config)
    kinds = (SwitchLinear, QuantizedSwitchLinear)
    switches = [m for m in model.modules() if isinstance(m, kinds)]
    skipped = [m for n, m in model.named_modules() if n in rows_only]
    experts = sum(map(_bytes, switches))
    token, windows, state = geometry(model)
    if not (token or windows or state):
        raise ValueError(
            "what this model keeps of a token is not known: mlx-lm's code of it does not run here"
        )
    dense = _bytes(model) - experts - sum(map(_bytes, skipped))
    chosen = _chosen(text, switches) if switches else 0.0
    linear = (nn.Linear, nn.QuantizedLinear, *kinds)
    matrices = sum(isinstance(m, linear) for m in model.modules())
    return Model(dense, token, experts, chosen, windows, state, matrices, _bytes(model))


def _bytes(module: nn.Module) -> int:
    leaves: Any = tree_flatten(module.parameters())
    return sum(a.nbytes for _, a in leaves)


def _chosen(text: dict[str, Any], switches: Sequence[nn.Module]) -> float:
    """The part of the experts that one token goes through."""
    counts = {m.weight.shape[0] for m in switches}
    top = next((text[k] for k in TOP_K if isinstance(text.get(k), int)), 0)
    if len(counts) != 1 or not top:
        raise ValueError(
            f"the config does not say how many experts a token takes: none of {', '.join(TOP_K)}"
        )
    return float(top) / counts.pop()


def _quantize(model: nn.Module, config: dict[str, Any]) -> None:
    """As the config says, by layer where it does; else what mlx-lm would quantize."""
    how = config.get("quantization") or config.get("quantization_config")
    if not how:
        return
    if not {"bits", "group_size"} <= how.keys():
        raise ValueError(
            "the config's quantization is not mlx-lm's: it has no bits and group_size; use --bits"
        )
    default = getattr(model, "quant_predicate", None) or (lambda *_: True)

    def chosen(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % how["group_size"]:
            return False
        return how[path] if path in how else default(path, module)

    mode = how.get("mode", "affine")
    nn.quantize(model, how["group_size"], how["bits"], mode=mode, class_predicate=chosen)


def curve(text: str) -> Curve:
    """One of CURVES by its name, or points measured elsewhere, as 1:1,2:1.03,8:2.7. Raises
    ValueError."""
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


def table(model: Model, args: argparse.Namespace) -> Table:
    """A line for each chip and acceptance, a column for each depth."""
    made = empty(("chip", "GB/s", "kept", *(f"depth {d}" for d in args.depths)), 1)
    for chip, p in product(args.chips, args.acceptance):
        width, cells = CHIPS[chip][0], []
        for d in args.depths:
            how = (expected(p, d), args.rows, args.draft, args.reached)
            cells.append(f"{speed(model, width, args.context, d, *how):.1f}")
        made.add_row(chip, f"{width:g}", f"{p:.0%}", *cells)
    return made


def compared() -> Table:
    """Each published speed beside what is predicted for it; "part" is published plain /
    predicted."""
    names = ("model", "chip", "context", "plain*", "published", "part")
    made = empty((*names, "tokens/round", "ideal*", "stock rows*", "published"), 2)
    for p in PUBLISHED:
        model = sized(json.loads((CONFIGS / f"{p.config}.json").read_text("utf-8")), p.bits)
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
    where these were measured on such chips, and if weights were read once for 8 rows."""
    names = {name: json.loads((CONFIGS / f"{name}.json").read_text("utf-8")) for name in REACHED}
    found = pairings({name: c.get("text_config", c) for name, c in names.items()})
    columns = ("target", "head", "tokens/round", "draft GB", "matrices")
    made = empty((*columns, *(f"{chip}*" for chip in chips), "published"), 2)
    models: dict[tuple[str, int], Model] = {}
    for p in found:
        key = p.target, p.bits
        if key not in models:
            model = models[key] = sized(names[p.target], p.bits)
            plain = Pairing(*key, Head(), "none", 0, 1.0, "")
            plain_gb = model.read(1, context, CURVES["ideal"]) / 1e9
            cells = _speeds(model, plain, chips, context)
            about = f"{p.target}, {p.bits} bits", "none", "1", f"({plain_gb:.1f})"
            made.add_row(*about, f"({model.matrices})", *cells, "")
        guess = "?" if p.source.startswith("assumed") else ""
        about = "", f"{p.name}, {p.depth}", f"{p.tokens:.2f}{guess}"
        draft = f"{p.head.draft(p.depth) / 1e9:.2f}", f"{p.head.matrices(p.depth)}"
        cells = _speeds(models[key], p, chips, context)
        made.add_row(*about, *draft, *cells, p.published)
    return made


def _speeds(model: Model, p: Pairing, chips: Sequence[str], context: int) -> list[str]:
    made = []
    for chip in chips:
        stock = STOCK.get((chip.split()[0], p.bits), "")
        both = []
        for name in (stock, "tile-of-8"):
            if not name:
                both.append("?")
                continue
            width = CHIPS[chip][0] * 1e9 * REACHED[p.target]
            both.append(f"{head_speed(model, p, width, context, CURVES[name]):.0f}")
        made.append(" / ".join(both))
    return made


def head_speed(model: Model, p: Pairing, width: float, context: int, curve: Curve) -> float:
    """Tokens per second at `width` bytes per second and at the depth that is best, up to that of
    the pairing, if each token is accepted with the same chance."""
    chance = fitted(p.tokens, p.depth)
    found = []
    for depth in range(p.depth + 1):
        read = model.read(depth + 1, context, curve)
        if depth:
            read += p.head.block * curve.at(depth + 1) + depth * p.head.token
        found.append(expected(chance, depth) * width / read)
    return max(found)


def expected(p: float, depth: int) -> float:
    """Tokens of a round that drafts `depth` tokens, each accepted with chance `p` if those before
    it were."""
    return sum(p**i for i in range(depth + 1))


def fitted(tokens: float, depth: int) -> float:
    """The chance with which a round that drafts `depth` tokens gives so many."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if expected(middle, depth) < tokens:
            low = middle
        else:
            high = middle
    return low


def empty(columns: Sequence[str], words: int) -> Table:
    """The first `words` columns are words, the others figures."""
    made = Table(box=MARKDOWN)
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < words else "right", no_wrap=True)
    return made


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
        help="one of docs/roofline.md, or points as 1:1,4:1.3",
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
    parser.add_argument(
        "--heads", action="store_true", help="predict trained heads for four targets instead"
    )
    args = parser.parse_args(argv)
    console = Console()
    try:
        if args.heads:
            made = with_heads(HEAD_CHIPS, args.context)
            console.print(
                f"tokens/s at {args.context} tokens of context; * is predicted, rows of MLX's own"
                " kernels / a tile of 8 rows; published figures are others'."
            )
        elif args.config:
            model = sized(json.loads(Path(args.config).read_text("utf-8")), args.bits)
            made = table(model, args)
            plain = model.read(1, args.context, CURVES["ideal"]) / 1e9
            console.print(
                f"tokens/s at {args.context} tokens of context; a plain step reads {plain:.2f} GB."
            )
            console.print(f"Rows: {args.rows.source}")
        else:
            made = compared()
            console.print("tokens/s; * is predicted, published figures are others'.")
    except (ValueError, KeyError, TypeError, OSError) as error:
        parser.error(
            f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        )
    console.print(NOTE, style="bold")
    whole = console.measure(made, options=console.options.update(max_width=10_000)).maximum
    console.width = max(console.width, whole)  # a heading that is cut would lose its *
    console.print(made)


if __name__ == "__main__":
    main()

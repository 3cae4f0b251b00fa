"""What others measured with few-row kernels of their own, beside what is predicted for ours.

Rule: a measured figure is its author's and has its source in docs/roofline.md; the others are
predictions and marked so. No kernel of theirs is ours: where these agree, the counting may be right.
"""

from dataclasses import dataclass

from rich.table import Table

from bench.chips import CHIPS, CURVES, STOCK, Curve
from bench.formula import Model, batch_speed, round_bytes
from bench.heads import REACHED, Head, block, mtp
from bench.kernels import ours
from bench.sizes import read_config, sized
from bench.tables import empty

SHORT, LONG = 512, 16_384  # SHORT: a guess, as the sources name no context
DEPTH = 7
PART = {  # of the bandwidth that is reached
    "qwen3.5-4b": 0.76,  # mlx-lm's 61 tok/s with one request
    "qwen3.8-27b": REACHED["qwen3.8-27b"],
}


@dataclass(frozen=True, slots=True)
class Peer:
    """One figure: tokens/s of all `requests`, or of one whose rounds draft `depth` tokens with a
    head and give `tokens`, which is a `guess` where the source does not say it; milliseconds of a
    round where `tokens` is 0. `mlx`: what mlx-lm reached there, 0 if nobody says."""

    name: str
    chip: str
    config: str
    measured: float
    requests: int = 1
    depth: int = 0
    head: str = ""
    tokens: float = 1.0
    mlx: float = 0.0
    bits: int = 4
    guess: bool = False


def _locals(requests: int, measured: float, mlx: float) -> Peer:
    return Peer("Locals", "M2 Pro", "qwen3.5-4b", measured, requests=requests, mlx=mlx)


def _drafted(
    name: str,
    chip: str,
    measured: float,
    tokens: float,
    head: str = "DFlash 2",
    bits: int = 4,
    guess: bool = False,
) -> Peer:
    return Peer(
        name,
        chip,
        "qwen3.8-27b",
        measured,
        depth=DEPTH,
        head=head,
        tokens=tokens,
        bits=bits,
        guess=guess,
    )


def _round(name: str, depth: int, measured: float) -> Peer:
    return Peer(name, "M5 Max", "qwen3.8-27b", measured, depth=depth, head="MTP", tokens=0)


PEERS = (
    _locals(1, 64, 61),
    _locals(2, 116, 82),
    _locals(4, 160, 87),
    _locals(8, 271, 87),
    _locals(16, 341, 157),
    Peer("Locals", "M2 Max", "qwen3.8-27b", 78, requests=8, mlx=25),
    _drafted("mlx-dspark", "M4 Pro", 40.0, 5.09),
    _drafted("mlx-dspark", "M4 Pro", 38.6, 4.83, head="DSpark"),
    _drafted("mlx-dspark", "M4 Pro", 30.8, 5.42, bits=8),
    _drafted("Splash, a user", "M3 Max", 66.5, 6.39),
    _drafted("Splash, a user", "M3 Max", 30.7, 2.96),
    _drafted("Splash, itself", "M3 Max", 92, 6.39, guess=True),
    _drafted("Splash, itself", "M5 Pro", 74, 6.39, guess=True),
    _round("mlx-serve, none", 6, 62.47),
    _round("mlx-serve, none", 7, 79.94),
    _round("mlx-serve, none", 8, 91.61),
    _round("mlx-serve, accelerators", 6, 62.56),
    _round("mlx-serve, accelerators", 7, 64.43),
    _round("mlx-serve, accelerators", 8, 66.06),
)


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """Tokens/s of reading a prompt of 16K tokens and of the answer, by program."""

    chip: str
    splash: tuple[float, float]
    justfit: tuple[float, float]
    mlx_vlm: tuple[float, float]


LONG_PROMPTS = (  # Qwen3.8-27B in 4 bits, of JustFit 2.3.0's documentation
    LongPrompt("M4 Pro", (128.6, 51.0), (140.4, 46.5), (123, 13.3)),
    LongPrompt("M5 Pro", (403.7, 57.6), (479.6, 55.5), (346, 14.5)),
    LongPrompt("M6", (307.2, 36.9), (449.1, 36.1), (277, 8.2)),
)


def beside_peers() -> Table:
    """A line for each figure; "off" is our speed by theirs, less 1."""
    columns = "measured by", "chip", "model", "step", "tokens", "mlx-lm", "MLX's rows*", "theirs"
    made = empty((*columns, "ours*", "off*"), 4)
    models: dict[tuple[str, int], Model] = {}
    for p in PEERS:
        key = p.config, p.bits
        model = models[key] = models.get(key) or sized(read_config(p.config), p.bits)
        step = f"{p.head}, {p.depth}" if p.head else f"{p.requests} at once"
        stock = CURVES[STOCK[p.chip.split()[0], p.bits]]
        before, after = (_seconds(p, model, c) for c in (stock, ours(p.chip, p.bits)))
        tokens = p.requests * p.tokens
        each = f"{tokens:g}" + "?" * p.guess if tokens else ""
        theirs = tokens / p.measured if tokens else p.measured / 1000
        figures = (_figure(tokens, seconds) for seconds in (before, theirs, after))
        mlx = _figure(tokens, tokens / p.mlx) if p.mlx else ""
        off = f"{theirs / after - 1:+.0%}"
        about = p.name, p.chip, f"{p.config}, {p.bits} bits", step, each
        made.add_row(*about, mlx, *figures, off)
    return made


def long_prompts() -> Table:
    """A line for each chip: what three programs reached, read / answered; ours with two numbers of
    tokens a round; and the tokens a round with which ours would answer as fast as Splash."""
    programs = "Splash 1.3.0", "JustFit 2.3.0", "mlx-vlm"
    given = 5.09, 6.39
    columns = "chip", *programs, *(f"ours at {n}*" for n in given), "tokens/round for Splash's*"
    made = empty(columns, 1)
    model, head = sized(read_config("qwen3.8-27b"), 4), _head("DFlash 2")
    for p in LONG_PROMPTS:
        measured = [f"{read:g} / {made:g}" for read, made in (p.splash, p.justfit, p.mlx_vlm)]
        cells = ["?"] * (len(given) + 1)
        if p.chip in CHIPS:
            read = round_bytes(model, head, DEPTH, LONG, ours(p.chip, 4))
            seconds = read / _width(p.chip, "qwen3.8-27b")
            cells = [f"{n / seconds:.1f}" for n in given] + [f"{p.splash[1] * seconds:.1f}"]
        made.add_row(p.chip, *measured, *cells)
    return made


def _seconds(p: Peer, model: Model, curve: Curve) -> float:
    """Of a step or round."""
    width = _width(p.chip, p.config)
    if p.head:
        return round_bytes(model, _head(p.head), p.depth, SHORT, curve) / width
    return p.requests / batch_speed(model, p.requests, width, SHORT, curve)


def _figure(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tok/s" if tokens else f"{1000 * seconds:.1f} ms"


def _width(chip: str, config: str) -> float:
    return CHIPS[chip][0] * 1e9 * PART[config]


def _head(name: str) -> Head:
    """Of the 27B, as the roofline's table of heads has it."""
    text = read_config("qwen3.8-27b")["text_config"]
    inner = text["intermediate_size"]
    if name == "MTP":
        return mtp(text)
    return block(text, inner, rank=256 if name == "DSpark" else 0)

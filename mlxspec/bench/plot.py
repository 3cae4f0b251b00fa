"""The figures as a picture: what each round brought, and how fast tokens came. The one user of
matplotlib.

matplotlib is an extra, `mlxspec[bench]`; it is imported when a picture is asked for.
"""

import importlib.util
import itertools
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxspec.bench.figures import Cell, Row
from mlxspec.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = (*range(1, 9), 9, 13, 17, 25)  # the least tokens of a round in each bar; the last has no end
GREY, BLUE, LINE = "#b8bcc4", "#1f6feb", "#e6e8eb"
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11, "pad": 26}
LEGEND: dict[str, Any] = {  # between title and axes, where no bar can be
    "loc": "lower left",
    "bbox_to_anchor": (-0.01, 0.99),
    "ncols": 4,
    "frameon": False,
    "fontsize": 9,
    "handlelength": 1.2,
    "columnspacing": 1.4,
    "borderaxespad": 0.2,
}
COLOURS = {"edits": "#1f6feb", "humaneval": "#e8772e", "chat": "#2a9d6f", "mixed": "#8957e5"}


def need() -> None:
    """Raises UserError where no picture can be drawn, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "--out needs matplotlib, which is not installed; run: pip install 'mlxspec[bench]'"
        )


def draw(file: Path, title: str, cells: Sequence[Cell], rows: Sequence[Row]) -> None:
    """Write the picture as PNG. Raises OSError where `file` cannot be written."""
    need()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, max(4.6, 1.6 + 0.55 * len(rows))), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", fontweight="bold")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    _lengths(left, cells)
    _speeds(right, rows)
    figure.savefig(file, format="png")


def _lengths(axes: "Axes", cells: Sequence[Cell]) -> None:
    """Share of rounds by the tokens they brought, a bar for each workload; its streams are taken
    together."""
    names = list(dict.fromkeys(cell.workload for cell in cells))
    counts = {name: [0] * len(BINS) for name in names}
    for cell in cells:
        for brought, rounds in cell.brought().items():
            counts[cell.workload][bisect(BINS, brought) - 1] += rounds
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        total = sum(counts[name]) or 1
        at = [n + (i - (len(names) - 1) / 2) * width for n in range(len(BINS))]
        share = [100 * n / total for n in counts[name]]
        axes.bar(
            at,
            share,
            width * 0.92,
            label=f"{name} ({total:,} rounds)",
            color=COLOURS.get(name, GREY),
        )
    axes.set_xticks(range(len(BINS)), _labels(), fontsize=8)
    axes.set(xlabel="tokens that a round brought", ylabel="rounds, %")
    axes.set_title("Rounds with speculation, by length", **TITLE)
    axes.grid(axis="y", color=LINE)
    axes.legend(**LEGEND)


def _labels() -> list[str]:
    last = [(low, high - 1) for low, high in itertools.pairwise(BINS)]
    return [*(str(low) if low == high else f"{low}-{high}" for low, high in last), f"{BINS[-1]}+"]


def _speeds(axes: "Axes", rows: Sequence[Row]) -> None:
    """Tokens/s without and with speculation, one pair of bars a row, and the ratio of decode
    times."""
    for name, colour, side, values in (
        ("without speculation", GREY, -0.2, [r.plain or 0.0 for r in rows]),
        ("with speculation", BLUE, 0.2, [r.drafted or 0.0 for r in rows]),
    ):
        axes.barh([i + side for i in range(len(rows))], values, 0.38, label=name, color=colour)
    for i, r in enumerate(rows):
        if r.ratio is not None and r.drafted is not None:
            axes.annotate(
                f"{r.ratio:.2f}x",
                (r.drafted, i + 0.2),
                (5, 0),
                textcoords="offset points",
                va="center",
                size=9,
            )
    streams = [f"{r.workload}\n{r.streams} stream{'s' * (r.streams > 1)}" for r in rows]
    axes.set_yticks(range(len(rows)), streams, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="tokens/s of one stream, median over prompts")
    axes.set_title("Decode speed, and how many times faster with speculation", **TITLE)
    axes.grid(axis="x", color=LINE)
    axes.legend(**LEGEND)

"""The picture of `mlxspec tune`: what a step costs, how deep is drafted, what kernels bring.

matplotlib is an extra, `mlxspec[bench]`; it is imported when a picture is drawn.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.bench.plot import GREY, LINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mlxspec.bench.tune import Found

COLOURS = ("#1f6feb", "#e8772e", "#2a9d6f", "#8957e5")
STYLES = ("-", "--")  # of a source of drafts


def draw(file: Path, found: "Found") -> None:
    """Write the picture as PNG. Raises OSError where `file` cannot be written."""
    from matplotlib.figure import Figure

    count = 2 + bool(found.gains)
    figure = Figure(figsize=(5.4 * count, 4.4), dpi=150, layout="constrained")
    figure.suptitle(
        f"mlxspec tune: {found.model}", fontsize=12, x=0.01, ha="left", fontweight="bold"
    )
    parts = figure.subplots(1, count)
    for axes in parts:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(color=LINE)
    _costs(parts[0], found)
    _depths(parts[1], found)
    if found.gains:
        _gains(parts[2], found)
    for axes in parts:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, format="png")


def _costs(axes: "Axes", found: "Found") -> None:
    for colour, (context, seconds) in zip(COLOURS, found.steps.items(), strict=False):
        times = [1e3 * s for s in seconds.values()]
        axes.plot(
            list(seconds), times, "o-", ms=4, color=colour, label=f"{context} tokens of context"
        )
        axes.plot(list(seconds), [times[0] * n for n in seconds], ":", lw=1, color=GREY)
    axes.annotate(
        "dotted: rows one by one", (0.98, 0.02), xycoords="axes fraction", ha="right", size=8
    )
    axes.set_ylim(0, 1.15e3 * max(max(seconds.values()) for seconds in found.steps.values()))
    axes.set(xlabel="rows of a step", ylabel="ms", title="What a step costs")


def _depths(axes: "Axes", found: "Found") -> None:
    for style, (source, by_context) in zip(STYLES, found.depths.items(), strict=False):
        for colour, (context, chosen) in zip(COLOURS, by_context.items(), strict=False):
            depths = [depth for depth, _ in chosen.values()]
            label = f"{source}, {context} tokens of context"
            axes.plot(
                [100 * p for p in chosen],
                depths,
                style,
                marker="o",
                ms=4,
                color=colour,
                label=label,
            )
    axes.set_ylim(bottom=0)
    axes.set(
        xlabel="chance that a drafted token is accepted, %",
        ylabel="tokens drafted",
        title="How deep",
    )


def _gains(axes: "Axes", found: "Found") -> None:
    for name, gains in found.gains.items():
        axes.plot(list(gains), list(gains.values()), "o-", ms=4, label=name)
    axes.axhline(1, color=GREY, lw=1)
    axes.set(xlabel="rows", ylabel="times as fast as MLX's own", title="Kernels")

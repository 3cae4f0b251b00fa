"""The pictures: throughput by streams, the first token by turn of a session, gaps beside a long
prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cells import STREAMS, TURNS
from bench.rows import Rows, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "mlxspec": "#1f6feb",
    "mlxspec-plain": "#79b0ff",
    "mlx_lm.server": "#e8772e",
    "vllm-mlx": "#2a9d6f",
    "vllm-mlx-paged": "#7cc9a8",
    "rapid-mlx": "#8957e5",
    "rapid-mlx-suffix": "#c4a5f5",
    "mlx-vlm": "#c9304f",
    "mlx-vlm-apc": "#e88fa1",
}
OTHER, LINE = "#6b7280", "#e6e8eb"
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11, "pad": 10}


def all_of(rows: Rows, stem: Path) -> list[Path]:
    """Write STEM-streams.png and its like, those of which something was measured."""
    from matplotlib.figure import Figure

    made = []
    for name, drawn in (("streams", streams), ("session", session), ("gaps", gaps)):
        figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=LINE)
        if drawn(axes, rows):
            axes.legend(frameon=False, fontsize=9)
            made.append(stem.with_name(f"{stem.name}-{name}.png"))
            figure.savefig(made[-1], format="png")
    return made


def streams(axes: "Axes", rows: Rows) -> bool:
    drawn = _lines(axes, rows, STREAMS, lambda n: (f"streams {n}", "tokens_per_s"))
    axes.set_xscale("log", base=2)
    axes.set_xticks(STREAMS, [str(n) for n in STREAMS])
    axes.set(
        xlabel="requests, each at a random time in about two seconds",
        ylabel="tokens/s of all",
        ylim=(0, None),
    )
    axes.set_title("Throughput by streams, and the spread of the rounds", **TITLE)
    return drawn


def session(axes: "Axes", rows: Rows) -> bool:
    turns = tuple(range(1, TURNS + 1))
    drawn = _lines(axes, rows, turns, lambda n: ("session", f"ttft_turn_{n}_s"))
    axes.set_xticks(turns)
    axes.set(xlabel="turn of the conversation", ylabel="seconds to the first token", ylim=(0, None))
    axes.set_title("How soon an agent is answered, as its conversation grows", **TITLE)
    return drawn


def gaps(axes: "Axes", rows: Rows) -> bool:
    """Every wait of the first round, longest last, so that a line's end is the longest gap."""
    drawn = False
    for name in rows.servers():
        found = sorted(
            r.value
            for r in rows.rows
            if (r.server, r.workload, r.round) == (name, "prefill", 0)
            and r.metric.removeprefix("gap_").isdigit()
        )
        if found:
            share = [100 * (i + 1) / len(found) for i in range(len(found))]
            colour = COLOURS.get(name, OTHER)
            axes.plot(
                share,
                found,
                color=colour,
                label=f"{name}: longest {found[-1]:.2g} s",
                marker=".",
                ms=4,
            )
            drawn = True
    axes.set_yscale("log")
    axes.set(xlabel="of all pieces of the running answer, %", ylabel="seconds waited for a piece")
    axes.set_title("Waits of a running answer beside a long prompt, first round", **TITLE)
    return drawn


def _lines(
    axes: "Axes", rows: Rows, at: tuple[int, ...], what: Callable[[int], tuple[str, str]]
) -> bool:
    """A line a server: medians of the rounds, with bars from the least to the most."""
    drawn = False
    for name in rows.servers():
        points = [(n, s) for n in at if (s := spread(rows.values(name, *what(n)).values()))]
        if points:
            middle = [s.median for _, s in points]
            bars = [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]]
            colour = COLOURS.get(name, OTHER)
            axes.errorbar(
                [n for n, _ in points],
                middle,
                bars,
                color=colour,
                label=name,
                marker="o",
                ms=4,
                capsize=3,
            )
            drawn = True
    return drawn

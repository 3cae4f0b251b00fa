"""The figures as a table for the terminal, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from mlxspec.bench.figures import Cell, Row

NONE = "-"
COLUMNS = (
    "\nworkload",
    "streams\n/prompts",
    "\ntokens",
    "tok/s\nwithout",
    "tok/s\nwith",
    "decode\ntime",
    "whole\ntime",
    "tokens\n/round",
    "drafts\nkept",
    "\nby source",
)
CAPTION = "tok/s: one stream, median of prompts. time: without speculation / with it."


def table(rows: Sequence[Row]) -> Table:
    """One line a row, 80 columns wide at least; a row is red where an answer differs. Speeds are of
    one stream, the median; of times, the ratio without to with."""
    made = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=CAPTION, caption_justify="left"
    )
    for name in COLUMNS:
        text = name in (COLUMNS[0], COLUMNS[-1])
        made.add_column(name, justify="left" if text else "right", no_wrap=name != COLUMNS[-1])
    for r in rows:
        made.add_row(
            r.workload,
            f"{r.streams}/{r.prompts}",
            f"{r.tokens:,}",
            _shown(r.plain, "{:.1f}"),
            _shown(r.drafted, "{:.1f}"),
            _shown(r.ratio, "{:.2f}x"),
            _shown(r.whole, "{:.2f}x"),
            _shown(r.per_round, "{:.2f}"),
            _shown(r.kept, "{:.0%}"),
            ", ".join(f"{name} {part:.0%}" for name, part in r.sources.items()) or NONE,
            style="red" if r.differing else "",
        )
    return made


def verdict(rows: Sequence[Row]) -> Text:
    """Whether speculation changed any answer, and which."""
    names = [f"{name} ({r.workload}, streams: {r.streams})" for r in rows for name in r.differing]
    if not names:
        return Text(
            "Every prompt gave the same tokens with and without speculation.", style="green"
        )
    count = f"{len(names)} prompt{'s' * (len(names) > 1)}"
    said = f"{count} gave other tokens with speculation than without: {', '.join(names)}"
    return Text(said, style="bold red")


def report(about: dict[str, Any], cells: Sequence[Cell], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was measured, for a program to read; the answers' tokens once, as plain
    decoding gave them."""
    runs = [
        {
            "workload": cell.workload,
            "streams": cell.streams,
            "side": side,
            "seconds": group.seconds,
            "answers": [{**asdict(a), "tokens": len(a.tokens)} for a in group.answers],
        }
        for cell in cells
        for trial in cell.trials
        for side, group in (("plain", trial.plain), ("drafted", trial.drafted))
    ]
    tokens = {
        cell.workload: {a.name: a.tokens for a in cell.answers(drafted=False)}
        for cell in reversed(cells)
    }
    return {**about, "rows": [asdict(r) for r in rows], "runs": runs, "answers": tokens}


def _shown(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)

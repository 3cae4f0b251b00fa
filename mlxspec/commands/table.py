"""Prints tables for the commands."""

from collections.abc import Iterable, Sequence

from mlxspec.types import printable

WIDTH = 240  # characters, if stdout is not a terminal


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a line per row; text that is too wide for the terminal is folded."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    console.print(table)

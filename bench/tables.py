"""Tables of predictions in Markdown, each under a line that says what it is."""

from collections.abc import Sequence

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

NOTE = "A PREDICTION from a formula. Nothing of it was run on these chips."


def empty(columns: Sequence[str], words: int) -> Table:
    """The first `words` columns are words, the others figures."""
    made = Table(box=MARKDOWN)
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < words else "right", no_wrap=True)
    return made


def show(made: Table, about: str = "") -> None:
    """Prints what the table is about, NOTE and the table, as wide as it is."""
    console = Console()
    if about:
        console.print(about)
    console.print(NOTE, style="bold")
    whole = console.measure(made, options=console.options.update(max_width=10_000)).maximum
    console.width = max(console.width, whole)  # a heading that is cut would lose its *
    console.print(made)

"""Progress of long work on stderr: a bar on a terminal, elsewhere a log line every two seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from mlxspec import log

LOG_S = 2.0  # between two log lines

Report = Callable[[float, float], None]  # (done, total), in any unit


@contextmanager
def progress(text: str) -> Iterator[Report]:
    """Yields a function to call with (done, total). Shows nothing before its first call."""
    console = Console(stderr=True)
    logged = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(text, total=None, visible=False)

        def report(done: float, total: float) -> None:
            nonlocal logged
            bar.update(task, completed=done, total=total, visible=True)
            if bar.disable and time.monotonic() - logged > LOG_S:
                logged = time.monotonic()
                log.info("%s: %.0f %%", text, 100 * done / max(total, 1))

        yield report

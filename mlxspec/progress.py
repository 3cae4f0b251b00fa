"""Progress of long work on stderr: a bar on a terminal, elsewhere a log line every two seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from mlxspec import log

LOG_S = 2.0  # between two log lines

Report = Callable[[float, float], None]  # (done, total), in any unit


@contextmanager
def progress(text: str) -> Iterator[Report]:
    """Yields a function to call with (done, total). Shows nothing before its first call."""
    if not _terminal(sys.stderr):
        yield _log_lines(text)
        return
    from rich.console import Console  # not imported by a server without a terminal
    from rich.progress import Progress

    # Whole lines: other output meanwhile goes through this console, above the bar.
    console = Console(stderr=True, soft_wrap=True)
    with Progress(console=console, transient=True, redirect_stdout=_terminal(sys.stdout)) as bar:
        task = bar.add_task(text, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _terminal(stream: TextIO | None) -> bool:
    return bool(stream and stream.isatty())


def _log_lines(text: str) -> Report:
    logged = time.monotonic()

    def report(done: float, total: float) -> None:
        nonlocal logged
        if time.monotonic() - logged > LOG_S:
            logged = time.monotonic()
            log.info("%s: %.0f %%", text, 100 * done / max(total, 1))

    return report

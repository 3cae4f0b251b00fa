"""Progress of long work in the log: a line every two seconds."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("mlxspec")

LOG_S = 2.0  # between two log lines

Report = Callable[[float, float], None]  # (done, total), in any unit


@contextmanager
def progress(text: str) -> Iterator[Report]:
    """Yields what is called with (done, total). Logs nothing in the first two seconds."""
    logged = time.monotonic()

    def report(done: float, total: float) -> None:
        nonlocal logged
        if time.monotonic() - logged > LOG_S:
            logged = time.monotonic()
            log.info("%s: %.0f %%", text, 100 * done / max(total, 1))

    yield report

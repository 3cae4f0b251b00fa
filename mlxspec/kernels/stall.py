"""Notices a step that hangs while kernels are in use, and parks them all: which one hung cannot be told.

Rule: being parked wrongly costs speed only, and `mlxspec tune` tries again; going on may cost minutes a step.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from mlxspec.kernels.proven import VERDICTS, Verdict

log = logging.getLogger("mlxspec")

TIMES = 10  # the median of steps with as many rows
LEAST_S = 1.0  # other programs on the GPU hold a step up for tenths of a second, a stall for many seconds
ROUNDS = 16  # that are known before one is judged; the first few compile
WINDOW = 64
MOST_ROWS = 64  # from here on all count as alike, so that this is bounded


@dataclass(slots=True)
class Stalls:
    """What an engine's steps took. `keep` puts a verdict where the next start finds it."""

    keep: Callable[[str, Verdict], None]
    _past: dict[int, deque[float]] = field(default_factory=dict)  # seconds, by rows

    def took(self, rows: int, seconds: float, meanwhile: int = 0) -> None:
        """A step of `rows` rows took so long; while it ran, one of `meanwhile` rows was built, 0: none. To be
        told of steps without a prompt, while memory is not short."""
        past = self._past.setdefault(min(rows, MOST_ROWS), deque(maxlen=WINDOW))
        if seconds >= LEAST_S and self._knows(rows) and (not meanwhile or self._knows(meanwhile)):
            usual = median(past)
            if seconds >= TIMES * usual:
                longer = f"{seconds:.1f} s, {seconds / usual:.0f} times as long as usual"
                self._park(f"a step of {rows} rows took {longer}")
                return
        past.append(seconds)

    def _knows(self, rows: int) -> bool:
        return len(self._past.get(min(rows, MOST_ROWS), ())) >= ROUNDS

    def _park(self, why: str) -> None:
        used = {name: verdict for name, verdict in VERDICTS.items() if verdict.way}
        for name, verdict in used.items():
            verdict.why = f"{why}, while {verdict.way} was in use; `mlxspec tune` tries it again"
            verdict.way, verdict.parked = "", True
            self.keep(name, verdict)
        if used:
            log.warning(
                "%s: %d kernels are parked from now on, MLX's own run; `mlxspec tune` tries them again",
                why,
                len(used),
            )

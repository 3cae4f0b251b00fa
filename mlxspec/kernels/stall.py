"""Notices a step that hangs while kernels are in use, and parks them all: which one hung cannot be
told.

Rule: being parked wrongly costs speed, and the last bits of an answer that is being written, as
another count of rows does; going on may cost minutes a step. So it is for this process only, the
second time for good.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import mlx.core as mx

from mlxspec.kernels.proven import VERDICTS, Verdict

log = logging.getLogger("mlxspec")

TIMES = 10  # the median of steps with as many rows
LEAST_S = (
    1.0  # other programs on the GPU hold a step up for tenths of a second, a stall for many seconds
)
ROUNDS = 16  # that are known before one is compared
ABSURD_S = (
    10.0  # needs no comparison: a token every ten seconds is of no use, whatever the usual is
)
FIRST_S = (
    60.0  # that the first step with so many rows may take: it compiles, in seconds, not in a minute
)
WINDOW = 64
MOST_ROWS = 64  # from here on all count as alike, so that this is bounded


@dataclass(slots=True)
class HangDetector:
    """What an engine's steps took. `keep` is told of a verdict as it was and as parked, and returns
    whether the latter is what the next start will find."""

    keep: Callable[[str, Verdict, Verdict], bool]
    _past: dict[int, deque[float]] = field(default_factory=dict)  # seconds, by rows

    def took(self, rows: int, seconds: float, waited: float, meanwhile: int = 0) -> None:
        """A step of `rows` rows lasted `seconds`, `waited` of which the host only waited for the
        device; while it ran, one of `meanwhile` rows was built, 0: none. To be told of steps
        without a prompt, while memory is not short."""
        counts = [min(count, MOST_ROWS) for count in (rows, meanwhile) if count]
        known = min(len(self._past.get(count, ())) for count in counts)
        past = self._past.setdefault(counts[0], deque(maxlen=WINDOW))
        why = f"a step of {rows} rows waited {waited:.1f} s for the GPU"
        if waited >= (ABSURD_S if known else FIRST_S):
            self._park(why)
        elif known >= ROUNDS and waited >= max(LEAST_S, TIMES * median(past)):
            self._park(f"{why}, {waited / median(past):.0f} times as long as one usually takes")
        else:
            past.append(seconds)

    def _park(self, why: str) -> None:
        used = {name: verdict for name, verdict in VERDICTS.items() if verdict.way}
        good = 0
        for name, verdict in used.items():
            before = replace(verdict, why="; ".join(filter(None, (verdict.why, f"once, {why}"))))
            verdict.why, verdict.way, verdict.parked = (
                f"{why}, while {verdict.way} was in use",
                "",
                True,
            )
            why_again = f"{verdict.why}, not for the first time; `mlxspec tune` tries it again"
            good += self.keep(name, before, replace(verdict, why=why_again))
        if used:
            # what is compiled has a kernel in it, and does not ask for its verdict
            mx.disable_compile()
            log.warning(
                "%s: %d kernels are parked, and MLX's own run, until this process ends; for %d of them it is"
                " not the first time: they wait for `mlxspec tune`",
                why,
                len(used),
                good,
            )

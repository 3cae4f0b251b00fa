"""The answers that run and the last that ended, in numbers, for whoever watches.

Rule: no text of a prompt or an answer is kept here, and no more than KEPT rows of what has ended.
All that runs or waits is shown: the engine takes no more than so much.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

KEPT = 24

Doing = Literal["writing", "reading", "waiting"]
ORDER: tuple[Doing, ...] = ("writing", "reading", "waiting")


@dataclass(frozen=True, slots=True)
class Row:
    """One answer: tokens, and seconds since it arrived. `first` is 0 before its first token,
    `outcome` empty while it runs; `rate` is in tokens/s behind the first. `state` is the
    scheduler's while it runs: it waits for a place, its prompt is read, its answer is written."""

    id: str
    model: str
    prompt: int
    cached: int
    generated: int
    rounds: int
    drafted: int
    kept: int
    first: float
    seconds: float
    rate: float
    outcome: str = ""
    state: Doing = "waiting"


@dataclass(slots=True)
class Journal:
    """`live` makes the rows of what runs, by id: no more than the server has connections."""

    live: dict[str, Callable[[], Row]] = field(default_factory=dict)
    ended: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT))

    def end(self, row: Row) -> None:
        self.live.pop(row.id, None)
        self.ended.appendleft(row)

    def rows(self) -> list[Row]:
        """What writes, what reads, what waits, what ended; each newest first."""
        made = [make() for make in reversed(self.live.values())]
        return [*sorted(made, key=lambda row: ORDER.index(row.state)), *self.ended]

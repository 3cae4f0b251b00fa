"""How many prompt rows a step may carry, set by time: a decoding neighbour should wait `gap`
seconds at most.

Rule: the budget follows what steps of this size cost here, now; nothing about the machine is
assumed.
"""

from dataclasses import dataclass

FLOOR = 8  # rows; a prefill always gets on
CEILING = 2048  # rows; bounds a step's memory
# seconds a prefill step may take when nobody decodes: how late a cancel or an arrival is seen
IDLE_GAP = 1.0
MARGIN = 0.9  # aim below the bound: steps vary, but what they cost without prefill is paid for each
RISE = 1.3  # at most this much more at once: one fast step is no promise


@dataclass(slots=True)
class PrefillBudget:
    """`rows(decoding)` is the prefill budget of a step; `learn` feeds it what steps took.

    A step costs a + b * rows; scaling the rows by wanted / measured time converges on the wanted
    time for any a below it. `fixed` rows, if not 0, override the clock."""

    gap: float = 0.25
    fixed: int = 0
    shared: float = 64.0  # rows beside decodes
    alone: float = 256.0  # rows when nobody decodes

    def rows(self, decoding: bool) -> int:
        return self.fixed or int(self.shared if decoding else self.alone)

    def calibrate(self, prefill: int, seconds: float) -> None:
        """The first estimate, from a warm-up step of `prefill` rows that took `seconds`."""
        rate = MARGIN * prefill / max(seconds, 1e-6)
        self.alone = min(CEILING, max(FLOOR, rate * IDLE_GAP))
        self.shared = min(CEILING, max(FLOOR, rate * self.gap))

    def learn(self, prefill: int, decoding: bool, seconds: float) -> None:
        """`prefill` rows beside decodes or alone took `seconds`. A fast step well below the
        budget says little; a slow one says that the budget is too large."""
        want = MARGIN * (self.gap if decoding else IDLE_GAP)
        few = prefill < 0.5 * self.rows(decoding)
        if self.fixed or seconds <= 0 or (few and (seconds <= want or prefill < FLOOR)):
            return
        ratio = min(RISE, max(0.25, want / seconds))
        if decoding:
            self.shared = min(CEILING, max(FLOOR, self.shared * ratio))
        else:
            self.alone = min(CEILING, max(FLOOR, self.alone * ratio))
            self.shared = min(self.shared, self.alone)

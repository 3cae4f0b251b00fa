"""How many prompt rows a step may have, so that running answers wait `gap` seconds at most.

Rule: the budget follows the measured times of steps; nothing is assumed of the machine.
"""

from dataclasses import dataclass

MIN_ROWS = 8  # a prefill always makes progress
MAX_ROWS = 2048  # bounds a step's memory
IDLE_GAP = 1.0  # seconds of a step when nothing decodes: a cancel or an arrival waits for it
MARGIN = 0.9  # aims below the bound: steps vary
MAX_RISE, MAX_DROP = 1.3, 0.25  # of the budget in one step: one fast or slow step is no proof


@dataclass(slots=True)
class PrefillBudget:
    """`rows(decoding)` is the prefill budget of a step; `learn` feeds it what steps took.

    A step costs a + b * rows seconds with unknown a and b. Scaling the rows of a step by wanted /
    measured time never predicts too little time for more rows, and converges on the wanted time
    for fewer. `fixed` rows, if not 0, override the clock.
    """

    gap: float = 0.25  # seconds
    fixed: int = 0
    shared: float = 64.0  # rows beside decodes
    alone: float = 256.0  # rows when nothing decodes

    def rows(self, decoding: bool) -> int:
        if self.fixed:
            return self.fixed
        return int(self.shared if decoding else self.alone)

    def learn(self, prefill: int, decoding: bool, seconds: float) -> None:
        """A step with `prefill` prompt rows took `seconds`. A fast step far below the budget says
        little; a slow one says that the budget is too large."""
        if self.fixed or seconds <= 0:
            return
        wanted = MARGIN * (self.gap if decoding else IDLE_GAP)
        small = prefill < 0.5 * self.rows(decoding)
        if small and (seconds <= wanted or prefill < MIN_ROWS):
            return
        ratio = min(MAX_RISE, max(MAX_DROP, wanted / seconds))
        budget = self.shared if decoding else self.alone
        # From the rows that ran, not from the fraction that the budget holds beyond them: else it
        # rises past what was measured and falls back, by turns.
        scaled = min(prefill, budget) * ratio
        if ratio < 1 or scaled > budget:
            budget = min(MAX_ROWS, max(MIN_ROWS, scaled))
        if decoding:
            self.shared = budget
        else:
            self.alone = budget
            self.shared = min(self.shared, self.alone)

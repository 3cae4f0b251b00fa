"""Whether trees of drafts would beat chains on a machine, from what a step costs there by its rows:
`scripts/first-mac` asks.

The gains are those of a replay of drafted answers of the tiny pairs (12 answers of 64 tokens each;
shapes that are known before anything is drafted, as rounds here wait for nothing) in which each row
after the first costs the same part of a step. NOTES.md names the commit that has the replay.
"""

from collections.abc import Mapping
from statistics import median

import numpy as np

ROW_COSTS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12)  # of a step, each further row
# Percent more tokens a second by the best tree than by the best chain, by (head, temperature).
GAINS = {
    ("mtp", 0.0): (25.7, 16.8, 12.9, 8.9, 6.6, 2.8, 0.1, 0.0),
    ("mtp", 0.8): (26.6, 17.7, 11.9, 5.0, 2.4, 0.0, 0.0, 0.0),
    ("eagle3", 0.0): (20.4, 10.5, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ("eagle3", 0.8): (23.1, 11.6, 6.1, 2.0, 0.9, 0.0, 0.0, 0.0),
    ("dflash", 0.0): (23.6, 15.2, 8.9, 5.7, 3.6, 2.2, 0.0, 0.0),
    ("dflash", 0.8): (17.3, 10.8, 7.7, 3.7, 2.3, 0.7, 0.0, 0.0),
    ("dflash2", 0.0): (12.0, 5.3, 2.5, 1.7, 0.8, 0.0, 0.0, 0.0),
    ("dflash2", 0.8): (14.6, 7.8, 5.0, 3.9, 3.8, 0.9, 0.0, 0.0),
    ("dspark", 0.0): (22.6, 11.3, 6.2, 3.0, 1.5, 0.0, 0.0, 0.0),
    ("dspark", 0.8): (28.1, 17.9, 14.5, 9.5, 6.6, 3.6, 0.3, 0.0),
}
ROWS = 9  # of a step with a draft, up to which a row's cost is averaged
WORTH = 5.0  # percent


def verdict(seconds: Mapping[int, float]) -> str:
    """A line about trees where a step takes `seconds` (of any unit) by its rows; 1 and ROWS must be
    among these."""
    row = max(0.0, (seconds[ROWS] / seconds[1] - 1) / (ROWS - 1))
    found = [float(np.interp(row, ROW_COSTS, gains)) for gains in GAINS.values()]
    typical = median(found)
    chosen = "trees are worth building" if typical >= WORTH else "drafts stay chains"
    return (
        f"trees of drafts: a further row takes {row:.1%} of a step (up to {ROWS} rows), where trees"
        f" gain {min(found):.0f} to {max(found):.0f} %, half of the heads {typical:.0f} % or more:"
        f" {chosen}"
    )

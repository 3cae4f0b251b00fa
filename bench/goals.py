"""What mlxspec is to reach beside the others: one table, and how far a run is from it.

Rule: a ratio is of one round; what counts is the median of the rounds. The best peer is the one
with the best median, with the best setting that was measured of it: each server's line is one.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from bench.cells import WARM
from bench.rows import Rows, Spread, ratios, spread
from bench.servers import MLX_VLM, SERVERS

OURS = "mlxspec"
COPIES = {name for name, server in SERVERS.items() if server.copies}
MLX_LM = "mlx_lm.server"
BEST = "the best peer"
COPYING = "the best peer that copies"
EDIT = "code edit beside the best that copies"
SIGNS = {">": operator.gt, "≥": operator.ge, "≤": operator.le}
RATE_WARM = "tokens_per_round_warm"
ANSWERS = "answers"  # the workload of a goal that counts those of the probes which are right
RIGHT = {
    "right answers without drafts": "no draft",
    "right answers with drafts": "draft",
    "right answers with a head": "head",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """`against`: a server, BEST, COPYING, or empty for a figure of ours alone. `least`: ours is to
    be at least `bound` times theirs, or more than that where it says `above`; else at most."""

    text: str
    workload: str
    metric: str
    against: str
    bound: float
    least: bool = True
    above: bool = False

    @property
    def sign(self) -> str:
        return ">" if self.above else "≥" if self.least else "≤"


GOALS = (
    Goal("one chat, tokens/s", "chat", "tokens_per_s", BEST, 1.4),
    Goal(f"{EDIT}, tokens/s after the first", "edit", "tokens_per_s", COPYING, 1.5),
    Goal(f"{EDIT}, tokens/s with the prompt's time", "edit", "whole_tokens_per_s", COPYING, 1.5),
    Goal("8 streams, tokens/s of all", "streams 8", "tokens_per_s", BEST, 1.15),
    *(
        Goal(f"{kind} head, tokens a round", f"{kind} 1", "tokens_per_round", BEST, 1.0)
        for kind in MLX_VLM.heads
    ),
    *(
        Goal(f"{kind} head, the same at T = {WARM}", f"{kind} 1", RATE_WARM, BEST, 1.0, above=True)
        for kind in MLX_VLM.heads
    ),
    Goal(
        "first token of a long prompt, again / new", "first token", "hot_by_cold", "", 1 / 50, False
    ),
    Goal("longest gap beside a long prompt", "prefill", "gap_longest_s", MLX_LM, 1 / 5, False),
    Goal("memory after the workloads", "memory", "rss_mb", MLX_LM, 1.0, False),
    Goal("start to first token", "start", "first_token_s", BEST, 1.0, False),
    Goal("the first start with a model", "start", "first_ever_s", BEST, 2.0, False),
    *(
        Goal(f"{text}, of those asked for", ANSWERS, variant, "", 1.0)
        for text, variant in RIGHT.items()
    ),
    Goal("installed, MB", "install", "size_mb", "", 400, False),
    Goal("installed without torch", "install", "torch", "", 0, False),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`peer`: whom ours was compared with. `found` is None where something was not measured."""

    goal: Goal
    peer: str
    found: Spread | None

    @property
    def met(self) -> bool | None:
        if self.found is None:
            return None
        return SIGNS[self.goal.sign](self.found.median, self.goal.bound)

    @property
    def said(self) -> str:
        """met, missed by how much, or not measured."""
        if self.found is None:
            return "not measured"
        if self.met:
            return "met"
        if not self.goal.bound or not self.found.median:
            return "missed"
        off = self.found.median / self.goal.bound
        return f"missed: {off:.2f} {'of' if self.goal.least else 'times'} the bound"


def verdict(goal: Goal, rows: Rows) -> Verdict:
    if goal.workload == ANSWERS:
        right, asked = rows.answered(OURS, goal.metric)
        return Verdict(goal, "", spread([right / asked] if asked else []))
    ours = rows.values(OURS, goal.workload, goal.metric)
    if not goal.against:
        return Verdict(goal, "", spread(ours.values()))
    peer = _best(goal, rows) if goal.against in (BEST, COPYING) else goal.against
    return Verdict(goal, peer, spread(ratios(ours, rows.values(peer, goal.workload, goal.metric))))


def verdicts(rows: Rows, goals: Iterable[Goal] = GOALS) -> list[Verdict]:
    return [verdict(goal, rows) for goal in goals]


def _best(goal: Goal, rows: Rows) -> str:
    """The peer with the best median; "" where none has any."""
    found = {
        name: s.median
        for name in rows.servers()
        if not name.startswith(OURS)
        and (goal.against == BEST or name in COPIES)
        and (s := spread(rows.values(name, goal.workload, goal.metric).values())) is not None
    }
    return (max if goal.least else min)(found, key=found.__getitem__, default="")

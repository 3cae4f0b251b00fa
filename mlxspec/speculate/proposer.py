"""Chooses, for every sequence of a step, which drafter drafts and how much: whatever promises the
most tokens per second.

Rule: acceptance rates and costs are measured, never assumed for long; where drafting does not pay
it is parked, and probed now and then.
"""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeVar

from mlxspec.model.batch import Step
from mlxspec.speculate import Drafter, Plan
from mlxspec.speculate.controller import Controller, Costs, Key, Proposal, SequenceStats
from mlxspec.speculate.ngram import GRAMMAR, first_rate
from mlxspec.types import Accepted, Draft, Entry, Sequence

log = logging.getLogger("mlxspec")

T = TypeVar("T")
Options = dict[Proposal, Drafter]

FIRST_RATE = 0.6  # of the first token of a model or head, before anything is known


@dataclass(frozen=True, slots=True)
class Choice:
    """How one sequence drafts in the next step: `depth` tokens of a drafter's proposal."""

    drafter: Drafter
    proposal: Proposal
    depth: int


@dataclass(slots=True)
class Proposer:
    """Holds the drafters and one controller. `costs` are those of the target's steps; `overlap`:
    the target can start a step while drafts are in flight (the rows layout)."""

    costs: Costs
    drafters: list[Drafter]
    overlap: bool = True
    control: Controller = field(init=False)
    _stats: dict[Sequence, SequenceStats] = field(default_factory=dict)
    _chosen: dict[Sequence, Choice] = field(default_factory=dict)
    _by_name: dict[str, Drafter] = field(init=False)  # also those that failed

    def __post_init__(self) -> None:
        self.control = Controller(self.costs, self._prior)
        self._by_name = {drafter.name: drafter for drafter in self.drafters}

    def begin(self, seq: Sequence) -> None:
        self._stats[seq] = self.control.begin()
        for drafter in self.drafters:
            self._ask(drafter, drafter.begin, seq)

    def end(self, seq: Sequence) -> None:
        self._stats.pop(seq, None)
        for drafter in self.drafters:
            self._ask(drafter, drafter.end, seq)

    def clear(self) -> None:
        for drafter in self.drafters:
            self._ask(drafter, drafter.clear)

    def _ask(self, drafter: Drafter, method: Callable[..., T], *args: object) -> T | None:
        """Call a drafter. It only makes things faster: if it fails, decoding goes on without it."""
        try:
            return method(*args)
        except Exception:
            log.exception("drafting by %s failed: it is off until the next start", drafter.name)
            self.drafters = [other for other in self.drafters if other is not drafter]
            return None

    # ---- before a step -----------------------------------------------------------------------

    def needs_sync(self, seqs: Seq[Sequence]) -> bool:
        """Whether a draft in flight cannot be continued before it is read, or a copy is worth
        waiting for the tokens in flight."""
        for seq in seqs:
            restricted = seq.request.sampling.penalized or seq.matcher is not None
            if seq.inflight_drafts and (restricted or not self._overlaps()):
                return True
        in_flight = {seq for seq in seqs if seq.flight}
        choices = self._decide(seqs, in_flight).values()
        return any(not choice.drafter.lazy for choice in choices)

    def depths(self, seqs: Seq[Sequence]) -> Mapping[Sequence, int]:
        read = {seq for seq in seqs if not seq.flight}
        self._chosen = self._decide(seqs, read)
        return {seq: choice.depth for seq, choice in self._chosen.items()}

    def draft(self, plan: Plan, previous: Step | None) -> None:
        for drafter in self.drafters:
            entries: list[Entry] = []
            proposals: dict[Sequence, Proposal] = {}
            for e in plan:
                choice = self._chosen.get(e.seq)
                if e.depth and choice and choice.drafter is drafter:
                    entries.append(e)
                    proposals[e.seq] = choice.proposal
            self._ask(drafter, drafter.draft, plan, previous, proposals)
            if drafter not in self.drafters:  # it may have failed half way
                for e in entries:
                    e.draft = Draft()

    def _overlaps(self) -> bool:
        """Whether steps with drafts are submitted before the step in front of them is read."""
        return self.overlap and any(drafter.lazy for drafter in self.drafters)

    def _decide(self, seqs: Seq[Sequence], read: set[Sequence]) -> dict[Sequence, Choice]:
        """What to draft for each sequence, if anything. Drafters that are not lazy are asked only
        for the sequences whose tokens are `read`, or will be."""
        seqs = [seq for seq in seqs if seq in self._stats]
        found = [self._options(seq, seq in read) for seq in seqs]
        stats = [self._stats[seq] for seq in seqs]
        proposals = [list(options) for options in found]
        context = sum(seq.known for seq in seqs)
        mode = "overlap" if self._overlaps() else "exact"
        decided = self.control.decide(stats, proposals, context, mode, self._draw(seqs))
        chosen = {}
        for seq, options, (depth, proposal) in zip(seqs, found, decided, strict=True):
            if depth and proposal:
                chosen[seq] = Choice(options[proposal], proposal, depth)
        return chosen

    def _options(self, seq: Sequence, read: bool) -> Options:
        """What could be drafted for a sequence, with its present acceptance rates, and by whom.
        Tokens that a grammar forces leave no other choice."""
        rate = self._stats[seq].rate
        options: Options = {}
        for drafter in self.drafters:
            if not (drafter.lazy or read):
                continue
            for proposal in self._ask(drafter, drafter.options, seq) or []:
                rates = {key: rate.of(key) for key in set(proposal.keys)}
                proposal.rates = [rates[key] for key in proposal.keys]
                options[proposal] = drafter
                if proposal.source == GRAMMAR:
                    return {proposal: drafter}
        return options

    def _prior(self, key: Key) -> float:
        """The acceptance rate of a key that was never tried: (source, position) starts from the
        position before it, a copy's (source, matching tokens, agreement) from a table."""
        assert isinstance(key, tuple)
        if len(key) == 3:
            return first_rate(key[1], key[2])
        source, position = key
        if position == 1:
            return FIRST_RATE
        return self.control.rate.of((source, position - 1))

    def _draw(self, seqs: Seq[Sequence]) -> float:
        return self.costs.draw([seq.request.sampling.kind for seq in seqs])

    # ---- after a step ------------------------------------------------------------------------

    def observe(self, step: Step, accepted: Seq[Accepted], seconds: float) -> None:
        if seconds > 0:
            self._learn_costs(step, seconds)
        for e, new in zip(step.plan, accepted, strict=True):
            stats = self._stats.get(e.seq)
            if stats and new.tokens and e.seq.finish is None:
                keys = e.draft.keys[: len(e.draft)]
                self.control.judge(stats, keys, new.drafts)
        for drafter in self.drafters:
            self._ask(drafter, drafter.observe, step, accepted)

    def _learn_costs(self, step: Step, seconds: float) -> None:
        """Correct the costs by what the step took. A step with a prompt in it says nothing about
        drafts; what a step with a model's drafts took beyond the target's part is the model's."""
        plan = step.plan
        if any(e.count > 1 for e in plan):
            return
        rows = sum(e.rows for e in plan)
        context = sum(e.end for e in plan)
        mode = "overlap" if step.overlaps else "exact"
        draw = self._draw([e.seq for e in plan])
        depths: dict[str, int] = {}  # by model
        for e in plan:
            source, depth = e.draft.source, len(e.draft)
            if depth and source in self._by_name:
                depths[source] = max(depth, depths.get(source, 0))
        if not depths:
            self.costs.learn(rows, context, mode, seconds, draw)
        elif len(depths) == 1:
            own = seconds - self.costs.step(rows, context, mode, draw)
            for name, depth in depths.items():
                self._by_name[name].learn_seconds(own, depth)

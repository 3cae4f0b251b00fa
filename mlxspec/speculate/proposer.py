"""Chooses, for every sequence of a step, which drafter drafts and how much: whatever promises the
most tokens per second.

Rule: acceptance rates and costs are measured, never assumed for long; where drafting does not pay
it is parked, and probed now and then.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from mlxspec.model.batch import Step
from mlxspec.speculate import Drafter
from mlxspec.speculate.controller import Controller, Costs, Key, Proposal, SequenceStats
from mlxspec.speculate.ngram import GRAMMAR, first_rate
from mlxspec.types import Accepted, Draft, Plan, Seq

log = logging.getLogger("mlxspec")

T = TypeVar("T")
Decided = dict[Seq, tuple[int, Proposal]]

FIRST_RATE = 0.6  # of the first token of a model or head, before anything is known


class Proposer:
    """Holds the drafters and one controller. `costs` are those of the target's steps; `overlap`:
    the target can start a step while drafts are in flight (the rows layout)."""

    def __init__(
        self,
        costs: Costs,
        drafters: list[Drafter],
        overlap: bool = True,
    ) -> None:
        self.costs = costs
        self.drafters = drafters
        self.overlap = overlap
        self.control = Controller(costs, self._prior)
        self._stats: dict[Seq, SequenceStats] = {}
        self._chosen: dict[Seq, Proposal] = {}
        self._by_name = {drafter.name: drafter for drafter in drafters}  # also those that failed

    def begin(self, seq: Seq) -> None:
        self._stats[seq] = self.control.begin()
        for drafter in self.drafters:
            self._ask(drafter, drafter.begin, seq)

    def end(self, seq: Seq) -> None:
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

    def needs_sync(self, seqs: Sequence[Seq]) -> bool:
        """Whether a draft in flight cannot be continued before it is read, or a copy is worth
        waiting for the tokens in flight."""
        for seq in seqs:
            if seq.inflight_drafts and not self._continues(seq):
                return True
        decided = self._decide(seqs, in_flight=True)
        return any(not proposal.drafter.lazy for _, proposal in decided.values())

    def depths(self, seqs: Sequence[Seq]) -> Mapping[Seq, int]:
        decided = self._decide(seqs, in_flight=False)
        self._chosen = {seq: proposal for seq, (_, proposal) in decided.items()}
        return {seq: depth for seq, (depth, _) in decided.items()}

    def draft(self, plan: Plan, previous: Step | None) -> None:
        for drafter in self.drafters:
            chosen = {}
            for e in plan:
                proposal = self._chosen.get(e.seq)
                if e.depth and proposal and proposal.drafter is drafter:
                    chosen[e.seq] = proposal
            self._ask(drafter, drafter.draft, plan, previous, chosen)
            if drafter in self.drafters:
                continue
            for e in plan:  # it may have failed half way
                if e.seq in chosen:
                    e.draft = Draft()

    def _overlaps(self) -> bool:
        """Whether steps with drafts are submitted before the step in front of them is read."""
        return self.overlap and any(drafter.lazy for drafter in self.drafters)

    def _continues(self, seq: Seq) -> bool:
        """Whether the sequence's next step can be built before its draft in flight is read."""
        counted = seq.request.sampling.penalized
        return self._overlaps() and not counted and seq.matcher is None

    def _decide(self, seqs: Sequence[Seq], in_flight: bool) -> Decided:
        """How many tokens to draft for each sequence, if any. Drafters that are not lazy are asked
        only for sequences that have tokens `in_flight`, as if these were read, or only for others.
        """
        seqs = [seq for seq in seqs if seq in self._stats]
        stats = [self._stats[seq] for seq in seqs]
        options = [self._options(seq, in_flight) for seq in seqs]
        if in_flight and all(proposal.drafter.lazy for some in options for proposal in some):
            return {}  # nothing would be waited for
        context = sum(seq.known for seq in seqs)
        mode = "overlap" if self._overlaps() else "exact"
        draw = self.costs.draw([seq.request.sampling.kind for seq in seqs])
        decided = self.control.decide(stats, options, context, mode, draw)
        chosen = {}
        for seq, (depth, proposal) in zip(seqs, decided, strict=True):
            if depth and proposal:
                chosen[seq] = depth, proposal
        return chosen

    def _options(self, seq: Seq, in_flight: bool) -> list[Proposal]:
        """What could be drafted for a sequence, with its present acceptance rates. Tokens that a
        grammar forces leave no other choice."""
        rate = self._stats[seq].rate
        options = []
        for drafter in self.drafters:
            if not drafter.lazy and bool(seq.flight) != in_flight:
                continue
            for proposal in self._ask(drafter, drafter.options, seq) or []:
                rates = {key: rate.of(key) for key in set(proposal.keys)}
                proposal.rates = [rates[key] for key in proposal.keys]
                proposal.drafter = drafter
                options.append(proposal)
        forced = [proposal for proposal in options if proposal.source == GRAMMAR]
        return forced or options

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

    # ---- after a step ------------------------------------------------------------------------

    def observe(self, step: Step, accepted: Sequence[Accepted], seconds: float) -> None:
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
        draw = self.costs.draw([e.seq.request.sampling.kind for e in plan])
        drafts = [e.draft for e in plan if len(e.draft) and e.draft.source in self._by_name]
        if not drafts:
            self.costs.learn(rows, context, mode, seconds, draw)
            return
        own = seconds - self.costs.step(rows, context, mode, draw)
        deepest = max(drafts, key=len)
        self._by_name[deepest.source].learn_seconds(own, len(deepest))

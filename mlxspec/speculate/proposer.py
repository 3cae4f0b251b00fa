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
from mlxspec.speculate import Drafter
from mlxspec.speculate.controller import Controller, Costs, Key, Proposal, SequenceStats
from mlxspec.speculate.ngram import GRAMMAR, first_rate
from mlxspec.types import Accepted, Draft, Entry, Sequence

log = logging.getLogger("mlxspec")

T = TypeVar("T")

FIRST_RATE = 0.6  # of the first token of a model or head, before anything is known
PARKED = 256  # steps without a draft after which the log says so
PROBE_WEIGHT = 8  # steps that a single drafted token sets this count back

Choice = tuple[Drafter, Proposal]


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
    _names: frozenset[str] = frozenset()  # of all drafters, also of those that failed
    _quiet: int = 0  # steps that decoded without a draft, probes aside

    def __post_init__(self) -> None:
        self.control = Controller(self.costs, self._prior)
        self._names = frozenset(drafter.name for drafter in self.drafters)

    def begin(self, seq: Sequence) -> None:
        self._stats[seq] = self.control.begin()
        for drafter in [*self.drafters]:
            self._ask(drafter, drafter.begin, seq)

    def end(self, seq: Sequence) -> None:
        self._stats.pop(seq, None)
        for drafter in [*self.drafters]:
            self._ask(drafter, drafter.end, seq)

    def clear(self) -> None:
        for drafter in [*self.drafters]:
            self._ask(drafter, drafter.clear)

    def _ask(self, drafter: Drafter, verb: Callable[..., T], *args: object) -> T | None:
        """Ask a drafter. It only makes things faster: if it fails, decoding goes on without it."""
        try:
            return verb(*args)
        except Exception:
            log.exception("drafting by %s failed: it is off until the next start", drafter.name)
            self.drafters.remove(drafter)
            return None

    def _options(self, drafter: Drafter, seq: Sequence) -> list[Proposal]:
        return self._ask(drafter, drafter.options, seq) or []

    # ---- before a step -----------------------------------------------------------------------

    def needs_sync(self, seqs: Seq[Sequence]) -> bool:
        """A draft in flight that its sequence cannot go on from, or a copy that is worth waiting
        for the tokens in flight."""
        if any(s.inflight_drafts and not self._can_overlap(s) for s in seqs):
            return True
        known = [s for s in seqs if s in self._stats]
        waiting = {s for s in known if s.flight and self._has_stale(s)}
        if not waiting:
            return False
        choices = self._decide(known, waiting)
        return any(depth and not drafter.lazy for depth, drafter, _ in choices if drafter)

    def depths(self, seqs: Seq[Sequence]) -> Mapping[Sequence, int]:
        known = [s for s in seqs if s in self._stats]
        read = {s for s in known if not s.flight}
        self._chosen, depths = {}, {}
        for s, (depth, picked, proposal) in zip(known, self._decide(known, read), strict=True):
            if depth and picked and proposal:
                depths[s] = depth
                self._chosen[s] = picked, proposal
        return depths

    def draft(self, plan: Seq[Entry], previous: Step | None) -> None:
        for drafter in [*self.drafters]:
            entries = [e for e in plan if e.depth and self._chosen[e.seq][0] is drafter]
            chosen = {e.seq: self._chosen[e.seq][1] for e in entries}
            self._ask(drafter, drafter.draft, plan, previous, chosen)
            if drafter not in self.drafters:  # it may have failed half way
                for e in entries:
                    e.draft = Draft()

    def _can_overlap(self, seq: Sequence) -> bool:
        """Whether the sequence may go on while a draft of it is in flight."""
        plain = not seq.request.sampling.penalized and seq.matcher is None
        return plain and self._overlaps()

    def _overlaps(self) -> bool:
        return self.overlap and any(drafter.lazy for drafter in self.drafters)

    def _has_stale(self, seq: Sequence) -> bool:
        """Whether a drafter that reads tokens could draft for it, were they read."""
        return any(not d.lazy and self._options(d, seq) for d in [*self.drafters])

    def _decide(
        self, seqs: Seq[Sequence], read: set[Sequence]
    ) -> list[tuple[int, Drafter | None, Proposal | None]]:
        """(depth, drafter, proposal) for each sequence; drafters that are not lazy only for the
        sequences whose tokens are `read`, or will be."""
        options: list[list[Choice]] = []
        for seq in seqs:
            some: list[Choice] = []
            for drafter in [*self.drafters]:
                if drafter.lazy or seq in read:
                    found = self._options(drafter, seq)
                    some += [(drafter, self._rated(seq, p)) for p in found]
            forced = [choice for choice in some if choice[1].source == GRAMMAR]
            options.append(forced or some)
        stats, context = [self._stats[s] for s in seqs], sum(s.known for s in seqs)
        proposals = [[proposal for _, proposal in some] for some in options]
        mode = "overlap" if self._overlaps() else "exact"
        decided = self.control.decide(stats, proposals, context, mode, self._draw(seqs))
        choices: list[tuple[int, Drafter | None, Proposal | None]] = []
        for some, (depth, picked) in zip(options, decided, strict=True):
            owner = next((d for d, proposal in some if proposal is picked), None)
            choices.append((depth, owner, picked))
        return choices

    def _rated(self, seq: Sequence, proposal: Proposal) -> Proposal:
        """The proposal with the sequence's present acceptance rates."""
        rate, known = self._stats[seq].rate, dict[Key, float]()
        for key in proposal.keys:  # a long copy has few different keys
            if key not in known:
                known[key] = rate.of(key)
        proposal.rates = [known[key] for key in proposal.keys]
        return proposal

    def _prior(self, key: Key) -> float:
        """A rate nothing is known of: (source, position) starts from the position before it, a
        copy's (source, matching tokens, agreement) from FIRST_RATE."""
        assert isinstance(key, tuple)
        if len(key) == 3:
            return first_rate(key[1], key[2])
        source, position = key
        return FIRST_RATE if position == 1 else self.control.rate.of((source, position - 1))

    def _draw(self, seqs: Seq[Sequence]) -> float:
        return self.costs.draw([s.request.sampling.kind for s in seqs])

    # ---- after a step ------------------------------------------------------------------------

    def observe(self, step: Step, accepted: Seq[Accepted], seconds: float) -> None:
        self._learn_costs(step, seconds)
        self._report(step.plan)
        for e, new in zip(step.plan, accepted, strict=True):
            if new.tokens and e.seq.finish is None and e.seq in self._stats:
                keys = e.draft.keys[: len(e.draft)]
                self.control.judge(self._stats[e.seq], keys, new.drafts)
        for drafter in [*self.drafters]:
            self._ask(drafter, drafter.observe, step, accepted)

    def _learn_costs(self, step: Step, seconds: float) -> None:
        """Correct the costs by what the step took. A step with a prompt in it says nothing about
        drafts; what a step with a model's drafts took beyond the target's part is the model's."""
        plan = step.plan
        if seconds <= 0 or any(e.count > 1 for e in plan):
            return
        rows, context = sum(e.rows for e in plan), sum(e.end for e in plan)
        mode, draw = "overlap" if step.overlaps else "exact", self._draw([e.seq for e in plan])
        depths: dict[str, int] = {}
        for e in plan:
            if len(e.draft) and e.draft.source in self._names:
                depths[e.draft.source] = max(len(e.draft), depths.get(e.draft.source, 0))
        if not depths:
            self.costs.learn(rows, context, mode, seconds, draw)
        elif len(depths) == 1:
            ((name, depth),) = depths.items()
            own = seconds - self.costs.step(rows, context, mode, draw)
            for drafter in self.drafters:
                if drafter.name == name:
                    drafter.learn_seconds(own, depth)

    def _report(self, plan: Seq[Entry]) -> None:
        """Log when drafting stops for long, and when it goes on."""
        if any(len(e.draft) > 1 for e in plan):
            if self._quiet >= PARKED:
                log.info("speculation pays again")
            self._quiet = 0
        elif any(len(e.draft) for e in plan):  # a probe, unless it comes again and again
            self._quiet = max(0, self._quiet - PROBE_WEIGHT)
        elif any(e.count == 1 for e in plan):
            self._quiet += 1
            if self._quiet == PARKED:
                log.info("speculation is parked: no draft paid for %d steps; it is probed", PARKED)

"""Chooses which drafter drafts for each sequence of a step, and how many tokens, for the most
expected tokens per second. What vLLM calls a proposer is a Drafter here.

Rule: acceptance rates and costs are measured while serving. Where drafting does not pay it is
parked, and probed now and then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlxspec import log
from mlxspec.model.batch import Step
from mlxspec.sequences import Accepted, Draft, Plan, Seq
from mlxspec.speculate import Drafter
from mlxspec.speculate.chain import LIKELIEST
from mlxspec.speculate.controller import AcceptanceRates, Controller, Costs, Key, Proposal
from mlxspec.speculate.ngram import FIRST_RATE, GRAMMAR
from mlxspec.types import MAX_DEPTH

T = TypeVar("T")

MAX_PADDED_DEPTH = 15  # of a draft outside the rows layout: the attention kernel takes 16 rows

# Initial acceptance rate of the first token of a model or head.
FIRST_TOKEN = 0.6
LIKELY = 0.75  # of a head's likeliest tokens, which are tried unless sampled ones do better


@dataclass
class Proposer:
    """Holds the drafters and one controller. `costs` are those of the target's steps; until they
    are known (`start`), drafters follow what is computed and nothing is drafted. `fixed_depth`: a
    draft length for models and heads, while nothing else drafts; 0: what pays. `padded`: the other
    sequences' rows are padded to the longest draft, which is limited then. `tries_likeliest`: at a
    temperature, drafts of a fixed depth are of the likeliest tokens too if more of these are
    accepted; else all are sampled, which shows what a head has learned."""

    costs: Costs | None
    drafters: list[Drafter]
    fixed_depth: int = 0
    padded: bool = False
    tries_likeliest: bool = False

    def __post_init__(self) -> None:
        self.max_depth = MAX_PADDED_DEPTH if self.padded else MAX_DEPTH
        self.control = Controller(self.costs, self._prior, self.padded)
        self._stats: dict[Seq, AcceptanceRates] = {}
        self._chosen: dict[Seq, Proposal] = {}
        self._proposals: dict[Seq, list[Proposal]] = {}  # until a step is read or drafted for
        self._names = [drafter.name for drafter in self.drafters]  # also of those that fail

    def start(self, costs: Costs | None) -> None:
        """Draft by these costs of steps from now on."""
        self.costs = self.control.costs = costs

    def draft_at_most(self, depth: int) -> None:
        """Never draft more tokens of a sequence."""
        self.max_depth = min(self.max_depth, depth)

    def drop(self, drafter: Drafter) -> None:
        """Stop using a drafter."""
        self.drafters = [other for other in self.drafters if other is not drafter]
        drafter.close()

    def begin(self, seq: Seq) -> None:
        self._stats[seq] = self.control.begin()
        for drafter in self.drafters:
            self._call(drafter, drafter.begin, seq)

    def end(self, seq: Seq) -> None:
        del self._stats[seq]
        for drafter in self.drafters:
            self._call(drafter, drafter.end, seq)

    def clear(self) -> None:
        for drafter in self.drafters:
            self._call(drafter, drafter.clear)

    def _call(self, drafter: Drafter, method: Callable[..., T], *args: object) -> T | None:
        """Call a drafter. It only makes things faster: if it fails, go on without it."""
        try:
            return method(*args)
        except Exception:
            log.exception("drafting by %s failed: it is off until the next start", drafter.name)
            self.drop(drafter)
            return None

    # ---- before a step -----------------------------------------------------------------------

    def needs_sync(self, seqs: Sequence[Seq]) -> bool:
        """Whether a draft in flight cannot be continued before it is read, or a copy is worth
        waiting for the tokens in flight."""
        for seq in seqs:
            if seq.inflight_drafts and (
                not self._overlaps() or seq.request.sampling.penalized or seq.restricted
            ):
                return True
        decided = self._decide(seqs, in_flight=True)
        return not all(proposal.drafter.lazy for *_, proposal in decided)

    def depths(self, seqs: Sequence[Seq]) -> Mapping[Seq, int]:
        self._chosen = {}
        depths = {}
        for seq, depth, proposal in self._decide(seqs, in_flight=False):
            depths[seq] = min(depth, self.max_depth)
            self._chosen[seq] = proposal
        self._proposals.clear()
        return depths

    def draft(self, plan: Plan, previous: Step | None) -> None:
        for e in plan:
            if e.depth:
                e.proposal = self._chosen[e.seq]
        for drafter in self.drafters:
            self._call(drafter, drafter.draft, plan, previous)
            if drafter not in self.drafters:  # it may have failed half way
                for e in drafter.chosen(plan):
                    e.draft = Draft()

    def _overlaps(self) -> bool:
        """Whether steps with drafts are submitted before the step in front of them is read."""
        return any(drafter.lazy for drafter in self.drafters)

    def _decide(self, seqs: Sequence[Seq], in_flight: bool) -> Iterator[tuple[Seq, int, Proposal]]:
        """The sequences to draft for, each with a depth and a proposal. Drafters that are not lazy
        count only for sequences that have tokens `in_flight`, as if these were read, or only for
        others."""
        if not self.costs:
            return
        seqs = [seq for seq in seqs if seq in self._stats]  # others have not been in a plan yet
        stats = [self._stats[seq] for seq in seqs]
        options = [self._options(seq, in_flight) for seq in seqs]
        lazy = [proposal.drafter.lazy for some in options for proposal in some]
        if not lazy or (in_flight and all(lazy)):
            return  # nothing to draft, or nothing to wait for
        if fixed := self.fixed_depth:
            for seq, some in zip(seqs, options, strict=True):
                models = [proposal for proposal in some if proposal.drafter.lazy]
                if not self.tries_likeliest:
                    models = models[:1]
                if models:
                    best = max(models, key=lambda model: sum(model.cumulative[:fixed]))
                    depth = min(fixed, len(best.rates))
                    yield seq, depth, best
            return
        context = sum(seq.known for seq in seqs)
        mode = "overlap" if all(lazy) else "synced"
        decided = self.control.decide(stats, options, context, mode=mode)
        for seq, (depth, proposal) in zip(seqs, decided, strict=True):
            if depth and proposal:
                yield seq, depth, proposal

    def _options(self, seq: Seq, in_flight: bool) -> list[Proposal]:
        """The proposals for a sequence, with its present acceptance rates. If a grammar forces the
        next tokens and no copy has them, only these."""
        if seq not in self._proposals:
            self._proposals[seq] = list(self._rated_proposals(seq))
        unread = bool(seq.flight) != in_flight
        options = [p for p in self._proposals[seq] if p.drafter.lazy or not unread]
        forced = [proposal for proposal in options if proposal.source == GRAMMAR]
        return forced or options

    def _rated_proposals(self, seq: Seq) -> Iterator[Proposal]:
        rate = self._stats[seq]
        for drafter in self.drafters:
            for proposal in self._call(drafter, drafter.options, seq) or []:
                proposal.rates = rate.all_of(proposal.rate_keys)
                proposal.drafter = drafter
                yield proposal

    def _prior(self, key: Key) -> float:
        """The acceptance rate of a key that was never tried. A copy's (source, bucket of matching
        tokens) starts from a table, a model's position from the one before it."""
        source, *sampling, n = key
        if not sampling:
            return FIRST_RATE[n]
        if n == 1:  # a small model's noise keeps more than its likeliest tokens: NOTES.md
            return LIKELY if sampling == [LIKELIEST] and source != "model" else FIRST_TOKEN
        return self.control.overall((source, *sampling, n - 1))

    # ---- after a step ------------------------------------------------------------------------

    def observe(self, step: Step, accepted: Sequence[Accepted], seconds: float) -> None:
        self._proposals.clear()
        if self.costs and seconds > 0:
            self._learn_costs(self.costs, step, seconds)
        for e, new in zip(step.plan, accepted, strict=True):
            if new.tokens and e.seq.finish is None:
                # In a draft that a grammar cut, the token that it refused counts as rejected.
                keys = e.draft.rate_keys[: min(e.depth, e.draft.size + 1)]
                self.control.learn(self._stats[e.seq], keys, new.drafts)
        for drafter in self.drafters:
            self._call(drafter, drafter.observe, step, accepted)

    def _learn_costs(self, costs: Costs, step: Step, seconds: float) -> None:
        """Correct the costs by the step's time. A step with a prompt in it says nothing about
        drafts; in one with a model's drafts, time beyond the target's part is the model's."""
        plan = step.plan
        if any(e.count > 1 for e in plan):
            return
        rows = sum(e.rows for e in plan)
        if self.padded:
            rows = len(plan) * max(e.rows for e in plan)
        context = sum(e.end for e in plan)
        mode = "overlap" if step.overlaps else "synced"
        drafts = [(e.draft.size, e.draft.source) for e in plan if e.draft.source in self._names]
        if not drafts:
            costs.learn(rows, context, mode, seconds=seconds)
            return
        size, source = max(drafts)
        if size:  # else a grammar refused all that was drafted
            drafting = seconds - costs.step(rows, context, mode)
            for drafter in self.drafters:
                if drafter.name == source:
                    drafter.learn_seconds(drafting, size)

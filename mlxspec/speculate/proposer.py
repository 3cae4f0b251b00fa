"""The engine's drafter: copies first, a model second, nothing third, by predicted tokens per
second.

Rule: chances and costs are measured, never assumed for long; where drafting does not pay it is
parked, and asked again now and then. A copy needs tokens that the host has read: while one is worth
while, the engine reads a step before it plans the next. A model's draft is lazy and needs none.
"""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from mlxspec.model.runner import Step
from mlxspec.speculate.controller import Controller, Costs, Key, Option, SequenceStats, corrected
from mlxspec.speculate.draft_model import MODEL_DEPTH, SOURCE, DraftModel
from mlxspec.speculate.ngram import REACH, Lookup, Proposal
from mlxspec.speculate.suffix import Corpus
from mlxspec.types import MAX_DEPTH, Draft, Entry, Sequence

log = logging.getLogger("mlxspec")

INDEXED = 4096  # tokens indexed in one step: a few milliseconds
CONTEXT = 8  # tokens of a prompt's end that are remembered with what followed
FIRST = {
    0: 0.5,
    1: 0.3,
    2: 0.35,
    3: 0.6,
    4: 0.8,
    5: 0.9,
    6: 0.96,
}  # by bucket of the matching tokens
FIRST_MODEL = 0.6
GRAMMAR = "grammar"  # the source of what a grammar forces: nothing else can be right
PARKED = 256  # steps without a draft after which the log says so


def bucket(match: int) -> int:
    """0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more matching tokens."""
    return min(match, 63).bit_length()


@dataclass(slots=True, eq=False)
class Live:
    """One sequence: what may be copied into it, the best of it now, and how drafts went so far."""

    pilot: SequenceStats
    lookup: Lookup
    best: Proposal | None = None  # after `fed` tokens of the sequence
    fed: int = 0


@dataclass(slots=True)
class Proposer:
    """`costs` are those of the target's steps, `model` drafts where there is nothing to copy, until
    it fails. `late`: the target can begin a step where nobody knows yet how far the one before it
    got."""

    costs: Costs
    model: DraftModel | None = None
    corpus: Corpus = field(default_factory=Corpus)
    lookup: Callable[[Seq[int]], Lookup] = Lookup
    late: bool = True
    control: Controller = field(init=False)
    _live: dict[Sequence, Live] = field(default_factory=dict)
    _chosen: dict[Sequence, Proposal | None] = field(default_factory=dict)  # None: the model
    _quiet: int = 0  # steps that decoded without a draft, probes aside

    def __post_init__(self) -> None:
        self.control = Controller(self.costs, self._first)

    def begin(self, seq: Sequence) -> None:
        self._live[seq] = Live(self.control.pilot(), self.lookup(seq.request.prediction))
        if self.model:
            self._ask(self.model.begin, seq)

    def end(self, seq: Sequence) -> None:
        if self._live.pop(seq, None) and seq.generated:
            start = seq.prompt_len
            self.corpus.add(seq.tokens[max(0, start - CONTEXT) : start], seq.tokens[start:])
        if self.model:
            self._ask(self.model.end, seq)

    def forget(self) -> None:
        self.corpus = Corpus(self.corpus.capacity)

    def blind(self, seq: Sequence) -> bool:
        """Whether the sequence may go on while a draft of it is in flight."""
        plain = not seq.request.sampling.penalized and seq.matcher is None
        return self.model is not None and self.late and plain

    def waits(self, seqs: Seq[Sequence]) -> bool:
        if any(s.spread and not self.blind(s) for s in seqs):
            return True  # else the others would go on without it
        known = [s for s in seqs if s in self._live]
        stale = [s for s in known if s.flight and self._live[s].best]
        if not stale:
            return False
        chosen = self._decide(known, [self._live[s].best if s in stale else None for s in known])
        return any(depth and option and option.source != SOURCE for depth, option in chosen)

    def plan(self, seqs: Seq[Sequence]) -> Mapping[Sequence, int]:
        found = [
            self._live[s].best if not s.flight and self._live[s].fed == s.known else None
            for s in seqs
        ]
        depths: dict[Sequence, int] = {}
        self._chosen = {}
        for s, made, (depth, option) in zip(seqs, found, self._decide(seqs, found), strict=True):
            if depth and option:
                depths[s] = depth
                self._chosen[s] = None if option.source == SOURCE else made
        return depths

    def draft(self, entries: Seq[Entry], before: Step | None) -> None:
        for e in entries:
            if e.depth and (made := self._chosen.get(e.seq)):
                e.draft = Draft(list(made.tokens[: e.depth]), made.source)
        if self.model:
            wanted = {
                e.seq: e.depth for e in entries if e.depth and self._chosen.get(e.seq, e) is None
            }
            self._ask(self.model.draft, entries, before, wanted)

    def observe(
        self, entries: Seq[Entry], accepted: Seq[list[int]], seconds: float, how: str
    ) -> None:
        self._clock(entries, seconds, how)
        self._tell(entries)
        if self.model:
            self._ask(self.model.observe, entries, accepted)
        left = INDEXED - self.corpus.index(INDEXED)
        for e, new in zip(entries, accepted, strict=True):
            live = self._live.get(e.seq)
            if live is None or e.seq.finish is not None:
                continue
            if e.samples and new:
                keys = self._keys(e.draft.source, len(e.draft), live.best)
                self.control.judge(live.pilot, keys, len(new) - 1)
                live.lookup.moved(len(new) - 1)
            left -= live.lookup.feed(e.seq.tokens, max(0, left))
            live.best = self._best(e.seq, live) if e.samples else None
            live.fed = len(e.seq.tokens)

    def _clock(self, entries: Seq[Entry], seconds: float, how: str) -> None:
        """Correct the costs. A step with a prompt in it tells nothing about drafts, nor does one of
        no duration, which was disturbed; what one with the model's drafts took beyond the target's
        part is the model's."""
        if seconds <= 0 or any(e.count > 1 for e in entries):
            return
        rows, context = sum(e.rows for e in entries), sum(e.end for e in entries)
        draw = self._draw([e.seq for e in entries])
        deepest = max((len(e.draft) for e in entries if e.draft.source == SOURCE), default=0)
        if not deepest:
            self.costs.learn(rows, context, how, seconds, draw)
        elif self.model:
            own = seconds - self.costs.step(rows, context, how, draw)
            self.model.seconds *= corrected(own / deepest / self.model.seconds)

    def _tell(self, entries: Seq[Entry]) -> None:
        """Say when drafting stops for long, and when it goes on."""
        if any(len(e.draft) > 1 for e in entries):
            if self._quiet >= PARKED:
                log.info("speculation pays again")
            self._quiet = 0
        elif any(len(e.draft) for e in entries):  # a probe, unless it comes again and again
            self._quiet = max(0, self._quiet - 8)
        elif any(e.count == 1 for e in entries):
            self._quiet += 1
            if self._quiet == PARKED:
                log.info("speculation is parked: no draft paid for %d steps; probes go on", PARKED)

    def _decide(
        self, seqs: Seq[Sequence], found: Seq[Proposal | None]
    ) -> list[tuple[int, Option | None]]:
        lives = [self._live[s] for s in seqs]
        options = []
        for s, live, made in zip(seqs, lives, found, strict=True):
            some = [self._option(live.pilot, made)] if made else []
            forced = made is not None and made.source == GRAMMAR
            most = 0 if forced else min(MODEL_DEPTH, s.room - 1)
            model = self.model
            if most > 0 and model and self._ask(model.ready, s):
                keys = [(SOURCE, i) for i in range(1, most + 1)]
                some.append(Option(SOURCE, [live.pilot.chance.of(k) for k in keys], model.seconds))
            options.append(some)
        how = (
            "overlap" if self.model and self.late else "exact"
        )  # a copy is waited for, a model may not be
        pilots, context = [live.pilot for live in lives], sum(s.known for s in seqs)
        return self.control.decide(pilots, options, context, how, self._draw(seqs))

    def _ask(self, verb: Callable[..., Any], *args: object) -> Any:
        """Ask the model. Where it fails, copies go on without it."""
        try:
            return verb(*args)
        except Exception:
            log.exception(
                "the draft model failed; drafts are copies alone until the model is loaded again"
            )
            self.model = None
            return None

    def _draw(self, seqs: Seq[Sequence]) -> float:
        return self.costs.draw([s.request.sampling.kind for s in seqs])

    def _best(self, seq: Sequence, live: Live) -> Proposal | None:
        most = min(MAX_DEPTH, seq.room - 1)
        if most < 1:
            return None
        best, other = live.lookup.propose(most), self.corpus.propose(seq.tokens[-REACH:], most)
        if best and other:
            best = max(best, other, key=lambda m: self._option(live.pilot, m).expected())
        best = best or other
        forced = tuple(seq.matcher.forced(most)) if seq.matcher is not None else ()
        if forced and (best is None or best.tokens[: len(forced)] != forced):
            return Proposal(GRAMMAR, forced, REACH, (1.0,) * len(forced))
        return best

    def _option(self, pilot: SequenceStats, made: Proposal) -> Option:
        known: dict[Key, float] = {}  # a long copy has few keys
        keys = _keys(made)
        for key in keys:
            if key not in known:
                known[key] = pilot.chance.of(key)
        return Option(made.source, [known[key] for key in keys])

    @staticmethod
    def _keys(source: str, drafted: int, made: Proposal | None) -> list[Key]:
        if source == SOURCE:
            return [(SOURCE, i) for i in range(1, drafted + 1)]
        return _keys(made)[:drafted] if made and made.source == source else []

    def _first(self, key: Key) -> float:
        """A chance before anything is known: a model's from the position before, a copy's from its
        match."""
        assert isinstance(key, tuple)
        if key[0] == SOURCE:
            return FIRST_MODEL if key[1] == 1 else self.control.chance.of((SOURCE, key[1] - 1))
        return FIRST[key[1]] * (0.3, 0.7, 1.0)[key[2]]


def _keys(made: Proposal) -> list[Key]:
    """What a token's chance depends on: the source, the tokens that match if those before it are
    right, and how many of the occurrences agree."""
    return [
        (made.source, bucket(made.match + i), 2 if s > 0.9 else 1 if s > 0.5 else 0)
        for i, s in enumerate(made.shares)
    ]

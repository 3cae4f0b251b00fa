"""What drafters have in common that chain passes: one for each token, drawn as the target draws.

Rule: a pass is submitted before the next is built, and nothing is waited for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import mlx.core as mx

from mlxspec.model.batch import Shift, Step
from mlxspec.model.sampler import SampledRow, sample
from mlxspec.speculate import Proposals
from mlxspec.speculate.controller import Proposal, corrected
from mlxspec.types import Draft, Entry, Plan, Sampling, Seq

MAX_DEPTH = 8  # tokens that are drafted at most: each takes a pass
MAX_LAG = 32  # tokens that a drafter may fall behind a sequence for which it does not draft

# (sequences that want one more token, each as an entry that ends at its last one; these tokens if
# they were drafted, int32 [n]; the shift of the entries) -> logits [n, vocab]
NextLogits = Callable[[Plan, mx.array | None, Shift], mx.array]


@dataclass(slots=True)
class DraftCosts:
    """Seconds of a drafted token, and of drafting at all; guesses until they are measured."""

    token: float = 1e-6
    fixed: float = 0.0

    def measure(self, seconds: Callable[[int], float], longest: int = 3) -> None:
        """`seconds(depth)`: what a draft took."""
        seconds(longest)  # the first compiles
        one = min(seconds(1) for _ in range(3))
        more = min(seconds(longest) for _ in range(3))
        self.token = max(1e-9, (more - one) / max(1, longest - 1))
        self.fixed = max(0.0, one - self.token)

    def learn(self, seconds: float, depth: int) -> None:
        """A draft of `depth` tokens took so long."""
        ratio = corrected(seconds / (self.fixed + depth * self.token))
        self.token *= ratio
        self.fixed *= ratio


def proposals(
    source: str,
    most: int,
    costs: DraftCosts,
    temperature: float,
) -> list[Proposal]:
    """Drafts of at most so many tokens that are drawn with the target's noise, and, at a
    temperature above 0, of the likeliest tokens, which a drafter less sure than its target guesses
    better. Each has rates of its own; the keys of the latter have negative positions."""
    signs = (1, -1) if temperature > 0 else (1,)
    made = []
    for sign in signs:
        keys = [(source, sign * (i + 1)) for i in range(most)]
        made.append(Proposal(source, seconds=costs.token, fixed=costs.fixed, rate_keys=keys))
    return made


def sampling_of(seq: Seq, proposal: Proposal) -> Sampling:
    """How a proposal's tokens are drawn: without penalties, which need counts of tokens that the
    host has not read. The target applies them."""
    sampling = seq.request.sampling
    likeliest = len(proposal.rate_keys) > 0 and proposal.rate_keys[0][1] < 0
    if not (likeliest or sampling.penalized or sampling.logprobs is not None):
        return sampling
    return replace(
        sampling,
        temperature=0.0 if likeliest else sampling.temperature,
        logprobs=None,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )


def deepest_first(plan: Plan, chosen: Proposals) -> list[Entry]:
    """The entries to draft for, so that each pass has the first entries of the one before it, and
    similar contexts, which share a call of attention, are neighbours."""
    drafting = [e for e in plan if e.seq in chosen]
    drafting.sort(key=lambda e: (-e.depth, e.start))
    return drafting


def shift_after(previous: Step | None, entries: Plan) -> Shift:
    """int32 [entries]: the shift of entries by drafts in flight in `previous`; None: all are 0."""
    if previous is None or not any(e.inflight_drafts for e in entries):
        return None
    return previous.shift_of(entries)


def logits_by_row(logits: mx.array) -> NextLogits:
    """From logits [n, depth, vocab] that one pass made of all tokens."""
    row = count()
    return lambda entries, last, shift: logits[: len(entries), next(row)]


def fill_drafts(
    drafting: Sequence[Entry],
    chosen: Proposals,
    source: str,
    shift: Shift,
    next_logits: NextLogits,
) -> None:
    """Fill the drafts of entries, the deepest first, of which each further pass has the first.
    Tokens are drawn with the target's noise of their positions."""
    entries = drafting
    samplings = [sampling_of(e.seq, chosen[e.seq]) for e in drafting]
    passes: list[mx.array] = []
    none = mx.zeros((0,), mx.int32)
    while n := sum(e.depth > len(passes) for e in drafting):
        last, part = None, None if shift is None else shift[:n]
        entries = entries[:n]
        if passes:
            last = passes[-1][:n]
            entries = [_next(e) for e in entries]
        logits = next_logits(entries, last, part)
        rows = [SampledRow(e, s, e.end) for e, s in zip(entries, samplings, strict=False)]
        passes.append(sample(logits, rows, none, part).tokens)
    for i, e in enumerate(drafting):
        tokens = [sampled[i : i + 1] for sampled in passes[: e.depth]]
        e.draft = Draft(mx.concatenate(tokens), source, chosen[e.seq].rate_keys)


def _next(e: Entry) -> Entry:
    """The entry of the row after this one's. Not by `replace`, which takes twice as long."""
    return Entry(e.seq, e.end, 1, True, e.depth, e.pending, e.inflight_drafts)

"""What drafters have in common that chain passes: one for each token, drawn as the target draws.

Rule: a pass is submitted before the next is built, and nothing is waited for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx

from mlxspec import log
from mlxspec.model.batch import Shift
from mlxspec.model.sampler import SampledRow, sample
from mlxspec.speculate import Proposals
from mlxspec.speculate.controller import Proposal, corrected
from mlxspec.types import Draft, Entry, Plan, Sampling, Seq

MAX_CHAIN = 8  # tokens that are drafted at most: each takes a pass
LIKELIEST = "likeliest"  # draft greedily at any temperature
MAX_LAG = 32  # tokens that a drafter may fall behind a sequence for which it does not draft


@dataclass(slots=True)
class DraftCosts:
    """Seconds of a drafted token, and of drafting at all; guesses until they are measured."""

    token: float = 1e-6
    fixed: float = 0.0

    def measure(self, seconds: Callable[[int], float], longest: int) -> None:
        """`seconds(depth)`: what a draft took."""
        seconds(longest)  # the first compiles
        one = min(seconds(1) for _ in range(3))
        more = min(seconds(longest) for _ in range(3))
        self.token = max(1e-9, (more - one) / max(1, longest - 1))
        self.fixed = max(0.0, one - self.token)
        log.info("a draft takes %.1f ms and %.1f ms a token", 1e3 * self.fixed, 1e3 * self.token)

    def learn(self, seconds: float, depth: int) -> None:
        """A draft of `depth` tokens took so long."""
        ratio = corrected(seconds / (self.fixed + depth * self.token))
        self.token *= ratio
        self.fixed *= ratio


def sampling_of(seq: Seq, proposal: Proposal) -> Sampling:
    """How a proposal's tokens are drawn: without penalties, which need counts of tokens that the
    host has not read. The target applies them."""
    sampling = seq.request.sampling
    likeliest = len(proposal.rate_keys) > 0 and proposal.rate_keys[0][1] == LIKELIEST
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


@dataclass(slots=True)
class Chain:
    """Drafts of `drafting`, the deepest first, which are drawn one token after the other.

    `entries` want one more token: each ends at its last one, of `tokens` int32 [n], and its
    positions shift by `shift`. They are the first ones of `drafting`.
    """

    drafting: list[Entry]
    chosen: Proposals
    shift: Shift
    tokens: mx.array
    entries: list[Entry] = field(init=False)
    _drawn: list[mx.array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries = self.drafting

    def draw(self, logits: mx.array) -> None:
        """Draw the next token of each entry from logits [n, vocab], with the target's noise of its
        position. The last one fills the drafts."""
        rows = []
        for e in self.entries:
            rows.append(SampledRow(e, sampling_of(e.seq, self.chosen[e.seq]), e.end))
        none = mx.zeros((0,), mx.int32)
        drawn = sample(logits, rows, none, self.shift, checked=False).tokens
        self._drawn.append(drawn)
        n = sum(e.depth > len(self._drawn) for e in self.entries)
        self.entries = [_next(e) for e in self.entries[:n]]
        self.tokens = drawn[:n]
        if self.shift is not None:
            self.shift = self.shift[:n]
        if not n:
            self._fill()

    def _fill(self) -> None:
        for i, e in enumerate(self.drafting):
            parts = [drawn[i : i + 1] for drawn in self._drawn[: e.depth]]
            tokens = mx.concatenate(parts)
            chosen = self.chosen[e.seq]
            e.draft = Draft(tokens, chosen.source, chosen.rate_keys)


def _next(e: Entry) -> Entry:
    """The entry of the row after this one's. Not by `replace`, which takes twice as long."""
    return Entry(e.seq, e.end, 1, True, e.depth, e.pending, e.inflight_drafts)

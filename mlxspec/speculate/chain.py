"""Drafts by a chain of passes, one for each token, which is sampled as the target samples.

Rule: a pass is submitted before the next is built, and nothing waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import mlx.core as mx

from mlxspec import log
from mlxspec.model.batch import Shift
from mlxspec.model.sampler import SampledRow, sample
from mlxspec.sequences import Entry, LazyTokens, Plan, Span, Spans
from mlxspec.speculate.controller import corrected
from mlxspec.types import Sampling

MAX_CHAIN = 8  # drafted tokens, at most: each takes a pass
LIKELIEST = "likeliest"  # draft greedily at any temperature


@dataclass(slots=True)
class DraftCosts:
    """Seconds per drafted token, and per draft; guesses until they are measured."""

    token: float = 1e-6
    fixed: float = 0.0

    def measure(self, seconds: Callable[[int], float], longest: int) -> None:
        """`seconds(depth)` times a draft."""
        seconds(longest)  # the first compiles
        one = min(seconds(1) for _ in range(3))
        more = min(seconds(longest) for _ in range(3))
        self.token = max(1e-9, (more - one) / max(1, longest - 1))
        self.fixed = max(0.0, one - self.token)
        log.info("a draft takes %.1f ms and %.1f ms a token", 1e3 * self.fixed, 1e3 * self.token)

    def learn(self, seconds: float, depth: int) -> None:
        """A draft of `depth` tokens took `seconds`."""
        ratio = corrected(seconds / (self.fixed + depth * self.token))
        self.token *= ratio
        self.fixed *= ratio


def sampling_of(e: Entry) -> Sampling:
    """How an entry's draft is sampled: without penalties, which need counts of tokens that the host
    has not read. The target applies them."""
    sampling = e.state.sampling
    likeliest = e.proposal.sampling == LIKELIEST
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


def deepest_first(entries: Plan) -> list[Entry]:
    """The entries in an order in which each pass has the first entries of the pass before it, and
    similar contexts, which share a call of attention, are neighbours."""
    return sorted(entries, key=lambda e: (-e.depth, e.start))


@dataclass(slots=True)
class Chain:
    """Drafts of `depths` tokens, the deepest first, which are sampled one token after the other by
    their `samplings`.

    `spans` need one more token: each ends at its newest one, in `tokens` int32 [n], with positions
    shifted by `shift`. Those of the shallower drafts leave first. `drafts`, once all tokens are
    sampled: `depths` tokens each.
    """

    spans: Spans
    depths: Sequence[int]
    samplings: Sequence[Sampling]
    shift: Shift
    tokens: mx.array
    drafts: list[LazyTokens] = field(default_factory=list)
    _rows: list[SampledRow] = field(init=False)  # of the next tokens
    _sampled: list[mx.array] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = zip(self.spans, self.samplings, strict=True)
        self._rows = [SampledRow(e, sampling, e.end) for e, sampling in pairs]

    def sample_next(self, logits: mx.array) -> None:
        """Sample the next token of each span from logits [n, vocab], with the target's noise for
        its position."""
        sampled = sample(
            logits,
            self._rows,
            inputs=mx.zeros((0,), mx.int32),
            shift=self.shift,
            checked=False,
        ).tokens
        self._sampled.append(sampled)
        n = sum(depth > len(self._sampled) for depth in self.depths)
        self._rows = self._rows[:n]
        for row in self._rows:
            row.span = _next(row.span)
            row.position += 1
        self.spans = [row.span for row in self._rows]
        self.tokens = sampled[:n]
        if self.shift is not None:
            self.shift = self.shift[:n]
        if not n:
            self.drafts = self._drafts()

    def _drafts(self) -> list[LazyTokens]:
        array = mx.concatenate(self._sampled)
        first = [0, *accumulate(len(tokens) for tokens in self._sampled)]
        return [
            LazyTokens(array, [start + i for start in first[:depth]])
            for i, depth in enumerate(self.depths)
        ]


def _next(e: Span) -> Span:
    """The row after this one's. Not by `replace`, which takes twice as long."""
    return Span(
        e.state,
        e.tables,
        e.tokens,
        start=e.end,
        count=1,
        samples=True,
        pending=e.pending,
        inflight_drafts=e.inflight_drafts,
    )

"""A sequence while it runs, and its share of a step. The scheduler works with `Seq` and `Entry`; a
forward needs only a `SeqState` and a `Span`, which heads, drafters and measurements also build.

Rule: engine thread only. Imports types only.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxspec.types import (
    MAX_DEPTH,
    MAX_PRIORITY,
    Finish,
    ImageSpan,
    Logprob,
    Pooling,
    Request,
    Sampling,
)

MAX_OVERTAKES = 64  # later sequences that may start before a waiting one


@dataclass(slots=True)
class LazyTokens:
    """Tokens that the host has not read: those at `places` of `array` int32 [N], which the drafts
    of a step share."""

    array: Any
    places: list[int]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[int]:
        """Waits for the device."""
        tokens = self.array.tolist()
        return (tokens[place] for place in self.places)


@dataclass(slots=True, eq=False)
class Draft:
    """Proposed tokens for one entry: ints, or LazyTokens from a drafter that does not sync.
    `source` names the drafter in the metrics; `rate_keys` say what each token's acceptance rate
    depends on."""

    tokens: Any = ()
    source: str = ""
    rate_keys: Sequence[Any] = ()
    size: int = field(init=False)  # is read more often than all else

    def __post_init__(self) -> None:
        self.size = len(self.tokens)


NO_DRAFT = Draft()


@dataclass(slots=True, eq=False, weakref_slot=True)
class SeqState:
    """What a model knows and keeps of one sequence from step to step: how its tokens are drawn, its
    choice's `index` in the key of their noise, and what its rows left behind."""

    sampling: Sampling = field(default_factory=Sampling)
    index: int = 0
    prompt_len: int = 0
    pooling: Pooling = ""
    images: Sequence[ImageSpan] = ()  # of its prompt
    recurrent: Any = None  # of recurrent layers, after its rows; the solo layout's own caches
    batch: Any = None  # the batch that `recurrent` is a slice of
    counts: Any = None  # token counts for penalties: the sampler's
    embedding: Any = None  # float32 [D] of the rows so far: the sum, or the last

    def whole_rows(self, chunk: int) -> int:
        """Tokens of the prompt that are computed in whole chunks of so many rows: all but the last,
        which a cached prefix leaves to compute, and the one before, which a head may read again;
        and up to an image that no step may cut."""
        uncut = [image.start for image in self.images if image.both_ways]
        return max(0, min([self.prompt_len - 2, *uncut])) // chunk * chunk


@dataclass(slots=True, eq=False)
class Span:
    """One sequence's rows in one forward: `start .. start + count` of `tokens`, then the draft's.

    `tables` are its block ids by position // block_size, for full attention and for each window. If
    it `samples`, each of its last `1 + draft.size` rows is sampled. `pending`: its last known row
    is a token the host has not read. While a draft of the sequence is in flight, `start` is a lower
    bound, by up to `inflight_drafts`.
    """

    state: SeqState
    tables: Sequence[list[int]]
    tokens: list[int]
    start: int
    count: int
    samples: bool
    pending: bool = False
    inflight_drafts: int = 0
    draft: Draft = NO_DRAFT
    masks: Sequence[bytes] = ()  # of the sampled rows, under a grammar; see GrammarMatcher.masks
    recurrent: Any = None  # the sequence's recurrent state after these rows, once submitted

    @property
    def rows(self) -> int:
        return self.count + self.draft.size

    @property
    def end(self) -> int:
        """Positions that are computed after it, its draft included."""
        return self.start + self.count + self.draft.size

    @property
    def num_sampled(self) -> int:
        """Rows that are sampled."""
        return 1 + self.draft.size if self.samples else 0


Spans = Sequence[Span]  # of a forward


@dataclass(slots=True, eq=False)
class Seq:
    """One choice of a request while it runs.

    `computed <= len(tokens) + pending`. `tokens` are prompt and output as far as the host has read
    them; `pending` counts sampled tokens in flight, as if every draft in flight were rejected.
    `computed` counts positions whose KV is written, submitted or taken from the prefix cache.
    """

    request: Request
    index: int = 0
    order: int = 0  # arrival
    passed: int = 0  # later sequences that have started while it waited
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pending: int = 0
    inflight_drafts: int = 0  # drafted tokens in flight: `pending` may turn out larger by so many
    table: list[int] = field(default_factory=list)  # block ids by position // block_size
    windows: list[list[int]] = field(default_factory=list)  # tables of sliding-window layers
    branch_points: list[int] = field(default_factory=list)  # blocks where prompts may part
    block_hashes: list[bytes] = field(default_factory=list)  # the hash chain of its full blocks
    shared: int = 0  # of these, those that were cached when it was last admitted
    deferred: int = 0  # plans in which shorter prefills went first
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reported_cached: int = 0  # tokens from the prefix cache at the first admission, for usage
    finish: Finish | None = None
    flight: "deque[Entry]" = field(default_factory=deque)  # submitted, not committed
    admitted: bool = False
    # Of the request's grammar, thinking budget or loop guard, advanced over its tokens.
    matcher: Any = None
    prompt_len: int = field(init=False)
    state: SeqState = field(init=False)

    def __post_init__(self) -> None:
        asked = self.request
        self.prompt_len = len(asked.prompt)
        self.state = SeqState(
            asked.sampling,
            self.index,
            self.prompt_len,
            pooling=asked.pooling,
            images=asked.images,
        )

    @property
    def priority(self) -> int:
        """Its request's; lower than any once MAX_OVERTAKES others have started before it."""
        return self.request.priority if self.passed < MAX_OVERTAKES else -MAX_PRIORITY - 1

    @property
    def turn(self) -> tuple[int, int]:
        """The lowest starts first and is preempted last."""
        return self.priority, self.order

    @property
    def tables(self) -> list[list[int]]:
        return [self.table, *self.windows]

    @property
    def known(self) -> int:
        """Tokens that exist, read or not."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Rows left to compute."""
        # Not by `known`: each step asks this of every sequence several times.
        return len(self.tokens) + self.pending - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def room(self) -> int:
        """Tokens that may still be sampled, if everything in flight is accepted."""
        ahead = self.pending + self.inflight_drafts
        return self.prompt_len + self.request.max_tokens - len(self.tokens) - ahead

    def uncut(self, rows: int, alone: bool) -> int:
        """So many next rows, or others, if these would end between rows that see each other: those
        before that image, or all of it; none of it where the step is not for this prompt alone, as
        memory is planned for a step of the budget or of an image, not of both."""
        stop = self.computed + rows
        for image in self.request.images:
            if rows and image.both_ways and image.start < stop < image.stop:
                ahead = image.start - self.computed
                if ahead > 0:
                    return ahead
                return image.stop - self.computed if alone else 0
        return rows

    @property
    def loops(self) -> int:
        """Loops that were ended; 0 without a loop guard."""
        return getattr(self.matcher, "loops", 0)

    @property
    def restricted(self) -> bool:
        """Whether some token that the next step samples may not be any token."""
        ahead = self.pending + self.inflight_drafts + MAX_DEPTH
        return bool(self.matcher and self.matcher.restricts(ahead))


def pass_over(waiting: Iterable[Seq], started: Seq) -> None:
    """Count that a sequence has started before older ones. One that was passed too often goes
    alone: the others that were are passed as often again, so that a starved queue does not overtake
    all that is more important."""
    for other in waiting:
        other.passed += other.order < started.order
        starved = min(started.passed, other.passed) >= MAX_OVERTAKES
        if starved and other.request is not started.request:
            other.passed = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Span):
    """One sequence's share of one step, as it is planned. It samples iff it reaches the end of what
    is known."""

    seq: Seq
    depth: int = 0  # tokens that may be drafted
    proposal: Any = None  # the Proposal of which they are drafted


Plan = Sequence[Entry]  # the entries of a step


@dataclass(slots=True)
class Accepted:
    """What a step brought for one entry, cut at a stop: accepted drafts, then one sampled token.
    Empty where the entry did not sample. With finish "error" its numbers are not finite: there is
    no sampled token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: Finish | None = None
    drafts: int = field(init=False)  # accepted draft tokens

    def __post_init__(self) -> None:
        self.drafts = max(0, len(self.tokens) - (self.finish != "error"))

"""Drafts by copying: what followed the last time that the text went as it goes now, in this
sequence (prompt lookup, Saxena 2023) or in past answers (SuffixDecoding, arXiv 2411.04975).

Rule: adding a token and finding the longest earlier match take constant time; one dict per n-gram
size is all the memory. A copy needs tokens that the host has read.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

from mlxspec.model.batch import Step
from mlxspec.speculate import Proposals
from mlxspec.speculate.controller import Proposal
from mlxspec.types import MAX_DEPTH, Accepted, Draft, Plan, Seq, Tap

LONG, SHORT = 6, 2  # n-gram sizes; a match of SHORT tokens is the shortest
MAX_CANDIDATES = 12  # latest occurrences of an n-gram that are compared
MAX_MATCH = 64  # tokens that a comparison goes back
MAX_MISSES = 4  # rounds without an accepted token after which resuming behind a miss ends
SEPARATOR = -1  # between texts; equal to no token

CORPUS_TOKENS = 1 << 17  # of past outputs; about 30 MB with their index
MATCH_LENGTHS = 3  # that are compared in the corpus, longest first
SHORTEST_OUTPUT = 8  # tokens; a shorter one is not kept
CONTEXT = 8  # tokens of a prompt's end that are kept with the output that followed
INDEXED_PER_STEP = 4096  # tokens: a few milliseconds

# Acceptance rates to start from, by bucket of the matching tokens and by agreement.
FIRST_RATE = (0.5, 0.3, 0.35, 0.6, 0.8, 0.9, 0.96)
AGREEMENT = (0.3, 0.7, 1.0)
MOST = (0.5, 0.9)  # shares above which most, or nearly all, of the occurrences agree
GRAMMAR = "grammar"  # the source of tokens that a grammar forces

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens that followed a match of `match` tokens, and for each the share of the compared
    occurrences that went on with it."""

    source: str
    tokens: Tokens
    match: int
    shares: tuple[float, ...]

    @property
    def score(self) -> float:
        """Expected accepted tokens, if the shares were probabilities (SuffixDecoding)."""
        total, reached = 0.0, 1.0
        for share in self.shares:
            reached *= share
            total += reached
        return total


@dataclass(slots=True)
class Index:
    """A growing text of token ids, of which the first `indexed` tokens can be found: the last place
    of each n-gram, and for each place the one before it with the same n-gram, by size."""

    tokens: list[int] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)
    _before: dict[int, list[int]] = field(default_factory=lambda: {LONG: [], SHORT: []})

    @property
    def indexed(self) -> int:
        return len(self._before[LONG])

    def index(self, most: int) -> int:
        """Index up to `most` further tokens. Returns how many were."""
        first = self.indexed
        stop = min(len(self.tokens), first + most)
        for size, before in self._before.items():
            for end in range(first, stop):
                start = max(0, end + 1 - size)
                key = hash((size, *self.tokens[start : end + 1]))
                before.append(self._last.get(key, -1))
                self._last[key] = end
        return stop - first

    def find(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """(length, end) of earlier texts that end as `context` does, longest first, then latest;
        `end` is the last matching position. At least SHORT tokens match."""
        for size, before in self._before.items():
            found = []
            key = hash((size, *context[-size:]))
            end = self._last.get(key, -1)
            for _ in range(MAX_CANDIDATES):
                if end < 0:
                    break
                length = self._common(context, end)
                following = self.tokens[end + 1 : end + 2]
                if length >= size and following not in ([], [SEPARATOR]):
                    found.append((length, end))
                end = before[end]
            if found:
                return sorted(found, reverse=True)
        return []

    def _common(self, context: Sequence[int], end: int) -> int:
        """How many tokens up to `end` equal the last ones of `context`."""
        start = max(0, end + 1 - MAX_MATCH)
        text = self.tokens[start : end + 1]
        same = map(eq, reversed(text), reversed(context))
        return sum(takewhile(bool, same))

    def follow(self, source: str, match: int, ends: list[int], most: int) -> Copy:
        """What most of the occurrences at `ends` go on with, token by token; each token keeps those
        that agree. A copy that reaches the end of the text goes on with itself."""
        size = len(self.tokens)
        tokens: list[int] = []
        shares: list[float] = []
        while len(tokens) < most:
            following = {}
            for end in ends:
                at = end + 1 + len(tokens)
                following[end] = self.tokens[at] if at < size else tokens[at - size]
            known = [token for token in following.values() if token != SEPARATOR]
            if not known:
                break
            token = max(known, key=known.count)
            tokens.append(token)
            shares.append(known.count(token) / len(ends))
            ends = [end for end in ends if following[end] == token]
        return Copy(source, tuple(tokens), match, tuple(shares))


@dataclass(slots=True)
class Lookup:
    """The text of one sequence: what its client predicted, its prompt, its output.

    Where nothing matches, a copy goes on behind the token that was rejected: an edit often replaces
    a word and leaves what follows. It is given up after MAX_MISSES rounds that kept nothing.
    """

    prediction: Sequence[int] = ()
    _index: Index = field(default_factory=Index)
    _cursor: int = -1
    _offset: int = 0  # of the sequence's tokens in the index
    _misses: int = 0

    def __post_init__(self) -> None:
        if self.prediction:
            self._index.tokens += [*self.prediction, SEPARATOR]
            self._offset = len(self._index.tokens)
            self._cursor = 0

    def feed(self, tokens: Sequence[int], most: int) -> int:
        """`tokens` are all of the sequence so far. Index up to `most` of them; returns how many
        were."""
        known = len(self._index.tokens) - self._offset
        self._index.tokens += tokens[known:]
        return self._index.index(most)

    def propose(self, most: int) -> Copy | None:
        """What followed the longest earlier match, or the copy that is under way."""
        tokens = self._index.tokens
        context = tokens[max(self._offset, len(tokens) - MAX_MATCH) :]
        found = self._index.find(context)
        if found:
            match = found[0][0]
            ends = [end for length, end in found if length == match]
            self._cursor = ends[0] + 1
            return self._index.follow("lookup", match, ends, most)
        resumes = self._misses < MAX_MISSES and 0 <= self._cursor < len(tokens)
        if resumes and tokens[self._cursor] != SEPARATOR:
            return self._index.follow("resume", 0, [self._cursor - 1], most)
        return None

    def advance(self, accepted: int) -> None:
        """A round accepted that many tokens and sampled one more."""
        self._misses = 0 if accepted else self._misses + 1
        if self._cursor >= 0:
            self._cursor += accepted + 1


@dataclass(slots=True)
class Corpus:
    """Past outputs, oldest first; beyond `capacity` tokens the older half is evicted."""

    capacity: int = CORPUS_TOKENS
    _index: Index = field(default_factory=Index)

    def add(self, context: Sequence[int], output: Sequence[int]) -> None:
        """Keep an output, with the end of its prompt as the `context` that it followed."""
        if len(output) < SHORTEST_OUTPUT:
            return
        half = self.capacity // 2
        new = [*context, *output, SEPARATOR]
        if len(new) > half:
            new = [*output[1 - half :], SEPARATOR]
        text = self._index.tokens
        if text and len(text) + len(new) > self.capacity:
            text = text[-half:]
            first_end = text.index(SEPARATOR)  # the first may have lost its beginning
            self._index = Index(text[first_end + 1 :])
        self._index.tokens += new

    def index(self, most: int) -> int:
        """Index up to `most` further tokens. Returns how many were."""
        return self._index.index(most)

    def propose(self, context: Sequence[int], most: int) -> Copy | None:
        """The continuation with the best score over the longest matches: a shorter match has more
        occurrences."""
        found = self._index.find(context)
        lengths = sorted({length for length, _ in found})
        copies = []
        for match in reversed(lengths[-MATCH_LENGTHS:]):
            ends = [end for length, end in found if length >= match]
            copies.append(self._index.follow("suffix", match, ends, most))
        return max(copies, key=lambda copy: copy.score, default=None)


@dataclass(slots=True)
class NgramDrafter:
    """Copies from the sequence itself and from past answers, and what a grammar forces."""

    corpus: Corpus = field(default_factory=Corpus)
    lookup: Callable[[Sequence[int]], Lookup] = Lookup
    name: str = "copy"
    taps: tuple[Tap, ...] = ()
    lazy: bool = False
    _live: dict[Seq, Lookup] = field(default_factory=dict)
    _proposals: dict[Seq, list[Proposal]] = field(default_factory=dict)

    def begin(self, seq: Seq) -> None:
        self._live[seq] = self.lookup(seq.request.prediction)

    def end(self, seq: Seq) -> None:
        self._proposals.pop(seq, None)
        del self._live[seq]
        context = seq.request.prompt[-CONTEXT:]
        self.corpus.add(context, seq.tokens[seq.prompt_len :])

    def clear(self) -> None:
        self.corpus = Corpus(self.corpus.capacity)

    def options(self, seq: Seq) -> list[Proposal]:
        return self._proposals.get(seq, [])

    def draft(self, plan: Plan, previous: Step | None, chosen: Proposals) -> None:
        for e in plan:
            if proposal := chosen.get(e.seq):
                tokens = proposal.tokens[: e.depth]
                e.draft = Draft(tokens, proposal.source, proposal.keys)

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        left = INDEXED_PER_STEP
        left -= self.corpus.index(left)
        for e, new in zip(step.plan, accepted, strict=True):
            if e.seq.finish is not None:
                continue
            lookup = self._live[e.seq]
            if new.tokens:
                lookup.advance(new.drafts)
            left -= lookup.feed(e.seq.tokens, left)
            if e.samples:
                self._proposals[e.seq] = self._propose(e.seq, lookup)

    def learn_seconds(self, seconds: float, depth: int) -> None:
        """Copying costs nothing."""

    def _propose(self, seq: Seq, lookup: Lookup) -> list[Proposal]:
        most = min(MAX_DEPTH, seq.room - 1)
        if most < 1:
            return []
        context = seq.tokens[-MAX_MATCH:]
        copies = [lookup.propose(most), self.corpus.propose(context, most)]
        forced: Tokens = ()
        if seq.matcher is not None:
            forced = tuple(seq.matcher.forced(most))
        found = [copy for copy in copies if copy and copy.tokens[: len(forced)] == forced]
        if forced and not found:
            sure = tuple(1.0 for _ in forced)
            found = [Copy(GRAMMAR, forced, MAX_MATCH, sure)]
        return list(map(_proposal, found))


def bucket(match: int) -> int:
    """0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more matching tokens."""
    return min(match, 63).bit_length()


def _proposal(copy: Copy) -> Proposal:
    """What a token's acceptance rate depends on: the source, the tokens that match if those before
    it are right, and how many of the occurrences agree."""
    keys = []
    for i, share in enumerate(copy.shares):
        agreement = bisect_left(MOST, share)
        keys.append((copy.source, bucket(copy.match + i), agreement))
    return Proposal(copy.source, keys=keys, tokens=copy.tokens)


def first_rate(matching: int, agreement: int) -> float:
    """The acceptance rate of a copied token before anything is known."""
    return FIRST_RATE[matching] * AGREEMENT[agreement]

"""Drafts by copying: what followed an earlier occurrence of the newest tokens, in this sequence
(prompt lookup, Saxena 2023) or in past answers (SuffixDecoding, arXiv 2411.04975).

Rule: adding a token and finding the longest earlier match take constant time. A copy needs tokens
that the host has read.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle, islice, takewhile
from operator import eq

from mlxspec.model.batch import Step
from mlxspec.sequences import Accepted, Draft, Plan, Seq
from mlxspec.speculate import Drafter
from mlxspec.speculate.controller import Proposal
from mlxspec.types import MAX_DEPTH

LONG, SHORT = 6, 2  # n-gram sizes; a match of SHORT tokens is the shortest
MAX_CANDIDATES = 12  # latest occurrences of an n-gram that are compared
MAX_MATCH = 64  # tokens that a comparison goes back
NOWHERE = 1 << 62  # a position after every text
MAX_MISSES = 4  # rounds without an accepted token after which a copy is dropped
SEPARATOR = -1  # between texts; equal to no token. No id below 0 is copied

CORPUS_TOKENS = 1 << 17  # of past outputs; about 30 MB with their index
CONTEXT = 8  # tokens of a prompt's end that are kept with the output that followed
INDEXED_PER_STEP = 4096  # tokens: a few milliseconds

# Acceptance rates to start from, by bucket of the matching tokens.
FIRST_RATE = (0.5, 0.3, 0.35, 0.6, 0.8, 0.9, 0.96)
GRAMMAR = "grammar"  # the source of tokens that a grammar forces
FORCED = (GRAMMAR, 6)  # the key of their acceptance rate, with the highest one to start from

Match = tuple[int, int]  # matching tokens, position of the last of them


@dataclass(slots=True)
class Index:
    """A growing text of token ids; its first `indexed` tokens can be searched, by the positions at
    which each n-gram ends."""

    tokens: list[int] = field(default_factory=list)
    indexed: int = 0
    _ends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def index(self, most: int) -> int:
        """Index up to `most` further tokens. Returns their number."""
        first = self.indexed
        self.indexed = min(len(self.tokens), first + most)
        for size in (LONG, SHORT):
            for end in range(first, self.indexed):
                start = max(0, end + 1 - size)
                key = hash((size, *self.tokens[start : end + 1]))
                self._ends[key].append(end)
        return self.indexed - first

    def find(self, context: Sequence[int]) -> Match | None:
        """The earlier text that ends as `context` does and continues: the longest, of these the
        latest. At least SHORT tokens match."""
        tokens = self.tokens
        for size in (LONG, SHORT):
            found = None
            longest = size - 1
            key = hash((size, *context[-size:]))
            for end in reversed(self._ends.get(key, ())[-MAX_CANDIDATES:]):
                if len(context) <= longest or end < longest or end + 1 >= len(tokens):
                    continue
                # Most others are shorter, as one token shows.
                if tokens[end - longest] != context[-1 - longest] or tokens[end + 1] < 0:
                    continue
                length = self._common(context, end)
                if length > longest:
                    longest = length
                    found = length, end
            if found:
                return found
        return None

    def _common(self, context: Sequence[int], end: int) -> int:
        """The number of tokens up to `end` that equal the last ones of `context`."""
        start = max(0, end + 1 - MAX_MATCH)
        text = self.tokens[start : end + 1]
        same = map(eq, reversed(text), reversed(context))
        return sum(takewhile(bool, same))

    def copy(self, source: str, match: int, end: int, most: int) -> Proposal:
        """What followed the `match` matching tokens whose last is at `end`. A copy that reaches the
        end of the text continues with itself.

        A token's acceptance rate depends on the source and on the tokens that match if those before
        it are right."""
        text = self.tokens[end + 1 : end + 1 + most]
        if min(text) < 0:
            text = list(takewhile(lambda token: token >= 0, text))
        elif len(text) < most:
            text = list(islice(cycle(text), most))
        keys = copy_keys(source, match, len(text))
        return Proposal(source, rate_keys=keys, tokens=tuple(text))


@dataclass(slots=True)
class Lookup:
    """The text of one sequence: what its client predicted, its prompt, its output.

    If nothing matches, the last copy continues after the token that was rejected: an edit often
    replaces a word and keeps what follows. It is dropped after MAX_MISSES consecutive rounds
    without an accepted token, whichever drafter proposed them.
    """

    prediction: Sequence[int] = ()
    _index: Index = field(default_factory=Index)
    _cursor: int = NOWHERE  # position in the index of the copy's next token
    _offset: int = 0  # of the sequence's tokens in the index
    _misses: int = 0

    def __post_init__(self) -> None:
        if self.prediction:
            self._index.tokens += [*self.prediction, SEPARATOR]
            self._offset = len(self._index.tokens)
            self._cursor = 0

    def feed(self, tokens: Sequence[int], most: int) -> int:
        """`tokens` are all of the sequence so far. Index up to `most` of them; returns their
        number."""
        length = len(self._index.tokens) - self._offset
        self._index.tokens += tokens[length:]
        return self._index.index(most)

    def propose(self, most: int) -> Proposal | None:
        """What followed the longest earlier match, or the rest of the last copy."""
        tokens = self._index.tokens
        start = max(self._offset, len(tokens) - MAX_MATCH)
        match = self._index.find(tokens[start:])
        if match:
            self._cursor = match[1] + 1
            return self._index.copy("lookup", *match, most)
        following = tokens[self._cursor : self._cursor + 1]
        if self._misses >= MAX_MISSES or not following or following[0] < 0:
            return None
        return self._index.copy("resume", 0, self._cursor - 1, most=most)

    def advance(self, accepted: int) -> None:
        """A round accepted that many tokens and sampled one more."""
        self._cursor += accepted + 1
        self._misses += 1
        if accepted:
            self._misses = 0


@dataclass(slots=True)
class Corpus:
    """Past outputs, oldest first; beyond `capacity` tokens the older half is evicted."""

    capacity: int = CORPUS_TOKENS
    _index: Index = field(default_factory=Index)

    def add(self, context: Sequence[int], output: Sequence[int]) -> None:
        """Keep an output, with the end of its prompt as the `context` that it followed."""
        half = self.capacity // 2
        new = [*context, *output, SEPARATOR][-half:]
        text = self._index.tokens
        if len(text) + len(new) > self.capacity:
            text = text[-half:]
            first_end = text.index(SEPARATOR)  # the first may have lost its beginning
            self._index = Index(text[first_end + 1 :])
        self._index.tokens += new

    def index(self, most: int) -> int:
        """Index up to `most` further tokens. Returns their number."""
        return self._index.index(most)

    def propose(self, context: Sequence[int], most: int) -> Proposal | None:
        """What followed the longest earlier match."""
        match = self._index.find(context)
        return self._index.copy("suffix", *match, most) if match else None


@dataclass(slots=True)
class NgramDrafter(Drafter):
    """Copies from the sequence itself and from past answers, and tokens that a grammar forces."""

    corpus: Corpus = field(default_factory=Corpus)
    name: str = "copy"
    lazy: bool = False
    _live: dict[Seq, Lookup] = field(default_factory=dict)

    def begin(self, seq: Seq) -> None:
        self._live[seq] = Lookup(seq.request.prediction)

    def end(self, seq: Seq) -> None:
        del self._live[seq]
        if seq.generated:
            context = seq.request.prompt[-CONTEXT:]
            self.corpus.add(context, seq.tokens[seq.prompt_len :])

    def close(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.corpus = Corpus()

    def options(self, seq: Seq) -> list[Proposal]:
        most = min(MAX_DEPTH, seq.room - 1)
        if most < 1 or seq.remaining != 1:
            return []
        context = seq.tokens[-MAX_MATCH:]
        copies = [self._live[seq].propose(most), self.corpus.propose(context, most)]
        forced: tuple[int, ...] = ()
        if seq.matcher is not None:
            forced = tuple(seq.matcher.forced(most))
        proposals = [copy for copy in copies if copy and copy.tokens[: len(forced)] == forced]
        if forced and not proposals:
            keys = [FORCED for _ in forced]
            proposals.append(Proposal(GRAMMAR, rate_keys=keys, tokens=forced))
        return proposals

    def draft(self, plan: Plan, previous: Step | None) -> None:
        for e in self.chosen(plan):
            proposal = e.proposal
            e.draft = Draft(proposal.tokens[: e.depth], proposal.source, proposal.rate_keys)

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        budget = INDEXED_PER_STEP
        budget -= self.corpus.index(budget)
        for e, new in zip(step.plan, accepted, strict=True):
            if e.seq.finish is not None:
                continue
            lookup = self._live[e.seq]
            if new.tokens:
                lookup.advance(new.drafts)
            budget -= lookup.feed(e.seq.tokens, budget)


@lru_cache(4096)
def copy_keys(source: str, match: int, length: int) -> tuple[tuple[str, int], ...]:
    """The rate keys of a copy of `length` tokens."""
    return tuple((source, bucket(match + i)) for i in range(length))


def bucket(match: int) -> int:
    """0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more matching tokens."""
    return min(match, 63).bit_length()

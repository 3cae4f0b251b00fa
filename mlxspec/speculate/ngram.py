"""Drafts by copying: what followed the last time that the text went as it goes now, in this
sequence (prompt lookup, Saxena 2023) or in past answers (SuffixDecoding, arXiv 2411.04975).

Rule: adding a token and finding the longest earlier match take constant time; one dict per n-gram
size is all the memory. A copy needs tokens that the host has read.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlxspec.model.batch import Step
from mlxspec.speculate.controller import Key, Proposal
from mlxspec.types import MAX_DEPTH, Accepted, Draft, Entry, Tap
from mlxspec.types import Sequence as Seq

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
FIRST_RATE = {0: 0.5, 1: 0.3, 2: 0.35, 3: 0.6, 4: 0.8, 5: 0.9, 6: 0.96}
AGREEMENT = (0.3, 0.7, 1.0)
GRAMMAR = "grammar"  # the source of tokens that a grammar forces


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens that followed a match of `match` tokens, and for each the share of the compared
    occurrences that went on with it."""

    source: str
    tokens: tuple[int, ...]
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
    """A growing text of token ids, and where its n-grams occur. `find` knows the first `indexed`
    tokens."""

    tokens: list[int] = field(default_factory=list)
    indexed: int = 0
    _last: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    _before: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))  # same n-gram

    def index(self, most: int) -> int:
        """Index up to `most` further tokens -> how many were."""
        t, first = self.tokens, self.indexed
        (long, short), (long_before, short_before) = self._last, self._before
        stop = min(len(t), first + most)
        for i in range(first, stop):
            key = hash(tuple(t[i - LONG + 1 : i + 1])) if i >= LONG - 1 else i - LONG
            long_before.append(long.get(key, -1))
            long[key] = i
            key = t[i - 1] << 32 | t[i] if i else -1
            short_before.append(short.get(key, -1))
            short[key] = i
        self.indexed = stop
        return stop - first

    def find(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """(length, end) of earlier texts that end as `context` does, longest first, then latest;
        `end` is the last matching position. At least SHORT tokens match."""
        found: list[tuple[int, int]] = []
        for size, last, before in zip((LONG, SHORT), self._last, self._before, strict=True):
            if len(context) < size:
                continue
            tail = context[-size:]
            key = hash(tuple(tail)) if size == LONG else tail[0] << 32 | tail[1]
            end = last.get(key, -1)
            for _ in range(MAX_CANDIDATES):
                if end < 0:
                    break
                length = self._common(context, end)
                more = end + 1 < len(self.tokens) and self.tokens[end + 1] != SEPARATOR
                if length >= size and more:
                    found.append((length, end))
                end = before[end]
            if found:
                break
        found.sort(key=lambda f: (-f[0], -f[1]))
        return found

    def _common(self, context: Sequence[int], end: int) -> int:
        t, n = self.tokens, min(len(context), end + 1, MAX_MATCH)
        return next((i for i in range(n) if t[end - i] != context[-1 - i]), n)

    def follow(
        self, source: str, match: int, ends: Sequence[int], most: int, own: bool = False
    ) -> Copy | None:
        """What most occurrences go on with, token by token; each token keeps those that agree.
        `own`: the copy continues this very text, so it may run into itself, as a repetition
        does."""
        alive = list(ends)
        tokens: list[int] = []
        shares: list[float] = []
        while len(tokens) < most:
            at = len(tokens) + 1
            if len(alive) == 1:  # the common case: a slice instead of a count for each token
                tokens += self._copy(alive[0] + at, tokens, most, own)
                shares += [1.0] * (len(tokens) - len(shares))
                break
            following = [self._token(end + at, tokens, own) for end in alive]
            counts = Counter(token for token in following if token != SEPARATOR)
            if not counts:
                break
            token, n = counts.most_common(1)[0]
            tokens.append(token)
            shares.append(n / len(alive))
            alive = [e for e, said in zip(alive, following, strict=True) if said == token]
        return Copy(source, tuple(tokens), match, tuple(shares)) if tokens else None

    def _token(self, at: int, copied: Sequence[int], own: bool) -> int:
        if at < len(self.tokens):
            return self.tokens[at]
        return copied[at - len(self.tokens)] if own else SEPARATOR

    def _copy(self, start: int, copied: Sequence[int], most: int, own: bool) -> list[int]:
        """What one occurrence goes on with from `start`, behind the tokens `copied`; `most` with
        them."""
        t, left = self.tokens, most - len(copied)
        run = t[start : start + left]
        if SEPARATOR in run:
            return run[: run.index(SEPARATOR)]
        if own and len(run) < left:
            made = [*copied, *run]
            while len(made) < most:  # into itself
                made.append(made[start - len(t) + len(made) - len(copied)])
            run = made[len(copied) :]
        return run


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
            self._index.tokens = [*self.prediction, SEPARATOR]
            self._offset = len(self._index.tokens)
            self._cursor = 0

    def feed(self, tokens: Sequence[int], most: int) -> int:
        """`tokens` are all of the sequence so far; index up to `most` of them -> how many were."""
        self._index.tokens += tokens[len(self._index.tokens) - self._offset :]
        return self._index.index(most)

    def propose(self, most: int) -> Copy | None:
        """What followed the longest earlier match, or the copy that is under way."""
        index = self._index
        context = index.tokens[max(self._offset, len(index.tokens) - MAX_MATCH) :]
        if found := index.find(context):
            match = found[0][0]
            best = [end for length, end in found if length == match]
            self._cursor = best[0] + 1
            return index.follow("lookup", match, best, most, own=True)
        if self._misses < MAX_MISSES and 0 <= self._cursor < len(index.tokens):
            return index.follow("resume", 0, [self._cursor - 1], most)
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
        most, text = self.capacity // 2, self._index.tokens
        new = [*context, *output, SEPARATOR]
        if len(new) > most:
            new = [*output[1 - most :], SEPARATOR]
        if text and len(text) + len(new) > self.capacity:
            kept = text[-most:]
            text = kept[kept.index(SEPARATOR) + 1 :]  # the first may have lost its beginning
            self._index = Index(text)
        text += new

    def index(self, most: int) -> int:
        """Index up to `most` further tokens -> how many were."""
        return self._index.index(most)

    def propose(self, context: Sequence[int], most: int) -> Copy | None:
        """The continuation with the best score over the longest matches: a shorter match has more
        occurrences."""
        found = self._index.find(context)
        best: Copy | None = None
        for match in sorted({length for length, _ in found}, reverse=True)[:MATCH_LENGTHS]:
            ends = [end for length, end in found if length >= match]
            copy = self._index.follow("suffix", match, ends, most)
            if copy and (best is None or copy.score > best.score):
                best = copy
        return best


@dataclass(slots=True, eq=False)
class LiveText:
    """One sequence's text, and what could be copied into it now."""

    lookup: Lookup
    proposals: list[Proposal] = field(default_factory=list)


@dataclass(slots=True)
class NgramDrafter:
    """Copies from the sequence itself and from past answers, and what a grammar forces."""

    corpus: Corpus = field(default_factory=Corpus)
    lookup: Callable[[Sequence[int]], Lookup] = Lookup
    name: str = "copy"
    taps: tuple[Tap, ...] = ()
    lazy: bool = False
    _live: dict[Seq, LiveText] = field(default_factory=dict)

    def begin(self, seq: Seq) -> None:
        self._live[seq] = LiveText(self.lookup(seq.request.prediction))

    def end(self, seq: Seq) -> None:
        if self._live.pop(seq, None) and seq.generated:
            start = seq.prompt_len
            self.corpus.add(seq.tokens[max(0, start - CONTEXT) : start], seq.tokens[start:])

    def clear(self) -> None:
        self.corpus = Corpus(self.corpus.capacity)

    def options(self, seq: Seq) -> list[Proposal]:
        return self._live[seq].proposals if seq in self._live else []

    def draft(
        self, plan: Sequence[Entry], previous: Step | None, chosen: Mapping[Seq, Proposal]
    ) -> None:
        for e in plan:
            if proposal := chosen.get(e.seq):
                tokens = list(proposal.tokens[: e.depth])
                e.draft = Draft(tokens, proposal.source, proposal.keys)

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        left = INDEXED_PER_STEP - self.corpus.index(INDEXED_PER_STEP)
        for e, new in zip(step.plan, accepted, strict=True):
            live = self._live.get(e.seq)
            if live is None or e.seq.finish is not None:
                continue
            if new.tokens:
                live.lookup.advance(new.drafts)
            left -= live.lookup.feed(e.seq.tokens, max(0, left))
            live.proposals = self._propose(e.seq, live) if e.samples else []

    def learn_seconds(self, seconds: float, depth: int) -> None:
        """Copying costs nothing."""

    def _propose(self, seq: Seq, live: LiveText) -> list[Proposal]:
        most = min(MAX_DEPTH, seq.room - 1)
        if most < 1:
            return []
        copies = [live.lookup.propose(most), self.corpus.propose(seq.tokens[-MAX_MATCH:], most)]
        found = [copy for copy in copies if copy]
        forced = tuple(seq.matcher.forced(most)) if seq.matcher is not None else ()
        if forced:
            found = [copy for copy in found if copy.tokens[: len(forced)] == forced]
        if forced and not found:
            found = [Copy(GRAMMAR, forced, MAX_MATCH, tuple(1.0 for _ in forced))]
        return [Proposal(c.source, keys=keys_of(c), tokens=c.tokens) for c in found]


def bucket(match: int) -> int:
    """0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more matching tokens."""
    return min(match, 63).bit_length()


def keys_of(copy: Copy) -> list[Key]:
    """What a token's acceptance rate depends on: the source, the tokens that match if those before
    it are right, and how many of the occurrences agree."""
    keys: list[Key] = []
    for i, share in enumerate(copy.shares):
        agreement = 2 if share > 0.9 else 1 if share > 0.5 else 0
        keys.append((copy.source, bucket(copy.match + i), agreement))
    return keys


def first_rate(matching: int, agreement: int) -> float:
    """The acceptance rate of a copied token before anything is known."""
    return FIRST_RATE[matching] * AGREEMENT[agreement]

"""Drafts by copying: what followed the last time that the text went as it goes now.

Prompt lookup (Saxena 2023) as an index of n-grams with backward extension: adding a token and
finding the longest earlier match both take constant time, and one dict per n-gram size is all the
memory.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

LONG, SHORT = 6, 2  # n-gram sizes; a match of SHORT tokens is the shortest
TRIED = 12  # latest occurrences of an n-gram that are compared
REACH = 64  # tokens that a comparison goes back: longer matches are not told apart
LOST = 4
END = -1  # between texts; equal to no token


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens to draft, how many tokens before them matched, and for each token the share of the
    compared occurrences that went on with it."""

    source: str
    tokens: tuple[int, ...]
    match: int
    shares: tuple[float, ...]

    @property
    def score(self) -> float:
        """Expected accepted tokens, if the shares were probabilities (SuffixDecoding, arXiv
        2411.04975)."""
        total, survival = 0.0, 1.0
        for share in self.shares:
            survival *= share
            total += survival
        return total


@dataclass(slots=True)
class Index:
    """A text of token ids that grows, and where its n-grams occur. `indexed` tokens are known to
    `find`."""

    tokens: list[int] = field(default_factory=list)
    indexed: int = 0
    _last: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    _before: tuple[list[int], list[int]] = field(
        default_factory=lambda: ([], [])
    )  # same n-gram, earlier

    def index(self, most: int) -> int:
        """Index up to `most` tokens that are not yet -> how many were."""
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
            for _ in range(TRIED):
                if end < 0:
                    break
                length = self._common(context, end)
                if length >= size and end + 1 < len(self.tokens) and self.tokens[end + 1] != END:
                    found.append((length, end))
                end = before[end]
            if found:
                break
        found.sort(key=lambda f: (-f[0], -f[1]))
        return found

    def _common(self, context: Sequence[int], end: int) -> int:
        t, n = self.tokens, min(len(context), end + 1, REACH)
        return next((i for i in range(n) if t[end - i] != context[-1 - i]), n)

    def follow(
        self, source: str, match: int, ends: Sequence[int], most: int, own: bool = False
    ) -> Proposal | None:
        """What most occurrences go on with, token by token; each token leaves those that agree.
        `own`: the proposal continues this very text, so a copy may run into itself, as a repetition
        does."""
        t, alive = self.tokens, list(ends)
        tokens: list[int] = []
        shares: list[float] = []
        while len(tokens) < most:
            at = len(tokens) + 1
            if (
                len(alive) == 1
            ):  # as most are, and there is nobody to ask: a slice instead of a count for each
                tokens += self._copy(alive[0] + at, tokens, most, own)
                shares += [1.0] * (len(tokens) - len(shares))
                break
            next_ = [
                t[e + at] if e + at < len(t) else tokens[e + at - len(t)] if own else END
                for e in alive
            ]
            counts = Counter(token for token in next_ if token != END)
            if not counts:
                break
            token, n = counts.most_common(1)[0]
            tokens.append(token)
            shares.append(n / len(alive))
            alive = [e for e, said in zip(alive, next_, strict=True) if said == token]
        return Proposal(source, tuple(tokens), match, tuple(shares)) if tokens else None

    def _copy(self, start: int, before: Sequence[int], most: int, own: bool) -> list[int]:
        """What one occurrence goes on with from `start`, behind the tokens `before`; `most` with
        them."""
        t, left = self.tokens, most - len(before)
        run = t[start : start + left]
        if END in run:
            return run[: run.index(END)]
        if own and len(run) < left:
            made = [*before, *run]
            while len(made) < most:  # into itself
                made.append(made[start - len(t) + len(made) - len(before)])
            run = made[len(before) :]
        return run


@dataclass(slots=True)
class Lookup:
    """The text of one sequence: what its client predicted, its prompt, its output.

    Where nothing matches, a copy goes on behind the token that was refused: an edit often replaces
    a word and leaves what follows. After LOST rounds that kept nothing it is given up."""

    prediction: Sequence[int] = ()
    _index: Index = field(default_factory=Index)
    _cursor: int = -1
    _offset: int = 0  # of the sequence's tokens in the index
    _lost: int = 0

    def __post_init__(self) -> None:
        if self.prediction:
            self._index.tokens = [*self.prediction, END]
            self._offset = len(self._index.tokens)
            self._cursor = 0

    def feed(self, tokens: Sequence[int], most: int) -> int:
        """`tokens` are all of the sequence so far; index up to `most` of them -> how many were."""
        self._index.tokens += tokens[len(self._index.tokens) - self._offset :]
        return self._index.index(most)

    def propose(self, most: int) -> Proposal | None:
        """What followed the longest earlier match; None where nothing matches."""
        index = self._index
        context = index.tokens[max(self._offset, len(index.tokens) - REACH) :]
        if found := index.find(context):
            match = found[0][0]
            best = [end for length, end in found if length == match]
            self._cursor = best[0] + 1
            return index.follow("lookup", match, best, most, own=True)
        if self._lost < LOST and 0 <= self._cursor < len(index.tokens):
            return index.follow("resume", 0, [self._cursor - 1], most)
        return None

    def moved(self, kept: int) -> None:
        """A round kept that many of the last proposal's tokens and sampled one more."""
        self._lost = 0 if kept else self._lost + 1
        if self._cursor >= 0:
            self._cursor += kept + 1

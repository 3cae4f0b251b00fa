"""Drafts from what this model has said before, to whoever asked: earlier turns, repeated tool
calls, loops.

The idea and the score are SuffixDecoding's (arXiv 2411.04975). Counts come from comparing the
latest occurrences in a bounded text of past outputs; no tree is kept, so forgetting the oldest is
one rebuild.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxspec.speculate.ngram import END, Index, Proposal

CAPACITY = 1 << 17  # tokens of past outputs; about 30 MB with their index
LENGTHS = 3  # match lengths that are compared, longest first
SHORTEST = 8  # an output of fewer tokens is not worth keeping


@dataclass(slots=True)
class Corpus:
    """Past outputs, oldest first; beyond `capacity` tokens the older half is forgotten."""

    capacity: int = CAPACITY
    _index: Index = field(default_factory=Index)

    def add(self, context: Sequence[int], output: Sequence[int]) -> None:
        """Remember an output, with the end of its prompt as the `context` that it followed."""
        if len(output) < SHORTEST:
            return
        most, text = self.capacity // 2, self._index.tokens
        new = [*context, *output, END]
        if len(new) > most:
            new = [*output[1 - most :], END]
        if text and len(text) + len(new) > self.capacity:
            kept = text[-most:]
            text = kept[kept.index(END) + 1 :]  # the first of them may have lost its beginning
            self._index = Index(text)
        text += new

    def index(self, most: int) -> int:
        """Index up to `most` tokens that are not yet -> how many were."""
        return self._index.index(most)

    def propose(self, context: Sequence[int], most: int) -> Proposal | None:
        """The continuation with the best score over the longest matches: a shorter one has more
        witnesses."""
        found = self._index.find(context)
        best: Proposal | None = None
        for match in sorted({length for length, _ in found}, reverse=True)[:LENGTHS]:
            ends = [end for length, end in found if length >= match]
            made = self._index.follow("suffix", match, ends, most)
            if made and (best is None or made.score > best.score):
                best = made
        return best

"""Drafters: who proposes tokens for the target to verify. Only the empty one exists so far.

Rule: a drafter can change how fast tokens come, never which. Its proposals are ints that the target's own
samples confirm or refuse (`accept`).
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from mlxspec.types import Entry, Sequence


class Drafter(Protocol):
    """Four verbs, all on the engine thread. `overlaps` says that `draft` needs no token that the host has
    not read; otherwise the engine reads a step before it plans the next one."""

    overlaps: bool

    def begin(self, seq: Sequence) -> None:
        """The sequence starts; its prompt is in `seq.tokens`."""

    def depth(self, seq: Sequence) -> int:
        """How many tokens it may want to draft for the sequence's next step."""

    def draft(self, entries: Seq[Entry]) -> None:
        """Fill `entry.draft` with up to `entry.depth` tokens, or leave it empty."""

    def observe(self, entries: Seq[Entry], accepted: Seq[list[int]]) -> None:
        """What the step committed, in plan order."""

    def end(self, seq: Sequence) -> None:
        """The sequence has finished or was aborted."""


class NoDrafter:
    """Plain decoding."""

    overlaps = True

    def begin(self, seq: Sequence) -> None: ...
    def depth(self, seq: Sequence) -> int:
        return 0

    def draft(self, entries: Seq[Entry]) -> None: ...
    def observe(self, entries: Seq[Entry], accepted: Seq[list[int]]) -> None: ...
    def end(self, seq: Sequence) -> None: ...


def accept(draft: Seq[int], sampled: Seq[int]) -> list[int]:
    """The tokens a round commits: `sampled` holds one more than `draft`; a drafted token stands while it
    equals the sample of its row, and the first row that differs brings its own sample.

    Exact by construction at any temperature: only samples are ever emitted."""
    kept = next((i for i, token in enumerate(draft) if token != sampled[i]), len(draft))
    return list(sampled[: kept + 1])

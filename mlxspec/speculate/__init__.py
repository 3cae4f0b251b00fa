"""Drafters: who proposes tokens for the target to verify.

Rule: a drafter can change how fast tokens come, never which: only the target's own samples are
emitted.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from mlxspec.model.runner import Step
from mlxspec.types import Entry, Sequence


class Drafter(Protocol):
    """All on the engine thread."""

    def begin(self, seq: Sequence) -> None:
        """The sequence starts; its prompt is in `seq.tokens`."""

    def waits(self, seqs: Seq[Sequence]) -> bool:
        """Whether the step in flight is to be read before the next is planned, because some of
        these running sequences are to get a draft that needs its tokens."""

    def plan(self, seqs: Seq[Sequence]) -> Mapping[Sequence, int]:
        """How many tokens to draft for each of the sequences that sample in the next step."""

    def draft(self, entries: Seq[Entry], before: Step | None) -> None:
        """All entries of the next step: fill `entry.draft` of those with a depth, with that many
        tokens at most, or leave it empty. `before` is the step in flight, which holds what is
        pending."""

    def observe(
        self, entries: Seq[Entry], accepted: Seq[list[int]], seconds: float, how: str
    ) -> None:
        """What the step committed, in plan order, and how long it took; "overlap" where it was
        submitted before the step in front of it was read, else "exact"."""

    def end(self, seq: Sequence) -> None:
        """The sequence has finished or was aborted."""

    def forget(self) -> None:
        """Drop what was remembered of sequences that have ended."""


class NoDrafter:
    """Plain decoding."""

    def begin(self, seq: Sequence) -> None: ...
    def waits(self, seqs: Seq[Sequence]) -> bool:
        return False

    def plan(self, seqs: Seq[Sequence]) -> Mapping[Sequence, int]:
        return {}

    def draft(self, entries: Seq[Entry], before: Step | None) -> None: ...
    def observe(
        self, entries: Seq[Entry], accepted: Seq[list[int]], seconds: float, how: str
    ) -> None: ...
    def end(self, seq: Sequence) -> None: ...
    def forget(self) -> None: ...

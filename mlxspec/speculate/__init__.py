"""Speculation: drafters propose tokens, which the target verifies.

Rule: a drafter can change how fast tokens come, never which: only the target's own samples are
emitted.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from mlxspec.model.batch import Step
from mlxspec.sequences import Accepted, Entry, Plan, Seq
from mlxspec.speculate.controller import Proposal


class Drafter(Protocol):
    """One way to draft: copies, a small model, a trained head. Engine thread only.

    `name` is the source of its drafts. A `lazy` drafter continues from tokens in flight, so that
    the step which samples them need not be read first.
    """

    name: str
    lazy: bool

    def begin(self, seq: Seq) -> None:
        """The sequence starts; its prompt is in `seq.tokens`."""

    def options(self, seq: Seq) -> list[Proposal]:
        """Proposals of what it could draft now, with the keys of their rates and their costs."""

    def chosen(self, plan: Plan) -> list[Entry]:
        """The entries for which one of its proposals is to be drafted."""
        return [e for e in plan if e.proposal and e.proposal.drafter is self]

    def draft(self, plan: Plan, previous: Step | None) -> None:
        """Fill the draft of each `chosen` entry, with at most `entry.depth` tokens. `plan` is the
        whole next step, `previous` the step in flight. Never waits for the device."""

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        """A step was committed."""

    def learn_seconds(self, seconds: float, depth: int) -> None:
        """Drafting `depth` tokens took `seconds`."""
        return None

    def end(self, seq: Seq) -> None:
        """The sequence has finished or was aborted."""

    def clear(self) -> None:
        """Forget sequences that ended, except for what is in blocks."""
        return None

    def close(self) -> None:
        """It failed and is not called again: release everything that it holds."""


class Speculator(Protocol):
    """The engine's view of drafting: the Proposer, or nothing, which is what the bodies here do."""

    def begin(self, seq: Seq) -> None:
        """The sequence starts."""
        return None

    def needs_sync(self, seqs: Sequence[Seq]) -> bool:
        """Whether the step in flight must be read before the next one is planned."""
        return False

    def depths(self, seqs: Sequence[Seq]) -> Mapping[Seq, int]:
        """How many tokens to draft for each of the sequences that decode in the next step."""
        return {}

    def draft(self, plan: Plan, previous: Step | None) -> None:
        """Fill the drafts of the plan's entries that have a depth."""
        return None

    def observe(self, step: Step, accepted: Sequence[Accepted], seconds: float) -> None:
        """A step was committed; it took `seconds` (0: its time says nothing)."""
        return None

    def end(self, seq: Seq) -> None:
        """The sequence has finished or was aborted."""
        return None

    def clear(self) -> None:
        """Forget sequences that ended."""
        return None


class NoSpeculation(Speculator):
    """Plain decoding."""

"""A drafter that knows the truth and is wrong every so often: it proves that drafts cannot change
the output."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxspec.sequences import Accepted, Draft, Entry, Seq
from tests.support import tiny


@dataclass
class NoisyOracle:
    """Drafts the sequence's true continuation (`truth`: (prompt, index) -> output), each token
    wrong with probability `lies`. Ragged: every entry drafts another length."""

    truth: dict[tuple[tuple[int, ...], int], list[int]]
    lies: float = 0.3
    most: int = 5
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    live: set[int] = field(default_factory=set)
    drafted: int = 0
    kept: int = 0

    def begin(self, seq: Seq) -> None:
        assert id(seq) not in self.live
        self.live.add(id(seq))

    def needs_sync(self, seqs: Sequence[Seq]) -> bool:
        return True

    def depths(self, seqs: Sequence[Seq]) -> dict[Seq, int]:
        return {seq: self.rng.randint(0, self.most) for seq in seqs}

    def draft(self, plan: Sequence[Entry], previous: object) -> None:
        for e in plan:
            if not e.depth:
                continue
            assert not e.seq.pending
            rest = self.truth[e.seq.request.prompt, e.seq.index][e.seq.generated :][: e.depth]
            e.draft = Draft(
                [(t + (self.rng.random() < self.lies)) % tiny.VOCAB for t in rest], "liar"
            )

    def observe(self, step: Any, accepted: Sequence[Accepted], seconds: float) -> None:
        self.drafted += sum(e.draft.size for e in step.plan)
        self.kept += sum(new.drafts for new in accepted)

    def clear(self) -> None: ...

    def end(self, seq: Seq) -> None:
        self.live.remove(id(seq))

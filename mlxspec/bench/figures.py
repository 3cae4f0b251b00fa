"""What was measured, and the figures made of it. Plain data: no engine, no terminal.

Rule: a speed is tokens by seconds; decode time runs from a prompt's first tokens to its last. A
ratio is of totals, so a long answer weighs more than a short one; where nothing was decoded there
is no figure.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlxspec.types import Output


@dataclass(slots=True)
class Answer:
    """One prompt's answer on one side. `first` and `last` are seconds from the start of its group;
    `brought` lists how many tokens each round brought. `rounds`, `drafted` and `kept` are the
    engine's own counts."""

    name: str
    tokens: list[int] = field(default_factory=list)
    brought: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    rounds: int = 0
    drafted: int = 0
    kept: dict[str, int] = field(default_factory=dict)  # drafted tokens that stood, by source

    def add(self, output: Output, now: float) -> None:
        """Book what a step brought; `now` is in seconds from the start of the group."""
        self.rounds, self.drafted, self.kept = output.rounds, output.drafted, dict(output.accepted)
        if output.tokens:
            self.first = self.first if self.tokens else now
            self.last = now
            self.tokens += output.tokens
            self.brought.append(len(output.tokens))

    @property
    def decoded(self) -> int:
        """Tokens after those that the prompt's own step brought."""
        return len(self.tokens) - self.brought[0] if self.brought else 0

    @property
    def seconds(self) -> float:
        return self.last - self.first


@dataclass(slots=True)
class Side:
    """A group of prompts that ran together, with or without speculation. `seconds` is their whole
    time."""

    answers: list[Answer]
    seconds: float


@dataclass(slots=True)
class Trial:
    """The same group on both sides."""

    plain: Side
    drafted: Side

    @property
    def differing(self) -> list[str]:
        """The prompts whose tokens are not the same on both sides."""
        pairs = zip(self.plain.answers, self.drafted.answers, strict=True)
        return [a.name for a, b in pairs if a.tokens != b.tokens]


@dataclass(slots=True)
class Cell:
    """All trials of one workload at one number of streams."""

    workload: str
    streams: int
    trials: list[Trial] = field(default_factory=list)

    def answers(self, drafted: bool) -> list[Answer]:
        return [a for t in self.trials for a in (t.drafted if drafted else t.plain).answers]

    def brought(self) -> Counter[int]:
        """Rounds with speculation, by the number of tokens they brought."""
        return Counter(n for a in self.answers(True) for n in a.brought)


@dataclass(frozen=True, slots=True)
class Row:
    """A cell's figures. Speeds are tokens/s of one stream, the median over prompts; a ratio above 1
    says that speculation was faster. None: not to be had."""

    workload: str
    streams: int
    prompts: int
    tokens: int  # that were generated with speculation, in all rounds
    plain: float | None
    drafted: float | None
    ratio: float | None  # of decode time
    whole: float | None  # of whole time, prompts included
    per_round: float | None  # tokens
    kept: float | None  # part of the drafted tokens that stood
    sources: dict[str, float]  # part of the kept tokens that each source drafted
    differing: list[str]


def row(cell: Cell) -> Row:
    """The figures of a cell."""
    plain, drafted = cell.answers(False), cell.answers(True)
    kept: Counter[str] = Counter()
    for answer in drafted:
        kept.update(answer.kept)
    tokens = sum(len(a.tokens) for a in drafted)
    whole = [
        _part(sum(len(a.tokens) for s in sides for a in s.answers), sum(s.seconds for s in sides))
        for sides in ([t.plain for t in cell.trials], [t.drafted for t in cell.trials])
    ]
    return Row(
        workload=cell.workload,
        streams=cell.streams,
        prompts=len({a.name for a in drafted}),
        tokens=tokens,
        plain=_median(plain),
        drafted=_median(drafted),
        ratio=_ratio(_speed(drafted), _speed(plain)),
        whole=_ratio(whole[1], whole[0]),
        per_round=_part(tokens, sum(a.rounds for a in drafted)),
        kept=_part(sum(kept.values()), sum(a.drafted for a in drafted)),
        sources={name: n / kept.total() for name, n in kept.most_common() if n},
        differing=sorted({name for t in cell.trials for name in t.differing}),
    )


def _part(n: float, of: float) -> float | None:
    return n / of if of else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _speed(answers: Sequence[Answer]) -> float | None:
    return _part(sum(a.decoded for a in answers), sum(a.seconds for a in answers))


def _median(answers: Iterable[Answer]) -> float | None:
    speeds = [a.decoded / a.seconds for a in answers if a.decoded and a.seconds > 0]
    return statistics.median(speeds) if speeds else None

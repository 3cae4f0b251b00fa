"""A grammar over token ids for tests: it knows at each point which tokens may come, and often only
one. And a thinking budget."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlxspec.text.structured.thinking import ThinkingBudget
from tests.support import tiny

SIZE = -(-tiny.VOCAB // 8)
MOST = 6  # tokens of reasoning
END = (5, 9)  # its end marker
MARKS: Any = SimpleNamespace(think_start="<think>", think_end_tokens=END)


def allowed(said: Seq[int]) -> set[int]:
    """What may follow these tokens of an answer: one token at every third place, else a few."""
    n, last = len(said), said[-1] if said else 3
    if n % 3 == 2:
        return {(last * 11 + n) % tiny.VOCAB}
    return {(last + step * step + n) % tiny.VOCAB for step in range(1, 9)}


def mask(tokens: set[int]) -> bytes:
    made = bytearray(SIZE)
    for token in tokens:
        made[token // 8] |= 1 << token % 8
    return bytes(made)


@dataclass
class Maze:
    """The matcher. It fails once its answer has `breaks` tokens, if that is given."""

    breaks: int = -1
    said: list[int] = field(default_factory=list)

    def masks(self, draft: Seq[int]) -> list[bytes]:
        if len(self.said) >= self.breaks >= 0:
            raise ValueError("no way out")
        found = [mask(allowed(self.said))]
        for i, token in enumerate(draft):
            if token not in allowed([*self.said, *draft[:i]]):
                break
            found.append(mask(allowed([*self.said, *draft[: i + 1]])))
        return found

    def take(self, tokens: Seq[int]) -> None:
        for token in tokens:
            assert token in allowed(self.said), "a token came that the mask did not allow"
            self.said.append(token)

    def restricts(self, ahead: int) -> bool:
        return True

    def forced(self, most: int) -> list[int]:
        made: list[int] = []
        while len(made) < most and len(only := allowed([*self.said, *made])) == 1:
            made += only
        return made


def budget(most: int = MOST) -> ThinkingBudget:
    """Of an answer whose prompt has opened the reasoning."""
    return ThinkingBudget(MARKS, str, most, thinking=True)

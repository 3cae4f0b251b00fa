"""Thinking budgets: after a number of reasoning tokens the end marker is forced, as by a grammar.

Rule: what is forced depends only on the tokens before it, so neither a drafter nor the batch nor
the cache can change an answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.text.formats import ChatFormat

# By reasoning effort, if a model's template has no levels of its own: Google's table for Gemini
# 2.5 (https://ai.google.dev/gemini-api/docs/openai). Other words set no limit.
EFFORT_TOKENS = {"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": 24576}


@dataclass(slots=True)
class ThinkingBudget:
    """The matcher of one answer, whose reasoning may have `remaining` more tokens before the end
    marker is forced; the marker's last token ends it. The protocol is GrammarMatcher's.

    `thinking` None: the answer, `text` so far, may still open the reasoning; False: the reasoning
    is over, or there is none. `inner` is the matcher of a grammar, if there is one.
    """

    form: ChatFormat
    decode: Callable[[list[int]], str]
    remaining: int
    thinking: bool | None
    inner: Any = None
    text: str = ""

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """GrammarMatcher.masks; an empty mask allows every token. A draft is truncated where the
        end marker begins, and may continue in it."""
        rows = [b"" for _ in range(1 + len(draft))]
        if self.inner:
            rows = self.inner.masks(draft)
        if self.thinking is False:
            return rows
        closing = self._closing()
        rows = rows[: max(len(closing) + 1, self.remaining)]
        for i, token in enumerate(closing[: len(rows)]):
            rows[i] = (1 << token).to_bytes(token // 8 + 1, "little")
        return rows

    def take(self, tokens: Sequence[int]) -> None:
        """Advance over sampled tokens."""
        start = self.form.think_start
        for token in tokens:
            if self.thinking:
                self.remaining -= 1
                self.thinking = token != self.form.think_end_tokens[-1]
            elif self.thinking is None:
                text = self.text = (self.text + self.decode([token])).lstrip()
                opened = text.startswith(start)
                if opened or not start.startswith(text):
                    self.thinking = opened
        if self.inner:
            self.inner.take(tokens)

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that must follow."""
        closing = self._closing()
        if closing or not self.inner:
            return closing[:most]
        return list(self.inner.forced(most))

    def restricts(self, ahead: int) -> bool:
        """GrammarMatcher.restricts; without a grammar only near the end marker."""
        return self.inner is not None or (self.thinking is not False and ahead >= self.remaining)

    def _closing(self) -> list[int]:
        """The rest of the end marker, once it is forced."""
        if not self.thinking or self.remaining > 0:
            return []
        return list(self.form.think_end_tokens[-self.remaining :])

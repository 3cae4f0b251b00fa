"""Reads values as models write them: JSON, Python's literals, Gemma's notation, or a mixture.

What cannot be read for certain is an error: text is better than a changed call.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from mlxspec.text.messages import clean
from mlxspec.types import Json

WORDS: Mapping[str, Any] = {
    **{"true": True, "True": True, "false": False, "False": False},
    **{"null": None, "None": None},
}
ESCAPE = re.compile(r"\\(U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
ESCAPED |= {char: char for char in "\"'\\/"}
BARE = re.compile(r"[^\s,:=(){}\[\]\"'<>]+")
CLOSES = {"{": "}", "[": "]", "(": ")"}
# A quote ends a string where something else can follow; others are part of it.
QUOTED = r"{0}((?:[^{0}\\]|\\.|{0}(?!\s*(?:[,:=)\]}}]|\Z)|\s+{0}))*+){0}(?!\s+{0})"
THRICE = r"{0}{0}{0}(.*?){0}{0}{0}"
STRINGS = {quote: re.compile(QUOTED.format(quote), re.DOTALL) for quote in "\"'"}
STRINGS |= {3 * quote: re.compile(THRICE.format(quote), re.DOTALL) for quote in "\"'"}


class Literals:
    """A reader of the values in a text, from `at` on. Strings stand between quotes, or without
    escapes between `quote` twice. Its methods raise ValueError, IndexError or RecursionError."""

    def __init__(self, text: str, quote: str = "") -> None:
        self.text, self.at, self._quote = text, 0, quote
        # A quote that is a character may stand in a string too: the next argument must follow.
        ends = r"(?=\s*(?:,\s*[^\s=,]+=|\)\s*(?:[,\]]|\Z)))" if len(quote) == 1 else ""
        self._raw = re.compile(rf"{re.escape(quote)}(.*?){re.escape(quote)}{ends}", re.DOTALL)

    def value(self) -> Any:
        """The value that comes next."""
        begin = self.peek()
        if begin in CLOSES:
            self.at += 1
            return self.members(begin) if begin == "{" else self._items(begin)
        if (string := self._string()) is not None:
            return string
        word = self.word()
        return WORDS[word] if word in WORDS else json.loads(word)

    def members(self, begin: str) -> Json:
        """What follows the bracket that begins an object or the arguments of a call: keys with or
        without quotes, and values."""
        made: Json = {}
        while self.peek() != CLOSES[begin]:
            key = self._string()
            key = self.word() if key is None else key
            if self.peek() not in "=:":
                raise ValueError(f"{key} has no value")
            self.at += 1
            made[key] = self.value()
            self._end_item(begin)
        self.at += 1
        return made

    def _items(self, begin: str) -> list[Any]:
        made = []
        while self.peek() != CLOSES[begin]:
            made.append(self.value())
            self._end_item(begin)
        self.at += 1
        return made

    def _end_item(self, begin: str) -> None:
        if self.peek() == ",":
            self.at += 1
        elif self.peek() != CLOSES[begin]:
            raise ValueError(f"{self.text[self.at : self.at + 9]!r} where a comma should be")

    def word(self) -> str:
        """Text without quotes and brackets."""
        found = BARE.match(self.text, self.at)
        if not found:
            raise ValueError(f"{self.text[self.at : self.at + 9]!r} is no value")
        self.at = found.end()
        return found[0]

    def peek(self) -> str:
        """The character that comes next, behind white space."""
        while self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at]

    def _string(self) -> str | None:
        self.peek()
        if self._quote and self.text.startswith(self._quote, self.at):
            found = self._raw.match(self.text, self.at)
        elif self.text[self.at] in STRINGS:
            thrice = self.text[self.at : self.at + 3]
            found = STRINGS.get(thrice, STRINGS[self.text[self.at]]).match(self.text, self.at)
        else:
            return None
        if not found:
            raise ValueError("a string has no end")
        self.at = found.end()
        return found[1] if found.re is self._raw else unescaped(found[1])


def unescaped(text: str) -> str:
    """A string's text without its escapes, of JSON or Python."""

    def char(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if code[1:] else ESCAPED.get(code, found[0])

    return clean(ESCAPE.sub(char, text))  # pairs of surrogates become one character


def literal(text: str) -> Any:
    """The value of a whole text. Raises ValueError, IndexError or RecursionError."""
    reader = Literals(text.strip())
    value = reader.value()
    if reader.at < len(reader.text):
        raise ValueError("there is more than a value")
    return value

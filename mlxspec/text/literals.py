"""Reads values as models write them: JSON, Python's literals, Gemma's notation, or a mixture.

Anything ambiguous is an error: showing it as text is better than changing a call.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from mlxspec.text.messages import clean
from mlxspec.types import Json

NOT_JSON = (ValueError, TypeError, LookupError, AttributeError, RecursionError, StopIteration)
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
    """Reads the values in a text, from position `at`. Strings are in quotes, or unescaped between
    two `quote` markers. The methods raise ValueError, IndexError or RecursionError."""

    def __init__(self, text: str, quote: str = "") -> None:
        self.text, self.at, self._quote = text, 0, quote
        # A quote of one character may also be inside a string: the next argument must follow.
        ends = r"(?=\s*(?:,\s*[^\s=,]+=|\)\s*(?:[,\]]|\Z)))" if len(quote) == 1 else ""
        self._raw = re.compile(rf"{re.escape(quote)}(.*?){re.escape(quote)}{ends}", re.DOTALL)

    def value(self) -> Any:
        """Read the next value."""
        begin = self.peek()
        if begin in CLOSES:
            self.at += 1
            return self.members(begin) if begin == "{" else self._items(begin)
        if (string := self._string()) is not None:
            return string
        word = self.word()
        return WORDS[word] if word in WORDS else json.loads(word)

    def members(self, begin: str) -> Json:
        """Read what follows the bracket that opens an object or a call's arguments: keys, quoted or
        not, and values."""
        members: Json = {}
        while self.peek() != CLOSES[begin]:
            key = self._string()
            key = self.word() if key is None else key
            if self.peek() not in "=:":
                raise ValueError(f"{key} has no value")
            self.at += 1
            members[key] = self.value()
            self._end_item(begin)
        self.at += 1
        return members

    def _items(self, begin: str) -> list[Any]:
        items = []
        while self.peek() != CLOSES[begin]:
            items.append(self.value())
            self._end_item(begin)
        self.at += 1
        return items

    def _end_item(self, begin: str) -> None:
        if self.peek() == ",":
            self.at += 1
        elif self.peek() != CLOSES[begin]:
            raise ValueError(f"{self.text[self.at : self.at + 9]!r} where a comma should be")

    def word(self) -> str:
        """Read a word: text without quotes and brackets."""
        match = BARE.match(self.text, self.at)
        if not match:
            raise ValueError(f"{self.text[self.at : self.at + 9]!r} is not a value")
        self.at = match.end()
        return match[0]

    def peek(self) -> str:
        """The character that comes next, after white space."""
        while self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at]

    def _string(self) -> str | None:
        self.peek()
        if self._quote and self.text.startswith(self._quote, self.at):
            match = self._raw.match(self.text, self.at)
        elif self.text[self.at] in STRINGS:
            thrice = self.text[self.at : self.at + 3]
            match = STRINGS.get(thrice, STRINGS[self.text[self.at]]).match(self.text, self.at)
        else:
            return None
        if not match:
            raise ValueError("a string is not closed")
        self.at = match.end()
        return match[1] if match.re is self._raw else unescaped(match[1])


def unescaped(text: str) -> str:
    """A string's text with the escapes of JSON and Python resolved."""

    def char(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if code[1:] else ESCAPED.get(code, match[0])

    return clean(ESCAPE.sub(char, text))  # pairs of surrogates become one character


def literal(text: str) -> Any:
    """The value of a whole text. Raises ValueError, IndexError or RecursionError."""
    reader = Literals(text.strip())
    value = reader.value()
    if reader.at < len(reader.text):
        raise ValueError("there is text after the value")
    return value


def dumped(value: Any) -> str:
    """A value as JSON, its letters as they are. Raises ValueError for one that is not finite."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

"""Parses arguments that a model writes one parameter at a time, into pieces of a JSON object.

A value has the types that the tool's schema gives it, or that the model marked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from html import unescape
from typing import Any

import regex

from mlxspec.text.formats import ChatFormat
from mlxspec.text.layouts import SAME_KEY, TAG, TAGS, CallLayout, Value, loose
from mlxspec.text.literals import NOT_JSON, dumped, literal, unescaped
from mlxspec.text.messages import clean
from mlxspec.text.patterns import END, any_of, plain_text

CONTROL = re.compile(r"[\x00-\x1f]")
NULLS = ("null", "None")


def end_pattern(form: ChatFormat, layout: CallLayout) -> str:
    """The pattern of the markers that end a call, or all of them."""
    tags = [
        *re.findall(TAGS, layout.call_closes + layout.section_closes),
        layout.start_marker,
        form.think_end,
    ]
    return "|".join(loose(tag) for tag in tags if tag)


@lru_cache
class ParameterPatterns:
    """Patterns of a call's parameters. `key`: the text before a value, with the name, and the index
    of the value's form as the name of the last group, or "any" for further attributes; or the end
    of the call. `closes`: the end of a value, by form; the group `next` is the text after it, and
    if the end is left out, the group `name` is the next parameter's. `bare`: the same, whatever
    follows. `closing`: its text. `ends`: the markers that end the call. `ending`: its end, if the
    last value's is left out."""

    def __init__(self, form: ChatFormat, layout: CallLayout, name: str = "") -> None:
        """`name`: the key of the value, if the text after a value has it."""
        key, ends = loose(layout.key), end_pattern(form, layout)
        opens = [f"(?P<w{i}>{_opens(value, layout)})" for i, value in enumerate(layout.values)]
        if any(value.opens.startswith('"') and ">" in value.opens for value in layout.values):
            opens.append(r'(?P<any>"\s[^<>]{0,256}>)')
        self.key = regex.compile(
            rf'[\s,]*(?:(?:{ends})|{key}([^<>\n"]+?)(?:{"|".join(opens)}))',
        )
        openings = "|".join(loose(value.opens.rstrip()) for value in layout.values)
        line = r"\n" if "\n" in layout.separator else r"\n?"
        forgotten = rf"{line}(?P<next>{key}(?P<name>[^<>\n\"]+?)(?:{openings}))"
        call = loose(layout.call_closes.strip())
        forgotten += rf"|\n?(?P<next>{call}\s{{0,64}}{loose(layout.start_marker)})" if call else ""
        tag = re.match(r"<\w+", layout.key.strip())
        malformed = rf"|{tag[0]}[^<\w]" if tag else ""
        begins = rf"(?:{key}|{ends}{malformed}))"
        self.closes, self.bare = [], []
        self.closing = [value.closes.replace(SAME_KEY, name) for value in layout.values]
        for value in layout.values:
            closes = _closes(value).replace(SAME_KEY, re.escape(name))
            follows = rf"\s{{0,64}}{begins}" if closes else begins
            sure = not value.closes or SAME_KEY in value.closes
            others = "" if sure else f"|{forgotten}"
            self.closes.append(regex.compile(f"{closes}(?P<next>{follows}{others}"))
            anything = ")" if closes else follows
            self.bare.append(regex.compile(f"{closes}(?P<next>{anything}{others}"))
        # Text in which nothing of this begins, nor white space that may belong to it.
        edges = [layout.key, layout.call_closes, *(value.closes for value in layout.values)]
        self.plain = plain_text("<".join(text.strip()[:1] for text in edges))
        self.ends = regex.compile(ends)
        self.ending = regex.compile(rf"\s{{0,64}}{call or '(?!)'}\s{{0,64}}(?:{ends})?\s*\Z")


def _opens(value: Value, layout: CallLayout) -> str:
    """The pattern before a value. White space at its end is the template's, but only once."""
    text = value.opens.rstrip()
    padding = value.opens[len(text) :]
    longer = [other.opens.removeprefix(value.opens) for other in layout.values]
    longer = [more for more in longer if more not in ("", *(v.opens for v in layout.values))]
    opens = loose(text.removesuffix('"')) + ('"' if text.endswith('"') else "")
    opens += f"(?!{any_of(longer, END)})" if longer else ""
    return opens + (rf"(?:{re.escape(padding)}|(?=[^{re.escape(padding[0])}]))" if padding else "")


def _closes(value: Value) -> str:
    """The pattern after a value; the last character of a tag may be wrong."""
    text = value.closes.lstrip()
    if not text:
        return ""
    closes = ('"' if text.startswith('"') else "") + loose(text.removeprefix('"'))
    if text.startswith("</"):
        closes = loose(text.removesuffix(">")) + r"\s*/?(?:>|(?=[^\s/>]))"
    padding = re.escape(value.closes[: -len(text)])
    return (f"(?:{padding})?" if padding else "") + closes


@dataclass(slots=True)
class ParameterArguments:
    """Arguments that are parameters, with the interface of JsonArguments. A string is emitted as it
    comes, any other value once it is complete. If a parameter cannot be read, the text from there
    on is emitted as it is, which is not JSON: better than a call without it."""

    form: ChatFormat
    layout: CallLayout
    types: Mapping[str, set[str]]  # of parameters
    patterns: ParameterPatterns = field(init=False)
    rest: str = ""
    ended: bool = False
    _before: str = "{"  # the next parameter
    _index: int | None = None  # of the current value's form, in `layout.values`
    _types: set[str] = field(default_factory=set)  # of that value
    _quoted: bool = False  # whether it is a string of which the quote was emitted
    _at: int = 0  # where in `rest` its end may be
    _first_end: tuple[int, int] | None = None  # where it ends if it has no better end
    _broken: bool = False  # whether a parameter could not be read
    _missing: set[str] = field(init=False)  # parameters that have not come

    def __post_init__(self) -> None:
        self._missing = set(self.types)
        self.patterns = ParameterPatterns(self.form, self.layout)

    def feed(self, text: str) -> str:
        """The next piece of the arguments."""
        self.rest += text
        if self._quoted and self.patterns.plain.fullmatch(self.rest):
            return self._escaped(self._cut(len(self.rest), len(self.rest)))
        pieces = []
        while not self.ended and (piece := self._next()) is not None:
            pieces.append(piece)
        return "".join(pieces)

    def _next(self) -> str | None:
        """What can be read now; None: nothing."""
        if self._broken:
            return self._unread() or None
        if self._index is None:
            return self._next_key()
        if self._is_string():
            return self._string(self._index) or None
        if not (end := self._value_end(self._index)):
            return None
        return self._end_value(*end)

    def _next_key(self) -> str | None:
        key = self.patterns.key.match(self.rest, partial=True)
        if key and key.partial:
            return None
        if not key:
            self._broken = True
            return self._before
        self.rest = self.rest[key.end() :]
        return self._begin(key[1], key.lastgroup)

    def _unread(self) -> str:
        """Text of parameters that cannot be read, up to the end of the call."""
        match = self.patterns.ends.search(self.rest, partial=True)
        self.ended = bool(match and not match.partial)
        start, stop = match.span() if match else (len(self.rest), len(self.rest))
        text, self.rest = self.rest[:start], self.rest[stop if self.ended else start :]
        return text

    def _string(self, index: int) -> str:
        """The part of a string that is certain. One that may also be null is emitted once it is
        not."""
        quote = "" if self._quoted else '"'
        match = self._closer(index)
        if match and not match.partial:
            text = self._cut(match.start(), match.start("next"))
            self._index, self._quoted = None, False
            if quote and "null" in self._types and text.strip() in NULLS:
                return "null"
            return f'{quote}{self._escaped(text)}"'
        end = match.start() if match else len(self.rest)
        text = self.rest[:end].strip()
        if quote and "null" in self._types and any(word.startswith(text) for word in NULLS):
            return ""
        if match := self.patterns.ending.search(self.rest, partial=True):
            end = min(end, match.start())
        self._quoted = True
        return quote + self._escaped(self._cut(end, end))

    def _closer(self, index: int) -> regex.Match[str] | None:
        """The end of a string, or what may be its beginning. If the end is left out, a parameter
        that has not come must follow; others are part of the text."""
        closes, at = self.patterns.closes[index], 0
        while match := closes.search(self.rest, at, partial=True):
            if match.partial or self._may_follow(match):
                return match
            at = match.start() + 1
        return None

    def _may_follow(self, match: regex.Match[str]) -> bool:
        name = match.groupdict().get("name")
        return name is None or name in self._missing

    def _value_end(self, index: int) -> tuple[int, int] | None:
        """Where a value other than a string ends, and where what follows it begins: at the first
        end before which it is one. Lists and objects may have ends in their strings."""
        bare, closes = self.patterns.bare[index], self.patterns.closes[index]
        while match := bare.search(self.rest, self._at, partial=True):
            if match.partial:
                self._at = match.start()
                return None
            end = match.start(), match.start("next")
            text = self.rest[: match.start()]
            if self._may_follow(match) and self._is_value(text):
                return end
            follows = closes.match(self.rest, match.start(), partial=True)
            if follows and follows.partial:
                return None
            if follows and self._may_follow(follows):
                if not text.lstrip().startswith(("[", "{")):
                    return end
                self._first_end = self._first_end or end
            self._at = match.start() + 1
        self._at = len(self.rest)
        return None

    def _is_value(self, text: str) -> bool:
        try:
            literal(self._unescaped(text).strip())
        except NOT_JSON:
            return self.layout.html  # in which no value has an end inside
        return True

    def _cut(self, end: int, start: int) -> str:
        """Take the text up to `end`; what follows begins at `start`."""
        text, self.rest = self.rest[:end], self.rest[start:]
        self._at, self._first_end = 0, None
        return text

    def finish(self) -> str:
        """The last piece of the arguments, if the model ended the answer. The value, or its call,
        must have ended."""
        if self._broken:
            text, self.rest = self.rest, ""
            return text
        if self._index is None:
            key, rest = self.layout.key.strip(), self.rest.strip()
            if rest and (rest.startswith(key) or key.startswith(rest)):
                return ""  # it breaks off in a parameter's name
        elif self._first_end:
            return self._end_value(*self._first_end) + self.feed("")
        else:
            match = self.patterns.ending.search(self.rest, partial=True)
            if match and re.search(TAG, match[0]):
                self.rest = self.rest[: match.start()] + self.patterns.closing[self._index]
                self._at = min(self._at, match.start())
        return self.feed(
            self.layout.call_closes + self.layout.section_closes + self.layout.end_marker
        )

    def _begin(self, key: str | None, group: str | None) -> str:
        """Begin a parameter, or without a key the end of the call."""
        if key is None or group is None:
            self.ended = True
            return "}" if self._before == ", " else "{}"
        forms = self.layout.values
        texts = [i for i, value in enumerate(forms) if value.string is not False]
        self._index = texts[0] if group == "any" else int(group[1:])
        marked = None if group == "any" else forms[self._index].string  # by the format
        self._missing.discard(key)
        self._types = self.types.get(key, set())
        if marked and ("string" in self._types or not self._types):
            self._types = {"string"}
        elif marked is False:
            self._types = self._types - {"string"} or {"object"}
        if SAME_KEY in forms[self._index].closes:
            self.patterns = ParameterPatterns(self.form, self.layout, key)
        self._quoted = False
        piece = f"{self._before}{dumped(key)}: "
        self._before = ", "
        return piece

    def _is_string(self) -> bool:
        """Whether the value is a string that is emitted as it comes."""
        string = "string" in self._types and self._types <= {"string", "null"}
        return string and not self.layout.html

    def _escaped(self, text: str) -> str:
        """The text of a string in JSON, as which the model may write it itself."""
        if self._is_json():
            return CONTROL.sub(lambda match: dumped(match[0])[1:-1], text)
        return dumped(text)[1:-1]

    def _is_json(self) -> bool:
        value = self.layout.values[self._index or 0]
        return not self.layout.raw and value.opens.endswith('"') and value.closes.startswith('"')

    def _unescaped(self, text: str) -> str:
        if self._is_json():
            return unescaped(text)
        return unescape(text) if self.layout.html else text

    def _end_value(self, end: int, start: int) -> str:
        """The value that ends at `end`; what follows it begins at `start`."""
        text = self._unescaped(self._cut(end, start))
        self._index = None
        try:
            return clean(dumped(parse_value(text, self._types)))
        except NOT_JSON:
            return dumped(text)


def parse_value(text: str, types: set[str]) -> Any:
    """The value of a parameter's text; the text itself if it has none of the types."""
    stripped = text.strip()
    if "string" in types:
        return None if stripped in NULLS and "null" in types else text
    if not types and not stripped.startswith(("{", "[")):
        return text
    try:
        value = literal(stripped)
        if isinstance(value, str) and types & {"object", "array"}:
            value = literal(value)  # JSON in JSON
    except NOT_JSON:
        return text
    if isinstance(value, float) and types == {"integer"} and value.is_integer():
        return int(value)
    return value

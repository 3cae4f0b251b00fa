"""Parses the arguments of a tool call while the model writes it, into pieces of a JSON object.

Rule: the pieces together depend only on the text, never on how it was split, and no piece is
retracted. If the text breaks off, or is not JSON, so are they.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from html import unescape
from typing import Any

import regex

from mlxspec.text.control_tokens import END, any_of, plain_text
from mlxspec.text.formats import ChatFormat
from mlxspec.text.layouts import CALL_ID, NAME, OTHER, PIECE, TAG, TAGS, Layout, Value
from mlxspec.text.literals import literal, unescaped
from mlxspec.text.messages import Types, clean

Pattern = re.Pattern[str]

MAX_HEAD = 256  # characters in which the arguments must begin, or the call is read as a whole
NOT_JSON = (ValueError, TypeError, LookupError, AttributeError, RecursionError, StopIteration)

# Text before a call without meaning: white space, a code fence, the end of the JSON before it; and
# inside of tags also tags and further fields.
BETWEEN = r"```(?:json)?(?=\s|\Z)|[\s,;\[\]}]"
SKIPPED = (
    rf'</?\|?[\w:]*(?:tool|function)_calls?\w*\|?>|\[TOOL_CALLS\]|"\w+"\s*:\s*"[^"]*"|{BETWEEN}'
)
TOOL = r"([^\s\"'<>\[\](){}\\]+?)"  # the name of one
OBJECT = r'\s*(?=\{\s*["}])'  # where arguments in JSON begin
# A call up to there, in any format: Hermes' and Qwen's, Mistral's, Kimi's, Harmony's.
JSON_HEAD = (
    rf'(?:\{{\s*"name"\s*:\s*"|(?:to=)?){TOOL}'
    r'(?:"\s*,\s*"(?:arguments|parameters)"\s*:|\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]'
    rf"|\s*<\|tool_call_argument_begin\|>|(?=[\s<])[^{{}}]{{0,64}}<\|message\|>){OBJECT}"
)
CONTROL = re.compile(r"[\x00-\x1f]")
IN_STRING = re.compile(r'\\.?|["\x00-\x1f]', re.DOTALL)
OUTSIDE = re.compile(r'["{}\[\]]|(?=<)')
# Half a surrogate pair, which JSON can contain, but nobody can send or encode: group 1 may still
# become a whole pair, group 2 cannot. Whole pairs and other escapes are skipped.
HALVES = re.compile(
    r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w"
    r"|(u\w{0,3}\Z|u[dD][89abAB]\w\w(?:\\(?:u\w{0,3})?)?\Z)|(u[dD][89a-fA-F]\w\w)|.)",
    re.DOTALL,
)
DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1}


def tool_named(name: str, tools: Collection[str]) -> str:
    """The tool that a model calls by this name: with a namespace and a number as Kimi writes them,
    or without the tool's own namespace. Raises ValueError if there is none."""
    bare = re.sub(r"\Afunctions[.:]", "", name)
    plain = re.sub(r":\d+\Z" if bare == name else r":?\d+\Z", "", bare)
    matches = [variant for variant in (name, bare, plain) if variant in tools]
    short = [tool for tool in tools if tool.endswith(f"__{name}")]
    if matches or len(short) == 1:
        return (matches or short)[0]
    raise ValueError(f"there is no tool {name!r}")


def loose(text: str) -> str:
    """The pattern of a format's text with any white space, quotes, digits, ids and names."""
    patterns = []
    for piece in PIECE.findall(text):
        if piece.isspace():
            patterns.append(r"(?:\\n|\s)*+")
        elif piece == '"':
            patterns.append(r"\s*\"?\s*")
        elif piece.startswith(CALL_ID):
            patterns.append(r"[\w.:-]*+")
        elif piece in (NAME, OTHER):
            patterns.append(r"[^\s<>\"]++")
        else:
            patterns.append(re.sub(r"\d+", r"\\d+", re.escape(piece)))
    return "".join(patterns)


@lru_cache
def skipped(form: ChatFormat) -> Pattern:
    """The pattern of text before a call without meaning, in a format."""
    edges = set()
    for layout in form.layouts:
        texts = [layout.start, layout.opens, layout.closes, layout.between, layout.ends]
        texts += re.findall(TAGS, "".join(texts))
        edges |= {loose(text.strip()) for text in texts if re.search(r"[^\W\d]|>>", text)}
    longest = sorted(edges, key=len, reverse=True)
    return re.compile(f"(?:{'|'.join([*longest, SKIPPED])})*+")


@lru_cache
def head_patterns(form: ChatFormat) -> list[tuple[Pattern, Layout | None]]:
    """The patterns of calls up to their arguments, with the name as a group; and the layout if the
    arguments are parameters."""
    before = skipped(form).pattern
    patterns: list[tuple[Pattern, Layout | None]] = [(re.compile(before + JSON_HEAD), None)]
    for layout in form.layouts:
        opens = before + loose(layout.name_opens.removesuffix("functions.")) + TOOL
        after = loose(layout.after) if layout.name_opens else f"(?:{loose(layout.after)})?"
        if layout.style != "words":
            patterns.append((re.compile(opens + after + OBJECT), None))
        if layout.style == "tags":
            first = f"(?={loose(layout.key)}|{end_pattern(form, layout)})"
            patterns.append((re.compile(opens + loose(layout.after) + first), layout))
    return patterns


def end_pattern(form: ChatFormat, layout: Layout) -> str:
    """The pattern of the markers that end a call, or all of them."""
    tags = [*re.findall(TAGS, layout.closes + layout.ends), layout.start, form.think_end]
    return "|".join(loose(tag) for tag in tags if tag)


@dataclass(slots=True)
class JsonArguments:
    """Arguments that are JSON already, up to their last bracket, or to a tag where none can be.
    `rest` is unread text; once they have `ended`, all text after them."""

    rest: str = ""
    ended: bool = False
    _string: bool = False  # whether the text ends inside one
    _half: str = ""  # the end of the text, if it may be half a pair
    _depth: int = 0  # of open brackets

    def feed(self, text: str) -> str:
        """The next piece of the arguments, with U+FFFD for halves of surrogate pairs."""
        piece, self._half = self._half + self._read(text), ""
        return HALVES.sub(self._replace, piece) if "\\" in piece else piece

    def _replace(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            self._half = match[0]
            return ""
        return "\\ufffd" if match[2] else match[0]

    def _read(self, text: str) -> str:
        text, self.rest = self.rest + text, ""
        piece, done, at = "", 0, 0
        while match := (IN_STRING if self._string else OUTSIDE).search(text, at):
            mark, at = match[0], match.end()
            if mark == '"':
                self._string = not self._string
            elif not self._string:
                self._depth += DEPTHS.get(mark, 0)
                if not mark or self._depth == 0:
                    self.ended, self.rest = True, text[at:]
                    return piece + text[done:at]
            elif mark == "\\":  # the escaped character has not come yet
                text, self.rest = text[:-1], mark
            elif mark < " ":  # JSON has no bare control characters there
                piece, done = piece + text[done : match.start()] + _dumped(mark)[1:-1], at
        return piece + text[done:]

    def finish(self) -> str:
        """The last piece, at the end of the answer: empty."""
        return ""


@lru_cache
class ParameterPatterns:
    """Patterns of a call's parameters. `key`: the text before a value, with the name, and the index
    of the value's form as the name of the last group; or the end of the call. `closes`: the end of
    a value, by form; the group `next` is the text after it, and if the end is left out, the group
    `name` is the next parameter's. `ending`: the end of the call, if the last value's is left
    out."""

    def __init__(self, form: ChatFormat, layout: Layout) -> None:
        key, ends = loose(layout.key), end_pattern(form, layout)
        opens = [f"(?P<w{i}>{_opens(value, layout)})" for i, value in enumerate(layout.values)]
        self.key = re.compile(rf'{key}([^<>\n"]+?)(?:{"|".join(opens)})|(?:{ends})')
        openings = "|".join(loose(value.opens.rstrip()) for value in layout.values)
        line = r"\n" if "\n" in layout.separator else r"\n?"
        forgotten = rf"{line}(?P<next>{key}(?P<name>[^<>\n\"]+?)(?:{openings}))"
        call = loose(layout.closes.strip())
        forgotten += rf"|\n?(?P<next>{call}\s{{0,64}}{loose(layout.start)})" if call else ""
        self.closes = []
        for value in layout.values:
            closes = rf"{_closes(value)}(?:{key}|{ends}))"
            self.closes.append(regex.compile(f"{closes}|{forgotten}" if value.closes else closes))
        # Text in which nothing of this begins, nor white space that may belong to it.
        edges = [layout.key, layout.closes, *(value.closes for value in layout.values)]
        self.plain = plain_text("<".join(text.strip()[:1] for text in edges))
        self.ending = regex.compile(rf"\s{{0,64}}{call or '(?!)'}\s{{0,64}}(?:{ends})?\s*\Z")


def _opens(value: Value, layout: Layout) -> str:
    """The pattern before a value. White space at its end is the template's, but only once."""
    text = value.opens.rstrip()
    padding = value.opens[len(text) :]
    longer = [other.opens.removeprefix(value.opens) for other in layout.values]
    longer = [more for more in longer if more not in ("", *(v.opens for v in layout.values))]
    opens = loose(text.removesuffix('"')) + ('"' if text.endswith('"') else "")
    opens += f"(?!{any_of(longer, END)})" if longer else ""
    return opens + (rf"(?:{re.escape(padding)}|(?=[^{re.escape(padding[0])}]))" if padding else "")


def _closes(value: Value) -> str:
    """The pattern after a value, up to what follows; the last character of a tag may be wrong."""
    text = value.closes.lstrip()
    if not text:
        return "(?P<next>"
    closes = ('"' if text.startswith('"') else "") + loose(text.removeprefix('"'))
    if text.startswith("</"):
        closes = loose(text.removesuffix(">")) + r"\s*/?>?"
    padding = re.escape(value.closes[: -len(text)])
    return (f"(?:{padding})?" if padding else "") + closes + r"(?P<next>\s{0,64}"


@dataclass(slots=True)
class ParameterArguments:
    """Arguments that are parameters, with the interface of JsonArguments. A string is emitted as it
    comes, any other value once it is complete."""

    form: ChatFormat
    layout: Layout
    types: Mapping[str, set[str]]  # of parameters
    patterns: ParameterPatterns = field(init=False)
    rest: str = ""
    ended: bool = False
    _before: str = "{"  # the next parameter
    _index: int | None = None  # of the current value's form, in `layout.values`
    _types: set[str] = field(default_factory=set)  # of that value
    _missing: set[str] = field(init=False)  # parameters that have not come

    def __post_init__(self) -> None:
        self._missing = set(self.types)
        self.patterns = ParameterPatterns(self.form, self.layout)

    def feed(self, text: str) -> str:
        """The next piece of the arguments."""
        self.rest += text
        piece = ""
        while not self.ended:
            if self._index is None:
                key = self.patterns.key.search(self.rest)
                if not key:
                    break
                self.rest = self.rest[key.end() :]
                piece += self._begin(key[1], key.lastgroup)
                continue
            if self._is_streamed() and self.patterns.plain.fullmatch(self.rest):
                piece, self.rest = piece + self._escaped(self.rest), ""
                break
            match = self._closer(self._index)
            if not match or match.partial:
                piece += self._stream(match.start() if match else len(self.rest))
                break
            text, self.rest = self.rest[: match.start()], self.rest[match.start("next") :]
            piece += self._value(text)
            self._index = None
        return piece

    def _closer(self, index: int) -> regex.Match[str] | None:
        """The end of the value, or what may be its beginning. If the end is left out, a parameter
        that has not come must follow; others are part of the text."""
        closes, at = self.patterns.closes[index], 0
        while match := closes.search(self.rest, at, partial=True):
            name = match.groupdict().get("name")
            if match.partial or name is None or name in self._missing:
                return match
            at = match.start() + 1
        return None

    def finish(self) -> str:
        """The last piece of the arguments, if the model ended the answer. The value, or its call,
        must have ended."""
        if self._index is None:
            key, rest = self.layout.key.strip(), self.rest.strip()
            if rest and (rest.startswith(key) or key.startswith(rest)):
                return ""  # it breaks off in a parameter's name
        else:
            match = self.patterns.ending.search(self.rest, partial=True)
            if match and re.search(TAG, match[0]):
                self.rest = self.rest[: match.start()] + self.layout.values[self._index].closes
        return self.feed(self.layout.closes + self.layout.ends + self.layout.end)

    def _begin(self, key: str | None, group: str | None) -> str:
        """Begin a parameter, or without a key the end of the call."""
        if key is None or group is None:
            self.ended = True
            return "}" if self._before == ", " else "{}"
        self._index = int(group[1:])
        self._missing.discard(key)
        self._types = self.types.get(key, set())
        if not self._types and (string := self.layout.values[self._index].string) is not None:
            self._types = {"string"} if string else {"object"}
        piece = f"{self._before}{_dumped(key)}: "
        self._before = ", "
        return piece + ('"' if self._types == {"string"} else "")

    def _stream(self, end: int) -> str:
        """The part of a string that is certain, at most up to `end`."""
        if not self._is_streamed():
            return ""
        if match := self.patterns.ending.search(self.rest, partial=True):
            end = min(end, match.start())
        text, self.rest = self.rest[:end], self.rest[end:]
        return self._escaped(text)

    def _is_streamed(self) -> bool:
        """Whether the value is emitted as it comes."""
        return self._types == {"string"} and not self.layout.html

    def _escaped(self, text: str) -> str:
        """The text of a string in JSON, as which the model may write it itself."""
        if self._is_quoted():
            return CONTROL.sub(lambda match: _dumped(match[0])[1:-1], text)
        return _dumped(unescape(text) if self.layout.html else text)[1:-1]

    def _is_quoted(self) -> bool:
        value = self.layout.values[self._index or 0]
        return not self.layout.raw and value.opens.endswith('"') and value.closes.startswith('"')

    def _value(self, text: str) -> str:
        """A complete value, or the rest of a string."""
        if self._types == {"string"}:
            return self._escaped(text) + '"'
        if self._is_quoted():
            text = unescaped(text)
        elif self.layout.html:
            text = unescape(text)
        try:
            return clean(_dumped(parse_value(text, self._types)))
        except NOT_JSON:
            return _dumped(text)


Arguments = JsonArguments | ParameterArguments


def begin_call(text: str, form: ChatFormat, tools: Types) -> tuple[str, Arguments, int] | None:
    """The call that the text begins with: its name, a parser for its arguments, and where they
    begin. None if they have not begun, if no tool is called, or for a format that is parsed as a
    whole."""
    text = text[:MAX_HEAD]
    for pattern, layout in head_patterns(form):
        match = pattern.match(text)
        try:
            name = tool_named(match[1], tools) if match else None
        except ValueError:
            continue
        if match and name and layout is None:
            return name, JsonArguments(), match.end()
        if match and name and layout:
            return name, ParameterArguments(form, layout, tools[name]), match.end()
    return None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def parse_value(text: str, types: set[str]) -> Any:
    """The value of a parameter's text; the text itself if it has none of the types."""
    stripped = text.strip()
    if "string" in types:
        return None if stripped == "null" and "null" in types else text
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

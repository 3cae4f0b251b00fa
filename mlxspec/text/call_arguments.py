"""Reads the arguments of a tool call while the model writes it, as pieces of a JSON object.

Rule: the pieces together depend on the text alone, never on how it was cut, and no piece is taken
back. Where the text breaks off, or is no JSON, so are they.
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

# What stands before a call and says nothing: white space, a code fence, the end of the JSON before
# it; and inside of tags also tags and further fields.
BETWEEN = r"```(?:json)?(?=\s|\Z)|[\s,;\[\]}]"
SKIPPED = (
    rf'</?\|?[\w:]*(?:tool|function)_calls?\w*\|?>|\[TOOL_CALLS\]|"\w+"\s*:\s*"[^"]*"|{BETWEEN}'
)
TOOL = r"([^\s\"'<>\[\](){}\\]+?)"  # the name of one
OBJECT = r'\s*(?=\{\s*["}])'  # where arguments in JSON begin
# Up to there, whatever the format: Hermes' and Qwen's, Mistral's, Kimi's, Harmony's.
JSON_HEAD = (
    rf'(?:\{{\s*"name"\s*:\s*"|(?:to=)?){TOOL}'
    r'(?:"\s*,\s*"(?:arguments|parameters)"\s*:|\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]'
    rf"|\s*<\|tool_call_argument_begin\|>|(?=[\s<])[^{{}}]{{0,64}}<\|message\|>){OBJECT}"
)
CONTROL = re.compile(r"[\x00-\x1f]")
IN_STRING = re.compile(r'\\.?|["\x00-\x1f]', re.DOTALL)
OUTSIDE = re.compile(r'["{}\[\]]|(?=<)')
# Half a surrogate pair, which JSON can spell, but nobody can send or encode: group 1 what may still
# become a whole one, group 2 one that cannot. Whole pairs and other escapes are skipped.
HALVES = re.compile(
    r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w"
    r"|(u\w{0,3}\Z|u[dD][89abAB]\w\w(?:\\(?:u\w{0,3})?)?\Z)|(u[dD][89a-fA-F]\w\w)|.)",
    re.DOTALL,
)
DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1}


def known_name(name: str, tools: Collection[str]) -> str:
    """The tool that a model calls by this name: with a namespace and a number as Kimi writes them,
    or without the tool's own namespace. Raises ValueError where there is none."""
    own = re.sub(r"\Afunctions[.:]", "", name)
    numbered = re.sub(r":\d+\Z" if own == name else r":?\d+\Z", "", own)
    known = [each for each in (name, own, numbered) if each in tools]
    short = [tool for tool in tools if tool.endswith(f"__{name}")]
    if known or len(short) == 1:
        return (known or short)[0]
    raise ValueError(f"there is no tool {name!r}")


def loose(text: str) -> str:
    """The pattern of a format's text, with any white space, quotes, digits, ids and names."""
    made = []
    for piece in PIECE.findall(text):
        if piece.isspace():
            made.append(r"(?:\\n|\s)*+")
        elif piece == '"':
            made.append(r"\s*\"?\s*")
        elif piece.startswith(CALL_ID):
            made.append(r"[\w.:-]*+")
        elif piece in (NAME, OTHER):
            made.append(r"[^\s<>\"]++")
        else:
            made.append(re.sub(r"\d+", r"\\d+", re.escape(piece)))
    return "".join(made)


@lru_cache
def skipped(form: ChatFormat) -> Pattern:
    """What stands before a call and says nothing, in a format."""
    edges = set()
    for layout in form.layouts:
        texts = [layout.start, layout.opens, layout.closes, layout.between, layout.ends]
        texts += re.findall(TAGS, "".join(texts))
        edges |= {loose(text.strip()) for text in texts if re.search(r"[^\W\d]|>>", text)}
    longest = sorted(edges, key=len, reverse=True)
    return re.compile(f"(?:{'|'.join([*longest, SKIPPED])})*+")


@lru_cache
def heads(form: ChatFormat) -> list[tuple[Pattern, Layout | None]]:
    """The patterns of calls up to their arguments, with the name; a layout for those whose
    arguments are parameters."""
    before = skipped(form).pattern
    made: list[tuple[Pattern, Layout | None]] = [(re.compile(before + JSON_HEAD), None)]
    for layout in form.layouts:
        opens = before + loose(layout.name_opens.removesuffix("functions.")) + TOOL
        after = loose(layout.after) if layout.name_opens else f"(?:{loose(layout.after)})?"
        if layout.style != "words":
            made.append((re.compile(opens + after + OBJECT), None))
        if layout.style == "tags":
            first = f"(?={loose(layout.key)}|{endings(form, layout)})"
            made.append((re.compile(opens + loose(layout.after) + first), layout))
    return made


def endings(form: ChatFormat, layout: Layout) -> str:
    """The pattern of the markers that end a call, or all of them."""
    tags = [*re.findall(TAGS, layout.closes + layout.ends), layout.start, form.think_end]
    return "|".join(loose(tag) for tag in tags if tag)


@dataclass(slots=True)
class JsonArguments:
    """Arguments that are JSON already, up to their last bracket, or to a tag where none can stand.
    `rest` is text that has not been taken, once they have `ended` all that is behind them."""

    rest: str = ""
    ended: bool = False
    _string: bool = False  # whether the text ends inside one
    _half: str = ""  # what the text ends in, if it may be half a pair
    _depth: int = 0  # of open brackets

    def feed(self, text: str) -> str:
        """What this text adds to the arguments, with U+FFFD for halves of surrogate pairs."""
        made, self._half = self._half + self._read(text), ""
        return HALVES.sub(self._whole, made) if "\\" in made else made

    def _whole(self, found: re.Match[str]) -> str:
        if found[1] is not None:
            self._half = found[0]
            return ""
        return "\\ufffd" if found[2] else found[0]

    def _read(self, text: str) -> str:
        text, self.rest = self.rest + text, ""
        made, done, at = "", 0, 0
        while found := (IN_STRING if self._string else OUTSIDE).search(text, at):
            mark, at = found[0], found.end()
            if mark == '"':
                self._string = not self._string
            elif not self._string:
                self._depth += DEPTHS.get(mark, 0)
                if not mark or self._depth == 0:
                    self.ended, self.rest = True, text[at:]
                    return made + text[done:at]
            elif mark == "\\":  # what it escapes is not here yet
                text, self.rest = text[:-1], mark
            elif mark < " ":  # JSON has no bare control characters there
                made, done = made + text[done : found.start()] + _dumped(mark)[1:-1], at
        return made + text[done:]

    def finish(self) -> str:
        """What the end of the answer adds: nothing."""
        return ""


@lru_cache
class ParameterPatterns:
    """How the parameters of a call are read. `key`: what stands before a value, with the name, and
    the number of the way in which it is written as the last group; or the end of the call. `closes`
    ends a value, by its way: the group `next` is behind it; where its end is left out, the group
    `name` is the next parameter's. `ending`: the end of the call, where that of the last value is
    left out."""

    def __init__(self, form: ChatFormat, layout: Layout) -> None:
        key, ends = loose(layout.key), endings(form, layout)
        opens = [f"(?P<w{i}>{_opens(way, layout)})" for i, way in enumerate(layout.values)]
        self.key = re.compile(rf'{key}([^<>\n"]+?)(?:{"|".join(opens)})|(?:{ends})')
        ways = "|".join(loose(way.opens.rstrip()) for way in layout.values)
        line = r"\n" if "\n" in layout.separator else r"\n?"
        forgotten = rf"{line}(?P<next>{key}(?P<name>[^<>\n\"]+?)(?:{ways}))"
        call = loose(layout.closes.strip())
        forgotten += rf"|\n?(?P<next>{call}\s{{0,64}}{loose(layout.start)})" if call else ""
        self.closes = []
        for way in layout.values:
            closes = rf"{_closes(way)}(?:{key}|{ends}))"
            self.closes.append(regex.compile(f"{closes}|{forgotten}" if way.closes else closes))
        # Text in which nothing of this begins, nor white space that may belong to it.
        edges = [layout.key, layout.closes, *(way.closes for way in layout.values)]
        self.plain = plain_text("<".join(text.strip()[:1] for text in edges))
        self.ending = regex.compile(rf"\s{{0,64}}{call or '(?!)'}\s{{0,64}}(?:{ends})?\s*\Z")


def _opens(way: Value, layout: Layout) -> str:
    """The pattern before a value. White space at its end is the template's, once."""
    text = way.opens.rstrip()
    padding = way.opens[len(text) :]
    longer = [other.opens.removeprefix(way.opens) for other in layout.values]
    longer = [more for more in longer if more not in ("", *(v.opens for v in layout.values))]
    made = loose(text.removesuffix('"')) + ('"' if text.endswith('"') else "")
    made += f"(?!{any_of(longer, END)})" if longer else ""
    return made + (rf"(?:{re.escape(padding)}|(?=[^{re.escape(padding[0])}]))" if padding else "")


def _closes(way: Value) -> str:
    """The pattern behind a value, up to what follows; of a tag the last character may be wrong."""
    text = way.closes.lstrip()
    if not text:
        return "(?P<next>"
    made = ('"' if text.startswith('"') else "") + loose(text.removeprefix('"'))
    if text.startswith("</"):
        made = loose(text.removesuffix(">")) + r"\s*/?>?"
    padding = re.escape(way.closes[: -len(text)])
    return (f"(?:{padding})?" if padding else "") + made + r"(?P<next>\s{0,64}"


@dataclass(slots=True)
class ParameterArguments:
    """Arguments that are parameters with a value each, like JsonArguments. A value is given out
    when it is complete, a string as it comes."""

    form: ChatFormat
    layout: Layout
    types: Mapping[str, set[str]]  # of parameters
    patterns: ParameterPatterns = field(init=False)
    rest: str = ""
    ended: bool = False
    _before: str = "{"  # the next parameter
    _way: int | None = None  # of the value that is being read
    _types: set[str] = field(default_factory=set)  # of that value
    _left: set[str] = field(init=False)  # parameters that have not come

    def __post_init__(self) -> None:
        self._left = set(self.types)
        self.patterns = ParameterPatterns(self.form, self.layout)

    def feed(self, text: str) -> str:
        """What this text adds to the arguments."""
        self.rest += text
        made = ""
        while not self.ended:
            if self._way is None:
                key = self.patterns.key.search(self.rest)
                if not key:
                    break
                self.rest = self.rest[key.end() :]
                made += self._begin(key[1], key.lastgroup)
                continue
            if self._is_streamed() and self.patterns.plain.fullmatch(self.rest):
                made, self.rest = made + self._in_json(self.rest), ""
                break
            found = self._closer(self._way)
            if not found or found.partial:
                made += self._stream(found.start() if found else len(self.rest))
                break
            text, self.rest = self.rest[: found.start()], self.rest[found.start("next") :]
            made += self._value(text)
            self._way = None
        return made

    def _closer(self, way: int) -> regex.Match[str] | None:
        """What ends the value, or may begin to. Where its end is left out, a parameter must follow
        that has not come; others are a part of the text."""
        closes, at = self.patterns.closes[way], 0
        while found := closes.search(self.rest, at, partial=True):
            name = found.groupdict().get("name")
            if found.partial or name is None or name in self._left:
                return found
            at = found.start() + 1
        return None

    def finish(self) -> str:
        """What the end of the answer adds, where the model ended it. A value must have ended, or
        its call."""
        if self._way is None:
            begun_key, rest = self.layout.key.strip(), self.rest.strip()
            if rest and (rest.startswith(begun_key) or begun_key.startswith(rest)):
                return ""  # it breaks off in a parameter's name
        else:
            found = self.patterns.ending.search(self.rest, partial=True)
            if found and re.search(TAG, found[0]):
                self.rest = self.rest[: found.start()] + self.layout.values[self._way].closes
        return self.feed(self.layout.closes + self.layout.ends + self.layout.end)

    def _begin(self, key: str | None, way: str | None) -> str:
        """The next parameter, or without a key the end of the call."""
        if key is None or way is None:
            self.ended = True
            return "}" if self._before == ", " else "{}"
        self._way = int(way[1:])
        self._left.discard(key)
        self._types = self.types.get(key, set())
        if not self._types and (string := self.layout.values[self._way].string) is not None:
            self._types = {"string"} if string else {"object"}
        made = f"{self._before}{_dumped(key)}: "
        self._before = ", "
        return made + ('"' if self._types == {"string"} else "")

    def _stream(self, end: int) -> str:
        """What is certain of a string, at most up to `end`."""
        if not self._is_streamed():
            return ""
        if found := self.patterns.ending.search(self.rest, partial=True):
            end = min(end, found.start())
        text, self.rest = self.rest[:end], self.rest[end:]
        return self._in_json(text)

    def _is_streamed(self) -> bool:
        """Whether the value is given out as it comes."""
        return self._types == {"string"} and not self.layout.html

    def _in_json(self, text: str) -> str:
        """The text of a string, which the model may write in JSON itself."""
        if self._is_json():
            return CONTROL.sub(lambda found: _dumped(found[0])[1:-1], text)
        return _dumped(unescape(text) if self.layout.html else text)[1:-1]

    def _is_json(self) -> bool:
        way = self.layout.values[self._way or 0]
        return not self.layout.raw and way.opens.endswith('"') and way.closes.startswith('"')

    def _value(self, text: str) -> str:
        """A complete value, or the rest of a string."""
        if self._types == {"string"}:
            return self._in_json(text) + '"'
        if self._is_json():
            text = unescaped(text)
        elif self.layout.html:
            text = unescape(text)
        try:
            return clean(_dumped(typed(text, self._types)))
        except NOT_JSON:
            return _dumped(text)


Arguments = JsonArguments | ParameterArguments


def begun(text: str, form: ChatFormat, tools: Types) -> tuple[str, Arguments, int] | None:
    """The call that the text begins with: its name, a reader for its arguments, and where they
    begin. None where they have not begun, it calls no tool, or the format is read as a whole."""
    text = text[:MAX_HEAD]
    for pattern, layout in heads(form):
        found = pattern.match(text)
        try:
            name = known_name(found[1], tools) if found else None
        except ValueError:
            continue
        if found and name and layout is None:
            return name, JsonArguments(), found.end()
        if found and name and layout:
            return name, ParameterArguments(form, layout, tools[name]), found.end()
    return None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def typed(text: str, types: set[str]) -> Any:
    """The value of a parameter's text; the text itself where it has none of the types."""
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

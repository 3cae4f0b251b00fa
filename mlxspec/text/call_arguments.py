"""Parses the arguments of a tool call while the model writes it, into pieces of a JSON object.

Rule: the pieces together depend only on the text, never on how it was split, and no piece is
retracted. If the text breaks off, so do the pieces; if it is not JSON, neither are they.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from mlxspec.text.formats import ChatFormat
from mlxspec.text.layouts import TAGS, CallLayout, loose
from mlxspec.text.literals import dumped
from mlxspec.text.messages import Types
from mlxspec.text.parameters import ParameterArguments, end_pattern

Pattern = re.Pattern[str]

MAX_HEAD = 256  # characters in which the arguments must begin, or the call is read as a whole

# Text before a call without meaning: white space, a code fence, the end of the JSON before it; and
# inside of tags also tags and further fields.
BETWEEN = r"```(?:json)?(?=\s|\Z)|[\s,;\[\]}]"
SKIPPED = (
    rf'</?\|?[\w:]*(?:tool|function)_calls?\w*\|?>|\[TOOL_CALLS\]|"\w+"\s*:\s*"[^"]*"|{BETWEEN}'
)
TOOL = r"([^\s\"'<>\[\](){}\\]+?)"  # the name of one
OBJECT = r'\s*(?=\{\s*["}])'  # where arguments in JSON begin
# Up to a name in JSON, with further fields before it or in OpenAI's wrapper.
JSON_NAME = (
    r'\{\s*(?:"(?:type|id|index)"\s*:\s*(?:"[^"]*"|\d+)\s*,\s*)*'
    r'(?:"function"\s*:\s*\{\s*)?"(?:name|function)"\s*:\s*"'
)
WHOLE_CALL = re.compile(  # in JSON without tags; parsed when it has ended
    rf'\s*(?:```json\s*)?{JSON_NAME}[^"]+"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?:null|")'
)
# A call up to there, in any format: Hermes' and Qwen's, Mistral's, Kimi's, Harmony's.
JSON_HEAD = (
    rf"(?:{JSON_NAME}|(?:to=)?){TOOL}"
    r'(?:"\s*,\s*"(?:arguments|parameters)"\s*:|\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]'
    rf"|\s*<\|tool_call_argument_begin\|>|(?=[\s<])[^{{}}]{{0,64}}<\|message\|>){OBJECT}"
)
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


@lru_cache
def skipped(form: ChatFormat) -> Pattern:
    """The pattern of text before a call that means nothing in this format."""
    edges = set()
    for layout in form.layouts:
        texts = [
            layout.start_marker,
            layout.section_opens,
            layout.call_closes,
            layout.between,
            layout.section_closes,
        ]
        texts += re.findall(TAGS, "".join(texts))
        edges |= {loose(text.strip()) for text in texts if re.search(r"[^\W\d]|>>", text)}
    longest = sorted(edges, key=len, reverse=True)
    # Each repetition is atomic, for speed; a name may need the last ones.
    return re.compile(f"(?:(?>{'|'.join([*longest, SKIPPED])}))*")


@lru_cache
def head_patterns(form: ChatFormat) -> list[tuple[Pattern, CallLayout | None]]:
    """The patterns of calls up to their arguments, with the name as a group; and the layout if the
    arguments are parameters."""
    before = skipped(form).pattern
    patterns: list[tuple[Pattern, CallLayout | None]] = [(re.compile(before + JSON_HEAD), None)]
    for layout in form.layouts:
        opens = before + loose(layout.name_opens.removesuffix("functions.")) + TOOL
        after_name = loose(layout.after_name)
        after = after_name if layout.name_opens else f"(?:{after_name})?"
        if layout.style != "words":
            patterns.append((re.compile(opens + after + OBJECT), None))
        if layout.style == "tags":
            first = f"(?={loose(layout.key)}|{end_pattern(form, layout)})"
            patterns.append((re.compile(opens + after_name + first), layout))
    return patterns


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
                piece, done = piece + text[done : match.start()] + dumped(mark)[1:-1], at
        return piece + text[done:]

    def finish(self) -> str:
        """The last piece, at the end of the answer: empty."""
        return ""


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

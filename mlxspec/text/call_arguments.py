"""Reads the arguments of a tool call while the model writes it, as pieces of a JSON object.

Rule: the pieces together depend on the text alone, never on how it was cut, and no piece is taken
back. Where the text breaks off, or is no JSON, so are they.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import clean, types_of
from mlxspec.types import Json

MAX_HEAD = 128  # characters in which the arguments must begin, or the call is read as a whole
NOT_JSON = (ValueError, TypeError, LookupError, RecursionError)

# What stands before a call and says nothing: white space, a code fence, the end of the JSON before
# it; and inside of tags also tags and further fields.
BETWEEN = r"```(?:json)?(?=\s|\Z)|[\s,;\[\]}]"
SKIPPED = (
    r"(?:</?\|?[\w:]*(?:tool|function)_calls?\w*\|?>|\[TOOL_CALLS\]"
    rf'|"\w+"\s*:\s*"[^"]*"|{BETWEEN})*+'
)
# Up to the arguments in JSON, with the name: Hermes' and Qwen's, Mistral's, Kimi's, Harmony's.
JSON_HEAD = SKIPPED + (
    r'(?:\{\s*"name"\s*:\s*"|(?:to=)?(?:functions\.)?)([^\s"\\<>\[\]:]+)'
    r'(?:"\s*,\s*"(?:arguments|parameters)"\s*:|\s*\[ARGS\]|:\d+\s*<\|tool_call_argument_begin\|>'
    r"|[^{}]{0,64}<\|message\|>)"
    r'\s*(?=\{\s*["}])'
)
MARKS = re.compile(r'\\.?|["{}\[\]\x00-\x1f]|(?=<)', re.DOTALL)
DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1}
# The end of a text that may become the end of a value.
MAYBE_CLOSE = re.compile(r"\n?(?:</[\w:]{1,24}>\s{0,64}(?:<[\w/=]{0,12})?|<[\w:/]{0,24})?\Z")


class ParameterFormat(NamedTuple):
    """How a model writes a call as parameters, as patterns: of what stands before them, with the
    call's name; before a value, with the parameter's name, or at the end of the call; and behind a
    value. One line feed on either side of a value is no part of it."""

    head: str
    key: str
    close: str


GLM = ParameterFormat(
    r"([^\s<>{]+)\s*(?=<(?:longcat_)?arg_key>)",
    r"<(?:longcat_)?arg_key>([^<]+)</(?:longcat_)?arg_key>(?:\\n|\s)*+"
    r"<(?:longcat_)?arg_value>(?:\n|(?=[^\n]))|</(?:longcat_)?tool_call>|</think>",
    r"</(?:longcat_)?arg_value>",
)
FORMATS = {  # by mlx-lm's names
    "glm47": GLM,
    "longcat": GLM,
    "minimax_m2": ParameterFormat(
        r'<invoke name="?([^"<>]+)"?>',
        r'<parameter name="?([^"<>]+)"?>(?:\n|(?=[^\n]))'
        r"|</invoke>|</(?:minimax:)?tool_call>|</think>",
        r"</parameter>",
    ),
    "qwen3_coder": ParameterFormat(
        r"<function=([^\s<>]+)>",
        r"<parameter=([^\s<>]+)>(?:\n|(?=[^\n]))|</function>|</tool_call>|</think>",
        r"</parameter>(?=\s{0,64}(?:<parameter=|</function>|</tool_call>|</think>))",
    ),
}


@dataclass(slots=True)
class JsonArguments:
    """Arguments that are JSON already, up to their last bracket, or to a tag where none can stand.
    `rest` is text that has not been taken, once they have `ended` all that is behind them."""

    rest: str = ""
    ended: bool = False
    end: str = ""  # what ends them if the model does
    _string: bool = False  # whether the text ends inside one
    _depth: int = 0  # of open brackets

    def feed(self, text: str) -> str:
        """What this text adds to the arguments."""
        text, self.rest = self.rest + text, ""
        made, done = "", 0
        for found in MARKS.finditer(text):
            mark, at = found[0], found.end()
            if mark and mark < " ":
                if self._string:  # JSON has no bare control characters there
                    made, done = made + text[done : found.start()] + _dumped(mark)[1:-1], at
            elif mark == '"':
                self._string = not self._string
            elif mark == "\\":  # what it escapes is not here yet
                text, self.rest = text[:-1], mark
            elif not self._string:
                self._depth += DEPTHS.get(mark, 0)
                if not mark or self._depth == 0:
                    self.ended, self.rest = True, text[at:]
                    return made + text[done:at]
        return made + text[done:]


@dataclass(slots=True)
class ParameterArguments:
    """Arguments that are parameters with a value each, like JsonArguments. A value is given out
    when it is complete, one whose schema has only the type string as it comes."""

    form: ParameterFormat
    schemas: Json
    rest: str = ""
    ended: bool = False
    end: str = "</tool_call>"
    _before: str = "{"  # the next parameter
    _key: str = ""  # of the value that is being read
    _types: set[str] = field(default_factory=set)  # of that value

    def feed(self, text: str) -> str:
        """What this text adds to the arguments."""
        self.rest += text
        made = ""
        while found := re.search(self.form.close if self._key else self.form.key, self.rest):
            text, self.rest = self.rest[: found.start()], self.rest[found.end() :]
            if self._key:
                made += self._value(text.removesuffix("\n"))
                self._key = ""
            elif found[1]:
                self._key, self._types = found[1], types_of(self.schemas.get(found[1]))
                made += f"{self._before}{_dumped(self._key)}: "
                if self._types == {"string"}:
                    made += '"'
                self._before = ", "
            else:
                self.ended = True
                return made + ("}" if self._before == ", " else "{}")
        if self._key and self._types == {"string"}:
            text = MAYBE_CLOSE.sub("", self.rest)
            self.rest = self.rest[len(text) :]
            made += _dumped(text)[1:-1]
        return made

    def _value(self, text: str) -> str:
        """A complete value, or the rest of a string."""
        if self._types == {"string"}:
            return _dumped(text)[1:]
        try:
            return clean(_dumped(typed(text, self._types)))
        except NOT_JSON:
            return _dumped(text)


Arguments = JsonArguments | ParameterArguments


def begun(
    text: str, tokenizer: TokenizerWrapper, schemas: Json
) -> tuple[str, Arguments, int] | None:
    """The call that the text begins with: its name, a reader for its arguments, and where they
    begin. None where they have not begun, or the format is read as a whole. `schemas` are those of
    the parameters, by tool and name; a call in JSON is one of these tools."""
    text = text[:MAX_HEAD]
    form = FORMATS.get(tokenizer.tool_parser.__module__.rpartition(".")[2])
    if (found := re.match(JSON_HEAD, text)) and found[1] in schemas:
        return found[1], JsonArguments(), found.end()
    if form and (found := re.match(SKIPPED + form.head, text)):
        return found[1], ParameterArguments(form, schemas.get(found[1], {})), found.end()
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
    if stripped in ("True", "False"):
        stripped = stripped.lower()
    try:
        value = json.loads(stripped)
    except ValueError:
        return text
    if isinstance(value, float) and types == {"integer"} and value.is_integer():
        return int(value)
    return value

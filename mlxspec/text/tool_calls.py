"""Parses tool calls in the text of an answer: JSON, Qwen3-Coder's XML, or by mlx-lm's parser of the
model's format.

A parsed call is its name and its arguments, a JSON object as text.
"""

import json
import re
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Tools, clean, listed, types_of
from mlxspec.types import Json

NamedArguments = tuple[str, str]

FUNCTION, FUNCTION_END = "<function=", "</function>"
XML_HEAD = re.compile(r"\s*(?:</tool_call>\s*)?(?:<tool_call>\s*)?<function=([^\s<>]+)>")
XML_VALUE = re.compile(
    r"\s*<parameter=([^\s<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))",
    re.DOTALL,
)
XML_TAIL = re.compile(r"\s*(?:</function>|\Z)")
UNTAGGED_JSON = re.compile(r'(?:```(?:json)?\s*)?\{\s*"name"\s*:')
UNTAGGED_KEYS = {"name", "arguments", "parameters", "id", "type"}
SEPARATORS = " \n\t\r,;"  # between calls in JSON
NOT_JSON = (ValueError, TypeError, LookupError, RecursionError)


def is_xml(tokenizer: TokenizerWrapper) -> bool:
    """Whether the model writes its calls as Qwen3-Coder does."""
    return bool(tokenizer.tool_parser.__module__.endswith("qwen3_coder"))


def read_calls(text: str, tokenizer: TokenizerWrapper, tools: Tools) -> list[NamedArguments]:
    """The calls in the text between two markers. Raises whatever the parser of the model's format
    raises."""
    try:
        return [_checked(value) for value in _json_values(text)]
    except NOT_JSON:
        pass
    if FUNCTION in text and is_xml(tokenizer):
        found = parse_xml(text, tools)
    else:
        found = listed(tokenizer.tool_parser(text, tools))
    return [_checked(value) for value in found]


def read_untagged(text: str, tools: Tools) -> list[NamedArguments]:
    """The calls of these tools in a text that is nothing but calls in JSON, perhaps in a code
    fence; else none."""
    text = text.strip()
    if not UNTAGGED_JSON.match(text):
        return []
    text = text.removeprefix("```").removeprefix("json").removesuffix("```")
    names = {tool["function"]["name"] for tool in tools}
    calls = []
    try:
        for value in _json_values(text):
            call = _checked(value)
            if call[0] not in names or len(value) < 2 or not value.keys() <= UNTAGGED_KEYS:
                return []
            calls.append(call)
    except NOT_JSON:
        return []
    return calls


def _json_values(text: str) -> list[Any]:
    """JSON values written one after the other, one at least."""
    text = text.strip()
    decoder, at = json.JSONDecoder(), 0
    values: list[Any] = []
    while at < len(text) or not values:
        value, at = decoder.raw_decode(text, at)
        values.append(value)
        while at < len(text) and text[at] in SEPARATORS:
            at += 1
    return values


def _checked(found: Any) -> NamedArguments:
    """A call that a parser found. Raises one of NOT_JSON where it has no name, or no JSON object as
    arguments."""
    name = found["name"]
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not name or not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call needs a name, and an object as arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair can be written in JSON, but neither sent nor encoded.
    return clean(name), clean(text)


def parse_xml(text: str, tools: Tools) -> list[Json]:
    """Qwen3-Coder's calls, with values of the types in their schemas. mlx-lm's own parser leaves
    out what it does not expect and rounds large numbers. Raises ValueError where there is anything
    but calls."""
    calls, at = [], 0
    known = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    while head := XML_HEAD.match(text, at):
        at, arguments = head.end(), {}
        schemas = (known.get(head[1]) or {}).get("properties") or {}
        while value := XML_VALUE.match(text, at):
            arguments[value[1]] = typed(value[2], types_of(schemas.get(value[1])))
            at = value.end()
        end = XML_TAIL.match(text, at)
        if not end:
            raise ValueError("a parameter or a call has no end")
        at = end.end()
        calls.append({"name": head[1], "arguments": arguments})
    if text[at:].strip():
        raise ValueError("there is more than calls")
    return calls


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

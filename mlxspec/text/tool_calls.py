"""Parses whole tool calls in the text of an answer.

A parsed call is its name, which is a tool of the request, and its arguments, a JSON object as text.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from mlxspec.text.call_arguments import NOT_JSON, known_name
from mlxspec.text.formats import ChatFormat
from mlxspec.text.layouts import Layout
from mlxspec.text.literals import Literals, literal
from mlxspec.text.messages import clean, listed
from mlxspec.types import Json

NamedArguments = tuple[str, str]

NAMES = ("name", "tool_name", "function", "tool")  # of the fields of a call, in all formats
ARGUMENTS = ("arguments", "parameters", "args", "input")
SEPARATORS = " \n\t\r,;"  # between calls in JSON


def read_calls(text: str, form: ChatFormat, tools: Collection[str]) -> list[NamedArguments]:
    """The calls in the text between two markers, of these tools. Raises one of NOT_JSON where there
    is anything else."""
    try:
        return [_checked(value, tools) for value in _json_values(text)]
    except NOT_JSON:
        pass
    for layout in form.layouts:
        if layout.style == "words":
            try:
                return _worded(text, layout, tools)
            except NOT_JSON:
                pass
    return [_checked(value, tools) for value in listed(literal(text))]


def _json_values(text: str) -> list[Any]:
    """JSON values written one after the other, one at least, lists of them joined."""
    text = text.strip()
    decoder, at = json.JSONDecoder(strict=False), 0
    values: list[Any] = []
    while at < len(text) or not values:
        value, at = decoder.raw_decode(text, at)
        values += listed(value)
        while at < len(text) and text[at] in SEPARATORS:
            at += 1
    return values


def _worded(text: str, layout: Layout, tools: Collection[str]) -> list[NamedArguments]:
    """Calls as Python or Gemma writes them, one at least."""
    strings = next(value for value in layout.values if value.string is not False)
    quote = strings.opens.lstrip(":= ") if layout.raw else ""
    opens = re.escape(layout.name_opens)
    text = text.strip().removeprefix(layout.opens.strip().removeprefix(layout.start).strip())
    text = text.removesuffix(layout.ends.strip().removesuffix(layout.end).strip())
    head = re.compile(rf"[\s,;\[]*(?:{opens})?([^\s(){{}}\[\],\"'<>]+)\s*([({{])")
    calls: list[NamedArguments] = []
    reader = Literals(text, quote)
    while not calls or reader.at < len(text.rstrip(SEPARATORS + "]")):
        found = head.match(text, reader.at)
        if not found:
            raise ValueError("there is more than calls")
        reader.at = found.end()
        arguments = reader.members(found[2])
        calls.append((known_name(found[1], tools), _object(arguments)))
    return calls


def _checked(found: Any, tools: Collection[str]) -> NamedArguments:
    """A call as an object. Raises one of NOT_JSON where it is none of a tool with arguments."""
    inner = found.get("function", found)
    found = inner if isinstance(inner, dict) else found
    if len(found) == 1 and (name := next(iter(found))) in tools:
        return name, _object(found[name])
    name = next(found[key] for key in NAMES if key in found)
    arguments: Any = next((found[key] for key in ARGUMENTS if key in found), {})
    return known_name(name, tools), _object({} if arguments is None else arguments)


def _object(arguments: Any) -> str:
    """Arguments, maybe in JSON, as the text of a JSON object. Raises one of NOT_JSON for others."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}", strict=False)
    if not isinstance(arguments, dict):
        raise ValueError("a call needs an object as arguments")
    # Half a surrogate pair can be written in JSON, but neither sent nor encoded.
    return clean(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def as_object(arguments: str) -> Json:
    """The arguments of a call as an object. Those that are none, because the model broke off or
    wrote no JSON, are the text of the object's only field."""
    try:
        found: Json = json.loads(_object(arguments))
    except NOT_JSON:
        found = {"INVALID_JSON": arguments}
    return found

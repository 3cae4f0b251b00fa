"""Parses complete tool calls in the text of an answer.

A parsed call is its name, which is a tool of the request, and its arguments, a JSON object as text.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from mlxspec.text.call_arguments import tool_named
from mlxspec.text.formats import ChatFormat
from mlxspec.text.layouts import CallLayout
from mlxspec.text.literals import NOT_JSON, Literals, literal
from mlxspec.text.messages import as_list, clean
from mlxspec.types import Json

NamedArguments = tuple[str, str]

NAMES = ("name", "tool_name", "function", "tool")  # of the fields of a call, over all formats
ARGUMENTS = ("arguments", "parameters", "args", "input")
SEPARATORS = " \n\t\r,;"  # between calls in JSON


def read_calls(text: str, form: ChatFormat, tools: Collection[str]) -> list[NamedArguments]:
    """The calls of these tools in the text between two markers. Raises one of NOT_JSON if it
    contains anything else."""
    try:
        return [_object_call(value, tools) for value in _json_values(text)]
    except NOT_JSON:
        pass
    for layout in form.layouts:
        if layout.style == "words":
            try:
                return _word_calls(text, layout, tools)
            except NOT_JSON:
                pass
    return [_object_call(value, tools) for value in as_list(literal(text))]


def _json_values(text: str) -> list[Any]:
    """One or more JSON values in a row; lists of them are flattened."""
    text = text.strip()
    decoder, at = json.JSONDecoder(strict=False), 0
    values: list[Any] = []
    while at < len(text) or not values:
        value, at = decoder.raw_decode(text, at)
        values += as_list(value)
        while at < len(text) and text[at] in SEPARATORS:
            at += 1
    return values


def string_quote(layout: CallLayout) -> str:
    """What stands before and after a string in calls like those of Python."""
    strings = next(value for value in layout.values if value.string is not False)
    return strings.opens.lstrip(":= ")


def _word_calls(text: str, layout: CallLayout, tools: Collection[str]) -> list[NamedArguments]:
    """One or more calls, in the notation of Python or Gemma."""
    quote = string_quote(layout) if layout.raw else ""
    opens = re.escape(layout.name_opens)
    text = text.strip().removeprefix(
        layout.section_opens.strip().removeprefix(layout.start_marker).strip()
    )
    text = text.removesuffix(layout.section_closes.strip().removesuffix(layout.end_marker).strip())
    head = re.compile(rf"[\s,;\[]*(?:{opens})?([^\s(){{}}\[\],\"'<>]+)\s*([({{])")
    calls: list[NamedArguments] = []
    reader = Literals(text, quote)
    while not calls or reader.at < len(text.rstrip(SEPARATORS + "]")):
        match = head.match(text, reader.at)
        if not match:
            raise ValueError("there is text that is not a call")
        reader.at = match.end()
        arguments = reader.members(match[2])
        calls.append((tool_named(match[1], tools), _object(arguments)))
    return calls


def _object_call(call: Any, tools: Collection[str]) -> NamedArguments:
    """A call as a JSON object. Raises one of NOT_JSON if it is not a call of one of the tools."""
    inner = call.get("function", call)
    call = inner if isinstance(inner, dict) else call
    if len(call) == 1 and (name := next(iter(call))) in tools:
        return name, _object(call[name])
    name = next(call[key] for key in NAMES if key in call)
    arguments: Any = next((call[key] for key in ARGUMENTS if key in call), {})
    return tool_named(name, tools), _object({} if arguments is None else arguments)


def _object(arguments: Any) -> str:
    """Arguments, an object or its JSON, as JSON. Raises one of NOT_JSON for anything else."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}", strict=False)
    if not isinstance(arguments, dict):
        raise ValueError("a call needs an object as arguments")
    # Half a surrogate pair can be written in JSON, but neither sent nor encoded.
    return clean(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def as_object(arguments: str) -> Json:
    """The arguments of a call as an object. If they are not valid, because the model broke off or
    wrote no JSON, their text is the object's only field."""
    try:
        parsed: Json = json.loads(_object(arguments))
    except NOT_JSON:
        parsed = {"INVALID_JSON": arguments}
    return parsed

"""Parses whole tool calls in the text of an answer: JSON, or by mlx-lm's parser of the model's
format.

A parsed call is its name and its arguments, a JSON object as text.
"""

import json
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.call_arguments import NOT_JSON
from mlxspec.text.messages import Tools, clean, listed
from mlxspec.types import Json

NamedArguments = tuple[str, str]

FUNCTION, FUNCTION_END = "<function=", "</function>"
SEPARATORS = " \n\t\r,;"  # between calls in JSON


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
    if is_xml(tokenizer):
        raise ValueError("there is more than calls")  # mlx-lm's parser leaves out the rest
    return [_checked(value) for value in listed(tokenizer.tool_parser(text, tools))]


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
    if not name or not isinstance(name, str):
        raise ValueError("a call needs a name")
    return clean(name), _object(found.get("arguments", found.get("parameters", {})))


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

"""The Lark rule of tool calls: JSON objects with name and arguments between the model's markers.

Whatever the rule takes, the output parser reads as that call, with arguments that conform, also for
a model that would write its calls in another format. Only numbers too large for a float are not
read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import rejected
from mlxspec.text.structured.json_schema import json_rule
from mlxspec.types import Json

Function = Mapping[str, Any]

# Keywords by which an object may have more properties than it lists.
OPEN = frozenset("allOf anyOf oneOf $ref patternProperties const enum".split())


def marker(tokenizer: TokenizerWrapper, text: str) -> str:
    """A marker as the token that it is in this vocabulary, else as text."""
    token = tokenizer.convert_tokens_to_ids(text)
    known = token is not None and tokenizer.convert_ids_to_tokens(token) == text
    return f"<[{token}]>" if known else json.dumps(text)


def call_rules(
    tokenizer: TokenizerWrapper, functions: Sequence[Function], single: bool, where: str
) -> str:
    """The rule of calls of these functions; the rules that it refers to follow on further lines.
    Without an end marker all calls follow one begin marker. Raises RejectedRequest."""
    if tokenizer.response_transitions:
        why = "cannot be honoured with calls in this model's format; send tool_choice 'auto' and"
        raise rejected(where, f"{why} no format, or 'none'")
    call, calls, end = "call", "body", ""
    if tokenizer.tool_call_end:
        end = f'"\\n" {marker(tokenizer, tokenizer.tool_call_end)}'
        if not single:
            call = 'call ("\\n" call)*'
    elif not single:
        calls = 'body ("\\n" body)*'
    begin = marker(tokenizer, tokenizer.tool_call_start)
    bodies = []
    for function in functions:
        name = json.dumps(function["name"], ensure_ascii=False)
        head = json.dumps(f'{{"name": {name}, "arguments": ')
        bodies.append(f'{head} {json_rule(_arguments(function), where)} "}}"')
    body = " | ".join(bodies)
    return "\n".join([call, f'call: {begin} "\\n" {calls} {end}', f"body: {body}"])


def _arguments(function: Function) -> Json:
    """The schema of the arguments: an object, and closed where it lists its properties."""
    schema = {**(function.get("parameters") or {}), "type": "object"}
    listed, required = schema.get("properties"), schema.get("required", [])
    if isinstance(listed, dict) and isinstance(required, list) and not OPEN & schema.keys():
        if set(map(str, required)) <= listed.keys():
            schema.setdefault("additionalProperties", False)
    return schema

"""Rules of tool calls, in llguidance's Lark, by mlx-lm's names of the models' formats.

Whatever the rules take, mlx-lm's parser of the format reads as that call, with arguments that
conform. Qwen3-Coder's values are bare text: of those, plain types, enums and lengths conform.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import refused, types_of
from mlxspec.text.structured.json_schema import MAX_INT, STYLE, checked_schema, json_rule, validate
from mlxspec.text.tool_calls import typed

Function = Mapping[str, Any]
Rules = Callable[[TokenizerWrapper, Sequence[Function], bool, str], str]

OPEN = frozenset("allOf anyOf oneOf $ref patternProperties const enum".split())
CLOSE = "\n</parameter>\n"
WORD, TAG = r"[\w-]+", r"[^\s<>]+"  # what the parsers take as a name
# Free text in Qwen3-Coder's format has no closing tag.
TEXT = r"TEXT: /(?s:.*)/ & ~/(?s:.*)<\/(parameter|tool_call)>(?s:.*)/"
TAGS = re.compile("</?(parameter|tool_call)>")


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text)


def marker(tokenizer: TokenizerWrapper, text: str) -> str:
    """A marker as the token that it is in this vocabulary, else as text."""
    token = tokenizer.convert_tokens_to_ids(text)
    known = token is not None and tokenizer.convert_ids_to_tokens(token) == text
    return f"<[{token}]>" if known else quoted(text)


def json_calls(
    tokenizer: TokenizerWrapper, functions: Sequence[Function], single: bool, where: str
) -> str:
    """Hermes' and Qwen's: an object with name and arguments between tags. Also for a format without
    rules here: the output parser reads such objects between the model's own tags."""
    begin, close = marker(tokenizer, tokenizer.tool_call_start), tokenizer.tool_call_end
    end = ""
    if close:
        end = f'"\\n" {marker(tokenizer, close)}'
    call = f'call: {begin} "\\n" body {end}'
    return "\n".join((_repeated("call", "\n", single), call, *_bodies(functions, where)))


def mistral_calls(
    tokenizer: TokenizerWrapper, functions: Sequence[Function], single: bool, where: str
) -> str:
    """Mistral's: name[ARGS]{...}, or, in vocabularies without that token, a list of objects."""
    begin, args = marker(tokenizer, "[TOOL_CALLS]"), marker(tokenizer, "[ARGS]")
    if args.startswith('"'):
        calls = f'{begin} "[" {_repeated("body", ", ", single)} "]"'
        return "\n".join((calls, *_bodies(functions, where)))
    lines = ["call" if single else "call+", f"call: {begin} body", _choice(functions)]
    for i, function in enumerate(functions):
        name = _named(function["name"], WORD, where)
        lines.append(f"body{i}: {quoted(name)} {args} {_arguments(function, where)}")
    return "\n".join(lines)


def xml_calls(
    tokenizer: TokenizerWrapper, functions: Sequence[Function], single: bool, where: str
) -> str:
    """Qwen3-Coder's: each parameter between tags, strings as they are."""
    begin = marker(tokenizer, tokenizer.tool_call_start)
    end = marker(tokenizer, tokenizer.tool_call_end)
    call = f'call: {begin} "\\n" body "\\n" {end}'
    lines = [_repeated("call", "\n", single), call, _choice(functions), TEXT]
    for i, function in enumerate(functions):
        schema, parameters = _known(function, where), []
        required = schema.get("required", [])
        for j, name in enumerate(dict.fromkeys([*schema.get("properties", {}), *required])):
            rule = f"p{i}x{j}"
            parameters.append(rule if name in required else f"{rule}?")
            value, more = _value(name, schema, where, f"V{i}X{j}")
            head = quoted(f"<parameter={_named(name, TAG, where)}>\n")
            lines += [f"{rule}: {head} {value}", *more]
        head = quoted(f"<function={_named(function['name'], TAG, where)}>\n")
        lines.append(f'body{i}: {head} {" ".join(parameters)} "</function>"')
    return "\n".join(lines)


CALLS: dict[str, Rules] = {
    "json_tools": json_calls,
    "qwen3_coder": xml_calls,
    "mistral": mistral_calls,
}


def _repeated(rule: str, between: str, single: bool) -> str:
    return rule if single else f"{rule} ({quoted(between)} {rule})*"


def _choice(functions: Sequence[Function]) -> str:
    return f"body: {' | '.join(f'body{i}' for i in range(len(functions)))}"


def _bodies(functions: Sequence[Function], where: str) -> list[str]:
    lines = [_choice(functions)]
    for i, function in enumerate(functions):
        name = json.dumps(function["name"], ensure_ascii=False)
        head = quoted(f'{{"name": {name}, "arguments": ')
        lines.append(f'body{i}: {head} {_arguments(function, where)} "}}"')
    return lines


def _named(name: str, taken: str, where: str) -> str:
    if not re.fullmatch(taken, name):
        why = f"has the name {name!r}, which cannot be written in this model's format; change it"
        raise refused(where, why)
    return name


def _known(function: Function, where: str) -> dict[str, Any]:
    """The schema of the arguments: an object, and closed where it lists its properties."""
    schema = checked_schema({**(function.get("parameters") or {}), "type": "object"}, where)
    validate(json.dumps(schema), where)
    if "properties" in schema and not OPEN & schema.keys():
        if set(schema.get("required", ())) <= schema["properties"].keys():
            schema.setdefault("additionalProperties", False)
    return schema


def _arguments(function: Function, where: str) -> str:
    return f"%json {json.dumps({**_known(function, where), 'x-guidance': STYLE})}"


def _value(name: str, root: Mapping[str, Any], where: str, rule: str) -> tuple[str, list[str]]:
    """What a parameter's value may be, with its closing tag, and the rules that this needs."""
    schema, close = root.get("properties", {}).get(name), quoted(CLOSE)
    if not isinstance(schema, dict):
        schema = {}
    types = types_of(schema)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values:
        texts = []
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value)
            if json.dumps(typed(text, types)) == json.dumps(value) and not TAGS.search(text):
                texts.append(quoted(text))
        if not texts:
            why = f"has {name}, no value of which can be written in this model's format; change it"
            raise refused(where, why)
        return f"({' | '.join(texts)}) {close}", []
    if types and "string" not in types:
        if schema.get("type") in ("integer", "number"):  # more digits: infinite for the parser
            schema = {"minimum": -MAX_INT, "maximum": MAX_INT, **schema}
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{json_rule({**shared, **schema}, where)} {close}", []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if schema.get("type") != "string" or (not least and most == ""):
        return rule, [f"{rule}: TEXT {close}"]
    size = f"/(?s:.{{{least},{most}}})/"
    return rule, [f"{rule}: {rule}T {close}", f"{rule}T: TEXT & {size}"]

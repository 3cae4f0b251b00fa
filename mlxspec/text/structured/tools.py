"""Rules of tool calls, in llguidance's Lark, by mlx-lm's names of the models' formats.

Whatever the rules take, mlx-lm's parser of the format reads as that call, with arguments that
conform. Qwen3-Coder's values are bare text: of those, plain types, enums and lengths conform.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import refused, types_of
from mlxspec.text.structured.json_schema import MAX_INT, STYLE, checked_schema, json_rule, validate
from mlxspec.text.tool_calls import typed

Function = Mapping[str, Any]
FORMATS = ("json_tools", "qwen3_coder", "mistral")  # with rules of their own, by mlx-lm's names

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


def call_rules(
    tokenizer: TokenizerWrapper, functions: Sequence[Function], single: bool, where: str
) -> str:
    """The rule of calls of these functions; the rules that it needs follow on further lines.

    Hermes' and Qwen's: an object with name and arguments between tags; also for a format without
    rules here, the output parser reads such objects between the model's own tags. Qwen3-Coder's: an
    element between tags. Mistral's: name[ARGS]{...}, or, in vocabularies without that token, a list
    of objects.
    """
    kind = tokenizer.tool_parser.__module__.rpartition(".")[2]
    if kind not in FORMATS and tokenizer.response_transitions:
        why = f"cannot be honoured with calls in this model's format, {kind}; send"
        raise refused(where, f"{why} tool_choice 'auto' and no format, or 'none'")
    begin, end = marker(tokenizer, tokenizer.tool_call_start), ""
    if tokenizer.tool_call_end:
        end = f'"\\n" {marker(tokenizer, tokenizer.tool_call_end)}'
    call, between = f'{begin} "\\n" body {end}', "\n"
    args = marker(tokenizer, "[ARGS]")
    if kind == "mistral" and args.startswith('"'):
        kind, call = "list", f'{begin} "[" {_repeated("body", ", ", single)} "]"'
        single = True
    elif kind == "mistral":
        call, between = f"{begin} body", ""
    choice = " | ".join(f"body{i}" for i in range(len(functions)))
    lines = [_repeated("call", between, single), f"call: {call}", f"body: {choice}", TEXT]
    for i, function in enumerate(functions):
        name = function["name"]
        if kind == "qwen3_coder":
            lines += _xml_body(function, i, where)
        elif kind == "mistral":
            head = quoted(_named(name, WORD, where))
            lines.append(f"body{i}: {head} {args} {_arguments(function, where)}")
        else:
            head = quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
            lines.append(f'body{i}: {head} {_arguments(function, where)} "}}"')
    return "\n".join(lines)


def _xml_body(function: Function, i: int, where: str) -> list[str]:
    """Each parameter between tags, strings as they are."""
    lines, parameters = [], []
    schema = _known(function, where)
    required = schema.get("required", [])
    for j, name in enumerate(dict.fromkeys([*schema.get("properties", {}), *required])):
        rule = f"p{i}x{j}"
        parameters.append(rule if name in required else f"{rule}?")
        value, more = _value(name, schema, where, f"V{i}X{j}")
        head = quoted(f"<parameter={_named(name, TAG, where)}>\n")
        lines.append(f"{rule}: {head} {value}")
        lines += more
    head = quoted(f"<function={_named(function['name'], TAG, where)}>\n")
    lines.append(f'body{i}: {head} {" ".join(parameters)} "</function>"')
    return lines


def _repeated(rule: str, between: str, single: bool) -> str:
    return rule if single else f"{rule} ({quoted(between)} {rule})*"


def _named(name: str, taken: str, where: str) -> str:
    if not re.fullmatch(taken, name):
        why = f"has the name {name!r}, which cannot be written in this model's format; change it"
        raise refused(where, why)
    return name


def _known(function: Function, where: str) -> dict[str, Any]:
    """The schema of the arguments: an object, and closed where it lists its properties."""
    parameters = function.get("parameters") or {}
    schema = checked_schema({**parameters, "type": "object"}, where)
    validate(json.dumps(schema), where)
    if "properties" in schema and not OPEN & schema.keys():
        if set(schema.get("required", ())) <= schema["properties"].keys():
            schema.setdefault("additionalProperties", False)
    return schema


def _arguments(function: Function, where: str) -> str:
    schema = _known(function, where)
    schema["x-guidance"] = STYLE
    return f"%json {json.dumps(schema)}"


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
            same = json.dumps(typed(text, types)) == json.dumps(value)
            if same and not TAGS.search(text):
                texts.append(quoted(text))
        if not texts:
            why = f"has {name}, no value of which can be written in this model's format; change it"
            raise refused(where, why)
        return f"({' | '.join(texts)}) {close}", []
    if types and "string" not in types:
        whole = dict(schema)
        if schema.get("type") in ("integer", "number"):  # more digits: infinite for the parser
            whole.setdefault("minimum", -MAX_INT)
            whole.setdefault("maximum", MAX_INT)
        for key in ("$defs", "definitions"):
            if key in root:
                whole.setdefault(key, root[key])
        return f"{json_rule(whole, where)} {close}", []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if schema.get("type") != "string" or (not least and most == ""):
        return rule, [f"{rule}: TEXT {close}"]
    size = f"/(?s:.{{{least},{most}}})/"
    return rule, [
        f"{rule}: {rule}T {close}",
        f"{rule}T: TEXT & {size}",
    ]

"""Rules of tool calls, in llguidance's Lark, by mlx-lm's names of the models' formats.

Rule: what the rules take, mlx-lm's parser of the format reads as that call, with arguments that
conform; of Qwen3-Coder's, whose values are bare text, those of a plain type, an enum or a length
do.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Refused, types_of
from mlxspec.text.structured.json_schema import EXACT, STYLE, check, json_rule, plain

Function = Mapping[str, Any]
Rules = Callable[[TokenizerWrapper, Sequence[Function], bool, str], str]

PARAMETERS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
)
CLOSE = "\n</parameter>\n"
WORD, TAG = r"[\w-]+", r"[^\s<>]+"  # what the parsers take as a name
# Free text of Qwen3-Coder's: its parser reads "null" as no string, and what is in a tag must not
# end it.
TEXT = r"TEXT: /(?s:.*)/ & ~/(?s:.*)<\/(parameter|tool_call)>(?s:.*)/ & ~/(?i:null)/"


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
    """Hermes' and Qwen's: an object with name and arguments, between tags. Also for a format that
    has no rules here: between the model's own tags, which are read so as well."""
    begin, close = marker(tokenizer, tokenizer.tool_call_start), tokenizer.tool_call_end
    more, end = (
        "" if single else ' ("\\n" call)*',
        f'"\\n" {marker(tokenizer, close)}' if close else "",
    )
    return "\n".join((f"call{more}", f'call: {begin} "\\n" body {end}', *_bodies(functions, where)))


def mistral_calls(
    tokenizer: TokenizerWrapper, functions: Sequence[Function], single: bool, where: str
) -> str:
    """Mistral's: name[ARGS]{...}, or, before there was that token, a list of such objects as
    above."""
    begin, args = marker(tokenizer, "[TOOL_CALLS]"), marker(tokenizer, "[ARGS]")
    if args.startswith('"'):
        more = "" if single else ' (", " body)*'
        return "\n".join((f'{begin} "[" body{more} "]"', *_bodies(functions, where)))
    lines = ["call" if single else "call+", f"call: {begin} body", _choice(functions)]
    for i, function in enumerate(functions):
        name = _named(function["name"], WORD, where)
        lines.append(f"body{i}: {quoted(name)} {args} {_arguments(function, where)}")
    return "\n".join(lines)


def xml_calls(
    tokenizer: TokenizerWrapper, functions: Sequence[Function], single: bool, where: str
) -> str:
    """Qwen3-Coder's: each parameter between tags, strings as they are."""
    begin, end = (
        marker(tokenizer, tokenizer.tool_call_start),
        marker(tokenizer, tokenizer.tool_call_end),
    )
    more = "" if single else ' ("\\n" call)*'
    lines = [f"call{more}", f'call: {begin} "\\n" body "\\n" {end}', _choice(functions), TEXT]
    for i, function in enumerate(functions):
        schema = _known(function, where)
        check(json.dumps(schema), where)
        required, names = schema.get("required") or [], []
        for j, name in enumerate(dict.fromkeys([*schema.get("properties", {}), *required])):
            names.append(f"p{i}x{j}" + "?" * (name not in required))
            value, more_lines = _value(tokenizer, function, name, schema, where, f"V{i}X{j}")
            head = quoted(f"<parameter={_named(name, TAG, where)}>\n")
            lines += [f"p{i}x{j}: {head} {value}", *more_lines]
        head = quoted(f"<function={_named(function['name'], TAG, where)}>\n")
        lines.append(f'body{i}: {head} {" ".join(names)} "</function>"')
    return "\n".join(lines)


CALLS: dict[str, Rules] = {
    "json_tools": json_calls,
    "qwen3_coder": xml_calls,
    "mistral": mistral_calls,
}


def _choice(functions: Sequence[Function]) -> str:
    return f"body: {' | '.join(f'body{i}' for i in range(len(functions)))}"


def _bodies(functions: Sequence[Function], where: str) -> list[str]:
    lines = [_choice(functions)]
    for i, function in enumerate(functions):
        head = quoted(
            f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        )
        lines.append(f'body{i}: {head} {_arguments(function, where)} "}}"')
    return lines


def _named(name: str, taken: str, where: str) -> str:
    if not re.fullmatch(taken, name):
        raise Refused(
            where, f"{where}: the name {name!r} cannot be written in this model's format; change it"
        )
    return name


def _known(function: Function, where: str) -> dict[str, Any]:
    """The schema of the arguments: an object, and closed where it says what is in it."""
    own = function.get("parameters") or {}
    schema = plain({**own, "type": "object"} if isinstance(own, dict) else own, where)
    if "properties" in schema and set(schema) <= PARAMETERS:
        if set(schema.get("required") or ()) <= set(schema["properties"]):
            schema.setdefault("additionalProperties", False)
    return schema


def _arguments(function: Function, where: str) -> str:
    return f"%json {json.dumps({**_known(function, where), 'x-guidance': STYLE})}"


def _value(
    tokenizer: TokenizerWrapper,
    function: Function,
    name: str,
    root: Mapping[str, Any],
    where: str,
    rule: str,
) -> tuple[str, list[str]]:
    """What a parameter's value may be, with its closing tag, and the rules that this needs."""
    own, close = root.get("properties", {}).get(name), quoted(CLOSE)
    schema: dict[str, Any] = own if isinstance(own, dict) else {}
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        texts = [v if isinstance(v, str) else json.dumps(v) for v in values]
        texts = [
            t for t, v in zip(texts, values, strict=True) if _reads(tokenizer, function, name, t, v)
        ]
        if not texts:
            raise Refused(
                where,
                f"{where}: none of {name}'s values can be written in this model's format; change them",
            )
        return f"({' | '.join(quoted(text) for text in texts)}) {close}", []
    kind = schema.get("type")
    types = types_of(schema)
    if types and "string" not in types:
        if kind in (
            "integer",
            "number",
        ):  # without bounds its digits could overflow the parser's float
            schema = {"minimum": -EXACT, "maximum": EXACT, **schema}
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{json_rule({**shared, **schema}, where)} {close}", []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if kind != "string" or (not least and most is None):
        return rule, [f"{rule}: TEXT {close}"]
    size = f"/(?s:.{{{least},{'' if most is None else most}}})/"
    return rule, [f"{rule}: {rule}T {close}", f"{rule}T: TEXT & {size}"]


def _reads(
    tokenizer: TokenizerWrapper, function: Function, name: str, text: str, value: Any
) -> bool:
    """Whether mlx-lm's parser reads the text of a parameter as this value."""
    call = f"<function={function['name']}>\n<parameter={name}>\n{text}{CLOSE}</function>"
    try:
        found = tokenizer.tool_parser(call, [{"type": "function", "function": function}])[
            "arguments"
        ]
    except Exception:  # a parser raises whatever its author chose
        return False
    return (
        list(found) == [name]
        and json.dumps(found[name]) == json.dumps(value)
        and "</tool_call>" not in text
    )

"""Lark rules of tool calls in the layout in which a model writes them, so that a forced call is
what the model was trained to write.

A tool whose schema cannot be enforced in a layout with parameters is called in JSON between tags,
which the output parser reads too. Without `strict` a keyword that cannot be enforced is left out,
as OpenAI's and Anthropic's APIs do.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.control_tokens import any_of
from mlxspec.text.formats import format_of, layout_of
from mlxspec.text.layouts import CALL_ID, OTHER, Layout
from mlxspec.text.messages import RejectedRequest, types_of
from mlxspec.text.proof import forces_own
from mlxspec.text.structured.json_schema import json_rule
from mlxspec.types import Json

# Keywords by which an object may have more properties than it lists.
OPEN = frozenset("allOf anyOf oneOf $ref patternProperties const enum".split())
# Keywords of a string that free text up to a closing tag obeys.
FREE = frozenset("type title description default examples nullable".split())

Function = Mapping[str, Any]  # of a tool


def is_strict(function: Function) -> bool:
    """Whether the client wants no argument but by the schema."""
    return bool(function.get("strict"))


def call_rules(
    tokenizer: TokenizerWrapper,
    functions: Sequence[Function],
    single: bool,
    where: str,
) -> str:
    """The rule of calls of these functions, one or, unless `single`, several; the rules that it
    refers to follow on further lines. Raises RejectedRequest, naming the field `where`."""
    writer = _Rules(tokenizer, where)
    own, others = format_of(tokenizer).layouts[0], layout_of("json_tools")
    strings = [way for way in own.values if way.string is not False]
    ended = all(way.closes.strip() for way in strings)
    escaped = own.style == "tags" and (own.html or not own.raw)
    if own.style == "whole" or escaped or not ended or not forces_own(tokenizer):
        own = others
    flat = [each for each in functions if own.style == "json" or _is_flat(_schema(each))]
    flat = [each for each in flat if own is others or not re.search(r"[\s\"']", each["name"])]
    rest = [each for each in functions if each not in flat]
    sections = []
    for layout, some in ((own, flat), (others, rest)):
        if some:
            sections.append(writer.section(layout, some, single))
    return "\n".join([" | ".join(sections), *writer.lines])


def arguments_rule(function: Function, where: str) -> str:
    """The rule of a function's arguments in JSON. Raises RejectedRequest."""
    try:
        return json_rule(_schema(function), where, lenient=not is_strict(function))
    except RejectedRequest as error:
        if is_strict(function):
            name = function["name"]
            raise RejectedRequest(error.field, f"{error} (of the tool {name!r})") from error
        return json_rule({"type": "object"}, where)


def _schema(function: Function) -> Json:
    """The schema of the arguments: an object, and closed where it lists its properties."""
    schema = {**(function.get("parameters") or {}), "type": "object"}
    listed, required = schema.get("properties"), schema.get("required", [])
    if isinstance(listed, dict) and isinstance(required, list) and not OPEN & schema.keys():
        if set(map(str, required)) <= listed.keys():
            schema.setdefault("additionalProperties", False)
    return schema


def _is_flat(schema: Json) -> bool:
    """Whether parameters in text can be held to a schema: strings are any, or of a list."""
    properties = schema.get("properties", {})
    if schema.get("additionalProperties", True) is not False or "$ref" in json.dumps(schema):
        return False
    return all(
        isinstance(each, dict)
        and ("string" not in types_of(each) or each.keys() <= FREE or _words(each) is not None)
        and types_of(each) != set()
        and re.fullmatch(r"[^<>=\"\s]+", name) is not None
        for name, each in properties.items()
    )


def _words(schema: Json) -> list[str] | None:
    """The strings that a value must be one of; None where it may be any."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list) and listed and all(isinstance(each, str) for each in listed):
        return listed
    return None


class _Rules:
    """Writes rules; `lines` has those that others refer to."""

    def __init__(self, tokenizer: TokenizerWrapper, where: str) -> None:
        self._where, self.lines = where, list[str]()
        added = tokenizer.added_tokens_decoder.items()
        self._tokens = {token.content: id for id, token in added if token.content.strip()}
        self._special = {token.content for _, token in added if token.special}
        self._cut = re.compile(f"({any_of(self._tokens)})")

    def section(self, layout: Layout, functions: Sequence[Function], single: bool) -> str:
        """A section of calls. Neighbouring texts are one string: llguidance reads the longest, so
        none may begin another."""
        bodies = []
        for function in functions:
            name = json.dumps(json.dumps(function["name"], ensure_ascii=False)[1:-1])
            if layout.style == "json":
                arguments = arguments_rule(function, self._where)
                body = f"{self._text(layout.after)} {arguments} {self._text(layout.closes)}"
            else:
                body = self._parameters(layout, _schema(function))
            bodies.append(f"{name} {body}")
        call, more = self._rule(" | ".join(bodies)), ""
        if not single and (layout.start or layout.between) and OTHER not in layout.between:
            more = f"({self._text(layout.between + layout.before)} {call})*"
        begin = self._text((layout.opens + layout.before).lstrip())
        return f"{begin} {call} {more} {self._text(layout.ends.rstrip())}"

    def _parameters(self, layout: Layout, schema: Json) -> str:
        """What follows the name of a call with parameters, which come in the order of the schema:
        `rest` behind a parameter, `first` before all."""
        rest = first = '""'
        for name, own in reversed(schema.get("properties", {}).items()):
            key, value = layout.key + name, self._value(layout, own)
            alone = f"{self._text(key, value[0])} {value[1]} {rest}"
            behind = f"{self._text(layout.separator + key, value[0])} {value[1]} {rest}"
            if name not in schema.get("required", ()):
                alone, behind = f"{alone} | {first}", f"{behind} | {rest}"
            first, rest = self._rule(alone), self._rule(behind)
        if first == '""':
            return self._text(layout.empty)
        return f"{self._text(layout.after)} {first} {self._text(layout.closes)}"

    def _value(self, layout: Layout, schema: Json) -> tuple[str, str]:
        """The text before a value, and the rule of the value by its schema with what closes it."""
        types, words = types_of(schema), _words(schema)
        text = next(way for way in layout.values if way.string is not False)
        others = [way for way in layout.values if way.string is not True]
        named = [way for way in others if any(f'"{each}"' in way.opens for each in types)]
        other = (named or others)[0]
        if layout.style == "words" and text.opens[-1:] in ("'", '"'):
            words = None  # strings of JSON are read between double quotes
        elif "string" in types and words is None:
            return text.opens, self._rule(self._free_text(text.closes))
        if words:
            listed = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
            return text.opens, self._rule(f"({listed}) {self._text(text.closes)}")
        value = json_rule(schema, self._where)
        if types == {"boolean"} and schema.keys() <= FREE:
            value = f'("{layout.true}" | "{"False" if layout.true == "True" else "false"}")'
        return other.opens, self._rule(f"{value} {self._text(other.closes)}")

    def _free_text(self, closes: str) -> str:
        """Any text up to what closes it, which cannot be in it."""
        before, *rest = self._cut.split(closes, maxsplit=1)
        if rest and rest[0] in self._special:
            text = self._rule(f"/(.|\\n)*{regex_of(before)}/")
            return f"{text} {self._text(''.join(rest))}"
        self.lines.append(f"text{len(self.lines)}[lazy]: /(.|\\n)*{regex_of(closes)}/")
        return f"text{len(self.lines) - 1}"

    def _rule(self, body: str) -> str:
        """The name of a new rule."""
        self.lines.append(f"part{len(self.lines)}: {body}")
        return f"part{len(self.lines) - 1}"

    def _text(self, text: str, exact: str = "") -> str:
        """A text of the format, its tokens as tokens: with any number where one counts and any id
        where one stands, unless there is more of it, `exact`."""
        made = []
        for part in filter(None, self._cut.split(text + exact)):
            if part in self._tokens:
                made.append(f"<[{self._tokens[part]}]>")
                continue
            for piece in [part] if exact else re.split(rf"({CALL_ID}\d|\d+)", part):
                counts = (
                    "/[0-9]{1,9}/" if piece.isdigit() else json.dumps(piece, ensure_ascii=False)
                )
                made.append("/[a-zA-Z0-9]{9}/" if piece.startswith(CALL_ID) else counts)
        return " ".join(each for each in made if each != '""')


def regex_of(text: str) -> str:
    """The regular expression of a text, as Lark writes it."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)

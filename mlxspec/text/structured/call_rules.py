"""Lark rules of tool calls in the layout that a model writes, so that a forced call is what it was
trained to write.

A tool whose schema cannot be enforced in a layout with parameters is called in JSON between tags,
which the output parser accepts too. Without `strict` a keyword that cannot be enforced is left out,
as OpenAI's and Anthropic's APIs do.
"""

import json
import re
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.formats import format_of, layout_of
from mlxspec.text.layouts import (
    CALL_ID,
    OTHER,
    SAME_KEY,
    CallLayout,
)
from mlxspec.text.messages import (
    RejectedRequest,
    as_list,
    rejected,
    types_of,
)
from mlxspec.text.patterns import any_of
from mlxspec.text.proof import forces_own_format
from mlxspec.text.structured.json_schema import (
    first_line,
    json_rule,
    left_out,
    normalized,
)
from mlxspec.text.structured.trial import Trial
from mlxspec.types import Json

# Keywords by which an object may have more properties than it lists.
OPEN = frozenset("allOf anyOf oneOf $ref patternProperties const enum".split())
# Keywords of an object that its properties in tags do not obey.
CONDITIONS = {"if", "not", "anyOf", "oneOf", "allOf", "dependentRequired", "dependentSchemas"}
# Keywords of a string that free text up to a closing tag obeys.
FREE = frozenset("type title description default examples nullable".split())

Function = Mapping[str, Any]  # of a tool
Freed = Mapping[str, Sequence[str] | None]  # properties by function; None: all arguments


def is_strict(function: Function) -> bool:
    """Whether the client wants arguments only as in the schema."""
    return bool(function.get("strict"))


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may have: one of these functions or, unless `single`, several.
    `heads`: the rules of what precedes the arguments of each in a model whose answers have headers;
    there an answer has one call. `freed`: what may be anything in these functions."""

    tokenizer: TokenizerWrapper
    functions: Sequence[Function]
    single: bool
    heads: Sequence[str] = ()
    freed: Freed = field(default_factory=dict)

    def rule(self) -> str:
        """The Lark rule of the calls as the model writes them. The rules that it refers to follow
        on further lines. Raises RejectedRequest.

        The output parser parses whatever the rule accepts as that call, with arguments that
        conform, except numbers too large for a float."""
        if not self.heads:
            return _call_rules(self.tokenizer, self.functions, self.single)
        bodies = [arguments_rule(f) for f in self.functions]
        calls = [head + body for head, body in zip(self.heads, bodies, strict=True)]
        return "\n".join(["body", f"body: {' | '.join(calls)}"])

    def looser(self, trial: Trial) -> Iterator["Calls"]:
        """These calls and, whenever the last ones cannot be compiled, those that demand less of
        tools that are not strict: without the properties at fault, or the parameters of a tool
        where that does not help; without all parameters. Raises RejectedRequest for a strict tool
        at fault."""
        yield self
        if faults := self._at_fault(trial):
            some = self._without(_properties_at_fault(faults, trial))
            yield some._without({**some.freed, **dict.fromkeys(_names(some._at_fault(trial)))})
        yield self._without(dict.fromkeys(_names(f for f in self.functions if not is_strict(f))))

    def _at_fault(self, trial: Trial) -> list[Function]:
        """The functions whose arguments cannot be compiled by themselves. Raises RejectedRequest
        for a strict one."""
        found = []
        for function, (failed, told) in zip(
            self.functions, _checked(self.functions, trial), strict=False
        ):
            if failed and is_strict(function):
                why = f"cannot be honoured: {first_line(told[0])}; leave that out, or strict"
                raise rejected(parameters_of(function), why)
            found += [function] * failed
        return found

    def _without(self, freed: Freed) -> "Calls":
        functions = [_freed(f, freed.get(f["name"], [])) for f in self.functions]
        return replace(self, functions=functions, freed=freed)

    def left_out(self, trial: Trial) -> tuple[str, ...]:
        """The paths of what calls that compile do not obey."""
        functions = [f for f in self.functions if not is_strict(f)]
        paths = []
        for function, (_, told) in zip(functions, _checked(functions, trial), strict=False):
            freed = self.freed.get(function["name"], [])
            words = ["parameters"]
            if freed is not None:
                words = [*freed, *left_out(function["parameters"], told)]
            paths += [f"tools[{function['name'][:64]}].{word[:64]}" for word in words]
        return tuple(dict.fromkeys(paths))


def _names(functions: Iterable[Function]) -> list[str]:
    return [function["name"] for function in functions]


def _checked(functions: Sequence[Function], trial: Trial) -> list[tuple[bool, list[str]]]:
    """Trial.check of the arguments of each function."""
    rules = [f"start: {arguments_rule(function)}" for function in functions]
    return trial.check(rules) if rules else []


def _properties_at_fault(functions: Sequence[Function], trial: Trial) -> Freed:
    """The properties of each function that cannot be compiled by themselves."""
    names, alone = [], []
    for function in functions:
        schema, name = function["parameters"], function["name"]
        properties = schema.get("properties")
        for key, value in properties.items() if isinstance(properties, dict) else ():
            names.append((name, key))
            required = [key] * (key in as_list(schema.get("required")))
            only = {**schema, "properties": {key: value}, "required": required}
            alone.append({"name": name, "parameters": only})
    unknown = [(True, list[str]())] * len(names)
    found: dict[str, list[str]] = {name: [] for name in _names(functions)}
    for (name, key), (failed, _) in zip(names, _checked(alone, trial) + unknown, strict=False):
        found[name] += [key] * failed
    return found


def _freed(function: Function, names: Sequence[str] | None) -> Function:
    """A function where these properties may be anything; None: all arguments."""
    if not names:
        return with_schema({"name": function["name"]}) if names is None else function
    schema = function["parameters"]
    properties = {**schema["properties"], **{name: {} for name in names}}
    return {"name": function["name"], "parameters": {**schema, "properties": properties}}


def _call_rules(
    tokenizer: TokenizerWrapper,
    functions: Sequence[Function],
    single: bool,
) -> str:
    writer = _Rules(tokenizer)
    native, fallback = (
        format_of(tokenizer).layouts[0],
        layout_of("json_tools"),
    )
    strings = [value for value in native.values if value.string is not False]
    delimited = all(value.closes.strip() for value in strings)
    escaped = native.style == "tags" and (native.html or not native.raw)
    if native.style == "whole" or escaped or not delimited or not forces_own_format(tokenizer):
        native = fallback
    flat = [f for f in functions if native.style == "json" or _is_flat(f["parameters"])]
    flat = [f for f in flat if native is fallback or not re.search(r"[\s\"']", f["name"])]
    rest = [f for f in functions if f not in flat]
    sections = []
    for layout, group in ((native, flat), (fallback, rest)):
        if group:
            sections.append(writer.section(layout, group, single))
    return "\n".join([" | ".join(sections), *writer.lines])


def parameters_of(function: Function) -> str:
    """Where a request has the schema of a function's arguments, for people."""
    return f"tools[{function['name']}].parameters"


def arguments_rule(function: Function) -> str:
    """The rule of a function's arguments in JSON. Raises RejectedRequest."""
    return _schema_rule(function["parameters"], function)


def _schema_rule(schema: Json, function: Function) -> str:
    """The rule of a schema of a function in JSON; unless that is strict, without what cannot be
    enforced, and one that cannot be compiled for what cannot be read. Raises RejectedRequest."""
    try:
        return json_rule(schema, parameters_of(function), lenient=not is_strict(function))
    except RejectedRequest as error:
        if is_strict(function):
            raise RejectedRequest(error.field, f"{error}, or strict") from error
        return f"%json {json.dumps({'type': 'unreadable', 'schema': schema})}"


def with_schema(function: Function) -> Function:
    """A function whose arguments are an object, closed if it lists its properties; unless it is
    strict, as its keywords are meant."""
    schema = {**(function.get("parameters") or {}), "type": "object", "nullable": False}
    if not is_strict(function):
        schema = normalized(schema)
    properties, required = (
        schema.get("properties"),
        schema.get("required", []),
    )
    if isinstance(properties, dict) and isinstance(required, list) and not OPEN & schema.keys():
        if set(map(str, required)) <= properties.keys():
            schema.setdefault("additionalProperties", False)
    return {**function, "parameters": schema}


def _is_flat(schema: Json) -> bool:
    """Whether parameters in text can obey a schema: strings are free, or of a list."""
    properties = schema.get("properties", {})
    if schema.get("additionalProperties", True) is not False or "$ref" in json.dumps(schema):
        return False
    if schema.keys() & CONDITIONS:
        return False
    return all(
        isinstance(value, dict)
        and ("string" not in types_of(value) or value.keys() <= FREE or _words(value) is not None)
        and types_of(value) != set()
        and re.fullmatch(r"[^<>=\"\s]+", name) is not None
        for name, value in properties.items()
    )


def _words(schema: Json) -> list[str] | None:
    """The strings that a value must be one of; None if it may be any."""
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return [*words, "null"] if schema.get("nullable") else words
    return None


class _Rules:
    """Writes rules; `lines` has the rules that others refer to."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self.lines = list[str]()
        added = tokenizer.added_tokens_decoder.items()
        self._tokens = {token.content: id for id, token in added if token.content.strip()}
        self._special = {token.content for _, token in added if token.special}
        self._token_pattern = re.compile(f"({any_of(self._tokens)})")

    def section(self, layout: CallLayout, functions: Sequence[Function], single: bool) -> str:
        """The rule of a section of calls. Neighbouring texts are one string: llguidance matches the
        longest, so none may begin another."""
        bodies = []
        for function in functions:
            name = json.dumps(json.dumps(function["name"], ensure_ascii=False)[1:-1])
            if layout.style == "json":
                arguments = arguments_rule(function)
                body = (
                    f"{self._text(layout.after_name)} {arguments} {self._text(layout.call_closes)}"
                )
            else:
                body = self._parameters(layout, function)
            bodies.append(f"{name} {body}")
        call, more = self._rule(" | ".join(bodies)), ""
        if not single and (layout.start_marker or layout.between) and OTHER not in layout.between:
            more = f"({self._text(layout.between + layout.call_opens)} {call})*"
        begin = self._text((layout.section_opens + layout.call_opens).lstrip())
        return f"{begin} {call} {more} {self._text(layout.section_closes.rstrip())}"

    def _parameters(self, layout: CallLayout, function: Function) -> str:
        """The rule after the name of a call with parameters, which come in the order of the schema:
        `rest` after a parameter, `first` before all."""
        schema = function["parameters"]
        rest = first = '""'
        for name, value_schema in reversed(schema.get("properties", {}).items()):
            key, value = (
                layout.key + name,
                self._value(layout, value_schema, name, function),
            )
            alone = f"{self._text(key, value[0])} {value[1]} {rest}"
            after = f"{self._text(layout.separator + key, value[0])} {value[1]} {rest}"
            if name not in schema.get("required", ()):
                alone, after = f"{alone} | {first}", f"{after} | {rest}"
            first, rest = self._rule(alone), self._rule(after)
        if first == '""':
            return self._text(layout.empty)
        return f"{self._text(layout.after_name)} {first} {self._text(layout.call_closes)}"

    def _value(
        self,
        layout: CallLayout,
        schema: Json,
        name: str,
        function: Function,
    ) -> tuple[str, str]:
        """The text before a value, and the rule of the value by its schema and its closing text."""
        types, words = types_of(schema), _words(schema)
        text = next(value for value in layout.values if value.string is not False)
        others = [value for value in layout.values if value.string is not True]
        typed = [value for value in others if any(f'"{name}"' in value.opens for name in types)]
        other = (typed or others)[0]
        text_closes = text.closes.replace(SAME_KEY, name)
        if layout.style == "words" and text.opens[-1:] in ("'", '"'):
            words = None  # strings of JSON are parsed between double quotes
        elif "string" in types and words is None:
            return text.opens, self._rule(self._free_text(text_closes))
        if words:
            choices = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
            return text.opens, self._rule(
                f"({choices}) {self._text(text.closes.replace(SAME_KEY, name))}"
            )
        rule = _schema_rule(schema, function)
        if types == {"boolean"} and schema.keys() <= FREE:
            rule = f'("{layout.true}" | "{"False" if layout.true == "True" else "false"}")'
        return other.opens, self._rule(f"{rule} {self._text(other.closes.replace(SAME_KEY, name))}")

    def _free_text(self, closes: str) -> str:
        """The rule of any text up to its closing text, which cannot be in it."""
        before, *rest = self._token_pattern.split(closes, maxsplit=1)
        if rest and rest[0] in self._special:
            text = self._rule(f"/(.|\\n)*{regex_of(before)}/")
            return f"{text} {self._text(''.join(rest))}"
        self.lines.append(f"text{len(self.lines)}[lazy]: /(.|\\n)*{regex_of(closes)}/")
        return f"text{len(self.lines) - 1}"

    def _rule(self, body: str) -> str:
        """Add a rule; returns its name."""
        self.lines.append(f"part{len(self.lines)}: {body}")
        return f"part{len(self.lines) - 1}"

    def _text(self, text: str, exact: str = "") -> str:
        """The rule of a text of the format, its tokens as tokens. A number may be any number and
        an id any id, unless the text goes on with `exact`."""
        terms = []
        for part in filter(None, self._token_pattern.split(text + exact)):
            if part in self._tokens:
                terms.append(f"<[{self._tokens[part]}]>")
                continue
            for piece in [part] if exact else re.split(rf"({CALL_ID}\d|\d+)", part):
                term = "/[0-9]{1,9}/" if piece.isdigit() else json.dumps(piece, ensure_ascii=False)
                terms.append("/[a-zA-Z0-9]{9}/" if piece.startswith(CALL_ID) else term)
        return " ".join(term for term in terms if term != '""')


def regex_of(text: str) -> str:
    """The regular expression of a text, as Lark writes it."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)

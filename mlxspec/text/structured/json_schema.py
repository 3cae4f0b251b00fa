"""JSON schemas, and clients' grammars, as llguidance takes them.

Rule: llguidance refuses most of what it cannot enforce; here is refused what it would let pass,
read inexactly, or need minutes and gigabytes for. Annotations and vacuous constraints are dropped.
"""

import json
import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any, NoReturn, TypeGuard

from llguidance import LLMatcher, LLParserLimits

from mlxspec.text.messages import Refused
from mlxspec.types import shown

DEEPEST = 64
MOST_LEVELS = 1000  # reached through names: llguidance recurses; 3,000 rules overran its stack
MOST_BYTES = 1 << 18
EXACT = 1 << 53  # llguidance's numbers are floats: a larger integer becomes its neighbour
EXACTLY = "send integers up to 2^53 and 15 digits of others"
MOST_MULTIPLE = (
    10_000  # its automaton has a state for each remainder: 9,999,991 took 264 s and 5.6 GB
)
MOST_PATTERNS = 4  # that may meet on one string: the work is a product over them

# One way to write white space: a weak model cannot go on with it for ever, and the text between
# values is
# forced, hence drafted. It is json.dumps's way, that of the calls in most templates. Without \u no
# key can be
# a declared one in disguise, and no half of a surrogate pair comes.
STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}
NOTES = frozenset(
    "$schema $comment title description default examples example deprecated readOnly writeOnly contentSchema"
    " contentMediaType contentEncoding x-guidance".split()
)
UNMET = frozenset(
    "not if then else contains minContains maxContains uniqueItems propertyNames dependencies"
    " dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties $dynamicRef"
    " $recursiveRef".split()
)
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ONE = ("items", "additionalProperties", "additionalItems")
OWN = frozenset((*MAPS[:2], *ONE, "prefixItems", "pattern"))
LEAST, MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# llguidance's own bounds: about 20 ms of work on regular expressions to begin with, 15 ms for a
# mask.
LIMITS = LLParserLimits(
    verbose_errors=False, max_items_in_row=20_000, max_lexer_states=60_000, step_max_items=5_000
)
# Neither looks at a character twice: half a megabyte of brackets would keep the process for an
# hour.
OPTION = re.compile(r"\[[^\[\]]*\b(max_tokens|temperature|stop)\s*=")
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*+"|/(?:\\.|[^/\\\n])++/|//[^\n]*|#[^\n]*|(["/])')


def json_rule(schema: Any, where: str) -> str:
    """The rule, in llguidance's Lark, of the JSON that conforms to a schema. Raises Refused, of
    `where`."""
    return f"%json {json.dumps({**plain(schema, where), 'x-guidance': STYLE})}"


def plain(schema: Any, where: str) -> dict[str, Any]:
    """The schema without its notes. Raises Refused for what would not be enforced."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        text = json.dumps(schema, allow_nan=False)
        if len(text) > MOST_BYTES:
            raise Refused(
                where, f"{where} is larger than {MOST_BYTES >> 10} KB; send a smaller schema"
            )
        copy = json.loads(text)
        if not isinstance(copy, dict):
            raise Refused(where, f"{where} = {shown(schema)} is not a JSON schema; send an object")
        survey = Survey(copy, where)
        survey.visit(copy, where, 0)
        if sum(map(_height, survey.targets.values())) > MOST_LEVELS:
            survey.refuse(
                f"{where} has more than {MOST_LEVELS} levels in what $ref names; send fewer names"
            )
        return copy
    except RecursionError as error:
        raise Refused(where, f"{where} is nested too deep; send a flatter schema") from error
    except (ValueError, TypeError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(where, f"{where} is not a JSON schema: {error}; send an object") from error


@lru_cache(256)
def check(schema: str, where: str) -> None:
    """Raises Refused where llguidance does not take a schema that `plain` has passed."""
    grammar = LLMatcher.grammar_from_json_schema(schema)
    _, said = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if said:
        raise Refused(where, f"{where} cannot be honoured: {brief(said[0])}; leave that out")


def brief(error: str) -> str:
    """An error of llguidance's on one line, without the grammar and the state that it shows."""
    said = re.split(r"<state>|<backtrace>|<non-verbose|\n\s*\d* *\|", error)[0]
    return " ".join(said.split())[:300] or "nothing can follow"


@dataclass(slots=True)
class Survey:
    """Walks a schema once, its references too."""

    root: dict[str, Any]
    where: str
    seen: set[int] = field(default_factory=set)
    targets: dict[int, Any] = field(default_factory=dict)  # of references
    patterns: set[str] = field(default_factory=set)
    limits: list[tuple[str, float]] = field(default_factory=list)
    joins: bool = False  # somewhere two schemas meet in one value
    multiple: int = 1

    def visit(self, node: Any, at: str, depth: int) -> None:
        if isinstance(node, bool) or id(node) in self.seen:
            return
        if not isinstance(node, dict):
            self.refuse(f"{at} = {shown(node)} is not a schema; send an object")
        if depth > DEEPEST:
            self.refuse(f"{self.where} is nested deeper than {DEEPEST}; send a flatter schema")
        self.seen.add(id(node))
        for key in [*node]:
            if key in NOTES or (key == "$id" and not depth) or self.vacuous(key, node[key]):
                del node[key]
            elif key in UNMET or key == "$id":
                self.refuse(f'{self.where} cannot be honoured: "{key}" of {at}; leave that out')
        self.meeting(node, at)
        self.numbers(node, at)
        for key in MAPS:
            for name, each in self.entries(node, key, dict, at):
                self.visit(each, f"{at}.{key}.{name}", depth + 1)
        for key in (*LISTS, *(k for k in ONE if isinstance(node.get(k), list))):
            for i, each in self.entries(node, key, list, at):
                self.visit(each, f"{at}.{key}[{i}]", depth + 1)
        for key in ONE:
            if key in node and not isinstance(node[key], list):
                self.visit(node[key], f"{at}.{key}", depth + 1)
        for i, name in self.entries(node, "required", list, at):
            if not isinstance(name, str):
                self.refuse(f"{at}.required[{i}] = {shown(name)} is not a name; send a string")
        if "$ref" in node:
            found = self.target(node["$ref"], at)
            self.targets[id(found)] = found
            self.visit(found, f"{at}.$ref", depth + 1)

    def refuse(self, why: str) -> NoReturn:
        raise Refused(self.where, " ".join(why.split()))

    def entries(self, node: dict[str, Any], key: str, kind: type[Any], at: str) -> Any:
        value = node.get(key, {} if kind is dict else [])
        if not isinstance(value, kind):
            self.refuse(
                f"{at}.{key} = {shown(value)} must be {'an object' if kind is dict else 'a list'}"
            )
        return value.items() if isinstance(value, dict) else enumerate(value)

    def vacuous(self, key: str, value: Any) -> bool:
        """Whether the constraint constrains nothing, as some libraries write it."""
        return (key == "uniqueItems" and value is False) or (
            key == "propertyNames" and value in (True, {}, {"type": "string"})
        )

    def numbers(self, node: dict[str, Any], at: str) -> None:
        for key in ("const", "enum"):
            if any(map(_inexact, _numbers(node.get(key)))):
                self.refuse(f"{at}.{key} has a number that is not exact: {EXACTLY}")
        for key in (*LEAST, *MOST):
            value = node.get(key)
            if _number(value) and abs(value) > EXACT and (value < 0) == (key in LEAST):
                node[key] = EXACT if value > 0 else -EXACT  # tighter: what conforms to it conforms
            elif _number(value) and _inexact(value):
                self.refuse(f"{at}.{key} = {shown(value)} is not exact: {EXACTLY}")
        own = [(key, node[key]) for key in (*LEAST, *MOST) if _number(node.get(key))]
        self.limits += own
        if _loose(own) or (self.joins and _loose(self.limits)):
            self.refuse(
                f"{at}: exclusive bounds less than 1 apart cannot be honoured; send minimum, maximum"
            )
        step = node.get("multipleOf")
        if _number(step):
            _, digits, exponent = Decimal(repr(abs(step))).as_tuple()
            size = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
            self.multiple = math.lcm(self.multiple, size or MOST_MULTIPLE + 1)
            if self.multiple > MOST_MULTIPLE:
                self.refuse(
                    f"{at}.multipleOf = {shown(step)} cannot be honoured: 1 to {MOST_MULTIPLE} in its digits,"
                    " all of them in a schema together; leave it out"
                )
        least, required = node.get("minProperties"), node.get("required")
        if _number(least) and least > 1 + (
            len(set(map(str, required))) if isinstance(required, list) else 0
        ):
            self.refuse(
                f"{at}.minProperties = {shown(least)} cannot be honoured, names may come twice; use required"
            )

    def meeting(self, node: dict[str, Any], at: str) -> None:
        if isinstance(pattern := node.get("pattern"), str):
            self.patterns.add(pattern)
        met = len(node["allOf"]) if isinstance(node.get("allOf"), list) else 0
        met += sum(key in node for key in ("anyOf", "oneOf", "$ref")) + bool(OWN & set(node))
        self.joins |= met > 1
        if self.joins and len(self.patterns) > MOST_PATTERNS:
            self.refuse(
                f"{at}: more than {MOST_PATTERNS} different patterns in a schema that combines schemas cannot"
                " be honoured; leave some out"
            )

    def target(self, ref: Any, at: str) -> Any:
        node: Any = self.root
        if not isinstance(ref, str) or not re.fullmatch(r"#(/[^/~%]+)*", ref):
            self.refuse(f"{at}.$ref = {shown(ref)} is not in the schema; write it as #/$defs/name")
        for step in ref.split("/")[1:]:
            try:
                node = node[int(step)] if isinstance(node, list) else node[step]
            except (LookupError, ValueError, TypeError):
                self.refuse(f"{at}.$ref = {shown(ref)} leads nowhere; define it in $defs")
        return node


def checked_lark(text: str, where: str) -> str:
    """A client's grammar. Raises Refused for what has no meaning here, or bounds that do not
    hold."""
    if option := OPTION.search(text):
        raise Refused(where, f"{where}: the option {option[1]} cannot be honoured; leave it out")
    if any(found[1] for found in LITERAL.finditer(text)):  # llguidance takes minutes to find that
        raise Refused(
            where, f"{where} has a string or a pattern without its end on that line; close it"
        )
    bare = LITERAL.sub('""', text)
    for sign, mend in (
        ("&", "write one"),
        (r"~(?!\s*\d)", "write what may come"),
        ("%json", "send a JSON schema"),
    ):
        if found := re.search(sign, bare):
            # Both operators are llguidance's own; some took 20 GB. A schema has checks of its own.
            raise Refused(where, f"{where}: {found[0]} is not taken in a grammar; {mend}")
    if len(re.findall(r"[(\[:]", bare)) > MOST_LEVELS:
        raise Refused(where, f"{where} has more than {MOST_LEVELS} rules and groups; send fewer")
    return text


def _height(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_height, inner), default=0)


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> list[int | float]:
    """All that are in a value."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [n for part in parts for n in _numbers(part)]
    return [value] if _number(value) else []


def _inexact(number: int | float) -> bool:
    """Whether llguidance could take it for its neighbour: it reads decimals quickly, not
    exactly."""
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    long = len(digits) > 15 or abs(int(exponent)) > 22
    return abs(number) > EXACT or (isinstance(number, float) and (long or abs(number) >= 1e15))


def _loose(limits: list[tuple[str, float]]) -> bool:
    """Whether llguidance would take an excluded integer: it does where the bounds are in one
    unit."""
    low, high = ([(key, v) for key, v in limits if key in some] for some in (LEAST, MOST))
    return any(
        abs(b - a) < 1 and ((k == LEAST[1] and a == int(a)) or (m == MOST[1] and b == int(b)))
        for k, a in low
        for m, b in high
    )

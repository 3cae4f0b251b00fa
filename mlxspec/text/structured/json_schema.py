"""JSON schemas and clients' own Lark grammars, checked before llguidance compiles them.

llguidance refuses by name most of what it cannot enforce. This module refuses what llguidance would
let pass, read inexactly, or need minutes or gigabytes for, and drops what constrains nothing.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

from llguidance import LLParserLimits

from mlxspec.text.messages import rejected, rejected_value
from mlxspec.types import Json, shown

Nodes = list[Json]

MAX_BYTES = 1 << 18
MAX_DEPTH = 120  # serde_json, which reads the schema in llguidance, stops at 128
MAX_LEVELS = 1000  # of all $ref targets: llguidance recurses, 3,000 overran its stack
MAX_INT = 1 << 53  # llguidance computes with floats: a larger integer becomes its neighbour
MAX_MULTIPLE = 10_000  # an automaton state per remainder: 9,999,991 took 264 s and 5.6 GB
MAX_SHIFTED = 1e14  # an integer with a half beyond has more digits than floats hold
# llguidance's time grows with the square of these, or faster: 360 patterns in one object took 21 s.
MAX_NAMES = 2000  # of properties, in all
MAX_NAME_PATTERNS, MAX_ALL_PATTERNS = 64, 640  # of patternProperties, in one object and in all
MAX_PATTERNS = 12  # on one string: the automaton is a product over them, 24 took minutes
EXACT_HINT = "send integers up to 2^53 and other numbers with up to 15 digits"

# One way to write white space, so a weak model cannot go on with it for ever and the text between
# values is forced, hence drafted. It is that of json.dumps, which most templates use for calls.
# Without \u escapes no key is a declared key in disguise, and no half of a surrogate pair comes.
STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}
BRANCHES = frozenset(("anyOf", "oneOf", "$ref"))
APPLIED = BRANCHES | frozenset(  # keywords that two combined schemas may both have
    "properties patternProperties items additionalProperties additionalItems prefixItems"
    " pattern".split()
)
EVERY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})  # propertyNames without a constraint
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# llguidance's own bounds: about 20 ms of work on regular expressions to begin with, 30 ms a mask.
LIMITS = LLParserLimits(
    verbose_errors=False, max_items_in_row=20_000, max_lexer_states=60_000, step_max_items=10_000
)
# Neither pattern reads a character twice: half a megabyte of brackets would take an hour.
OPTION = re.compile(r"\[[^\[\]]*\b(max_tokens|temperature|stop)\s*=")
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*+"|/(?:\\.|[^/\\\n])++/|//[^\n]*|#[^\n]*|(["/])')
# llguidance's additions to Lark: intersection, negation and schemas. Some such grammars took 20 GB.
NOT_IN_LARK = re.compile(r"&|~(?!\s*\d)|%json")


def json_rule(schema: Any, where: str) -> str:
    """The Lark rule of the JSON that conforms to a schema. Raises RejectedRequest, naming the field
    `where`."""
    return f"%json {json.dumps({**checked_schema(schema, where), 'x-guidance': STYLE})}"


def checked_schema(schema: Any, where: str) -> Json:
    """A copy of the schema without what constrains nothing. Raises RejectedRequest for what would
    not be enforced."""
    try:
        text = json.dumps(schema, allow_nan=False)
        copy = json.loads(text)
        height = _height(copy)
    except (RecursionError, ValueError) as error:
        raise rejected(where, f"is not a JSON schema: {error}; send an object") from error
    if not isinstance(copy, dict):
        raise rejected_value(where, schema, "is not a JSON schema; send an object")
    if len(text) > MAX_BYTES:
        raise rejected(where, f"is larger than {MAX_BYTES >> 10} KB; send a smaller schema")
    if height > MAX_DEPTH:
        raise rejected(where, f"is nested deeper than {MAX_DEPTH}; send a flatter schema")
    nodes = [value for _, value in _walk(copy) if isinstance(value, dict)]
    copy.pop("$schema", None)  # may name a draft that llguidance does not know
    for node in nodes:
        _drop(node)
    if _reference_levels(nodes, height) > MAX_LEVELS:
        raise rejected(where, f"has more than {MAX_LEVELS} levels in what $ref names; send fewer")
    _check_numbers(nodes, where)
    _check_patterns(nodes, where)
    return copy


def first_line(error: str) -> str:
    """An error of llguidance on one line, without the grammar and the state that it prints."""
    head = re.split(r"<state>|<backtrace>|<non-verbose|\n\s*\d* *\|", error)[0]
    head = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", head)
    return " ".join(head.split())[:300] or "nothing can follow"


def checked_lark(text: str, where: str) -> str:
    """A client's grammar, unchanged. Raises RejectedRequest for options that have no meaning here,
    and for what could take minutes or gigabytes."""
    if option := OPTION.search(text):
        raise rejected(where, f"has the option {option[1]}, which cannot be honoured; leave it out")
    if any(found[1] for found in LITERAL.finditer(text)):  # llguidance takes minutes to find that
        raise rejected(where, "has a string or a pattern without its end; close it")
    bare = LITERAL.sub('""', text)
    if sign := NOT_IN_LARK.search(bare):
        raise rejected(
            where, f"has {sign[0]}, which is not taken in a grammar; write what may come"
        )
    if len(re.findall(r"[(\[:]", bare)) > MAX_LEVELS:
        raise rejected(where, f"has more than {MAX_LEVELS} rules and groups; send fewer")
    return text


def _drop(node: Json) -> None:
    """Removes two keywords in a form that constrains nothing, which some libraries write. Only from
    an object with a type: in others they may be names of properties."""
    if isinstance(node.get("type"), str):
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if node.get("propertyNames") in EVERY_NAME:
            del node["propertyNames"]


def _reference_levels(nodes: Nodes, height: int) -> int:
    """How deep the targets of all $ref are together, at most: definitions have their own heights,
    another target that of the whole schema."""
    levels = 0
    others = set()
    for node in nodes:
        for definitions in (node.get("$defs"), node.get("definitions")):
            if isinstance(definitions, dict):
                levels += sum(_height(each) for each in definitions.values())
        ref = str(node.get("$ref", "#"))
        if ref != "#" and not ref.startswith(("#/$defs/", "#/definitions/")):
            others.add(ref)
    return levels + len(others) * height


def _height(value: Any) -> int:
    return max(depth for depth, _ in _walk(value))


def _walk(value: Any, depth: int = 1) -> Iterator[tuple[int, Any]]:
    """All values inside a JSON value, with their depths, itself first."""
    yield depth, value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _walk(each, depth + 1)


def _check_numbers(nodes: Nodes, where: str) -> None:
    """Refuses numbers that llguidance would read inexactly, and what it can count only with a state
    for each number, or not at all."""
    multiple = 1
    for node in nodes:
        for key in LOWER + UPPER:
            if _is_number(bound := node.get(key)):
                node[key] = _bound(key, bound)
        for key in ("const", "enum", *LOWER, *UPPER):
            for _, value in _walk(node.get(key)):
                if _is_number(value) and _is_inexact(value):
                    why = f"{key} has {shown(value)}, which is not exact; {EXACT_HINT}"
                    raise rejected(where, why)
        step = node.get("multipleOf")
        if _is_number(step):
            multiple = math.lcm(multiple, _digits(step))
        if not 1 <= multiple <= MAX_MULTIPLE:
            why = f"together the digits of all in a schema may make 1 to {MAX_MULTIPLE}"
            raise rejected(where, f"has multipleOf = {shown(step)}: {why}; leave it out")
        least, required = node.get("minProperties"), node.get("required")
        names = set(map(str, required)) if isinstance(required, list) else ()
        if _is_number(least) and least > 1 + len(names):
            why = f"has minProperties = {shown(least)}, but names may come twice; use required"
            raise rejected(where, why)


def _bound(key: str, bound: float) -> float:
    """A bound, moved inwards to one that llguidance reads right: beyond exact integers to the last
    of them, and from an exclusive integer, which llguidance takes where the other bound is less
    than 1 away, to a number next to it."""
    sign = 1
    if key in LOWER:
        bound = max(bound, -MAX_INT)
    else:
        sign, bound = -1, min(bound, MAX_INT)
    if key.startswith("exclusive") and bound % 1 == 0 and abs(bound) < MAX_SHIFTED:
        step = 1e-8 if abs(bound) < 1e6 else 0.5  # 15 digits in all
        bound = round(bound + sign * step, 8)
    return bound


def _check_patterns(nodes: Nodes, where: str) -> None:
    """Refuses many patterns that may meet on one string, and many names."""
    names = patterned = 0
    combined = False
    for node in nodes:
        names += _count(node.get("properties"))
        here = _count(node.get("patternProperties"))
        patterned += here
        if here > MAX_NAME_PATTERNS or patterned > MAX_ALL_PATTERNS or names > MAX_NAMES:
            why = (
                f"has more than {MAX_NAMES} properties, or {MAX_ALL_PATTERNS} patternProperties,"
                f" or {MAX_NAME_PATTERNS} of these in an object; send fewer"
            )
            raise rejected(where, why)
        keys = node.keys()
        if "allOf" in keys or (keys & BRANCHES and len(keys & APPLIED) > 1):
            combined = True
    patterns = {str(node["pattern"]) for node in nodes if "pattern" in node}
    if combined and len(patterns) > MAX_PATTERNS:
        why = f"combines schemas with more than {MAX_PATTERNS} patterns; leave some out"
        raise rejected(where, why)


def _count(value: Any) -> int:
    return len(value) if isinstance(value, dict) else 0


def _digits(number: float) -> int:
    """A number without its point: 25 for 0.25."""
    exact = Decimal(repr(abs(number)))
    return int(exact.scaleb(max(0, -int(exact.as_tuple().exponent))))


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)


def _is_inexact(number: float) -> bool:
    """Whether llguidance could take a number for its neighbour: it reads decimals quickly, not
    exactly."""
    if isinstance(number, int):
        return abs(number) > MAX_INT
    too_long = float(f"{number:.15g}") != number
    return too_long or abs(number) >= 1e15 or 0 < abs(number) < 1e-8

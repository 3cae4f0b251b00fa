"""JSON schemas and clients' own Lark grammars, checked before llguidance compiles them.

llguidance refuses by name most of what it cannot enforce. This module refuses what llguidance would
let pass, read inexactly, or need minutes or gigabytes for, and drops annotations.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from itertools import product
from typing import Any, TypeGuard

from llguidance import LLMatcher, LLParserLimits

from mlxspec.text.messages import Refused
from mlxspec.types import shown

Nodes = list[dict[str, Any]]

MAX_BYTES = 1 << 18
MAX_DEPTH = 120  # serde_json, which reads the schema in llguidance, stops at 128
MAX_LEVELS = 1000  # of all $ref targets: llguidance recurses, 3,000 overran its stack
MAX_INT = 1 << 53  # llguidance computes with floats: a larger integer becomes its neighbour
MAX_MULTIPLE = 10_000  # an automaton state per remainder: 9,999,991 took 264 s and 5.6 GB
MAX_PATTERNS = 4  # on one string: the automaton is a product over them
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
MERGED = frozenset(  # keywords that meet those of another schema where two are combined
    "properties patternProperties items additionalProperties additionalItems prefixItems"
    " pattern".split()
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
VACUOUS_NAMES: tuple[Any, ...] = (
    True,
    {},
    {"type": "string"},
)  # propertyNames that constrain nothing
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# llguidance's own bounds: about 20 ms of work on regular expressions to begin with, 15 ms a mask.
LIMITS = LLParserLimits(
    verbose_errors=False, max_items_in_row=20_000, max_lexer_states=60_000, step_max_items=5_000
)
# Neither pattern reads a character twice: half a megabyte of brackets would take an hour.
OPTION = re.compile(r"\[[^\[\]]*\b(max_tokens|temperature|stop)\s*=")
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*+"|/(?:\\.|[^/\\\n])++/|//[^\n]*|#[^\n]*|(["/])')
# llguidance's additions to Lark: intersection, negation and schemas. Some such grammars took 20 GB.
NOT_IN_LARK = re.compile(r"&|~(?!\s*\d)|%json")


def json_rule(schema: Any, where: str) -> str:
    """The Lark rule of the JSON that conforms to a schema. Raises Refused, naming the field
    `where`."""
    return f"%json {json.dumps({**checked_schema(schema, where), 'x-guidance': STYLE})}"


def checked_schema(schema: Any, where: str) -> dict[str, Any]:
    """A copy of the schema without what constrains nothing. Raises Refused for what would not be
    enforced."""
    try:
        text = json.dumps(schema, allow_nan=False)
        copy = json.loads(text)
        height = _height(copy)
    except (RecursionError, ValueError) as error:
        raise Refused(where, f"{where} is not a JSON schema: {error}; send an object") from error
    if not isinstance(copy, dict):
        raise Refused(where, f"{where} = {shown(schema)} is not a JSON schema; send an object")
    if len(text) > MAX_BYTES:
        raise Refused(where, f"{where} is larger than {MAX_BYTES >> 10} KB; send a smaller schema")
    if height > MAX_DEPTH:
        raise Refused(where, f"{where} is nested deeper than {MAX_DEPTH}; send a flatter schema")
    _drop(copy)
    nodes = [value for _, value in _walk(copy) if isinstance(value, dict)]
    _check_references(copy, nodes, where)
    _check_numbers(nodes, where)
    together = [[node] for node in nodes]  # schemas that may apply to one value
    if any(map(_merges, nodes)):
        together = [nodes]
    for group in together:
        _check_group(group, where)
    return copy


@lru_cache(256)
def validate(schema: str, where: str) -> None:
    """Raises Refused where llguidance does not take a schema, as JSON text."""
    grammar = LLMatcher.grammar_from_json_schema(schema)
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if messages:
        raise Refused(where, f"{where} cannot be honoured: {first_line(messages[0])}; leave it out")


def first_line(error: str) -> str:
    """An error of llguidance on one line, without the grammar and the state that it prints."""
    head = re.split(r"<state>|<backtrace>|<non-verbose|\n\s*\d* *\|", error)[0]
    head = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", head)
    return " ".join(head.split())[:300] or "nothing can follow"


def checked_lark(text: str, where: str) -> str:
    """A client's grammar. Raises Refused for options that have no meaning here, and for what could
    take minutes or gigabytes."""
    if option := OPTION.search(text):
        raise Refused(where, f"{where}: the option {option[1]} cannot be honoured; leave it out")
    if any(found[1] for found in LITERAL.finditer(text)):  # llguidance takes minutes to find that
        raise Refused(where, f"{where} has a string or a pattern without its end; close it")
    bare = LITERAL.sub('""', text)
    if sign := NOT_IN_LARK.search(bare):
        raise Refused(where, f"{where}: {sign[0]} is not taken in a grammar; write what may come")
    if len(re.findall(r"[(\[:]", bare)) > MAX_LEVELS:
        raise Refused(where, f"{where} has more than {MAX_LEVELS} rules and groups; send fewer")
    return text


def _drop(node: Any, names: bool = False) -> None:
    """Removes $schema, which may name a draft that llguidance does not know, and two constraints
    that some libraries write in a form that constrains nothing. `names`: the keys are names that
    the client chose, not keywords."""
    if isinstance(node, dict) and not names:
        node.pop("$schema", None)
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if node.get("propertyNames") in VACUOUS_NAMES:
            del node["propertyNames"]
    for key, value in _items(node):
        if key not in ("const", "enum"):
            _drop(value, not names and key in NAMED)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _walk(value: Any, depth: int = 1) -> Iterator[tuple[int, Any]]:
    """All values inside a JSON value, with their depths, itself first."""
    yield depth, value
    for _, each in _items(value):
        yield from _walk(each, depth + 1)


def _height(value: Any) -> int:
    return max(depth for depth, _ in _walk(value))


def _merges(node: dict[str, Any]) -> bool:
    """Whether two schemas apply to one value."""
    combined = sum(key in node for key in ("anyOf", "oneOf", "$ref"))
    if isinstance(node.get("allOf"), list):
        combined += len(node["allOf"])
    return combined + bool(MERGED & node.keys()) > 1


def _check_references(root: dict[str, Any], nodes: Nodes, where: str) -> None:
    levels = {}
    for node in nodes:
        if node is not root and isinstance(node.get("$id"), str):  # the base of other references
            raise Refused(where, f'{where}: an inner "$id" cannot be honoured; leave it out')
        ref = node.get("$ref")
        if not isinstance(ref, str):
            continue
        if not re.fullmatch(r"#(/[^/~%]+)*", ref):
            why = f"{where}: $ref = {shown(ref)} is not in the schema; write it as #/$defs/name"
            raise Refused(where, why)
        target: Any = root
        for step in ref.split("/")[1:]:
            target = {str(key): value for key, value in _items(target)}.get(step)
        levels[ref] = _height(target)
    if sum(levels.values()) > MAX_LEVELS:
        why = f"{where} has more than {MAX_LEVELS} levels in what $ref names; send fewer"
        raise Refused(where, why)


def _check_numbers(nodes: Nodes, where: str) -> None:
    """Refuses numbers that llguidance would read inexactly, and moves bounds beyond exact integers
    inwards. Also what it can count only with a state for each number, or not at all."""
    multiple = 1
    for node in nodes:
        for key in LOWER + UPPER:
            if _is_number(bound := node.get(key)):
                node[key] = max(bound, -MAX_INT) if key in LOWER else min(bound, MAX_INT)
        for key in ("const", "enum", *LOWER, *UPPER):
            for _, value in _walk(node.get(key)):
                if _is_number(value) and _is_inexact(value):
                    why = f"{where}: {key} has {shown(value)}, which is not exact; {EXACT_HINT}"
                    raise Refused(where, why)
        step = node.get("multipleOf")
        if _is_number(step):
            multiple = math.lcm(multiple, _digits(step))
        if not 1 <= multiple <= MAX_MULTIPLE:
            why = f"together the digits of all in a schema may make 1 to {MAX_MULTIPLE}"
            raise Refused(where, f"{where}: multipleOf = {shown(step)}: {why}; leave it out")
        least, required = node.get("minProperties"), node.get("required")
        names = set(map(str, required)) if isinstance(required, list) else ()
        if _is_number(least) and least > 1 + len(names):
            why = "cannot be honoured, names may come twice; use required"
            raise Refused(where, f"{where}: minProperties = {shown(least)} {why}")


def _check_group(nodes: Nodes, where: str) -> None:
    """Refuses exclusive bounds so near to another that llguidance would take an excluded integer,
    and patterns that may meet on one string."""
    for low, high in product(LOWER, UPPER):
        if (low, high) == ("minimum", "maximum"):
            continue
        for one, other in product(_numbers(nodes, low), _numbers(nodes, high)):
            if abs(one - other) < 1:
                why = "exclusive bounds less than 1 apart cannot be honoured"
                raise Refused(where, f"{where}: {why}; send minimum and maximum")
    if len({str(node["pattern"]) for node in nodes if "pattern" in node}) > MAX_PATTERNS:
        why = f"more than {MAX_PATTERNS} patterns in a schema that combines schemas"
        raise Refused(where, f"{where}: {why} cannot be honoured; leave some out")


def _numbers(nodes: Nodes, key: str) -> set[float]:
    return {node[key] for node in nodes if _is_number(node.get(key))}


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

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
from itertools import chain
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
# Intersection and negation are llguidance's additions to Lark: some such grammars took 20 GB.
NOT_IN_LARK = {
    "&": "write one pattern",
    r"~(?!\s*\d)": "write what may come",
    "%json": "send a JSON schema",
}


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
    if len(text) > MAX_BYTES:
        raise Refused(where, f"{where} is larger than {MAX_BYTES >> 10} KB; send a smaller schema")
    if height > MAX_DEPTH:
        raise Refused(where, f"{where} is nested deeper than {MAX_DEPTH}; send a flatter schema")
    if not isinstance(copy, dict):
        raise Refused(where, f"{where} = {shown(schema)} is not a JSON schema; send an object")
    _drop(copy)
    nodes = list(_objects(copy))
    merges = any(map(_merges, nodes))
    _check_references(copy, nodes, where)
    _check_patterns(nodes, merges, where)
    _check_bounds(nodes, merges, where)
    _check_numbers(nodes, where)
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
    for sign, fix in NOT_IN_LARK.items():
        if found := re.search(sign, bare):
            raise Refused(where, f"{where}: {found[0]} is not taken in a grammar; {fix}")
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


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects inside a JSON value, itself first. Most are schemas; a few more are checked."""
    if isinstance(value, dict):
        yield value
    for _, each in _items(value):
        yield from _objects(each)


def _height(value: Any) -> int:
    return 1 + max((_height(each) for _, each in _items(value)), default=0)


def _merges(node: dict[str, Any]) -> bool:
    """Whether two schemas apply to one value."""
    combined = sum(key in node for key in ("anyOf", "oneOf", "$ref"))
    if isinstance(node.get("allOf"), list):
        combined += len(node["allOf"])
    if MERGED & node.keys():
        combined += 1
    return combined > 1


def _check_references(root: dict[str, Any], nodes: Nodes, where: str) -> None:
    targets = {}
    for node in nodes:
        if node is not root and isinstance(node.get("$id"), str):  # the base of other references
            raise Refused(where, f'{where}: an inner "$id" cannot be honoured; leave it out')
        if isinstance(ref := node.get("$ref"), str):
            if not re.fullmatch(r"#(/[^/~%]+)*", ref):
                raise Refused(
                    where,
                    f"{where}: $ref = {shown(ref)} is not in the schema; write it as #/$defs/name",
                )
            targets[ref] = _height(_target(root, ref))
    if sum(targets.values()) > MAX_LEVELS:
        raise Refused(
            where, f"{where} has more than {MAX_LEVELS} levels in what $ref names; send fewer"
        )


def _target(root: Any, ref: str) -> Any:
    """What a $ref names; None where llguidance will say that there is nothing."""
    node = root
    for step in ref.split("/")[1:]:
        node = {str(key): value for key, value in _items(node)}.get(step)
    return node


def _check_patterns(nodes: Nodes, merges: bool, where: str) -> None:
    patterns = {str(node["pattern"]) for node in nodes if "pattern" in node}
    if merges and len(patterns) > MAX_PATTERNS:
        raise Refused(
            where,
            f"{where}: more than {MAX_PATTERNS} patterns in a schema that combines schemas cannot"
            " be honoured; leave some out",
        )


def _check_bounds(nodes: Nodes, merges: bool, where: str) -> None:
    """Refuses exclusive bounds by which llguidance would take an excluded integer: it does where
    both bounds are in one unit. Moves bounds beyond exact integers inwards."""
    groups: list[list[tuple[str, float]]] = []
    for node in nodes:
        bounds = []
        for key in (*LOWER, *UPPER):
            value = node.get(key)
            if not _is_number(value):
                continue
            node[key] = max(value, -MAX_INT) if key in LOWER else min(value, MAX_INT)
            if _is_inexact(node[key]):
                raise Refused(where, f"{where}: {key} = {shown(value)} is not exact; {EXACT_HINT}")
            bounds.append((key, node[key]))
        groups.append(bounds)
    if merges:
        groups = [list(chain(*groups))]
    if any(map(_are_loose, groups)):
        raise Refused(
            where,
            f"{where}: exclusive bounds less than 1 apart cannot be honoured; send minimum and"
            " maximum",
        )


def _are_loose(bounds: list[tuple[str, float]]) -> bool:
    """Whether an excluded integer is less than 1 away from an opposite bound."""
    for exclusive, opposite in (("exclusiveMinimum", UPPER), ("exclusiveMaximum", LOWER)):
        values = [value for key, value in bounds if key in opposite]
        near = {*map(math.floor, values), *map(math.ceil, values)}
        if any(key == exclusive and value in near for key, value in bounds):
            return True
    return False


def _check_numbers(nodes: Nodes, where: str) -> None:
    multiple = 1
    for node in nodes:
        for key in ("const", "enum"):
            if any(map(_is_inexact, _numbers(node.get(key)))):
                raise Refused(where, f"{where}: {key} has a number that is not exact; {EXACT_HINT}")
        step, least, required = map(node.get, ("multipleOf", "minProperties", "required"))
        if _is_number(step):
            multiple = math.lcm(multiple, _digits(step))
        if not 1 <= multiple <= MAX_MULTIPLE:
            raise Refused(
                where,
                f"{where}: multipleOf = {shown(step)} cannot be honoured: the digits of all of them"
                f" in a schema together may make 1 to {MAX_MULTIPLE}; leave it out",
            )
        names = set(map(str, required)) if isinstance(required, list) else ()
        if _is_number(least) and least > 1 + len(names):
            raise Refused(
                where,
                f"{where}: minProperties = {shown(least)} cannot be honoured, names may come twice;"
                " use required",
            )


def _digits(number: float) -> int:
    """A number without its point: 25 for 0.25."""
    exact = Decimal(repr(abs(number)))
    return int(exact.scaleb(max(0, -int(exact.as_tuple().exponent))))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> list[float]:
    """All numbers inside a JSON value."""
    if _is_number(value):
        return [value]
    return [number for _, each in _items(value) for number in _numbers(each)]


def _is_inexact(number: float) -> bool:
    """Whether llguidance could take a number for its neighbour: it reads decimals quickly, not
    exactly."""
    if isinstance(number, int):
        return abs(number) > MAX_INT
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    return len(digits) > 15 or abs(int(exponent)) > 22 or abs(number) >= 1e15

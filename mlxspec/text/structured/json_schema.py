"""JSON schemas and clients' own Lark grammars, checked before llguidance compiles them.

llguidance rejects by name most of what it cannot enforce. This module rejects what llguidance would
accept or read inexactly, and drops what constrains nothing.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, TypeGuard

from mlxspec.text.messages import as_list, in_json_words, rejected, rejected_value
from mlxspec.types import Json, shown

Nodes = list[Json]

MAX_ERROR = 1 << 12  # characters: an error repeats the grammar
MAX_INT = 1 << 53  # llguidance computes with floats: a larger integer becomes its neighbour
MAX_MULTIPLE = 65_535  # llguidance multiplies two in 32 bits
MAX_SHIFTED = 1e14  # an integer with a half beyond has more digits than floats hold
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
EVERY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})  # propertyNames without a constraint
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# What no automaton can do: to look around, or back; and JavaScript's /^x$/i, which matches nothing.
BEYOND = re.compile(r"\(\?<?[=!]|\\[1-9]|\A/\^|(?<!\\)\$/[a-z]*\Z")
ENDS_WORDS = re.compile(r"(?<!\\)(?:\\\\)*\\[bBAZz]")
# What Python writes in another way, or has not.
FOREIGN = re.compile(r"\\[pP](?:\{[^}]*\}|[A-Z])|\\[ux]\{[^}]*\}|\?<(?=\w)")
COUNTS = "minLength maxLength minItems maxItems minProperties maxProperties".split()
MAX_COUNT = 1 << 31  # of characters, items or properties
REMARKS = {"default", "example", "examples"}
TYPES = frozenset("string number integer boolean array object null".split())
KEPT = {"const", "default"}  # keywords that may be null
DATA = {"const", "enum", "default", "example", "examples"}  # keywords whose values are no schemas
ROOTED = {"$defs", "definitions"}  # what `$ref`s refer to from the root
# Keywords whose values are schemas by name.
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
OPTION = re.compile(r"\[[^\[\]]*\b(max_tokens|temperature|stop)\s*=")


def json_rule(schema: Any, where: str, lenient: bool = False) -> str:
    """The Lark rule of the JSON that conforms to a schema; `lenient`: except for keywords that
    cannot be enforced. Raises RejectedRequest, naming the field `where`."""
    checked = checked_schema(schema, where, lenient)
    return f"%json {json.dumps({**checked, 'x-guidance': {**STYLE, 'lenient': lenient}})}"


def loosen(schema: Json) -> list[str]:
    """Delete the keywords of a schema that llguidance refuses, and those that have no meaning as
    they are written; returns them."""
    found = []
    for node in _schemas(schema):
        words = _faults(node)
        for word in words:
            del node[word]
        for word in REMARKS & node.keys():  # they constrain nothing, but may hold what JSON has not
            del node[word]
        found += sorted(words)
    return found


def _faults(node: Json) -> set[str]:
    """The keywords of a schema that llguidance refuses, or would hold in part or not at all."""
    words = {word for word, fits in FITS.items() if word in node and not fits(node[word])}
    if BEYOND.search(str(node.get("pattern"))):
        words.add("pattern")
    names = node.get("patternProperties")
    if isinstance(names, dict) and any(map(BEYOND.search, names)):
        # The names that the patterns allow must stay possible.
        words |= {"patternProperties", "additionalProperties"} & node.keys()
    # How many properties there are is held only where all that are listed are required, and at
    # least how many only up to one more: other names may come twice.
    required, properties = node.get("required"), node.get("properties")
    held = set(map(str, required)) if isinstance(required, list) else set()
    least = node.get("minProperties")
    optional = isinstance(properties, dict) and properties.keys() - held
    if optional or (_is_number(least) and least > 1 + len(held)):
        words |= {"minProperties", "maxProperties"} & node.keys()
    return words


def _admit_null(node: Json) -> None:
    """Read OpenAPI's `nullable`, which llguidance skips."""
    if not node.pop("nullable", False):
        return
    if "type" in node and not node.keys() & {"const", "enum"}:
        node["type"] = [*as_list(node["type"]), "null"]
    else:
        some = {word: node.pop(word) for word in [*node] if word not in ROOTED}
        node["anyOf"] = [some, {"type": "null"}]


def checked_schema(schema: Any, where: str, lenient: bool = False) -> Json:
    """A copy of the schema without keywords that constrain nothing; `lenient`: loosened. Raises
    RejectedRequest for those that would not be enforced."""
    try:
        copy = json.loads(json.dumps(schema, allow_nan=lenient))
    except (RecursionError, ValueError) as error:
        why = in_json_words(str(error))
        raise rejected(where, f"is not a JSON schema: {why}; send an object") from error
    if not isinstance(copy, dict):
        raise rejected_value(where, schema, "is not a JSON schema; send an object")
    if lenient:
        loosen(copy)
    for node in _schemas(copy):
        if words := _faults(node):
            why = f"has {(word := max(words))} = {shown(node[word])}, which cannot be enforced"
            raise rejected(where, f"{why}; change it, or leave it out")
        _admit_null(node)
    nodes = list(_schemas(copy))
    copy.pop("$schema", None)  # may name a draft that llguidance does not know
    for node in nodes:
        _drop(node)
    _check_numbers(nodes, where)
    return copy


def normalized(schema: Json) -> Json:
    """A copy of a schema that an MCP server or Gemini's SDK wrote, with lower-case types and
    without keywords that are null."""
    copy: Json = json.loads(json.dumps(schema))
    for node in _schemas(copy):
        for key in [key for key, value in node.items() if value is None and key not in KEPT]:
            del node[key]
        types = node.get("type")
        if isinstance(types, list):
            node["type"] = [_lower_case(name) for name in types]
        elif types is not None:
            node["type"] = _lower_case(types)
    return copy


def _lower_case(name: Any) -> Any:
    return str(name).lower() if str(name).lower() in TYPES else name


def _schemas(schema: Any) -> Iterator[Json]:
    """All schemas in one, and itself; neither its data nor its names."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key in NAMED and isinstance(value, dict):
                    stack += value.values()
                elif key not in DATA:
                    stack.append(value)


def left_out(schema: Json, warnings: list[str]) -> list[str]:
    """The keywords that a lenient rule of a schema does not enforce: what `loosen` deletes, and
    what llguidance warns of."""
    words = loosen(json.loads(json.dumps(schema)))
    for warning in warnings:
        known = re.match("oneOf|Unknown (format)", warning)
        words += [known[1] or known[0]] if known else re.findall(r'"([^"]+)"', warning)
    return words


def first_line(error: str) -> str:
    """An error of llguidance on one line, without the grammar and the state that it prints."""
    head = re.split(r"<state>|<backtrace>|<non-verbose|\n\s*\d* *\|", error[:MAX_ERROR])[0]
    head = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", head)
    return " ".join(head.split())[:300] or "nothing can follow"


def checked_lark(text: str, where: str) -> str:
    """A client's grammar, unchanged. Raises RejectedRequest for options that have no meaning
    here."""
    if option := OPTION.search(text):
        raise rejected(where, f"has the option {option[1]}, which cannot be honoured; leave it out")
    if "%json" in text:  # not checked, and in another style
        raise rejected(where, "has %json, which is not supported here; send a schema instead")
    return text


def _drop(node: Json) -> None:
    """Remove two keywords that some libraries write in a form that constrains nothing, where the
    schema has a type."""
    if isinstance(node.get("type"), str):
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if node.get("propertyNames") in EVERY_NAME:
            del node["propertyNames"]


def _walk(value: Any) -> Iterator[Any]:
    """All values inside a JSON value, and itself."""
    stack = [value]
    while stack:
        yield (value := stack.pop())
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def _check_numbers(nodes: Nodes, where: str) -> None:
    """Reject numbers that llguidance would read inexactly."""
    multiple = 1
    for node in nodes:
        for key in LOWER + UPPER:
            if _is_number(bound := node.get(key)):
                node[key] = _bound(key, bound)
        for key in ("const", "enum", *LOWER, *UPPER):
            for value in _walk(node.get(key)):
                if _is_number(value) and _is_inexact(value):
                    why = f"{key} has {shown(value)}, which is not exact; {EXACT_HINT}"
                    raise rejected(where, why)
        step = node.get("multipleOf")
        if _is_number(step):
            digits = re.sub(r"\D", "", f"{Decimal(repr(step)):f}")  # 25 of 0.25
            multiple = math.lcm(multiple, int(digits))
        if not 1 <= multiple <= MAX_MULTIPLE:
            why = f"together the digits of all in a schema may make 1 to {MAX_MULTIPLE}"
            raise rejected(where, f"has multipleOf = {shown(step)}: {why}; leave it out")


def _bound(key: str, bound: float) -> float:
    """A bound, moved inwards to one that llguidance reads right: beyond exact integers to the last
    of them, and an exclusive integer, which llguidance includes if the other bound is less than 1
    away, to a number next to it."""
    sign = 1
    if key in LOWER:
        bound = max(bound, -MAX_INT)
    else:
        sign, bound = -1, min(bound, MAX_INT)
    if key.startswith("exclusive") and bound % 1 == 0 and abs(bound) < MAX_SHIFTED:
        step = 1e-8 if abs(bound) < 1e6 else 0.5  # 15 digits in all
        bound = round(bound + sign * step, 8)
    return bound


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_multiple(value: Any) -> bool:
    return _is_finite(value) and value > 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_pattern(value: Any) -> bool:
    """Whether it is one, without the ends of words and texts, which an automaton lacks."""
    try:
        re.compile(FOREIGN.sub("x", value))
    except (re.error, TypeError, RecursionError, OverflowError):
        return False
    return not ENDS_WORDS.search(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)


def _is_inexact(number: float) -> bool:
    """Whether llguidance could read a number as its neighbour: it parses decimals quickly, not
    exactly."""
    if isinstance(number, int):
        return abs(number) > MAX_INT
    too_long = float(f"{number:.15g}") != number
    return too_long or abs(number) >= 1e15 or 0 < abs(number) < 1e-8


FITS: dict[str, Callable[[Any], bool]] = {  # what a keyword's value has to be
    "required": _is_names,
    "properties": lambda value: isinstance(value, dict),
    "enum": lambda value: isinstance(value, list) and bool(value),
    "nullable": lambda value: isinstance(value, bool),
    "pattern": _is_pattern,
    "multipleOf": _is_multiple,
    **dict.fromkeys((*LOWER, *UPPER), _is_finite),
    **dict.fromkeys(COUNTS, _is_count),
}

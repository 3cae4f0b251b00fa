"""JSON schemas for tests, with answers of bounded length."""

from typing import Any

from hypothesis import strategies as st

LEAVES = [
    {"type": "string", "maxLength": 6},
    {"type": "string", "pattern": "^[a-z]{2,4}$"},
    {"type": "string", "enum": ["a", 'b"', "c d"]},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"x": [1, "y"]}},
    {"enum": [1, "two", None, False]},
    {"$ref": "#/$defs/word"},
    {"$ref": "#/$defs/tree"},
]
DEFS = {
    "word": {"type": "string", "minLength": 1, "maxLength": 5},
    "tree": {
        "type": "object",
        "properties": {
            "leaf": {"$ref": "#/$defs/word"},
            "sub": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
        },
        "required": ["leaf"],
        "additionalProperties": False,
    },
}  # fmt: skip
NAMES = ["name", "n", "the list", 'a"b', "é", "type"]


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def obj(draw: Any) -> Any:
        properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3))
        required = [name for name in properties if draw(st.booleans())]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    lists = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner, st.integers(0, 1), st.integers(0, 2),
    )  # fmt: skip
    either = st.lists(inner, min_size=2, max_size=3).map(lambda some: {"anyOf": some})
    return obj() | lists | either


def schemas(endless: bool = True) -> st.SearchStrategy[Any]:
    """Nested objects, arrays, enums, constants, bounds, patterns, anyOf and references; with
    `endless` one that refers to itself, so that an answer by it may never end."""
    leaves = LEAVES if endless else [leaf for leaf in LEAVES if leaf.get("$ref") != "#/$defs/tree"]
    grown = st.recursive(st.sampled_from(leaves), _grown, max_leaves=6)
    return grown.map(lambda schema: {**schema, "$defs": DEFS})

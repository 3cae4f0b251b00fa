"""What llguidance alone would let pass: schemas of every kind and misshapen ones, drafts that break
it, text in tags, numbers that are not exact."""

import json
import random
from typing import Any
from unittest import mock

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.text.chat import encode, load_tokenizer
from mlxspec.text.messages import RejectedRequest
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.structured import grammar
from mlxspec.text.structured.grammar import Grammars
from mlxspec.text.structured.json_schema import checked_lark, json_rule
from tests.support.examples import examples
from tests.tiny_tokenizer import AGENT, CALLS, CODER, TEMPLATE, THINK, save_tokenizer

VOCAB = 330


class Made(dict[str, Grammars]):
    def __repr__(self) -> str:  # hypothesis prints it
        return "made"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def one(
        name: str, template: str, extra: tuple[str, ...], kind: Any = "bytes", vocab: int = VOCAB
    ) -> Grammars:
        path = save_tokenizer(tmp_path_factory.mktemp(name), kind, template, extra)
        return Grammars(load_tokenizer(path), vocab)

    return Made(
        {
            "agent": one("a", AGENT, THINK + CALLS),
            "coder": one("c", CODER, THINK + CALLS),
            "plain": one("p", TEMPLATE, ()),
            "spm": one("s", TEMPLATE, (), "spm"),
            "words": one("w", TEMPLATE, (), "words"),
            "mistral": one("m", "[TOOL_CALLS]" + TEMPLATE, ("[TOOL_CALLS]", "[ARGS]")),
            "mistral_list": one("l", "[TOOL_CALLS]" + TEMPLATE, ("[TOOL_CALLS]",)),
        }
    )


def ids(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def walk(g: Grammars, make: Any, seed: int, soft: int = 40) -> str:
    """Evenly drawn; from `soft` tokens on with a leaning to what ends texts, lists and answers."""
    rng, matcher, said = random.Random(seed), make(), []
    out = {encode(g.tokenizer, c, special=False)[-1] for c in '"]}<\n'}
    while len(said) < 600:
        allowed = ids(matcher.masks([])[0])
        ends = [t for t in allowed if t in g.tokenizer.eos_token_ids]
        if ends and (ends == allowed or rng.random() < 0.3 or len(said) > soft):
            return str(g.tokenizer.decode(said))
        allowed = [t for t in allowed if t not in ends]
        better = [t for t in allowed if t in out]
        said.append(
            rng.choice(better if better and len(said) > soft and rng.random() < 0.7 else allowed)
        )
        matcher.take(said[-1:])
    raise TimeoutError


def json_of(g: Grammars, schema: Any, thinking: bool | None = False) -> Any:
    return g.compile(g.rules([json_rule(schema, "f")]), thinking, "f").result()


numbers = st.one_of(
    st.integers(-200, 200),
    st.integers(-(2**70), 2**70),
    st.floats(-1e3, 1e3),
    st.floats(allow_nan=False),
)
bound = st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])


@settings(max_examples=150)
@given(
    st.sampled_from(["integer", "number"]),
    st.dictionaries(bound, numbers, max_size=3),
    st.integers(0, 1 << 30),
)
def test_bounds_hold_or_are_refused(
    made: dict[str, Grammars], kind: str, bounds: Any, seed: int
) -> None:
    schema = {"type": kind, **bounds}
    try:
        make = json_of(made["plain"], schema)
    except RejectedRequest:
        return
    for i in range(3):
        jsonschema.validate(json.loads(walk(made["plain"], make, seed + i, 12)), schema)


@settings(max_examples=80)
@given(st.one_of(numbers, st.lists(numbers, max_size=2)), st.integers(0, 1 << 30))
def test_constants_hold_or_are_refused(made: dict[str, Grammars], value: Any, seed: int) -> None:
    try:
        make = json_of(made["plain"], {"enum": [value, "x"]})
    except RejectedRequest:
        return
    assert json.loads(walk(made["plain"], make, seed)) in (value, "x")


words = st.sampled_from(["a", "b", "ab", "é", 'a"b', "a\nb", "x y"])
leaf = st.one_of(
    st.sampled_from(
        [
            {"type": "integer", "minimum": 0, "maximum": 30, "multipleOf": 7},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "pattern": "^[ab]{1,3}$", "maxLength": 2},
            {"type": "string", "pattern": "b", "maxLength": 5},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "ipv4"},
            {"type": "string", "format": "uuid"},
            {"type": "string", "minLength": 2, "maxLength": 3},
            {"type": ["string", "null"], "maxLength": 2},
            {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
            {"$ref": "#/$defs/tree"},
            {"$ref": "#/$defs/color"},
            {"const": None},
            {"enum": [1, 1.5, "1", [1], {"a": 1}, True]},
            True,
            False,
        ]
    ),
)
DEFS = {
    "color": {"enum": ["red", "green"]},
    "tree": {
        "type": "object",
        "properties": {"c": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}},
        "required": ["c"],
        "additionalProperties": False,
    },
}


def grown(inner: Any) -> Any:
    maps, some = st.dictionaries(words, inner, max_size=3), st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": maps,
                "required": st.lists(words, max_size=2, unique=True),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(
                    st.sampled_from(["^a", "b$", "^x+$"]), inner, max_size=2
                ),
                "minProperties": st.integers(0, 3),
                "maxProperties": st.integers(0, 4),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "maxItems": st.integers(0, 3)},
            optional={
                "items": inner,
                "prefixItems": some,
                "minItems": st.integers(0, 3),
                "uniqueItems": st.booleans(),
            },
        ),
        st.fixed_dictionaries({}, optional={"anyOf": some, "oneOf": some, "allOf": some}),
    )


@settings(max_examples=examples(250))
@given(st.recursive(leaf, grown, max_leaves=8), st.integers(0, 1 << 30))
def test_every_schema_holds_or_is_refused(
    made: dict[str, Grammars], schema: Any, seed: int
) -> None:
    schema = {**schema, "$defs": DEFS} if isinstance(schema, dict) else schema
    try:
        make = json_of(made["plain"], schema)
    except RejectedRequest as error:
        assert error.field == "f" and "\n" not in str(error) and len(str(error)) < 600
        return
    for i in range(2):
        try:
            text = walk(made["plain"], make, seed + i)
        except TimeoutError:
            continue
        jsonschema.validate(json.loads(text), schema)


KEYWORDS = (
    "type properties items anyOf allOf oneOf enum const $ref required minimum maxLength pattern multipleOf"
    " additionalProperties patternProperties prefixItems minProperties format $defs x-guidance"
).split()
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(400))
@given(junk)
def test_a_misshapen_schema_is_refused_or_taken(made: dict[str, Grammars], schema: Any) -> None:
    try:
        json_of(made["plain"], schema)
    except RejectedRequest as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": 2**53 + 1}, "2^53"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf"),
        ({"allOf": [{"multipleOf": 100_000}, {"multipleOf": 100_000}]}, "multipleOf"),
        (
            {"items": {"type": "integer", "multipleOf": 997}, "contains": {"multipleOf": 991}},
            "multipleOf",
        ),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        (
            {
                "type": "object",
                "properties": {"a": {"uniqueItems": True}},
                "x-guidance": {"lenient": True},
            },
            "uniqueItems",
        ),
        ({"properties": {"a": {"$id": "http://x/", "$ref": "#/$defs/a"}}}, "$defs/a"),
        ({"items": {"items": {"not": {}}}}, "not"),
        ({"$schema": "https://example.com/own", "not": {}}, "not"),
        (json.loads('{"items":' * 200 + "{}" + "}" * 200), "recursion"),
    ],
)
def test_what_llguidance_would_let_pass(made: dict[str, Grammars], schema: Any, said: str) -> None:
    with pytest.raises(RejectedRequest) as caught:
        json_of(made["plain"], schema)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "https://example.com/own", "$id": "own", "title": "T", "const": 5},
        {"type": "integer", "const": 5, "uniqueItems": False, "propertyNames": {"type": "string"}},
        {"type": "integer", "minimum": 5, "maximum": 5, "$defs": {"a": {"minimum": -(2**63)}}},
    ],
)
def test_what_constrains_nothing_is_dropped(made: dict[str, Grammars], schema: Any) -> None:
    assert walk(made["plain"], json_of(made["plain"], schema), 1) == "5"


@pytest.mark.parametrize(
    ("schema", "fits", "not_"),
    [
        ({"exclusiveMinimum": 0.2, "maximum": 0.9}, ["0.21", "0.9"], ["0.2", "0.20", "0", "0.91"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.001"], ["0", "0.0", "0.51"]),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, ["3.1"], ["3", "3.0", "3.5"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "0.1"]),
        ({"exclusiveMinimum": 999999, "maximum": 1000000.5}, ["1000000"], ["999999"]),
        ({"allOf": [{"exclusiveMinimum": 3}, {"maximum": 3.5}]}, ["3.5"], ["3"]),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2}, ["1", "2"], ["0", "3"]),
        ({"type": "integer", "exclusiveMaximum": 2000000}, ["1999999"], ["2000000"]),
    ],
)
def test_exclusive_bounds(
    made: dict[str, Grammars], schema: Any, fits: list[str], not_: list[str]
) -> None:
    g = made["plain"]
    make = json_of(g, {"type": "number", **schema})
    for text in fits + not_:
        tokens = encode(g.tokenizer, text, special=False)
        rows = make().masks(tokens)
        ended = set(ids(rows[-1])) & set(g.tokenizer.eos_token_ids)
        assert bool(len(rows) > len(tokens) and ended) is (text in fits), text


def test_a_property_may_have_the_name_of_a_keyword(made: dict[str, Grammars]) -> None:
    names = ["$schema", "propertyNames", "uniqueItems", "title", "pattern"]
    properties = {name: {"type": "string", "maxLength": 1} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    make = json_of(made["plain"], {**schema, "additionalProperties": False})
    assert list(json.loads(walk(made["plain"], make, 1))) == names


def test_data_that_look_like_a_schema_stay_as_they_are(made: dict[str, Grammars]) -> None:
    value = {"exclusiveMinimum": 5, "type": "array", "uniqueItems": False, "pattern": "(?=a)"}
    for schema in ({"const": value}, {"enum": [value]}):
        assert json.loads(walk(made["plain"], json_of(made["plain"], schema), 1)) == value


def test_no_key_comes_in_disguise(made: dict[str, Grammars]) -> None:
    g = made["plain"]
    make = json_of(g, {"type": "object", "properties": {"a": {"type": "integer"}}})
    for text, fits in (('{"a": 1, "b": 2}', True), ('{"a": 1, "\\u0061": "x"}', False)):
        tokens = encode(g.tokenizer, text, special=False)
        assert (len(make().masks(tokens)) == len(tokens) + 1) is fits


@pytest.mark.parametrize(
    "lark",
    [
        "start: a\na[temperature=1]: /x/",
        'start: a "b"\na[max_tokens=3]: /x+/',
        'start: "\ud800"',
        "start: /(?=a)/",
        'start: %json {"const": 9007199254740993}',
    ],
)
def test_a_clients_grammar_that_is_not_taken(made: dict[str, Grammars], lark: str) -> None:
    with pytest.raises(RejectedRequest):
        made["plain"].compile(checked_lark(lark, "grammar"), False, "grammar").result()


def test_a_clients_grammar_that_is(made: dict[str, Grammars]) -> None:
    g = made["plain"]
    other = g.compile("start: A\nA: /[ab]{7}/ & ~/.*a.*/", False, "f").result()
    assert walk(g, other, 1) == "b" * 7
    text = 'start: (word "&&")~2 X // & and ~ in a comment\nword: "a"|"b"\nX: /[~&]/\n'
    assert len(walk(g, g.compile(checked_lark(text, "f"), False, "f").result(), 1)) == 7


def test_a_draft_that_breaks_the_grammar_costs_no_more_than_itself(
    made: dict[str, Grammars],
) -> None:
    """llguidance's copies share a lexer: what a draft breaks is mended for all of them."""
    g, lark = made["plain"], 'start: "x" | A\nA: "a"{1000000000}'
    one, other = (g.compile(lark, False, "f").result()() for _ in range(2))
    first = one.masks([])
    assert first == one.masks(encode(g.tokenizer, "aaaa", special=False))[:1]
    for matcher in (one, other, g.compile(lark, False, "f").result()()):
        assert matcher.masks([]) == first
        matcher.take(encode(g.tokenizer, "x", special=False))
        assert set(ids(matcher.masks([])[0])) == set(g.tokenizer.eos_token_ids)


def test_masks_do_not_depend_on_how_tokens_came(made: dict[str, Grammars]) -> None:
    g = made["agent"]
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "the": {"const": "hello world"}},
        "required": ["the"],
    }
    make = json_of(g, schema, True)
    text = 'so {"a</think>\n\n{"name": "the hello", "the": "hello world"}'
    tokens = encode(g.tokenizer, text, special=False)
    for at in range(len(tokens) + 1):
        one, other = make(), make()
        one.take(tokens[:at])
        with mock.patch.object(grammar, "SLOW_S", 60):  # a busy machine would cut the draft
            rows = one.masks(tokens[at:])
            assert len(rows) == len(tokens) - at + 1 and rows == one.masks(tokens[at:])
        for token, row in zip([*tokens[at:], None], rows, strict=True):
            other_row = other.masks([]) if at == 0 else None
            assert other_row is None or other_row == [row]
            assert len(row) == -(-VOCAB // 8) and max(ids(row)) < len(g.tokenizer)
            if at == 0 and token is not None:
                other.take([token])


kinds = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"type": "integer"},
        {"type": "number", "minimum": -1e6, "maximum": 1e6},  # 1e999 is JSON, but not a float
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": 3, "maximum": 40},
        {"$ref": "#/$defs/color"},
        {"type": "array", "items": {"$ref": "#/$defs/color"}, "maxItems": 2},
        {"type": "string", "enum": ["a", "null", "b c"]},
        {"enum": [3, "x"]},
        {
            "type": "object",
            "properties": {"k": {"type": "integer"}},
            "required": ["k"],
            "additionalProperties": False,
        },
    ]
)


@pytest.mark.slow
@settings(max_examples=80)
@given(
    st.dictionaries(st.sampled_from(["p", "q-1", "r.s", "t"]), kinds, max_size=4),
    st.data(),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_calls_are_read_by_their_parsers(
    made: dict[str, Grammars], properties: Any, data: Any, single: bool, seed: int
) -> None:
    required = [p for p in properties if data.draw(st.booleans())]
    parameters = {"type": "object", "properties": properties, "required": required, "$defs": DEFS}
    tools = [
        {"type": "function", "function": {"name": n, "parameters": parameters}}
        for n in ("f", "f_2")
    ]
    for name in ("agent", "coder", "mistral", "mistral_list"):
        g = made[name]
        make = g.compile(g.rules([g.calls(tools, None, single, "t").rule()]), False, "t").result()
        try:
            text = walk(g, make, seed)
        except TimeoutError:
            continue
        reader = OutputParser(g.tokenizer, tools, False, constrained=True)
        assert all(part.call for part in reader.feed(text) + reader.finish())
        calls = [(call.name, call.arguments) for call in reader.calls]
        assert calls
        assert len(calls) == 1 or not single
        for called, said in calls:
            arguments = json.loads(said)
            assert called in ("f", "f_2") and set(required) <= set(arguments) <= set(properties)
            jsonschema.validate(arguments, parameters)


@pytest.mark.parametrize("kind", ["spm", "words"])
def test_other_tokenizers(made: dict[str, Grammars], kind: str) -> None:
    g = made[kind]
    if kind == "words":
        with pytest.raises(RejectedRequest, match="this model's tokenizer"):
            json_of(g, {"const": 5})
    else:
        assert "hello" in walk(g, json_of(g, {"const": "hello"}), 1)


def says(g: Grammars, make: Any, said: str) -> bool:
    """Whether an answer can be this text."""
    matcher = make()
    for token in encode(g.tokenizer, said, special=False):
        if token not in ids(matcher.masks([])[0]):
            return False
        matcher.take([token])
    return bool({*g.tokenizer.eos_token_ids} & {*ids(matcher.masks([])[0])})


NULLABLE: list[tuple[Any, list[Any], list[Any]]] = [  # a schema, what it allows beside null, and not
    ({"type": "string"}, ["x"], [5]),
    ({"type": "integer", "minimum": 3}, [4], [2, "x"]),
    ({"type": "boolean"}, [True], ["x"]),
    ({"type": ["string", "integer"]}, ["x", 5], [True]),
    ({"type": ["string", "null"]}, ["x"], [5]),
    ({"type": "string", "enum": ["a", "b"]}, ["b"], ["c"]),
    ({"enum": ["a", None]}, ["a"], ["c"]),
    ({"type": "array", "items": {"type": "integer"}}, [[5]], [["x"], [None]]),
    ({"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}, [{"k": "x"}], []),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["x", 5], [True]),
    ({"$ref": "#/$defs/color"}, ["red"], ["x", 5]),
    ({"allOf": [{"type": "string"}]}, ["x"], [5]),
    ({"properties": {"k": {"type": "string"}}, "additionalProperties": False}, [{"k": "x"}], [{"z": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "other", "wrong"), NULLABLE)
def test_nullable_admits_null(made: Made, schema: Any, other: list[Any], wrong: list[Any]) -> None:
    """OpenAPI's word, which Gemini's SDK writes too."""
    inner = {"a": {**schema, "nullable": True}, "nullable": {"type": "string"}}
    whole = {"type": "object", "properties": inner, "required": ["a"], "$defs": DEFS}
    make = json_of(made["plain"], {**whole, "additionalProperties": False})
    for value, allowed in ((None, True), *((v, True) for v in other), *((v, False) for v in wrong)):
        assert says(made["plain"], make, json.dumps({"a": value})) == allowed, value
    assert says(made["plain"], make, '{"a": null, "nullable": "x"}'), "a name is no keyword"
    off = {"a": {**schema, "nullable": False}}
    make = json_of(made["plain"], {**whole, "properties": off, "additionalProperties": False})
    without = jsonschema.Draft202012Validator({**schema, "$defs": DEFS}).is_valid(None)
    assert says(made["plain"], make, '{"a": null}') == without


@pytest.mark.parametrize(("schema", "other", "wrong"), NULLABLE)
@pytest.mark.parametrize("strict", [False, True])
def test_nullable_parameters(
    made: Made, schema: Any, other: list[Any], wrong: list[Any], strict: bool
) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {**schema, "nullable": True}},
        "required": ["a"],
        "nullable": True,  # the arguments are an object all the same
        "$defs": DEFS,
        "additionalProperties": False,
    }
    tool = {"name": "f", "parameters": parameters, "strict": strict}
    some = [{"type": "function", "function": tool}]
    for name in ("agent", "coder"):
        g, seen = made[name], set()
        calls = g.calls(some, None, True, "tool_choice")
        compiled = g.compile(g.rules([calls.rule()]), False, "tool_choice", calls).result()
        assert compiled.left_out == ()
        for seed in range(60):
            if "null" in seen and len(seen) > 1:
                break
            reader = OutputParser(g.tokenizer, some, False, constrained=True)
            reader.feed(walk(g, compiled, seed, 12))
            reader.finish()
            value = json.loads(reader.calls[0].arguments)["a"]
            seen.add(json.dumps(value))
            jsonschema.validate(value, {"anyOf": [schema, {"type": "null"}], "$defs": DEFS})
        assert "null" in seen and len(seen) > 1


@pytest.mark.parametrize("schema", [{"nullable": "yes", "type": "string"}, {"nullable": 1}])
def test_nullable_of_another_type_is_named(made: Made, schema: Any) -> None:
    with pytest.raises(RejectedRequest, match="nullable"):
        json_of(made["plain"], schema)


def test_what_means_nothing_is_refused_with_its_value(made: Made) -> None:
    """Also what llguidance skips, as a bound of draft 4."""
    for word, value in (
        ("exclusiveMinimum", True),
        ("maxLength", -1),
        ("maxLength", 10**30),
        ("pattern", r"\bfoo"),
        ("required", "a"),
    ):
        with pytest.raises(RejectedRequest) as caught:
            json_of(made["plain"], {"type": "object", "properties": {"a": {word: value}}})
        assert str(caught.value).startswith(f"f has {word} = {json.dumps(value)}, which cannot be")
    for schema in ({"maxLength": (1 << 31) - 1}, {"pattern": r"^(?<year>\d{4})\u{2d}$"}):
        json_of(made["plain"], {"type": "string", **schema})


SLASHED = [r"/^x$/i", r"/^x$/", "/^[a-z]+/u", r"/[a-z]+$/i", "/^a\nb$/gm"]


@pytest.mark.parametrize("pattern", SLASHED)
@pytest.mark.parametrize("named", [False, True])
def test_a_pattern_between_slashes(made: Made, pattern: str, named: bool) -> None:
    """As JavaScript writes it: it means nothing in a schema, where flags cannot be given."""
    word = "patternProperties" if named else "pattern"
    schema = {word: {pattern: {}}} if named else {"type": "string", word: pattern}
    whole: Any = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(RejectedRequest, match=f"f has {word} = .*cannot be enforced"):
        json_of(made["plain"], whole)
    for strict in (True, False):
        tool = {"name": "f", "parameters": whole, "strict": strict}
        some = [{"type": "function", "function": tool}]
        g = made["agent"]
        if strict:
            with pytest.raises(RejectedRequest, match=rf"tools\[f\].* has {word} = "):
                calls = g.calls(some, None, True, "tool_choice")
                g.compile(g.rules([calls.rule()]), False, "tool_choice", calls).result()
            continue
        calls = g.calls(some, None, True, "tool_choice")
        compiled = g.compile(g.rules([calls.rule()]), False, "tool_choice", calls).result()
        assert compiled.left_out == (f"tools[f].{word}",)


@pytest.mark.parametrize("pattern", ["^/api/v[0-9]/$", "/x/i", "/users/id", r"/a\$/i", "a/$"])
def test_slashes_that_belong_to_a_pattern(made: Made, pattern: str) -> None:
    json_of(made["plain"], {"type": "string", "pattern": pattern})

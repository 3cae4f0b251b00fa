"""Grammars: what is drawn under the masks keeps to them, and what cannot be enforced is refused by
name."""

import json
import random
import threading
import time
from pathlib import Path
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
from mlxspec.text.structured.grammar import MAX_BYTES, MAX_COMPILED, MAX_DIGITS, Grammars
from mlxspec.text.structured.json_schema import json_rule
from tests.support.examples import examples
from tests.support.parameter_rows import only
from tests.support.schemas import schemas
from tests.tiny_tokenizer import AGENT, CALLS, CODER, TEMPLATE, THINK, save_tokenizer

VOCAB = 330  # of the logits: wider than the tokenizer, as a model's is
MOST = 4000


def made(path: Path, template: str, extra: tuple[str, ...]) -> Grammars:
    return Grammars(load_tokenizer(save_tokenizer(path, template=template, extra=extra)), VOCAB)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return made(tmp_path_factory.mktemp("a"), AGENT, THINK + CALLS)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return made(tmp_path_factory.mktemp("c"), CODER, THINK + CALLS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """No thinking, no markers among its tokens."""
    return made(tmp_path_factory.mktemp("p"), TEMPLATE, ())


def ids(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def walk(g: Grammars, matcher: Any, rng: random.Random, most: int = MOST) -> list[int]:
    """Tokens drawn evenly from those allowed; where the answer may end it does so half of the time,
    and `most` tokens on it prefers what leads out: quotes and brackets."""
    out: list[int] = []
    ends = g.tokenizer.eos_token_ids
    ways_out = {encode(g.tokenizer, char, special=False)[0] for char in '"]}'}
    while not out or out[-1] not in ends:
        [mask] = matcher.masks([])
        allowed = ids(mask)
        assert allowed and max(allowed) < len(g.tokenizer), "an id that means nothing"
        stop = ends & set(allowed)
        better = ways_out & set(allowed) if len(out) > most else set()
        token = rng.choice(sorted(stop if stop and rng.random() < 0.5 else better or allowed))
        matcher.take([token])
        out.append(token)
        assert len(out) < 3 * MOST, "it does not end"
    return out


def text(g: Grammars, tokens: list[int]) -> str:
    return str(g.tokenizer.decode(tokens[:-1]))


def by(g: Grammars, schema: Any, thinking: bool | None = False) -> Any:
    return g.compile(g.rules([json_rule(schema, "f")]), thinking, "f").result()


# ---- JSON
# -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(schemas(), st.integers(0, 1 << 30))
def test_what_is_drawn_keeps_to_its_schema(plain: Grammars, schema: Any, seed: int) -> None:
    matcher = by(plain, schema)()
    jsonschema.validate(
        json.loads(text(plain, walk(plain, matcher, random.Random(seed), 60))), schema
    )


@settings(max_examples=60)
@given(schemas(), st.integers(0, 1 << 30), st.data())
def test_masks_of_a_draft_are_those_of_its_tokens(
    agent: Grammars, schema: Any, seed: int, data: Any
) -> None:
    """One after the other, and asking changes nothing; a draft that does not fit is cut where it
    stops to."""
    rng = random.Random(seed)
    said = walk(agent, by(agent, schema)(), rng, 40)
    at = data.draw(st.integers(0, len(said) - 1))
    draft = said[at : at + 9]
    if data.draw(st.booleans()):
        draft[data.draw(st.integers(0, len(draft) - 1))] = data.draw(st.integers(0, VOCAB - 1))
    one, other = by(agent, schema)(), by(agent, schema)()
    one.take(said[:at])
    other.take(said[:at])
    with mock.patch.object(
        grammar, "SLOW_S", 60
    ):  # on a busy machine a draft would be cut for its time
        masks, again = one.masks(draft), one.masks(draft)
    assert masks == again
    for i, mask in enumerate(masks):
        assert [mask] == other.masks([])
        if i < len(masks) - 1:
            assert draft[i] in ids(mask)
            other.take([draft[i]])
    if len(masks) <= len(draft):
        refused = draft[len(masks) - 1]
        assert refused not in ids(masks[-1]) or refused in agent.tokenizer.eos_token_ids


@settings(max_examples=40)
@given(schemas(), st.integers(0, 1 << 30))
def test_what_is_forced_is_allowed(agent: Grammars, schema: Any, seed: int) -> None:
    matcher, rng = by(agent, schema)(), random.Random(seed)
    no_clock = mock.patch.object(grammar, "SLOW_S", 60)  # a busy machine would cut the draft
    for _ in range(30):
        with no_clock:
            forced = matcher.forced(5)
            assert len(forced) <= 5 and len(matcher.masks(forced)) == len(forced) + 1
        allowed = ids(matcher.masks([])[0])
        token = rng.choice(forced[:1] or allowed)
        if token in agent.tokenizer.eos_token_ids:
            break
        matcher.take([token])


def test_the_names_of_an_object_are_forced(agent: Grammars) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert agent.tokenizer.decode(by(agent, schema)().forced(99)).startswith('{"city": ')


def test_a_number_ends(agent: Grammars) -> None:
    """A model may be lost in zeros; digits in a string, or where nothing else may come, are its
    own."""
    zeros = encode(agent.tokenizer, "0" * 90, special=False)
    for schema, head, most in (
        ({"type": "number"}, "0.", MAX_DIGITS),
        ({"type": "string"}, '"', 90),
        ({"type": "string", "pattern": "^[0-9]{50}$"}, '"', 50),
    ):
        matcher = by(agent, schema)()
        matcher.take(encode(agent.tokenizer, head, special=False))
        with mock.patch.object(grammar, "SLOW_S", 60):
            assert len(matcher.masks(zeros)) == most + 1
        matcher.take(zeros[:most])
        assert len(matcher.masks([])[0]) == -(-VOCAB // 8)


def test_any_object(agent: Grammars) -> None:
    matcher = by(agent, {"type": "object"})()
    assert isinstance(json.loads(text(agent, walk(agent, matcher, random.Random(3), 60))), dict)


def test_nothing_but_an_end_follows_the_end(agent: Grammars) -> None:
    matcher = by(agent, {"const": 5})()
    five = encode(agent.tokenizer, "5", special=False)
    assert len(matcher.masks([*five, *five])) == 2
    matcher.take(five)
    assert set(ids(matcher.masks([])[0])) == set(agent.tokenizer.eos_token_ids)
    assert (
        matcher.forced(9) == [] and len(matcher.masks([*agent.tokenizer.eos_token_ids, *five])) == 1
    )
    matcher.take([next(iter(agent.tokenizer.eos_token_ids))])


def test_a_token_that_does_not_fit_is_an_error(agent: Grammars) -> None:
    with pytest.raises(RuntimeError):
        by(agent, {"const": 5})().take(encode(agent.tokenizer, "6", special=False))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {}}, '"not"'),
        (False, "is not a JSON schema"),
        ({"if": {}, "then": {}}, '"if"'),
        ({"type": "strin"}, "strin"),
        ({"type": "string", "format": "nope"}, "nope"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "https://example.com/x.json"}, "example.com"),
        ({"type": "object", "patternProperties": 5}, "patternProperties"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "5"),
        ([], "is not a JSON schema"),
        ("x", "is not a JSON schema"),
        ({"enum": ["x" * MAX_BYTES]}, "larger than 512 KB"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    agent: Grammars, schema: Any, words: str
) -> None:
    with pytest.raises(RejectedRequest) as caught:
        by(agent, schema)
    assert words in str(caught.value) and caught.value.field == "f"
    assert "x-guidance" not in str(caught.value) and "\n" not in str(caught.value)


# ---- Lark
# -------------------------------------------------------------------------------------------------


def test_matchers_are_made_while_their_grammar_is_asked_for_again(agent: Grammars) -> None:
    """On the engine's thread, while the text thread warms the same grammar."""
    schema = {"enum": ["word" * n for n in range(1, 200)]}
    make, failed = by(agent, schema), []

    def warm() -> None:
        for _ in range(300):
            by(agent, schema)

    thread = threading.Thread(target=warm)
    thread.start()
    while thread.is_alive():
        try:
            make()
        except RuntimeError as error:
            failed.append(error)
    thread.join()
    assert failed == []


def test_a_grammar_of_the_clients_own(agent: Grammars) -> None:
    make = agent.compile('start: "yes" | "no" /!{1,3}/', False, "grammar").result()
    said = {text(agent, walk(agent, make(), random.Random(i))) for i in range(40)}
    assert {"yes", "no!"} < said <= {"yes", "no!", "no!!", "no!!!"}
    for wrong in ("start: nobody", "", "start: /(/", 'begin: "x"'):
        with pytest.raises(RejectedRequest, match="grammar cannot be honoured"):
            agent.compile(wrong, False, "grammar").result()


def test_a_grammar_that_takes_long_to_compile_is_compiled_once(
    agent: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling it again would hold up all answers. So no draft is tried under it, which may make
    that necessary, and a failure ends the answer."""
    monkeypatch.setattr(grammar, "RESTART_S", 0.0)
    matcher = by(agent, {"type": "object", "properties": {"long": {"const": 5}}})()
    a, brace = (encode(agent.tokenizer, char, special=False) for char in "a{")

    def fails(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(grammar, "LLMatcher", fails)
    assert matcher.forced(9) == [] and len(matcher.masks(brace)) == 1
    with pytest.raises(RuntimeError, match="send a smaller one"):
        matcher.take(a)
    other = by(agent, {"type": "object", "properties": {"long": {"const": 5}}})()
    other.take(brace)
    assert ids(other.masks([])[0])


@pytest.mark.slow
def test_a_grammar_that_branches_without_end_does_not_hold_up_others(agent: Grammars) -> None:
    matcher = agent.compile('start: s\ns: s s s | "a" | "b" |', False, "g").result()()
    a = encode(agent.tokenizer, "a", special=False)
    worst = 0.0
    assert matcher.forced(9) == []
    try:
        for _ in range(150):
            began = time.perf_counter()
            matcher.masks(a * 4)
            matcher.take(a)
            worst = max(worst, time.perf_counter() - began)
    except RuntimeError as error:
        assert "items" in str(error)
    assert worst < 2


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": []},
        {"properties": None},
        {"properties": {}, "required": 5},
        {"properties": {"x": {"enum": 5}}},
    ],
)
def test_parameters_that_are_no_schema(agent: Grammars, coder: Grammars, parameters: Any) -> None:
    some = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for g in (agent, coder):
        try:
            g.compile(
                g.rules([g.calls(some, None, True, "tool_choice").rule()]), False, "tool_choice"
            ).result()
        except RejectedRequest as error:
            assert error.field == "tool_choice"


def test_references_and_alternatives_in_calls(coder: Grammars) -> None:
    parameters = {
        "properties": {
            "n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
            "way": {"enum": ["x", "y"]},
            "any": {"type": ["integer", "null"]},
        },
        "required": ["n", "way", "any"],
        "$defs": {"n": {"type": "integer", "minimum": 3, "maximum": 5}},
    }
    some = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for seed in range(12):
        for _, arguments in called(coder, some, None, True, seed):
            jsonschema.validate(arguments, parameters)


def test_what_parameters_in_tags_do_not_obey_is_named(coder: Grammars) -> None:
    """And frees nothing else: neither the same call nor that of another tool."""
    unique = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    one = {"properties": {"a": unique, "n": {"enum": [7]}}, "required": ["a", "n"]}
    other = {
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}},
        "required": ["n"],
    }
    least = {**other, "if": {"required": ["n"]}, "then": {"required": ["m"]}}
    kinds: dict[str, Any] = {"one": one, "other": other, "least": least}
    some = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", **kind}}}
        for name, kind in kinds.items()
    ]
    calls = coder.calls(some, None, True, "tool_choice")
    lark = coder.rules([calls.rule()])
    grammar = coder.compile(lark, False, "tool_choice", calls).result()
    named = {"tools[one].uniqueItems", "tools[least].if", "tools[least].then"}
    assert set(grammar.left_out) == named
    del unique["uniqueItems"], least["if"]
    for seed in range(12):
        for name, arguments in called(coder, some, None, True, seed):
            jsonschema.validate(arguments, kinds[name])


def test_compiled_grammars_are_kept_and_bounded(agent: Grammars) -> None:
    for i in range(MAX_COMPILED + 5):
        agent.compile(f'start: "{i}"', False, "g").result()
    assert len(agent._compiled) == MAX_COMPILED


# ---- reasoning
# --------------------------------------------------------------------------------------------


def reasoned(g: Grammars, thought: str, answer: str) -> list[int]:
    return encode(g.tokenizer, f"{thought}</think>{answer}", special=False)


@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
@pytest.mark.parametrize("opened", [True, None])
def test_masks_begin_where_the_reasoning_ends(
    agent: Grammars, opened: bool | None, gap: str
) -> None:
    matcher = by(agent, {"const": 5}, opened)()
    ends = set(agent.tokenizer.eos_token_ids)
    if opened is None:
        first = ids(matcher.masks([])[0])
        assert len(first) > 1 and encode(agent.tokenizer, "<think>", special=False)[0] in first
        matcher.take(encode(agent.tokenizer, "<think>", special=False))
    assert set(range(len(agent.tokenizer))) - set(ids(matcher.masks([])[0])) == ends, (
        "all but the end"
    )
    said = reasoned(agent, "so 6", f"{gap}5")
    assert matcher.forced(9) == []
    assert len(matcher.masks([*said, *said])) == len(said) + 1
    assert len(matcher.masks(reasoned(agent, "so", "6"))) < len(reasoned(agent, "so", "6")) + 1
    for token in said:
        assert token in ids(matcher.masks([])[0])
        matcher.take([token])
    assert set(ids(matcher.masks([])[0])) == ends


def test_an_answer_may_do_without_reasoning(agent: Grammars) -> None:
    matcher = by(agent, {"const": 5}, None)()
    matcher.take(encode(agent.tokenizer, "5", special=False))
    assert set(ids(matcher.masks([])[0])) == set(agent.tokenizer.eos_token_ids)
    closed = by(agent, {"const": 5}, False)()
    assert len(ids(closed.masks([])[0])) == 1, "the prompt has closed the reasoning"


# ---- calls
# ------------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,12}", fullmatch=True)


PARAMETERS = [
    {"type": "string", "maxLength": 4},
    {"type": "string", "enum": ["x", 'y"']},
    {"type": "array", "items": {"enum": [1]}, "maxItems": 2},
    {"type": "integer"},
    {"type": "boolean"},
]


@st.composite
def tools(draw: Any) -> list[Any]:
    made = []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        properties = {
            key: draw(st.sampled_from(PARAMETERS))
            for key in draw(st.lists(names, max_size=3, unique=True))
        }
        required = [key for key in properties if draw(st.booleans())]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": name, "parameters": {**parameters, "additionalProperties": False}}
        made.append({"type": "function", "function": function})
    return made


def called(g: Grammars, some: Any, name: str | None, single: bool, seed: int) -> list[Any]:
    make = g.compile(
        g.rules([g.calls(some, name, single, "tool_choice").rule()]), False, "tool_choice"
    ).result()
    tokens = []
    for token in walk(g, make(), random.Random(seed), 60):
        tokens.append(token)
    reader = OutputParser(g.tokenizer, some, False, constrained=True)
    parts = reader.feed(text(g, tokens)) + reader.finish()
    assert parts and all(part.call for part in parts), "nothing but calls"
    return [(call.name, json.loads(call.arguments)) for call in reader.calls]


@settings(max_examples=examples(40))
@given(tools(), st.integers(0, 1 << 30), st.booleans())
def test_a_call_that_is_asked_for(
    agent: Grammars, plain: Grammars, some: Any, seed: int, single: bool
) -> None:
    for g in (agent, plain):  # markers of one token each, and of several
        made = called(g, some, None, single, seed)
        assert len(made) == 1 or not single
        for name, arguments in made:
            [schema] = [t["function"]["parameters"] for t in some if t["function"]["name"] == name]
            jsonschema.validate(arguments, schema)
        last = some[-1]["function"]["name"]
        assert [name for name, _ in called(g, some, last, True, seed)] == [last]


def test_calls_of_a_model_that_writes_xml(coder: Grammars) -> None:
    properties = {
        "n": {"type": "integer"}, "on": {"type": "boolean"}, "way": {"type": "string", "enum": ["x", "y z"]},
        "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    }  # fmt: skip
    parameters = {"type": "object", "properties": properties, "required": ["n", "way"]}
    some = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name in ("f", "g")
    ]
    seen = set()
    for seed in range(25):
        for name, arguments in called(coder, some, None, False, seed):
            jsonschema.validate(arguments, parameters)
            seen |= {name, *arguments}
    assert seen == {"f", "g", *properties}


def test_calls_that_cannot_be_asked_for(agent: Grammars) -> None:
    some = [{"type": "function", "function": {"name": "f"}}]
    for tools_, name in ((some, "g"), ([], None)):
        with pytest.raises(RejectedRequest, match="not in tools"):
            agent.calls(tools_, name, True, "tool_choice")
    bad = [
        {
            "type": "function",
            "function": {"name": "f", "strict": True, "parameters": {"not": {}}},
        }
    ]
    calls = agent.calls(bad, None, True, "tool_choice")
    why = r'^tools\[f\].parameters cannot be honoured: .*"not".*; leave that out, or strict$'
    with pytest.raises(RejectedRequest, match=why):
        agent.compile(agent.rules([calls.rule()]), False, "tool_choice", calls).result()


def test_only_the_tool_at_fault_is_freed(agent: Grammars) -> None:
    held = {"properties": {"n": {"enum": [7]}}, "required": ["n"]}
    wild: dict[str, Any] = {
        "reference": {"properties": {"a": {"$ref": "#/gone"}}},
        "regex": {"patternProperties": {"(": {}}},
        "type": {"properties": {"a": {"type": "strin"}}},
    }
    some = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", **kind}}}
        for name, kind in [("held", held), *wild.items()]
    ]
    calls = agent.calls(some, None, True, "tool_choice")
    lark = agent.rules([calls.rule()])
    made = agent.compile(lark, False, "tool_choice", calls).result()
    assert made.left_out == ("tools[reference].a", "tools[regex].parameters", "tools[type].a")
    begin = '<tool_call>\n{"name": "held", "arguments": {"n": '
    matcher = made()
    matcher.take(encode(agent.tokenizer, begin, special=False))
    [seven] = encode(agent.tokenizer, "7", special=False)
    assert ids(matcher.masks([])[0]) == [seven]


FAULTS: dict[str, Any] = {
    "word": {"type": "string", "pattern": r"\bfoo\b"},
    "end": {"type": "string", "pattern": r"a\Z"},
    "any": {"type": "any"},
    "date": {"type": "Date"},
    "null": None,
    "text": "string",
    "gone": {"$ref": "#/gone"},
    "inexact": {"enum": [1e300]},
    "nothing": {"type": "integer", "minimum": 5, "maximum": 1},
    "deep": {"type": "object", "properties": {"x": {"type": "any"}}},
}


PATTERNS = {"word", "end"}  # of which the type is held


@pytest.mark.parametrize("names", [*([name] for name in FAULTS), list(FAULTS)])
def test_only_the_property_at_fault_is_freed(
    agent: Grammars, coder: Grammars, names: list[str]
) -> None:
    properties = {"n": {"$ref": "#/$defs/n"}} | {name: FAULTS[name] for name in names}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "$defs": {"n": {"type": "Integer", "minimum": 7, "maximum": 7}},
    }
    some = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for g in (agent, coder):
        calls = g.calls(some, None, True, "tool_choice")
        lark = g.rules([calls.rule()])
        for _ in range(2):  # the second one is cached
            made = g.compile(lark, False, "tool_choice", calls).result()
            freed = [name for name in names if name not in PATTERNS]
            freed += ["pattern"] * bool(PATTERNS & {*names})
            assert made.left_out == tuple(f"tools[f].{name}" for name in freed)
        reader = OutputParser(g.tokenizer, some, False, constrained=True)
        reader.feed(text(g, walk(g, made(), random.Random(5), 60)))
        reader.finish()
        [call] = reader.calls
        arguments = json.loads(call.arguments)
        assert arguments["n"] == 7 and arguments.keys() == properties.keys()
        assert all(isinstance(arguments[name], str) for name in PATTERNS & {*names})


@pytest.mark.parametrize(
    "keyword, value",
    [
        ("minProperties", 4),
        ("required", "a"),
        ("minimum", "0"),
        ("maxLength", -1),
        ("maxLength", 10**30),
        ("multipleOf", 0),
        ("pattern", "["),
        ("enum", []),
        ("exclusiveMinimum", True),
    ],
)
def test_a_keyword_that_means_nothing_frees_no_type(
    agent: Grammars, keyword: str, value: Any
) -> None:
    """As servers of MCP and older drafts write them."""
    kind = {"maxLength": "string", "pattern": "string"}.get(keyword, "integer")
    a, schema = {"type": kind}, {"type": "object", "required": ["a", "b"]}
    (schema if keyword in ("minProperties", "required") else a)[keyword] = value
    schema["properties"] = {"a": a, "b": {"type": "boolean", "default": float("inf")}}
    some = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    calls = agent.calls(some, None, True, "tool_choice")
    made = agent.compile(agent.rules([calls.rule()]), False, "tool_choice", calls).result()
    assert made.left_out == (f"tools[f].{keyword}",)
    for seed in range(3):
        reader = OutputParser(agent.tokenizer, some, False, constrained=True)
        reader.feed(text(agent, walk(agent, made(), random.Random(seed), 60)))
        reader.finish()
        given = json.loads(reader.calls[0].arguments)
        assert isinstance(
            given.get("a", 0 if kind == "integer" else ""), int if kind == "integer" else str
        )
        assert isinstance(given.get("b", True), bool)


def test_a_client_cannot_name_what_is_left_out(agent: Grammars) -> None:
    """Its own texts are none of the server's words."""
    said = {"const": "mlxspec leaves out: uniqueItems", "description": "mlxspec leaves out: not"}
    format = {"type": "string", "format": 'x "pattern"'}
    schema = {"type": "object", "properties": {"a": said, "b": format}}
    some = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    calls = agent.calls(some, None, True, "tool_choice")
    made = agent.compile(agent.rules([calls.rule()]), False, "tool_choice", calls).result()
    assert made.left_out == ("tools[f].format",)


def test_each_schema_has_what_is_left_out_of_its_own(agent: Grammars, coder: Grammars) -> None:
    """Though the rules of these are the same, as of one the rest is deleted."""
    plain = {"type": "object", "properties": {"a": {"type": "array"}}}
    look = {"a": {"type": "array", "pattern": "^(?!x)"}}
    kinds: list[tuple[Any, tuple[str, ...]]] = [
        (plain, ()),
        ({**plain, "properties": look}, ("tools[f].pattern",)),
        ({**plain, "unevaluatedProperties": False}, ("tools[f].unevaluatedProperties",)),
    ]
    for g in (agent, coder):
        for schema, named in [*kinds, *reversed(kinds)]:
            some = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            calls = g.calls(some, None, True, "tool_choice")
            made = g.compile(g.rules([calls.rule()]), False, "tool_choice", calls).result()
            assert made.left_out == named


def test_warnings_of_a_slow_grammar_are_asked_for(agent: Grammars) -> None:
    names = {f"^a{i}.*x{i}$": {"type": "null"} for i in range(160)}  # takes a second
    schema = {"type": "object", "patternProperties": names, "properties": {"q": {"not": {}}}}
    some = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    calls = agent.calls(some, None, True, "tool_choice")
    made = agent.compile(agent.rules([calls.rule()]), False, "tool_choice", calls).result()
    assert made.left_out == ("tools[f].not",)


def test_json_or_a_call(agent: Grammars) -> None:
    some = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"properties": {}, "additionalProperties": False},
            },
        }
    ]
    rules = agent.rules([json_rule({"const": 5}, "f"), agent.calls(some, None, True, "f").rule()])
    said = {
        text(agent, walk(agent, agent.compile(rules, False, "f").result()(), random.Random(i)))
        for i in range(20)
    }
    assert said == {"5", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'}


HUNGRY = 'start: e\ne: e e | e e e | e e e e | "x" | f f\nf: "(" e ")"'


@pytest.mark.slow
def test_what_fails_in_a_draft_is_only_a_draft(agent: Grammars) -> None:
    """The answer goes on as long as it can by itself, and ends before it holds up others for
    long."""
    matcher = agent.compile(HUNGRY, False, "g").result()()
    x = encode(agent.tokenizer, "x", special=False)
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"items|too many ways"):
        for _ in range(400):
            matcher.forced(5)
            matcher.masks(x * 20)
            matcher.take(x)
            assert time.perf_counter() - began < 30


OTHERS = {  # mlx-lm knows a format by what is in the template
    "minimax_m2": "<minimax:tool_call>",
    "gemma4": "<|tool_call><tool_call|>",
    "function_gemma": "<start_function_call>",
    "longcat": "<longcat_tool_call>",
    "glm47": "<arg_key>",
    "pythonic": "<|tool_call_start|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minicpm5": '<function name="<param name="',
}


@pytest.mark.parametrize("kind", only(OTHERS, 0, 2, 5, 7))
def test_formats_without_rules_have_their_calls_in_json(tmp_path: Path, kind: str) -> None:
    g = made(tmp_path, "{# " + OTHERS[kind] + " #}" + TEMPLATE, ())
    assert g.tokenizer.tool_parser.__module__.endswith(kind)
    parameters = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "maxLength": 4},
            "n": {"enum": [[1], {"x": "y"}]},
        },
        "required": ["path", "n"],
        "additionalProperties": False,
    }
    some = [
        {"type": "function", "function": {"name": n, "parameters": parameters}} for n in ("f", "g")
    ]
    for seed in range(6):
        for name, arguments in called(g, some, "g" if seed % 2 else None, seed < 3, seed):
            assert name == "g" or not seed % 2
            jsonschema.validate(arguments, parameters)

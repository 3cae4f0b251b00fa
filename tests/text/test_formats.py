"""A format that is learned from a template reads what the template writes, in any pieces, and what
is forced in it is read as calls that conform."""

import itertools
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.text.chat import conversation_of, load_tokenizer, render
from mlxspec.text.formats import format_of, template_calls
from mlxspec.text.history import History
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.proof import MARKUP, call_support, failed_proofs
from mlxspec.text.structured.grammar import Grammars
from tests.support.examples import examples
from tests.support.parameter_rows import only
from tests.text.call_formats import MADE_UP, TEMPLATES
from tests.text.test_grammar import ids as tokens_of
from tests.tiny_tokenizer import save_tokenizer

STRING = {"type": "string"}
FIELDS = {
    "path": STRING, "content": STRING, "n": {"type": "integer"}, "part": {"type": "number"},
    "on": {"type": "boolean"}, "items": {"type": "array", "items": STRING}, "opts": {"type": "object"},
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": FIELDS},
        },
    }
    for name in ("write_file", "mcp__x-y__do")
]
# Without what some formats write calls with, which no format can tell from itself.
TEXT = st.text(st.sampled_from("ab \n\t\"'\\{}[](),:=é漢😀<>/&-_17"), max_size=12)
VALUES = {
    "path": TEXT, "content": TEXT, "n": st.integers(-99, 99), "part": st.sampled_from([0.5, -7.25]),
    "on": st.booleans(), "items": st.lists(TEXT, max_size=3), "opts": st.dictionaries(st.just("k"), TEXT),
}  # fmt: skip
CALL = st.tuples(
    st.sampled_from(["write_file", "mcp__x-y__do"]), st.fixed_dictionaries({}, optional=VALUES)
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        name: load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("f"), template=template))
        for name, template in TEMPLATES.items()
    }


def called(tokenizer: Any, pieces: Any, tools: Any = TOOLS, **how: bool) -> list[Any]:
    reader = OutputParser(tokenizer, tools, False, **how)
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    return [(call.name, json.loads(call.arguments)) for call in reader.calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_format_is_learned_and_proven(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    assert format_of(tokenizer).learned
    assert set(failed_proofs(tokenizer)) <= {MARKUP}, "a call that is not read back"
    assert call_support(tokenizer).startswith("own format")


@settings(max_examples=examples(150), deadline=None)
@given(name=st.sampled_from(sorted(TEMPLATES)), call=CALL, data=st.data())
def test_any_call_in_any_format_is_read_back(
    tokenizers: dict[str, Any], name: str, call: Any, data: Any
) -> None:
    """To the letter, however the text is cut into pieces."""
    tokenizer = tokenizers[name]
    said = template_calls(tokenizer, [call], TOOLS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    pieces = [said[a:b] for a, b in itertools.pairwise([0, *cuts, len(said)])]
    whole = called(tokenizer, [said])
    assert called(tokenizer, pieces) == called(tokenizer, said) == whole
    markup = [*format_of(tokenizer).layouts[0].values]
    ambiguous = any(way.closes.strip() in str(call[1]) for way in markup if way.closes.strip())
    assert whole == [call] or (ambiguous and format_of(tokenizer).layouts[0].style != "json")


@settings(max_examples=examples(100), deadline=None)
@given(name=st.sampled_from(sorted(TEMPLATES)), data=st.data())
def test_prose_about_a_format_in_any_pieces(
    tokenizers: dict[str, Any], name: str, data: Any
) -> None:
    """Text with pieces of markup before a call reads the same however it is cut, and nothing of it
    is lost."""
    tokenizer = tokenizers[name]
    layout = format_of(tokenizer).layouts[0]
    marks = [layout.start_marker, layout.end_marker, layout.key]
    marks += ["The module ", "write_file", "{", "[", "\n", "a"]
    prose = "".join(
        data.draw(st.lists(st.sampled_from([each for each in marks if each]), max_size=6))
    )
    said = prose + template_calls(tokenizer, [("write_file", {"path": "a"})], TOOLS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    seen = []
    for pieces in ([said], said, [said[a:b] for a, b in itertools.pairwise([0, *cuts, len(said)])]):
        reader = OutputParser(tokenizer, TOOLS, False)
        parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
        text = "".join(part.text for part in parts if part.kind == "content")
        seen.append((text, [(each.name, each.arguments) for each in reader.calls]))
    assert seen[0] == seen[1] == seen[2]


def test_a_large_vocabulary_costs_nothing_a_message(tmp_path: Path) -> None:
    """What depends on the vocabulary is found once for a tokenizer."""
    words = tuple(f"<|w{i}|>" for i in range(5000))
    tokenizer = load_tokenizer(
        save_tokenizer(tmp_path, template=TEMPLATES["json_tools"], extra=words)
    )
    render(
        tokenizer,
        conversation_of([{"role": "user", "content": "a"}], None, {}, History()),
        History(),
    )
    began = time.process_time()
    for _ in range(50):
        OutputParser(tokenizer, TOOLS, False)
    many = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 50
    render(tokenizer, conversation_of(many, None, {}, History()), History())
    assert time.process_time() - began < 2


def test_a_format_is_learned_without_a_copy_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=TEMPLATES["json_tools"]))
    monkeypatch.setattr(type(tokenizer._tokenizer), "get_vocab", None)
    assert call_support(tokenizer).startswith("own format")


def test_what_stands_around_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    """As Command R's; the text itself is not held up."""
    template = TEMPLATES["json_tools"].replace(
        "{{ m.content or '' }}",
        "{% if m.role == 'assistant' and m.content %}<|SAYS|>{{ m.content }}<|/SAYS|>"
        "{% else %}{{ m.content }}{% endif %}",
    )
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=template))
    for tools in (TOOLS, ()):
        reader = OutputParser(tokenizer, tools, False)
        parts = [part for piece in "<|SAYS|>Hello.<|/SAYS|>" for part in reader.feed(piece)]
        assert "".join(part.text for part in parts + reader.finish()) == "Hello."


@pytest.mark.parametrize("name", TEMPLATES)
def test_two_calls_are_two(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    calls = [("write_file", {"path": "a", "content": "x\n"}), ("mcp__x-y__do", {})]
    assert called(tokenizer, [template_calls(tokenizer, calls, TOOLS)]) == calls


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": STRING,
        "way": {"enum": ["x", "y z"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 20},
        "on": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
    },
    "required": ["path", "n"],
    "additionalProperties": False,
}
# What is forced in these would have no end, or the name behind the arguments.
IN_JSON = ("arguments first", "parameters without ends", "a name and JSON in a string")
IN_JSON += ("values in JSON in tags", "values in HTML")  # whose escapes free text would not have
FORCED = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g-2")
]


def said_under(tokenizer: Any, matcher: Any, rng: Random) -> str | None:
    """An answer of tokens drawn from those allowed, which now and then closes a value; None where
    it does not end."""
    closers = [way.closes for way in format_of(tokenizer).layouts[0].values] + ['"', "]", "}"]
    out: list[int] = []
    for _ in range(300):
        close = tokenizer.encode(rng.choice(closers), add_special_tokens=False)
        [mask, *_] = masks = matcher.masks(close)
        allowed = tokens_of(mask)
        ends = tokenizer.eos_token_ids & set(allowed)
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            return str(tokenizer.decode(out))
        whole = len(masks) == len(close) + 1 and rng.random() < 0.7
        taken = close if whole else [rng.choice(sorted(set(allowed) - ends))]
        matcher.take(taken)
        out += taken
    return None


@pytest.mark.parametrize("name", only(TEMPLATES, *range(0, len(TEMPLATES), 12)))
def test_forced_calls_are_read_and_conform(tokenizers: dict[str, Any], name: str) -> None:
    """In the model's own format, whatever the model would say."""
    tokenizer = tokenizers[name]
    grammars = Grammars(tokenizer, len(tokenizer))
    lark = grammars.rules([grammars.calls(FORCED, None, False, "tool_choice").rule()])
    make = grammars.compile(lark, False, "tool_choice").result()
    seen = set()
    for seed in range(20):
        said = said_under(tokenizer, make(), Random(seed))
        if said is None:
            continue
        assert said.startswith(format_of(tokenizer).layouts[0].start_marker) or name in IN_JSON
        calls = called(tokenizer, [said], FORCED, constrained=True)
        assert calls, said
        for tool, arguments in calls:
            assert tool in ("f", "g-2")
            jsonschema.validate(arguments, SCHEMA)
            seen |= {tool, *arguments}
    assert seen >= {"path", "n", "f", "g-2"}


@pytest.mark.parametrize("name", MADE_UP)
def test_a_tool_that_was_not_offered_is_text(tokenizers: dict[str, Any], name: str) -> None:
    said = template_calls(tokenizers[name], [("rm", {"path": "/"})], TOOLS)
    reader = OutputParser(tokenizers[name], TOOLS, False)
    parts = reader.feed(said) + reader.finish()
    assert not reader.calls and "rm" in "".join(part.text for part in parts)


# ---- histories
# -------------------------------------------------------------------------------------------


def call(number: int, content: str = "", also: bool = False) -> dict[str, Any]:
    made = [
        {"id": f"call_{number}_{i}", "function": {"name": "f", "arguments": {"a": f"{number}{i}"}}}
        for i in range(1 + also)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(number: int, i: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}_{i}", "content": f"result {number}{i}"}


def turns() -> list[list[dict[str, Any]]]:
    """What an agent adds to a conversation from one request to the next: results with reminders
    behind them, several calls, text beside calls, system text in the middle."""
    more = []
    for i in range(20):
        reminder = [{"role": "user", "content": f"reminder {i}"}]
        system = [{"role": "system", "content": f"rule {i}"}]
        kinds = [
            [call(i), result(i), *reminder],
            [call(i, "I look.", also=True), result(i, 0), result(i, 1)],
            [{"role": "assistant", "content": f"done {i}"}, *reminder, *system],
            [call(i, "Again."), result(i), *reminder, *reminder],
        ]
        more.append(kinds[i % len(kinds)])
    return more


STRICT = (  # refuses what Mistral's and Llama's refuse
    "{%- set ns = namespace(turn=0) %}{%- for m in messages %}"
    "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{%- if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{%- set ns.turn = ns.turn + 1 %}{% endif %}"
    "{%- if m.tool_calls and (m.tool_calls | length > 1 or m.content) %}{{ raise_exception('one call alone') }}{% endif %}"
    "{%- if m.tool_calls and m.tool_calls[0].id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{# tools #}{% if add_generation_prompt %}[assistant]{% endif %}"
)  # fmt: skip
FORGETFUL = (  # leaves out calls, and everything beside them
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{# tools tool_calls #}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


ORDERS = {
    "two system texts first": [("system", "s1"), ("system", "s2"), ("user", "q")],
    "a call without a result": [("user", "q"), call(1), ("user", "stop")],
    "a result without a call": [("user", "q"), result(1), ("user", "go on")],
    "system text between call and result": [("user", "q"), call(1), ("system", "s"), result(1)],
    "two calls, then their results": [("user", "q"), call(1), call(2), result(1), result(2)],
    "results in another order": [("user", "q"), call(1, also=True), result(1, 1), result(1, 0)],
    "an answer first": [("assistant", "a"), ("user", "q")],
    "system text alone": [("system", "s")],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("template", [STRICT, FORGETFUL, TEMPLATES["json_tools"]])
def test_no_order_of_turns_is_refused(template: str, order: str, tmp_path: Path) -> None:
    """And no text is lost."""
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=template))
    messages = [
        each if isinstance(each, dict) else {"role": each[0], "content": each[1]}
        for each in ORDERS[order]
    ]
    said = render(tokenizer, conversation_of(messages, None, {}, History()), History()).text
    for turn in messages:
        assert turn["content"] in said
        for each in turn.get("tool_calls", ()):
            assert each["function"]["arguments"]["a"] in said


@pytest.mark.parametrize("template", [STRICT, FORGETFUL, TEMPLATES["json_tools"]])
def test_a_session_keeps_its_prefix(template: str, tmp_path: Path) -> None:
    """20 turns of shapes that templates refuse: none is refused, no text is lost, and at least 95 %
    of each prompt was in the one before."""
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=template))
    messages: list[Any] = [
        {"role": "system", "content": "Be brief. " * 20},
        {"role": "user", "content": "Fix it."},
    ]
    before, kept, all_ = "", 0, 0
    for more in turns():
        messages += more
        rendered = render(tokenizer, conversation_of(messages, None, {}, History()), History())
        now = rendered.text.replace("\ufdd0", "")
        for turn in messages:
            assert turn["content"] in now
            for each in turn.get("tool_calls", ()):
                assert each["function"]["arguments"]["a"] in now
        same = len(before) if now.startswith(before) else 0
        while same < min(len(before), len(now)) and now[same] == before[same]:
            same += 1
        kept, all_, before = kept + same, all_ + len(before), now.removesuffix("[assistant]")
    assert kept >= 0.95 * all_

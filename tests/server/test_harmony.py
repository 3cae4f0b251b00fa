"""gpt-oss' answers, in OpenAI's Harmony: channels told apart, calls streamed, formats enforced, and
rendered again as its template wants them."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.text.chat import encode, load_tokenizer, render_chat
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.structured.grammar import Grammars
from mlxspec.text.structured.json_schema import json_rule
from tests.server.test_chat_request import allowed
from tests.support.scripted import INFO, Server, server
from tests.text.test_grammar import VOCAB, text, walk
from tests.text.test_output_parser import CALL_READ, TOOLS, read, told
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.anyio

MARKERS = tuple(f"<|{name}|>" for name in "start end message channel constrain return call".split())
# As gpt-oss': a call's turn has its analysis or its content, a last answer its analysis, and an
# earlier one neither.
TEMPLATE = """{%- set last = namespace(name='') %}
{%- for tool in tools or [] %}{{ '<|start|>developer<|message|>' + tool | tojson + '<|end|>' }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{% set f = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- set said = m.content or m.thinking %}{% set last.name = f.name %}
{%- if said %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + said + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- set ends = loop.last and not add_generation_prompt %}
{%- if ends and m.thinking is defined %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if ends else '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
JSON = '{"path": "a.py", "lines": 3}'
THOUGHT = "<|channel|>analysis<|message|>So {be} it.<|end|><|start|>assistant"
SAID = ("reasoning", "So {be} it.")
CALL = f"<|channel|>commentary to=functions.read <|constrain|>json<|message|>{JSON}"
ANSWERS = {
    "final": (f"{THOUGHT}<|channel|>final<|message|>Yes.\n", [SAID, ("content", "Yes.\n")]),
    "final alone": ("<|channel|>final<|message|>Yes.", [("content", "Yes.")]),
    "constrained": ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', [("content", '{"a": 1}')]),
    "a call": (f"{THOUGHT}{CALL}", [SAID, CALL_READ]),
    "the function first": (f"{THOUGHT} to=functions.read<|channel|>commentary json<|message|>{JSON}", [SAID, CALL_READ]),
    "in analysis": (f"<|channel|>analysis to=functions.read code<|message|>{JSON}", [CALL_READ]),
    "a preamble": (
        f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
        [SAID, ("content", "I look."), CALL_READ],
    ),
    "two calls": (f"{CALL}<|end|><|start|>assistant{CALL}", [CALL_READ, CALL_READ]),
    "an end in a string": (
        CALL.replace("a.py", "<|end|>"),
        [("call", "read", {"path": "<|end|>", "lines": 3})],
    ),
    "broken off": (CALL[:-12], [("cut", "read", '{"path": "a.py",')]),
    "nothing yet": ("<|channel|>analysis", []),
    "no namespace": (CALL.replace("functions.", ""), [CALL_READ]),
    "another recipient": (
        f'{THOUGHT}<|channel|>commentary to=browser.search code<|message|>{{"q": 1}}',
        [SAID, ("content", ' to=browser.search code<|message|>{"q": 1}')],
    ),
    "other words in the header": ("<|channel|>final json<|message|>Yes.", [("content", "Yes.")]),
    "more words in the header": (
        "<|channel|>analysis code<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>No.",
        [("reasoning", "Hm."), ("content", "No.")],
    ),
    "an end that is spoken of": (
        "<|channel|>final<|message|>It is <|end|> there, and `<|end|><|start|>user` here.",
        [("content", "It is <|end|> there, and `<|end|><|start|>user` here.")],
    ),
    "tags in the analysis": (
        "<|channel|>analysis<|message|>Use <tool_call>?<|end|><|start|>assistant<|channel|>final<|message|>No.",
        [("reasoning", "Use <tool_call>?"), ("content", "No.")],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("oss")
    save_tokenizer(path, template=TEMPLATE, extra=MARKERS)
    return load_tokenizer(path), path


@pytest.fixture
def make(oss: tuple[Any, Path]) -> Callable[..., Server]:
    return lambda *says, **kw: server(*oss, says=says, info=replace(INFO, context=4096), **kw)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_split_by_its_channels(oss: tuple[Any, Path], name: str) -> None:
    tokenizer, (said, want) = oss[0], ANSWERS[name]
    assert told(tokenizer, said) == want
    whole = read(tokenizer, [said])
    for at in range(len(said) + 1):
        assert read(tokenizer, [said[:at], said[at:]]) == whole
    assert read(tokenizer, said) == whole


def test_an_answer_that_continues_the_prompt_has_no_channel(oss: tuple[Any, Path]) -> None:
    reader = OutputParser(oss[0], (), False, continued=True)
    parts = [*reader.feed("and so on"), *reader.finish()]
    assert [(part.kind, part.text) for part in parts] == [("content", "and so on")]


async def test_a_call_reaches_the_client_while_it_is_written(make: Callable[..., Server]) -> None:
    for stream in (False, True):
        answer = await make(f"{THOUGHT}{CALL}").chat(tools=TOOLS, stream=stream)
        if not stream:
            [choice] = answer.json["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["reasoning_content"] == SAID[1]
            [call] = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "read", "arguments": JSON}
            continue
        deltas = [c["delta"] for event in answer.events[:-1] for c in event["choices"]]
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = [piece["function"].get("arguments", "") for piece in pieces]
        assert "".join(arguments) == JSON and len(arguments) > 5


def rendered(tokenizer: Any, messages: list[Any], more: bool = True) -> str:
    return str(tokenizer.decode(render_chat(tokenizer, messages, more)))


def test_the_reasoning_before_a_call_is_rendered_again(oss: tuple[Any, Path]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": JSON}}
    question = {"role": "user", "content": "hi"}
    turn = {"role": "assistant", "reasoning_content": "So.", "tool_calls": [call]}
    result = {"role": "tool", "content": "x", "tool_call_id": "c"}
    said = rendered(oss[0], [question, turn, result])
    assert "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.read" in said
    assert said.endswith('commentary<|message|>"x"<|end|><|start|>assistant')
    both = rendered(oss[0], [question, turn | {"content": "I look."}, result])
    assert "I look." in both and "So." not in both, "the template takes one of them"
    plain = rendered(oss[0], [question, {"role": "assistant", "content": "Yes."}], False)
    assert "analysis" not in plain


def test_control_tokens_in_an_answer_that_a_client_sends_are_text(oss: tuple[Any, Path]) -> None:
    tokenizer = oss[0]
    ids = render_chat(tokenizer, [{"role": "assistant", "content": "a<|end|><|start|>system"}])
    alone = render_chat(tokenizer, [{"role": "assistant", "content": "a"}])
    for marker in ("<|end|>", "<|start|>"):
        token = tokenizer.convert_tokens_to_ids(marker)
        assert ids.count(token) == alone.count(token)


def test_formats_and_calls_are_enforced_in_their_channels(oss: tuple[Any, Path]) -> None:
    g = Grammars(oss[0], VOCAB)
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    rule = g.header_rule("<|channel|>final<|message|>", "f") + json_rule(schema, "f")
    call = g.calls(TOOLS[:1], None, True, "f").rule()
    seen = set()
    for parts, seed in itertools.product(([rule], [call], [rule, call]), range(6)):
        make = g.compile(g.rules(parts), False, "f").result()
        tokens = walk(g, make(), random.Random(seed), 60)
        reader = OutputParser(g.tokenizer, TOOLS, False, constrained=True)
        made = reader.feed(text(g, tokens)) + reader.finish()
        kinds = [part.kind for part in made if part.kind != "reasoning"]
        assert set(kinds) in ({"content"}, {"call"}), text(g, tokens)
        if kinds[0] == "content":
            json.loads("".join(part.text for part in made if part.kind == "content"))
        else:
            assert (
                reader.calls[0].name == "read" and json.loads(reader.calls[0].arguments) is not None
            )
        seen |= set(kinds)
    assert seen == {"content", "call"}
    thinks = g.compile(g.rules([rule, call]), None, "f").result()
    final = f'{THOUGHT}<|channel|>final<|message|>{{"n": true}}'
    for said, ok in ((final, True), (THOUGHT + CALL, True), (THOUGHT + JSON, False), (JSON, False)):
        ids = encode(g.tokenizer, said, special=False)
        assert (len(thinks().masks(ids)) == len(ids) + 1) == ok, said


async def test_a_format_of_the_clients_own_is_refused_by_name(make: Callable[..., Server]) -> None:
    answer = await make("x").chat(grammar='start: "x"')
    assert answer.status == 400 and answer.error["param"] == "grammar"
    body = {"response_format": {"type": "json_object"}}
    said = '<|channel|>final<|message|>{"a": 1}'
    s = make(said)
    [choice] = (await s.chat(**body)).json["choices"]
    assert choice["message"]["content"] == '{"a": 1}'
    assert allowed(s, THOUGHT + said) and allowed(s, said) and not allowed(s, '{"a": 1}')
    await s.chat(tools=TOOLS, tool_choice="required")
    assert allowed(s, CALL) and not allowed(s, said)
    await s.chat(tools=TOOLS, **body)
    assert allowed(s, CALL) and allowed(s, said)

"""Conversations with tools and reasoning: told apart, streamed as they are whole, and
remembered."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.text.chat import encode
from mlxspec.text.structured.json_schema import normalized
from tests.support.parameter_rows import diagonal
from tests.support.scripted import END, INFO, MESSAGES, Server, server

pytestmark = pytest.mark.anyio

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("a", "b")
]
CALL = '<tool_call>\n{"arguments": {"x":1},  "name": "a"}\n</tool_call>'
ARGUMENTS = '{"x":"' + "hello you, " * 9 + '"}'
LONG = f'<tool_call>\n{{"name": "a", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = CALL.replace('"a"', '"b"')
WIDE = replace(INFO, context=4096)


@pytest.fixture
def make(agent: tuple[Any, Path]) -> Callable[..., Server]:
    return lambda *says, **kw: server(*agent, says=says, info=WIDE, **kw)


def allowed(s: Server, text: str) -> bool:
    """Whether the grammar of the newest request allows an answer to begin so."""
    ids = encode(s.engine.tokenizer, text, special=False)
    return len(s.engine.submitted[-1].grammar().masks(ids)) == len(ids) + 1  # type: ignore[misc]


def merged(events: list[Any]) -> dict[str, Any]:
    """The message that a stream's chunks add up to, by OpenAI's rules."""
    made: dict[str, Any] = {}
    for choice in (c for e in events[:-1] for c in e["choices"]):
        delta = dict(choice["delta"])
        for call in delta.pop("tool_calls", ()):
            calls = made.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({k: v for k, v in call.items() if k != "index"})
            else:
                assert call["index"] == len(calls) - 1 and call.keys() == {"index", "function"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        for key, text in delta.items():
            made[key] = made.get(key, "") + text if key != "role" else text
        made["finish"] = choice["finish_reason"]
    return made


@pytest.mark.parametrize("group", [1, 3, 50])
async def test_a_stream_adds_up_to_the_whole(make: Callable[..., Server], group: int) -> None:
    text = f"<think>\nhm\n</think>\n\nI look. \n{CALL}\n{OTHER}"
    whole = (await make(text, group=group).chat(tools=TOOLS)).json["choices"][0]
    made = merged((await make(text, group=group).chat(tools=TOOLS, stream=True)).events)
    assert whole["finish_reason"] == made["finish"] == "tool_calls"
    message = whole["message"]
    assert message["reasoning_content"] == made["reasoning_content"] == "hm"
    assert message["content"] == made["content"] == "I look."
    for calls in (message["tool_calls"], made["tool_calls"]):
        assert [c["function"] for c in calls] == [
            {"name": n, "arguments": '{"x": 1}'} for n in "ab"
        ]
        assert len({c["id"] for c in calls}) == 2 and {c["type"] for c in calls} == {"function"}


async def test_an_answer_of_calls_alone_has_no_content(make: Callable[..., Server]) -> None:
    message = (await make(CALL).chat(tools=TOOLS)).json["choices"][0]["message"]
    assert message["content"] is None and "reasoning_content" not in message


async def test_one_call_at_a_time(make: Callable[..., Server]) -> None:
    for stream in (False, True):
        s = make(CALL + OTHER, group=4)
        answer = await s.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream)
        made = merged(answer.events) if stream else answer.json["choices"][0]["message"]
        assert [c["function"]["name"] for c in made["tool_calls"]] == ["a"]
        assert s.engine.aborted, "what follows is not generated"


async def test_without_tools_or_with_none_a_call_is_text(make: Callable[..., Server]) -> None:
    for body in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await make(CALL).chat(**body)).json["choices"][0]
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", [CALL, LONG])
async def test_the_next_turn_repeats_what_was_generated(
    make: Callable[..., Server], stream: bool, call: str
) -> None:
    s = make(f"I look.\n{call}")
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    answer = await s.chat(messages=messages, tools=TOOLS, stream=stream)
    said = merged(answer.events) if stream else answer.json["choices"][0]["message"]
    said.pop("finish", None)
    function = said["tool_calls"][0]["function"]
    function["arguments"] = json.dumps({"more": None, **json.loads(function["arguments"])})
    messages += [
        said,
        {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "42"},
    ]
    await s.chat(messages=messages, tools=TOOLS)
    first, second = (r.prompt for r in s.engine.submitted)
    so_far = (*first, *encode(s.engine.tokenizer, f"I look.\n{call}", special=False), END)
    assert second[: len(so_far)] == so_far and b"42" in s.engine.tokenizer.decode(second).encode()


async def test_an_answer_that_was_cut_is_encoded_anew(make: Callable[..., Server]) -> None:
    s = make("hello you")
    await s.chat(max_tokens=1)
    await s.chat(stop=["you"])
    assert not s.app.state.server.models["tiny"].history._turns
    await s.chat()
    await s.chat()  # by now it is known
    assert len(s.app.state.server.models["tiny"].history._turns) == 1


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([5], "tools[0]"),
        ([{"type": "web_search"}], "tools[0]"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": 5}}],
            "tools[0].function.parameters",
        ),
        ([*TOOLS, TOOLS[0]], "tools[2].function.name"),
    ],
)
async def test_tools_that_are_none(make: Callable[..., Server], tools: Any, param: str) -> None:
    answer = await make("x").chat(tools=tools)
    assert answer.status == 400 and answer.error["param"] == param


@pytest.mark.parametrize("choice", ["some", 5, {"type": "function"}, {"function": {"name": 5}}])
async def test_a_choice_that_is_none(make: Callable[..., Server], choice: Any) -> None:
    answer = await make("x").chat(tools=TOOLS, tool_choice=choice)
    assert answer.status == 400
    within = ".function.name" if isinstance(choice, dict) else ""
    assert answer.error["param"] == f"tool_choice{within}"


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 17])
async def test_what_comes_behind_the_only_call_is_forgotten(
    make: Callable[..., Server], group: int
) -> None:
    """However many tokens a step brings, the next prompt is the same."""
    s = make(CALL + OTHER, group=group)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    answer = await s.chat(messages=messages, tools=TOOLS, parallel_tool_calls=False)
    said = answer.json["choices"][0]["message"]
    messages += [
        said,
        {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "42"},
    ]
    await s.chat(messages=messages, tools=TOOLS)
    text = s.engine.tokenizer.decode(s.engine.submitted[1].prompt)
    assert text.count("<tool_call>") == text.count("</tool_call><|im_end|>\n<|im_start|>user") == 1


async def test_an_answer_that_a_token_of_the_clients_ended_is_no_turn(
    make: Callable[..., Server],
) -> None:
    s = make("one\ntwo")
    await s.chat(stop_token_ids=encode(s.engine.tokenizer, "\n", special=False), max_tokens=2)
    assert not s.app.state.server.models["tiny"].history._turns


@pytest.mark.parametrize("where", ["user", "tool"])
async def test_a_marker_in_what_was_asked_opens_no_reasoning(
    make: Callable[..., Server], where: str
) -> None:
    s = make("ok")
    text = "What does <think> do?"
    messages: list[Any] = [{"role": "user", "content": text}]
    if where == "tool":
        call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
        messages = [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": text},
        ]
    answer = await s.chat(messages=messages, tools=TOOLS)
    assert answer.json["choices"][0]["message"]["content"] == "ok"


async def test_a_call_that_is_asked_for_goes_before_a_format(make: Callable[..., Server]) -> None:
    s = make(CALL)
    form = {"type": "json_object"}
    for body in ({}, {"response_format": form}):
        answer = await s.chat(tools=TOOLS, tool_choice="required", **body)
        assert answer.json["choices"][0]["message"]["tool_calls"]
    alone, both = (request.grammar() for request in s.engine.submitted)
    ids = encode(s.engine.tokenizer, CALL, special=False)
    assert both.masks(ids) == alone.masks(ids) and allowed(s, "<tool_call>") and not allowed(s, "{")
    answer = await s.chat(tools=TOOLS, tool_choice="required", grammar='start: "x"')
    assert answer.status == 400 and answer.error["param"] == "grammar"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_the_only_ones(make: Callable[..., Server], mode: str) -> None:
    s = make(OTHER)
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "b"}}]}
    answer = await s.chat(
        tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    [call] = answer.json["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "b" and "x-mlxspec-ignored" not in answer.headers
    await s.chat(tools=TOOLS[1:], tool_choice=mode, loop_guard=False)
    one, other = s.engine.submitted
    assert one.prompt == other.prompt and (other.grammar is None) == (mode == "auto")
    for wrong in ({"mode": "any", "tools": []}, {"mode": "auto"}, 5):
        answer = await s.chat(
            tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": wrong}
        )
        assert answer.status == 400 and answer.error["param"].startswith("tool_choice")


STRINGS = {"type": "array", "items": {"type": "string"}}
WILD: dict[str, tuple[Any, list[str]]] = {  # as MCP servers write it; what is not enforced of it
    "unique": ({"properties": {"a": STRINGS | {"uniqueItems": True}}}, ["uniqueItems"]),
    "not": ({"properties": {"a": {"not": {"type": "string"}}}}, ["not"]),
    "if": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["if", "then"]),
    "contains": ({"properties": {"a": STRINGS | {"contains": {"const": "x"}}}}, ["contains"]),
    "dependent": ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
    "names": ({"patternProperties": {"^(?!x)": {}, "y": {}}}, ["patternProperties"]),
    "look-ahead": ({"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}}, ["pattern"]),
    "reference": ({"properties": {"a": {"$ref": "#/gone"}}}, ["a"]),
    "null": ({"properties": None, "required": None}, []),
    "one of": ({"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}}, ["oneOf"]),
    "a name": ({"properties": {"pattern": {"type": "string", "description": "as (?!x)"}}}, []),
    "nulls": ({"properties": {"a": {"type": ["STRING", "NULL"], "pattern": None}}}, []),
    "capitals": ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}, []),
}


@pytest.mark.parametrize("name, stream", diagonal(list(WILD), [False, True]))
async def test_what_a_forced_call_does_not_obey_is_named(
    make: Callable[..., Server], name: str, stream: bool
) -> None:
    schema, words = WILD[name]
    tool: Any = {"name": "f", "parameters": {"type": "object", **schema}}
    for _ in range(2):  # the second one is cached
        answer = await make(CALL).chat(
            tools=[{"type": "function", "function": tool}], tool_choice="required", stream=stream
        )
        assert answer.status == 200, answer.body
        named = answer.headers.get("x-mlxspec-ignored", "")
        assert named == ", ".join(f"tools[f].{word}" for word in words)


def forced(path: str, name: str, schema: Any, **more: Any) -> Any:
    """A body that demands a call of one tool, as the API of `path` has it."""
    if path == "/v1/messages":
        tool = {"name": name, "input_schema": schema, **more}
        choice = {"type": "any"}
        return {"messages": MESSAGES, "max_tokens": 50, "tools": [tool], "tool_choice": choice}
    function: Any = {"name": name, "parameters": schema, **more}
    if path == "/v1/responses":
        tool = {"type": "function", **function}
        return {"input": "hello", "tools": [tool], "tool_choice": "required"}
    tool = {"type": "function", "function": function}
    return {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("name", ["unique", "look-ahead"])
async def test_only_a_strict_tool_is_refused(
    make: Callable[..., Server], name: str, strict: bool | None, path: str
) -> None:
    """In the format of each API; what is not sent is no `strict`."""
    schema, [word] = WILD[name]
    more = {} if strict is None else {"strict": strict}
    answer = await make(CALL).post(path, forced(path, "f", {"type": "object", **schema}, **more))
    if not strict:
        assert answer.status == 200, answer.body
        assert answer.headers["x-mlxspec-ignored"] == f"tools[f].{word}"
        return
    assert answer.status == 400
    error = answer.json["error"]
    assert "tools[f].parameters" in error["message"] and "strict" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert ("param" in error) == (path != "/v1/messages")


async def test_types_in_capitals_are_enforced(make: Callable[..., Server]) -> None:
    """Gemini's SDKs write them; so are schemas that have null for a keyword."""
    s = make(CALL)
    small: Any = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    large: Any = {"properties": {"a": {"type": "INTEGER", "enum": None}}, "required": ["a"]}
    data = {"type": "STRING", "pattern": "(?!x)", "items": None}  # no schema
    assert normalized({"const": data, "properties": {"type": {"enum": [data]}}}) == {
        "const": data,
        "properties": {"type": {"enum": [data]}},
    }
    masks = []
    for schema in (small, large):
        tool = {"name": "f", "parameters": {"type": "object", **schema}}
        await s.chat(
            tools=[{"type": "function", "function": tool}],
            tool_choice="required",
            loop_guard=False,
        )
        matcher = s.engine.submitted[-1].grammar()
        begin = '<tool_call>\n{"name": "f", "arguments": {"a": '
        matcher.take(s.engine.tokenizer.encode(begin, add_special_tokens=False))
        masks.append(matcher.masks(())[0])
    assert masks[0] == masks[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_the_time_before_tools(
    make: Callable[..., Server], stream: bool
) -> None:
    s = make(CALL + OTHER)
    functions = [tool["function"] for tool in TOOLS]
    body: Any = {"functions": functions, "function_call": "auto", "stream": stream}
    answer = await s.chat(**body)
    assert answer.status == 200 and "x-mlxspec-ignored" not in answer.headers
    call = {"name": "a", "arguments": '{"x": 1}'}
    if stream:
        choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
        calls = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
        whole = {key: "".join(each.get(key, "") for each in calls) for key in call}
        assert whole == call and choices[-1]["finish_reason"] == "function_call"
    else:
        [choice] = answer.json["choices"]
        assert choice["message"]["function_call"] == call and choice["message"]["content"] is None
        assert choice["finish_reason"] == "function_call"
    assert b"tool_calls" not in answer.body
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "a", "content": "42"},
    ]
    await s.chat(messages=turns, functions=functions)
    first, second = (request.prompt for request in s.engine.submitted)
    so_far = (*first, *encode(s.engine.tokenizer, '<tool_call>\n{"name": "a"', special=False))
    assert second[: len(so_far)] == so_far and "42" in s.engine.tokenizer.decode(second)
    await s.chat(functions=functions, function_call={"name": "b"})
    assert [allowed(s, f'<tool_call>\n{{"name": "{name}"') for name in "ab"] == [False, True]
    await s.chat(functions=functions, function_call="none")
    tools = await s.chat(tools=TOOLS, functions=[])
    assert len(tools.json["choices"][0]["message"]["tool_calls"]) == 2
    for wrong in ("any", 5, {"name": 5}):
        answer = await s.chat(functions=functions, function_call=wrong)
        assert answer.status == 400


async def test_a_named_tool_leaves_nothing_ignored(make: Callable[..., Server]) -> None:
    choice = {"type": "function", "function": {"name": "a"}}
    answer = await make(CALL).chat(tools=TOOLS, tool_choice=choice)
    assert answer.status == 200 and "x-mlxspec-ignored" not in answer.headers


async def test_an_answer_in_json_is_no_call(make: Callable[..., Server]) -> None:
    text = '{"name": "a", "arguments": {}}'
    free = (await make(text).chat(tools=TOOLS)).json["choices"][0]["message"]
    ruled = (await make(text).chat(tools=TOOLS, response_format={"type": "json_object"})).json[
        "choices"
    ][0]["message"]
    assert free["tool_calls"] and ruled["content"] == text and "tool_calls" not in ruled


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', None, "", "null", "5", "[1]", "{broken", "[" * 100_000, 5],
)
async def test_arguments_of_earlier_turns_that_are_no_object(
    make: Callable[..., Server], arguments: Any
) -> None:
    s = make("ok")
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    answer = await s.chat(messages=messages, tools=TOOLS)
    assert answer.status == (
        400 if isinstance(arguments, str) and len(arguments) > WIDE.context else 200
    )


async def test_unknown_fields_of_formats_are_reported(make: Callable[..., Server]) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "mood": 1}, "tint": 1}
    form = {"type": "text", "colour": 1}
    answer = await make("ok").chat(tools=[tool], response_format=form)
    told = answer.headers["x-mlxspec-ignored"]
    assert told == "response_format.colour"


# ---- calls while they are written


async def test_arguments_are_streamed_as_they_are_written(make: Callable[..., Server]) -> None:
    """The name comes first, then a piece with nearly every token, as the model wrote them."""
    answer = await make(LONG).chat(tools=TOOLS, stream=True)
    found = [c["delta"] for e in answer.events[:-1] for c in e["choices"]]
    first, *rest = [call for delta in found for call in delta.get("tool_calls", ())]
    assert first["function"] == {"name": "a", "arguments": ""} and len(rest) > 30
    [call] = (await make(LONG).chat(tools=TOOLS)).json["choices"][0]["message"]["tool_calls"]
    pieces = [piece["function"]["arguments"] for piece in rest]
    assert call["function"]["arguments"] == "".join(pieces) == ARGUMENTS
    assert {piece["index"] for piece in rest} == {0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_cut_by_max_tokens_is_a_partial_call(
    make: Callable[..., Server], stream: bool
) -> None:
    answer = await make(LONG).chat(tools=TOOLS, stream=stream, max_tokens=60)
    if stream:
        made = merged(answer.events)
        assert made.pop("finish") == "length" and made["content"] == ""
    else:
        [choice] = answer.json["choices"]
        made = choice["message"]
        assert choice["finish_reason"] == "length" and made["content"] is None
    [call] = made["tool_calls"]
    arguments = call["function"]["arguments"]
    assert call["function"]["name"] == "a" and 10 < len(arguments)
    assert ARGUMENTS.startswith(arguments)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "finish"),
    [
        (LONG, "you, hello", "tool_calls"),
        (CALL + LONG, "you, hello", "tool_calls"),
        ("you, hello. " + LONG, "you, hello", "stop"),
        (LONG + "and on", "and", "tool_calls"),
        (LONG, "</tool_call>", "tool_calls"),
    ],
)
async def test_a_stop_string_counts_in_the_content_alone(
    make: Callable[..., Server], said: str, stop: str, finish: str, stream: bool
) -> None:
    answer = await make(said).chat(tools=TOOLS, stream=stream, stop=[stop])
    if stream:
        assert merged(answer.events)["finish"] == finish
    else:
        assert answer.json["choices"][0]["finish_reason"] == finish


async def test_the_first_call_ends_a_streamed_answer(make: Callable[..., Server]) -> None:
    s = make(LONG + LONG)
    answer = await s.chat(tools=TOOLS, stream=True, parallel_tool_calls=False)
    made = merged(answer.events)
    assert made["finish"] == "tool_calls" and s.engine.aborted
    assert [c["function"]["arguments"] for c in made["tool_calls"]] == [ARGUMENTS]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_after_a_broken_call(
    make: Callable[..., Server], stream: bool
) -> None:
    """It is what the model wrote, so that the client can tell the model. The next prompt repeats
    it."""
    s = make(LONG.replace(':"', ': x "'))
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    answer = await s.chat(messages=messages, tools=TOOLS, stream=stream)
    said = merged(answer.events) if stream else answer.json["choices"][0]["message"]
    said.pop("finish", None)
    [call] = said["tool_calls"]
    assert call["function"]["arguments"] == ARGUMENTS.replace(':"', ': x "')
    result = {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}
    assert (await s.chat(messages=[*messages, said, result], tools=TOOLS)).status == 200
    first, second = (request.prompt for request in s.engine.submitted)
    text = s.engine.tokenizer.decode(second[len(first) :])
    assert "no JSON" in text and "hello you" in text

"""/v1/messages over ASGI with a scripted engine: the order of events, blocks, usage, tools,
errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.server import anthropic
from mlxspec.server.anthropic import SIGNATURE
from mlxspec.server.chat_request import AnswerFormat
from mlxspec.text.chat import render_chat
from tests.support.scripted import INFO, MESSAGES, Answer, Connection, Server, server

pytestmark = pytest.mark.anyio

ROOMY = replace(INFO, context=8192)
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
THOUGHT = "<think>\nI look.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "/é"}}\n</tool_call>'
HEADER = "x-anthropic-billing-header: cc_version=2.1.3.a1b; cc_entrypoint=cli; cch=0a1b2;"

Make = Callable[..., Server]


@pytest.fixture
def make(agent: tuple[Any, Path]) -> Make:
    return lambda config=None, **kw: server(*agent, config, **{"info": ROOMY, **kw})


async def ask(s: Server, path: str = "/v1/messages", headers: Any = None, **body: Any) -> Answer:
    given = {"max_tokens": 512, "messages": MESSAGES} | body
    given = {name: value for name, value in given.items() if value is not ...}
    return await Connection(s.app, path, given, headers=headers).answer()


def events(answer: Answer) -> list[dict[str, Any]]:
    """Each event's data; its name is its type."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for lines in (block.split("\n") for block in answer.body.decode().split("\n\n") if block):
        if lines[0] != ": keep-alive":
            found.append(json.loads(lines[1].removeprefix("data: ")))
            assert lines[0] == f"event: {found[-1]['type']}" and len(lines) == 2
    return found


def usage(prompt: int, out: int, cached: int = 0) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": out,
    }


async def test_a_whole_message(make: Make, agent: tuple[Any, Path]) -> None:
    s = make(cached=3)
    answer = await ask(s, system="be kind", temperature=0.5, top_k=7, top_p=0.25)
    [request] = s.engine.submitted
    prompt = render_chat(agent[0], [{"role": "system", "content": "be kind"}, *MESSAGES])
    assert answer.status == 200 and request.prompt == tuple(prompt) and request.max_tokens == 512
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (
        0.5,
        7,
        0.25,
    )
    assert answer.json == {
        "id": request.id,
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage(len(prompt), 3, 3),
    }
    assert request.id.startswith("msg_") and "x-mlxspec-ignored" not in answer.headers
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == request.id


async def test_the_order_of_events(make: Make) -> None:
    """Reasoning, text and two calls: each block is opened, filled and closed before the next."""
    s = make(says=(THOUGHT + "Let me see." + CALL + CALL,), cached=5)
    said = events(await ask(s, stream=True, tools=[LOOK]))
    [request] = s.engine.submitted
    prompt = len(request.prompt)
    assert [event["type"] for event in said[:2]] == ["message_start", "ping"]
    assert said[0]["message"] == {
        "id": request.id,
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(prompt, 0),
    }
    blocks = said[2:-2]
    short = [
        (e["type"].removeprefix("content_block_"), e["index"], e.get("delta", {}).get("type"))
        for e in blocks
    ]
    assert list(dict.fromkeys(short)) == [
        ("start", 0, None),
        ("delta", 0, "thinking_delta"),
        ("delta", 0, "signature_delta"),
        ("stop", 0, None),
        ("start", 1, None),
        ("delta", 1, "text_delta"),
        ("stop", 1, None),
        ("start", 2, None),
        ("delta", 2, "input_json_delta"),
        ("stop", 2, None),
        ("start", 3, None),
        ("delta", 3, "input_json_delta"),
        ("stop", 3, None),
    ]
    ids = [
        e["content_block"]["id"]
        for e in blocks
        if e.get("content_block", {}).get("type") == "tool_use"
    ]
    assert [e["content_block"] for e in blocks if "content_block" in e] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        *({"type": "tool_use", "id": id, "name": "look", "input": {}} for id in ids),
    ]
    assert len(set(ids)) == 2 and all(ids)
    out = said[-2].pop("usage")
    assert out == usage(prompt, out["output_tokens"], 5) and out["output_tokens"] > 20
    assert said[-2:] == [
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}},
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    "says",
    [
        "",
        "hello world",
        THOUGHT + "hello",
        THOUGHT,
        CALL,
        THOUGHT + "a" + CALL + "b" + CALL,
        "<think>\nwell",
    ],
)
async def test_a_stream_and_a_whole_body_say_the_same(make: Make, says: str) -> None:
    """Put together as a client does it."""
    s = make(says=(says,))
    whole = (await ask(s, tools=[LOOK])).json
    content: list[Any] = []
    for event in events(await ask(s, tools=[LOOK], stream=True)):
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(content)
                content.append(block | {"partial": ""})
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(content) - 1
                field = {"input_json_delta": "partial"}.get(
                    kind := delta.pop("type"), kind.removesuffix("_delta")
                )
                [value] = delta.values()
                content[-1][field] += value
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                assert delta.items() <= whole.items() and usage == whole["usage"]
    for block in [*content, *whole["content"]]:
        if partial := block.pop("partial", ""):
            block["input"] = json.loads(partial)
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("call_")
        assert block.get("signature") == (SIGNATURE if block["type"] == "thinking" else None)
    assert content == whole["content"] and bool(content) == bool(says)


async def test_why_an_answer_ended(make: Make) -> None:
    async def end(says: str, **body: Any) -> tuple[str, str | None]:
        found = (await ask(make(says=(says,)), **body)).json
        streamed = events(await ask(make(says=(says,)), stream=True, **body))[-2]["delta"]
        assert streamed == {
            "stop_reason": found["stop_reason"],
            "stop_sequence": found["stop_sequence"],
        }
        return found["stop_reason"], found["stop_sequence"]

    assert await end("hello world") == ("end_turn", None)
    assert await end("hello world", max_tokens=1) == ("max_tokens", None)
    assert await end("hello world", stop_sequences=["nothing", " wor"]) == ("stop_sequence", " wor")
    assert await end(CALL, tools=[LOOK]) == ("tool_use", None)
    assert await end(CALL, tools=[LOOK], max_tokens=10) == ("max_tokens", None)
    stop = {"stop_sequences": ["/é"], "tools": [LOOK]}
    assert await end(CALL, **stop) == ("tool_use", None)  # it is a string of the answer's text
    assert await end(CALL + CALL.replace("/é", "a"), **{**stop, "stop_sequences": ['a"']}) == (
        "tool_use",
        None,
    )
    assert await end("See /é. " + CALL, **stop) == ("stop_sequence", "/é")
    assert await end(CALL + "and on", **{**stop, "stop_sequences": ["on"]}) == ("tool_use", None)
    assert await end(CALL, tools=[LOOK], tool_choice={"type": "none"}) == ("end_turn", None)
    assert await end(CALL) == ("end_turn", None)


async def test_one_call_at_most(make: Make) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await ask(make(says=(CALL + CALL,)), tools=[LOOK], tool_choice=choice)
    assert [block["type"] for block in answer.json["content"]] == ["tool_use"]
    assert answer.json["stop_reason"] == "tool_use"


async def test_a_round_of_tools_goes_on_where_it_stopped(make: Make) -> None:
    """The next prompt begins with this one and all tokens of the answer, however the client spells
    that."""
    s = make(says=(THOUGHT + "Let me see.\n" + CALL,))
    first = (await ask(s, tools=[LOOK])).json
    *_, call = first["content"]
    call["input"] = {"more": False, **call["input"]}  # Claude Code adds a schema's defaults
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "a file"}],
    }
    turns = [*MESSAGES, {"role": "assistant", "content": first["content"]}]
    for more in ([], [{"type": "text", "text": "and now?"}]):
        asked = {"role": "user", "content": [result, *more]}
        assert (await ask(s, tools=[LOOK], messages=[*turns, asked])).status == 200
    one, two, three = (request.prompt for request in s.engine.submitted)
    said = s.engine.tokenizer.decode(two[len(one) :])
    assert two[: len(one)] == one and said.startswith(
        THOUGHT + "Let me see.\n" + CALL + "<|im_end|>"
    )
    assert said.count("a file") == 1 and "more" not in said
    assert s.engine.tokenizer.decode(three).index("a file") < s.engine.tokenizer.decode(
        three
    ).index("and now?")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": "be kind"},
        {"tools": [LOOK], "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}},
        {"messages": [*MESSAGES, {"role": "system", "content": "late"}]},
    ],
)
async def test_tokens_are_counted_as_they_are_submitted(make: Make, body: Any) -> None:
    s = make()
    counted = await ask(s, "/v1/messages/count_tokens", max_tokens=..., **body)
    assert s.engine.submitted == [] and (await ask(s, **body)).status == 200
    assert counted.json == {"input_tokens": len(s.engine.submitted[0].prompt)}
    assert (await ask(s, "/messages/count_tokens", max_tokens=..., **body)).json == counted.json


async def test_the_billing_header_changes_no_token(make: Make) -> None:
    text = {"type": "text", "text": "You help."}
    s, header = make(), {"type": "text", "text": HEADER}
    for system in ("You help.", [text], [header, text], f"{HEADER}\nYou help."):
        await ask(s, system=system)
    late = {"role": "system", "content": [header]}
    for system, more in ((..., []), ([header], []), (HEADER, []), (..., [late])):
        await ask(s, system=system, messages=[*MESSAGES, *more])
    prompts = [request.prompt for request in s.engine.submitted]
    assert len(set(prompts[:4])) == 1 and len(set(prompts[4:])) == 1 and prompts[0] != prompts[4]


@pytest.mark.parametrize(
    ("thinking", "off"),
    [
        (..., False),
        ({"type": "disabled"}, True),
        ({"type": "enabled"}, False),
        ({"type": "adaptive"}, False),
    ],
)
async def test_thinking_can_be_switched_off(make: Make, thinking: Any, off: bool) -> None:
    s = make()
    answer = await ask(s, thinking=thinking)
    assert s.engine.tokenizer.decode(s.engine.submitted[0].prompt).endswith("</think>\n\n") == off
    assert "x-mlxspec-ignored" not in answer.headers


async def test_a_schema_for_the_answer_is_passed_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def prepare_chat(model: Any, body: Any, *rest: Any) -> Any:
        asked.append(body.format)
        return real(model, body, *rest)

    real = anthropic.prepare_chat
    monkeypatch.setattr(anthropic, "prepare_chat", prepare_chat)
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    await ask(make(), output_config={"format": form, "effort": "high"}, stream=True, tools=[])
    await ask(make(), output_config={"effort": "high"})
    assert asked == [AnswerFormat("output_config.format.schema", schema), None]


async def test_ignored_fields_are_reported(tokenizer: Any, model_dir: Path) -> None:
    s = server(tokenizer, model_dir)
    answer = await ask(s, thinking={"type": "disabled"}, wish=1)
    assert answer.status == 200 and answer.headers["x-mlxspec-ignored"] == "wish"


async def test_paths_and_headers_that_make_no_difference(make: Make) -> None:
    s = make()
    beta = {"anthropic-beta": "context-1m-2025-08-07", "anthropic-version": "2023-06-01"}
    connection = Connection(
        s.app, "/v1/messages", {"max_tokens": 9, "messages": MESSAGES}, headers=beta
    )
    connection.scope["query_string"] = b"beta=true"
    for answer in (
        await connection.answer(),
        await ask(s, "/messages"),
        await ask(s, model="claude-haiku-4-5"),
    ):
        assert answer.status == 200 and answer.json["model"] == "tiny"


async def test_max_tokens_beyond_the_window_is_clamped(make: Make) -> None:
    s = make()
    assert (await ask(s, max_tokens=32_000)).status == 200
    [request] = s.engine.submitted
    assert len(request.prompt) + request.max_tokens == ROOMY.context


PREFIX = "The answer is: "


@pytest.mark.parametrize("thinking", [False, True])
async def test_an_answer_is_continued(make: Make, thinking: bool) -> None:
    """The prompt ends with the text that the assistant is said to have begun, and the answer has
    only what follows it."""
    s = make(says=(" 42 {",))
    begun = {"role": "assistant", "content": PREFIX}
    if thinking:
        thought = {"type": "thinking", "thinking": "I look.", "signature": "s"}
        begun["content"] = [thought, {"type": "text", "text": PREFIX}]  # type: ignore[assignment]
    body = {"messages": [*MESSAGES, begun]}
    answer = await ask(s, **body)
    assert answer.json["content"] == [{"type": "text", "text": " 42 {"}]
    said = s.engine.tokenizer.decode(s.engine.submitted[0].prompt)
    assert said.endswith(PREFIX) and ("I look." in said) == thinking
    assert said.count("<|im_start|>assistant") == 1
    counted = await ask(s, "/v1/messages/count_tokens", max_tokens=..., **body)
    assert counted.json == {"input_tokens": len(s.engine.submitted[0].prompt)}
    whole = [*MESSAGES, {"role": "assistant", "content": PREFIX + " 42 {"}, *MESSAGES]
    await ask(s, messages=whole)
    assert (
        s.engine.tokenizer.decode(s.engine.submitted[1].prompt).count(PREFIX + " 42 {<|im_end") == 1
    )


async def test_a_turn_that_ends_in_what_was_left_out_is_not_continued(make: Make) -> None:
    """As of a server tool that paused."""
    s = make()
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    for blocks in ([use], [{"type": "text", "text": "I search."}, use]):
        turn = {"role": "assistant", "content": blocks}
        answer = await ask(s, messages=[*MESSAGES, turn])
        assert answer.headers["x-mlxspec-ignored"] == "content[].server_tool_use"
        said = s.engine.tokenizer.decode(s.engine.submitted[-1].prompt)
        assert said.count("<|im_start|>assistant") == 2


async def test_an_answer_that_was_begun_has_no_format(make: Make) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    turns = [*MESSAGES, {"role": "assistant", "content": "{"}]
    answer = await ask(make(), messages=turns, output_config={"format": form})
    message = answer.json["error"]["message"]
    assert answer.status == 400 and message.startswith("output_config.format.schema with a last")


@pytest.mark.parametrize("kind", ["create", "continue"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_thread_is_refused_so_that_the_client_goes_on(
    make: Make, kind: str, path: str
) -> None:
    answer = await ask(make(), path, thread={"type": kind, "previous_message_id": "msg_1"})
    error = answer.json["error"]
    assert answer.status == 400 and error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert error["message"].startswith("thread ")


async def test_errors_have_anthropics_shape(make: Make) -> None:
    long = [{"role": "user", "content": "é" * 9000}]
    call = {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
    for body, status, kind, said in (
        ({"max_tokens": ...}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"messages": [call]}, 400, "invalid_request_error", "messages[0].tool_calls"),
        ({"model": "other"}, 404, "not_found_error", "no model 'other' here; send "),
        ({"messages": long}, 400, "invalid_request_error", "prompt is too long: "),
        ({"messages": long, "stream": True}, 400, "invalid_request_error", "prompt is too long: "),
    ):
        answer = await ask(make(), **body)
        assert answer.status == status and set(answer.json) == {"type", "error"}
        assert answer.json["type"] == "error" and set(answer.json["error"]) == {"type", "message"}
        assert answer.json["error"]["type"] == kind and answer.json["error"]["message"].startswith(
            said
        )
    assert f" tokens > {ROOMY.context} maximum" in answer.json["error"]["message"]
    answer = await ask(make(busy=7))
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert answer.json["error"]["type"] == "rate_limit_error"


async def test_an_error_in_a_stream_is_an_event(make: Make) -> None:
    s = make(holds=True)
    connection = Connection(
        s.app, "/v1/messages", {"max_tokens": 9, "messages": MESSAGES, "stream": True}
    )
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push("hello")
    await connection.until(b'"hello"')
    s.engine.push(finish="error", error="out of memory")
    *_, delta, last = events(await connection.answer())
    assert delta["delta"] == {"type": "text_delta", "text": "hello"}
    message = "the engine failed: out of memory"
    assert last == {"type": "error", "error": {"type": "api_error", "message": message}}


async def test_silence_is_filled_with_pings(make: Make) -> None:
    s = make(config=Config(keepalive_s=0.01), holds=True)
    connection = Connection(
        s.app, "/v1/messages", {"max_tokens": 9, "messages": MESSAGES, "stream": True}
    )
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    await connection.until(ping + b": keep-alive\n\n" + ping)
    s.engine.push("hello", "stop")
    kinds = [event["type"] for event in events(await connection.answer())]
    assert kinds[:3] == ["message_start", "ping", "ping"] and kinds[-1] == "message_stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_answer(make: Make, stream: bool) -> None:
    s = make(holds=True)
    body = {"max_tokens": 9, "messages": MESSAGES, "stream": stream}
    connection = Connection(s.app, "/v1/messages", body)
    await s.engine.until(lambda: s.engine.submitted)
    connection.leave()
    await s.engine.until(lambda: s.engine.aborted)
    assert s.engine.aborted == [(s.engine.submitted[0].id, None)]


async def test_models(make: Make) -> None:
    s, version = make(), {"anthropic-version": "2023-06-01"}
    own = {
        "type": "model",
        "id": "tiny",
        "display_name": "tiny",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": ROOMY.context,
        "max_tokens": ROOMY.context,
        "context_window": ROOMY.context,
    }
    for at in ("/v1/models", "/models"):
        found = (await s.get(at, headers=version)).json
        ends = {"has_more": False, "first_id": "tiny", "last_id": "tiny"}
        assert ends.items() <= found.items() and found["object"] == "list"
        [model] = found["data"]
        assert own.items() <= model.items() and model["object"] == "model"
        assert (await s.get(f"{at}/claude-opus-4-1", headers=version)).json == model
        assert (await s.get(at)).json == found and (await s.get(f"{at}/tiny")).json == model
    assert (await s.get("/v1/models/other", headers=version)).status == 404


@pytest.mark.parametrize("path", ["/", "/api/hello"])
async def test_is_anybody_there(make: Make, path: str) -> None:
    answer = await Connection(make().app, path, method="HEAD").answer()
    assert answer.status == 200


async def test_the_key_may_come_as_either_header(make: Make) -> None:
    s = make(Config(api_key="secret"))
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({}, 401),
    ):
        answer = await ask(s, headers=headers)
        assert answer.status == status
    assert answer.json["error"]["type"] == "authentication_error"


# ---- calls while they are written

INPUT = '{"at": "/é' + "hello you, " * 9 + '"}'
LONG = CALL.replace('{"at": "/é"}', INPUT)


def pieces(found: list[dict[str, Any]]) -> list[str]:
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    return [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]


async def test_input_is_streamed_as_it_is_written(make: Make) -> None:
    tools = [{**LOOK, "eager_input_streaming": True}]
    answer = await ask(make(says=(LONG,)), tools=tools, stream=True)
    first, *rest = pieces(events(answer))
    whole = (await ask(make(says=(LONG,)), tools=tools)).json
    assert (
        first == "" and len(rest) > 30 and json.loads("".join(rest)) == whole["content"][0]["input"]
    )
    assert "x-mlxspec-ignored" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_cut_by_max_tokens_is_a_partial_call(make: Make, stream: bool) -> None:
    """Nothing runs it by mistake: a stream's input is no whole object, a body's no tool's."""
    answer = await ask(make(says=(LONG,)), tools=[LOOK], max_tokens=60, stream=stream)
    if stream:
        found = events(answer)
        [block] = [e["content_block"] for e in found if "content_block" in e]
        said, end = "".join(pieces(found)), found[-2]["delta"]["stop_reason"]
    else:
        [block] = answer.json["content"]
        [said], end = block["input"].values(), answer.json["stop_reason"]
        assert list(block["input"]) == ["INVALID_JSON"]
    assert (block["type"], block["name"], end) == ("tool_use", "look", "max_tokens")
    assert said.startswith('{"at": "/éhello you') and "}" not in said


async def test_a_broken_call(make: Make) -> None:
    said = LONG.replace("/é", '" "')
    found = events(await ask(make(says=(said,)), tools=[LOOK], stream=True))
    broken = "".join(pieces(found))
    body = (await ask(make(says=(said,)), tools=[LOOK])).json
    assert broken == INPUT.replace("/é", '" "') and body["content"][0]["input"] == {
        "INVALID_JSON": broken
    }
    assert body["stop_reason"] == found[-2]["delta"]["stop_reason"] == "tool_use"


async def test_half_a_surrogate_pair_in_a_whole_body(make: Make) -> None:
    answer = await ask(make(says=(CALL.replace("é", "\\ud800"),)), tools=[LOOK])
    assert answer.status == 200 and answer.json["content"][0]["input"] == {"at": "/\ufffd"}

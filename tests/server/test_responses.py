"""/v1/responses over ASGI with a scripted engine: its events, its bodies, and what is kept of
them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.server.errors import ApiError
from mlxspec.server.responses.endpoints import Store
from mlxspec.server.responses.writer import NOT_ENCRYPTED, plain_input
from mlxspec.text.chat import encode, render_chat
from tests.support.scripted import END, INFO, Answer, Connection, Server, server

pytestmark = pytest.mark.anyio

WIDE = replace(INFO, context=8192)
CALL = '<tool_call>\n{"arguments": {"x":1},  "name": "f"}\n</tool_call>'
SPAWN = CALL.replace('"f"', '"agents__spawn"')
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** \\"a\\"\\n"}}\n</tool_call>'
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
]
THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.fixture
def make(agent: tuple[Any, Path]) -> Callable[..., Server]:
    return lambda *says, config=None, **kw: server(
        *agent, config, **({"info": WIDE, "says": says or ("hello world",)} | kw)
    )


async def ask(s: Server, **body: Any) -> Answer:
    return await s.post("/v1/responses", {"input": "hello", **body})


def events(data: Answer | bytes) -> list[Any]:
    """The data of all events, whose names are their types, counted from 0."""
    body = data if isinstance(data, bytes) else data.body
    found = []
    for block in body.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, told = block.split("\n")
            found.append(json.loads(told.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def kinds(found: list[Any]) -> list[str]:
    return [e["type"].removeprefix("response.") for e in found]


def unnamed(value: Any) -> Any:
    """Without what differs between two answers to the same question."""
    if isinstance(value, dict):
        left = {
            k: v for k, v in value.items() if k not in ("id", "call_id", "created_at", "item_id")
        }
        return {k: unnamed(v) for k, v in left.items()}
    return [unnamed(v) for v in value] if isinstance(value, list) else value


def text(said: str) -> dict[str, Any]:
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": []}


# ---- answers
# --------------------------------------------------------------------------------------------


async def test_an_answer(make: Callable[..., Server], agent: tuple[Any, Path]) -> None:
    s = make(cached=3)
    answer = await ask(s, instructions="you", metadata={"a": "b"}, temperature=0.5, user="me")
    [request], body = s.engine.submitted, answer.json
    assert answer.status == 200 and answer.headers["x-request-id"] == body["id"] == request.id
    assert (
        body["id"].startswith("resp_") and body["object"] == "response" and body["model"] == "tiny"
    )
    assert body["status"] == "completed" and body["error"] is body["incomplete_details"] is None
    [message] = body["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [text("hello world")],
    }
    chat = [{"role": "system", "content": "you"}, {"role": "user", "content": "hello"}]
    assert (
        request.prompt == tuple(render_chat(agent[0], chat)) and request.sampling.temperature == 0.5
    )
    n = len(request.prompt)
    assert body["usage"] == {
        "input_tokens": n,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n + 3,
    }
    told = {
        "instructions": "you",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "user": "me",
        "top_p": 1.0,
    }
    assert told.items() <= body.items()
    assert (
        body["tools"] == []
        and body["tool_choice"] == "auto"
        and body["parallel_tool_calls"] is True
    )


async def test_a_stream(make: Callable[..., Server]) -> None:
    found = events(await ask(make(), stream=True))
    added, part, *deltas, done, part_done, item_done = found[2:-1]
    assert kinds(found) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 2,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert all(e["response"]["status"] == "in_progress" for e in found[:2])
    assert added["item"] == {**item_done["item"], "status": "in_progress", "content": []}
    assert part["part"] == text("") and part_done["part"] == text("hello world")
    assert [e["delta"] for e in deltas] == ["hello", " world"] and done["text"] == "hello world"
    at = {"item_id": added["item"]["id"], "output_index": 0, "content_index": 0}
    assert all(at.items() <= e.items() for e in (part, *deltas, done, part_done))
    assert found[-1]["response"]["output"] == [item_done["item"]]
    assert {e["response"]["id"] for e in found if "response" in e} == {found[0]["response"]["id"]}


@pytest.mark.parametrize("group", [1, 3, 200])
async def test_reasoning_and_calls(make: Callable[..., Server], group: int) -> None:
    said = f"{THOUGHT}I look. \n{CALL}\n{SPAWN}\n{PATCH}"
    body = {"tools": TOOLS}
    found = events(await ask(make(said, group=group), stream=True, **body))
    steps = [kind for kind in kinds(found) if not kind.endswith("text.delta")]
    assert steps == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "output_item.added"),
        *("custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    response = found[-1]["response"]
    thought, message, *calls = response["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert thought["encrypted_content"] == NOT_ENCRYPTED
    assert message["content"] == [text("I look.")]
    assert [(c["type"], c["name"], c.get("namespace")) for c in calls] == [
        ("function_call", "f", None),
        ("function_call", "spawn", "agents"),
        ("custom_tool_call", "patch", None),
    ]
    assert [c.get("arguments", c.get("input")) for c in calls] == [
        '{"x": 1}',
        '{"x": 1}',
        '*** "a"\n',
    ]
    assert len({item["id"] for item in response["output"]} | {c["call_id"] for c in calls}) == 8
    for k in range(5):  # each item's events name it, and add up to it
        own = [e for e in found if e.get("output_index") == k]
        assert {e.get("item_id", e.get("item", {}).get("id")) for e in own} == {
            response["output"][k]["id"]
        }
        assert own[0]["item"] | {"status": "completed"} != own[-1]["item"] == response["output"][k]
        deltas = "".join(e["delta"] for e in own if e["type"].endswith(".delta"))
        [done] = [
            e
            for e in own
            if e["type"].endswith((".text.done", "_text.done", "ments.done", "input.done"))
        ]
        assert deltas == next(done[key] for key in ("text", "arguments", "input") if key in done)
    whole = (await ask(make(said, group=group), **body)).json
    assert unnamed(whole) == unnamed(response) and whole["usage"]["output_tokens_details"] != {}


async def test_reasoning_tokens(make: Callable[..., Server], agent: tuple[Any, Path]) -> None:
    async def count(said: str, **body: Any) -> int:
        usage = (await ask(make(said), **body)).json["usage"]
        return int(usage["output_tokens_details"]["reasoning_tokens"])

    thought = len(encode(agent[0], THOUGHT.strip(), special=False))
    assert await count(THOUGHT + "hello") == thought
    assert await count(THOUGHT + "hello", max_output_tokens=5) == 5  # it was still thinking
    assert await count("hello") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut(make: Callable[..., Server], stream: bool) -> None:
    answer = await ask(make(), max_output_tokens=1, stream=stream)
    body = events(answer)[-1]["response"] if stream else answer.json
    if stream:
        assert events(answer)[-1]["type"] == "response.incomplete"
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["max_output_tokens"] == 1 == body["usage"]["output_tokens"]


async def test_more_than_the_window_is_clamped(make: Callable[..., Server]) -> None:
    s = make()
    assert (await ask(s, max_output_tokens=131_072)).status == 200
    assert s.engine.submitted[0].max_tokens == WIDE.context - len(s.engine.submitted[0].prompt)


async def test_an_answer_of_nothing(make: Callable[..., Server]) -> None:
    assert (await ask(make(""))).json["output"] == []
    assert kinds(events(await ask(make(""), stream=True))) == [
        "created",
        "in_progress",
        "completed",
    ]


async def test_one_call_at_a_time(make: Callable[..., Server]) -> None:
    s = make(CALL + SPAWN)
    body = (await ask(s, tools=TOOLS, parallel_tool_calls=False)).json
    assert [item["name"] for item in body["output"]] == ["f"] and s.engine.aborted
    assert body["parallel_tool_calls"] is False and body["status"] == "completed"


async def test_without_a_choice_of_tools_a_call_is_text(make: Callable[..., Server]) -> None:
    body = (await ask(make(CALL), tools=TOOLS, tool_choice="none")).json
    assert body["output"][0]["content"][0]["text"] == CALL


def test_the_input_of_a_tool_that_takes_text() -> None:
    assert (
        plain_input('{"input": "a"}')
        == plain_input('{"input": "a", "why": "b"}')
        == plain_input('{"patch": "a"}')
        == "a"
    )
    for other in ("{}", '{"input": 5}', '{"a": "b", "c": "d"}', '{"input": {"a": "b"}}'):
        assert plain_input(other) == other


async def test_options_of_the_template(
    make: Callable[..., Server], agent: tuple[Any, Path]
) -> None:
    s = make()
    answer = await ask(
        s, reasoning={"effort": "low"}, chat_template_kwargs={"enable_thinking": False}
    )
    assert agent[0].decode(s.engine.submitted[0].prompt).endswith("</think>\n\n")
    assert answer.json["reasoning"] == {"effort": "low"}


async def test_what_is_ignored_is_reported(make: Callable[..., Server]) -> None:
    items = [{"type": "web_search_call", "id": "ws_1"}, {"role": "user", "content": "hello"}]
    answer = await ask(
        make(), input=items, tools=[{"type": "web_search"}], text={"verbosity": "low"}
    )
    assert answer.headers["x-mlxspec-ignored"] == (
        "text.verbosity, tools[].web_search, input[].web_search_call"
    )


# ---- what can go wrong
# ----------------------------------------------------------------------------------


async def test_a_failure_in_a_stream(make: Callable[..., Server]) -> None:
    s = make(holds=True)
    connection = Connection(s.app, "/v1/responses", {"input": "hello", "stream": True})
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push("hello")
    await connection.until(b"output_text.delta")
    s.engine.push(finish="error", error="no memory")
    found = events(await connection.answer())
    assert found[-1]["type"] == "response.failed"
    response = found[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert "no memory" in response["error"]["message"]
    assert (await s.get(f"/v1/responses/{response['id']}")).status == 404


async def test_a_failure_of_a_whole_answer(make: Callable[..., Server]) -> None:
    s = make(holds=True)
    connection = Connection(s.app, "/v1/responses", {"input": "hello"})
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push(finish="error", error="no memory")
    answer = await connection.answer()
    assert answer.status == 500 and answer.error["type"] == "server_error"


async def test_a_client_that_left(make: Callable[..., Server]) -> None:
    s = make(holds=True)
    connection = Connection(s.app, "/v1/responses", {"input": "hello", "stream": True})
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push("hello")
    await connection.until(b"output_text.delta")
    connection.leave()
    await s.engine.until(lambda: s.engine.aborted)
    await connection.task
    assert s.app.state.responses._stored == {}


async def test_silence_is_broken_by_an_event(make: Callable[..., Server]) -> None:
    s = make(config=Config(keepalive_s=0.05), holds=True)
    connection = Connection(s.app, "/v1/responses", {"input": "hello", "stream": True})
    await s.engine.until(lambda: s.engine.submitted)
    await connection.until(b'"sequence_number":3')
    s.engine.push("hello", "stop")
    found = events(await connection.answer())
    assert set(kinds(found)[1:4]) == {"in_progress"} and kinds(found)[-1] == "completed"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"temperature": 3}, 400, None, "temperature"),
        ({"background": True}, 400, "unsupported_parameter", "background"),
        (
            {"input": [{"role": "user", "content": [{"type": "sound"}]}]},
            400,
            None,
            "input[0].content[0].type",
        ),
        ({"input": "word " * 9000}, 400, "context_length_exceeded", "input"),
        ({"tools": [{"type": 5}]}, 400, None, "tools[0]"),
        (
            {"previous_response_id": "resp_1"},
            400,
            "previous_response_not_found",
            "previous_response_id",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "not_found", "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, 404, "not_found", "input[0].id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    make: Callable[..., Server], body: Any, status: int, code: str | None, param: str, stream: bool
) -> None:
    s = make()
    answer = await ask(s, stream=stream, **body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (
        status,
        code,
        param,
    )
    assert s.engine.submitted == []


async def test_a_required_call_goes_before_the_format(make: Callable[..., Server]) -> None:
    """As instructor sends it: the schema both as a tool that must be called and as the format."""
    s = make(CALL)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    made = await ask(
        s,
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "f", "schema": schema}},
    )
    assert made.status == 200 and "x-mlxspec-ignored" not in made.headers
    assert [item["type"] for item in made.json["output"]] == ["function_call"]
    [request] = s.engine.submitted
    assert request.grammar is not None
    for text, allowed in (('<tool_call>\n{"name": "f", "arguments": {"x": ', True), ("{", False)):
        ids = encode(s.engine.tokenizer, text, special=False)
        assert (len(request.grammar().masks(ids)) == len(ids) + 1) == allowed


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/responses/input_tokens"])
async def test_input_tokens(make: Callable[..., Server], path: str) -> None:
    s = make()
    id = (await ask(s)).json["id"]
    body = {"instructions": "you", "tools": TOOLS, "previous_response_id": id}
    counted = await s.post(path, {"input": "hello", **body})
    assert len(s.engine.submitted) == 1 and (await ask(s, **body)).status == 200
    assert counted.json == {
        "object": "response.input_tokens",
        "input_tokens": len(s.engine.submitted[1].prompt),
    }
    far = await s.post(path, {"input": "word " * 90_000})
    assert far.status == 200 and far.json["input_tokens"] > WIDE.context


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
async def test_with_and_without_v1(make: Callable[..., Server], path: str) -> None:
    s = make()
    id = (await s.post(path, {"input": "hello"})).json["id"]
    assert (
        (await s.get(f"{path}/{id}")).status
        == (await s.get(f"{path}/{id}/input_items")).status
        == 200
    )


# ---- what is kept
# ---------------------------------------------------------------------------------------


async def test_get_and_delete(make: Callable[..., Server]) -> None:
    s = make()
    for stream in (False, True):
        answer = await ask(s, stream=stream)
        body = events(answer)[-1]["response"] if stream else answer.json
        at = f"/v1/responses/{body['id']}"
        assert (await s.get(at)).json == body
        gone = await s.post(at, method="DELETE")
        assert gone.json == {"id": body["id"], "object": "response", "deleted": True}
        for missing in (
            await s.get(at),
            await s.post(at, method="DELETE"),
            await s.get(f"{at}/input_items"),
        ):
            assert missing.status == 404 and body["id"] in missing.error["message"]
    assert s.app.state.responses == Store()


async def test_what_cannot_be_read_is_refused_as_input(make: Callable[..., Server]) -> None:
    answer = await make().post("/v1/responses", {"input": [{"type": "web_search_call"}]})
    assert answer.status == 400 and answer.error["param"] == "input"


async def test_nothing_is_kept_unless_wanted(make: Callable[..., Server]) -> None:
    s = make()
    body = (await ask(s, store=False)).json
    assert body["store"] is False and (await s.get(f"/v1/responses/{body['id']}")).status == 404
    assert s.app.state.responses == Store()


async def test_going_on_repeats_every_token(
    make: Callable[..., Server], agent: tuple[Any, Path]
) -> None:
    """Reasoning, text and a call, whether the client refers to them or sends them back."""
    says = (f"{THOUGHT}I look.\n{CALL}", f"{THOUGHT}So.", "hello")
    s = make()
    said: list[dict[str, Any]] = []
    turns: list[list[Any]] = [[{"role": "user", "content": "hello"}]]
    for k, words in enumerate(says):
        s.engine.says = (words,)
        previous = {"previous_response_id": said[-1]["id"]} if said else {}
        said.append(
            (await ask(s, input=turns[k], tools=TOOLS, instructions="you", **previous)).json
        )
        call = next((item for item in said[-1]["output"] if item["type"] == "function_call"), None)
        output = call and {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": "ok",
        }
        turns.append([output or {"role": "user", "content": "and on"}])
    first, second, _ = (request.prompt for request in s.engine.submitted)
    made = (*encode(agent[0], says[0], special=False), END)
    assert second[: len(first) + len(made)] == first + made
    prompt = agent[0].decode(second)
    assert prompt.count("you") == 1 and "ok" in prompt[len(agent[0].decode(first + made)) :]
    sent = [*turns[0], *said[0]["output"], *turns[1]]
    referred = [
        *turns[0],
        *({"type": "item_reference", "id": i["id"]} for i in said[0]["output"]),
        *turns[1],
    ]
    for items in (sent, referred):
        await ask(s, input=items, tools=TOOLS, instructions="you", store=False)
        assert s.engine.submitted[-1].prompt == second


async def test_instructions_are_not_inherited(
    make: Callable[..., Server], agent: tuple[Any, Path]
) -> None:
    s = make()
    id = (await ask(s, instructions="system")).json["id"]
    await ask(s, input="and", previous_response_id=id)
    assert "system" not in agent[0].decode(s.engine.submitted[-1].prompt)


async def test_input_items(make: Callable[..., Server]) -> None:
    s = make()
    first = (
        await ask(
            s, input=[{"role": "user", "content": "1"}, {"role": "developer", "content": "2"}]
        )
    ).json
    second = (await ask(s, input="4", previous_response_id=first["id"])).json

    async def page(query: str) -> Answer:
        path = f"/v1/responses/{second['id']}/input_items"
        connection = Connection(s.app, path, method="GET")
        connection.scope["query_string"] = query.encode()
        return await connection.answer()

    found = (await page("order=asc")).json
    texts = [item["content"][0]["text"] for item in found["data"]]
    assert texts == ["1", "2", "hello world", "4"] and found["has_more"] is False
    ids = [item["id"] for item in found["data"]]
    assert (found["first_id"], found["last_id"]) == (ids[0], ids[-1]) and len(set(ids)) == 4
    assert [item["role"] for item in found["data"]] == ["user", "developer", "assistant", "user"]
    assert found["data"][0]["content"] == [{"type": "input_text", "text": "1"}]
    newest = (await page("limit=3")).json
    assert [item["id"] for item in newest["data"]] == ids[::-1] and newest["has_more"] is False


def response(id: str, previous: str | None = None, said: str = "hello") -> dict[str, Any]:
    return {
        "id": id,
        "previous_response_id": previous,
        "output": [{"id": f"msg_{id}", "said": said}],
    }


def test_the_least_used_makes_room() -> None:
    store = Store()
    for id in "ab":
        store.add(response(id), [])
    store.max_bytes = sum(each.size for each in store._stored.values())
    store.get("a")
    store.add(response("c"), [])
    with pytest.raises(ApiError):
        store.get("b")
    for id in "ac":
        assert store.get(id) == (response(id), [])


def test_what_is_kept_has_a_size() -> None:
    store = Store(max_bytes=1000)
    for id in map(str, range(50)):
        store.add(response(id, said="x" * 100), [])
        assert sum(each.size for each in store._stored.values()) <= 1000
    assert 2 < len(store._stored) < 10
    store.add(response("large", said="x" * 1000), [])  # no room for others, nor for itself
    assert store == Store(max_bytes=1000)


def test_a_conversation_needs_only_its_last_response() -> None:
    store = Store()
    store.add(response("a"), [])
    store.add(response("b", "a"), store.conversation("a"))
    assert [item["id"] for item in store.conversation("b")] == ["msg_a", "msg_b"]
    store.delete("a")
    assert [item["id"] for item in store.conversation("b")] == ["msg_a", "msg_b"]
    with pytest.raises(ApiError) as caught:
        store.conversation("a")
    assert (
        caught.value.code == "previous_response_not_found"
        and "is not stored" in caught.value.message
    )


def test_an_item_that_was_sent_again_is_found_in_its_latest_response() -> None:
    store = Store()
    store.add(response("a"), [])
    store.add(response("b"), [{"id": "msg_a", "said": "again"}])
    for id in "ab":
        items: list[Any] = [{"type": "item_reference", "id": "msg_a"}]
        store.resolve(items)
        assert items[0]["said"] == "again"
        store.delete(id)
    assert store == Store()


# ---- calls while they are written

ARGUMENTS = '{"input":"' + "hello you, " * 9 + '"}'
LONG = f'<tool_call>\n{{"name": "%s", "arguments": {ARGUMENTS}}}\n</tool_call>'


async def test_arguments_are_streamed_as_they_are_written(make: Callable[..., Server]) -> None:
    said = LONG % "f" + LONG % "agents__spawn"
    found = events(await ask(make(said), stream=True, tools=TOOLS))
    whole = (await ask(make(said), tools=TOOLS)).json
    assert unnamed(found[-1]["response"]["output"]) == unnamed(whole["output"])
    for k, item in enumerate(whole["output"]):
        own = [e for e in found if e.get("output_index") == k]
        pieces = [e["delta"] for e in own if kinds([e]) == ["function_call_arguments.delta"]]
        assert len(pieces) > 30 and all(pieces)
        assert "".join(pieces) == item["arguments"] == ARGUMENTS
        assert kinds([own[-2]]) == ["function_call_arguments.done"]
        assert own[-1]["item"]["status"] == "completed"


async def test_a_tools_own_name_goes_before_a_short_one(make: Callable[..., Server]) -> None:
    """Where a model leaves out the namespace."""
    spaces = [{"type": "namespace", "name": "n", "tools": [TOOLS[0], TOOLS[1]]}]
    said = LONG % "f" + LONG % "patch"
    for tools, names in (([TOOLS[0], *spaces], [None, "n"]), (spaces, ["n", "n"])):
        body = (await ask(make(said), tools=tools)).json
        assert [item.get("namespace") for item in body["output"]] == names


async def test_a_custom_tools_text_comes_whole(make: Callable[..., Server]) -> None:
    found = events(await ask(make(LONG % "patch"), stream=True, tools=TOOLS))
    [piece] = [e["delta"] for e in found if kinds([e]) == ["custom_tool_call_input.delta"]]
    assert piece == "hello you, " * 9


@pytest.mark.parametrize(("name", "kind"), [("f", "function_call"), ("patch", "custom_tool_call")])
async def test_a_call_cut_by_max_tokens_is_a_partial_call(
    make: Callable[..., Server], name: str, kind: str
) -> None:
    said = LONG % name
    found = events(await ask(make(said), stream=True, tools=TOOLS, max_output_tokens=60))
    whole = (await ask(make(said), tools=TOOLS, max_output_tokens=60)).json
    assert kinds(found)[-1] == "incomplete" and whole["status"] == "incomplete"
    assert unnamed(found[-1]["response"]["output"]) == unnamed(whole["output"])
    [item] = whole["output"]
    assert (item["type"], item["name"], item["status"]) == (kind, name, "incomplete")
    wrote = item.get("arguments", item.get("input"))
    assert wrote and ARGUMENTS.startswith(wrote)


@pytest.mark.parametrize(("name", "kind"), [("f", "function_call"), ("patch", "custom_tool_call")])
async def test_a_call_that_the_model_breaks_off_is_incomplete(
    make: Callable[..., Server], name: str, kind: str
) -> None:
    """A client must not run half a patch as if it were a whole one."""
    broken = (LONG % name)[:60]
    [item] = (await ask(make(broken), tools=TOOLS)).json["output"]
    assert (item["type"], item["status"]) == (kind, "incomplete")
    assert ARGUMENTS.startswith(item.get("arguments", item.get("input")))

"""What one body may cost: conversations are read in time and memory that grow with their size, and
all bodies together have a bound."""

import asyncio
import gc
import socket
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.config import Config, ConfigError
from mlxspec.server import anthropic, process
from mlxspec.server.body import MAX_BODIES, MAX_ITEMS, Body
from mlxspec.server.generate import Generation
from mlxspec.server.openai import schema as openai
from mlxspec.server.responses import schema as responses
from mlxspec.text.messages import RejectedRequest
from mlxspec.text.rewrites import merged
from tests.support.parameter_rows import only
from tests.support.scripted import MESSAGES, Connection, server

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
MANY, LONG = 9000, "x" * 3000
SECONDS = 20.0  # what is joined again and again takes minutes


def test_a_tool_is_defined_once_however_often_it_is_referred_to() -> None:
    tool = {"name": "fly", "input_schema": {"description": LONG}, "defer_loading": True}
    found = [{"type": "tool_reference", "tool_name": "fly"}] * MANY
    result = {"type": "tool_result", "tool_use_id": "c", "content": found}
    use = {"type": "tool_use", "id": "c", "name": "search", "input": {}}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = anthropic.Prompt.model_validate({"messages": turns, "tools": [tool]})
    *_, message = anthropic.chat_messages(body)
    assert message["content"].count(LONG) == 1
    assert len(message["content"]) < 2 * len(LONG) + 100 * MANY


def test_many_items_of_an_assistant() -> None:
    items = [{"type": "message", "role": "assistant", "content": LONG} for _ in range(MANY)]
    began = time.monotonic()
    [message] = responses.chat_messages([], items, [])
    assert len(message["content"]) == MANY * len(LONG) + (MANY - 1) * len(responses.GAP)
    assert time.monotonic() - began < SECONDS


ITEMS = st.sampled_from(
    [
        {"type": "message", "role": "assistant", "content": "a"},
        {"type": "message", "role": "user", "content": ""},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ]
)


@given(st.lists(ITEMS, max_size=12))
def test_neighbours_of_an_assistant_are_one_message(items: list[Any]) -> None:
    """In the order of their texts and calls, with a gap between neighbours of a kind."""
    made = responses.chat_messages([], items, [])
    assert not any(
        one["role"] == other["role"] == "assistant"
        for one, other in pairwise(made)
        if "reasoning_content" not in (one.keys() ^ other.keys())
    )
    texts = "".join(m.get("content", "") for m in made if m["role"] == "assistant")
    assert texts.replace(responses.GAP, "").count("a") == sum(
        i.get("role") == "assistant" for i in items
    )
    calls = [call for m in made for call in m.get("tool_calls", [])]
    assert len(calls) == sum(i["type"] == "function_call" for i in items)
    outputs = [m for m in made if m["role"] == "tool"]
    assert len(outputs) == sum(i["type"] == "function_call_output" for i in items)
    assert all(m["tool_call_id"] == "c" and m["content"] == "o" for m in outputs)


def test_many_messages_of_one_role() -> None:
    began = time.monotonic()
    [first] = merged([{"role": "user", "content": LONG} for _ in range(MANY)], None)
    assert first["content"] == "\n\n".join([LONG] * MANY)
    assert time.monotonic() - began < SECONDS


def test_neighbours_that_are_merged_keep_what_they_have() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "assistant", "content": "", "reasoning_content": "why"},
        {"role": "assistant", "content": "a", "tool_calls": [call], "name": "n"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    first, *results = merged(turns, None)
    assert first["content"] == "a\n\nb" and first["reasoning_content"] == "why"
    assert first["tool_calls"] == [call, call] and first["name"] == "n"
    assert results == turns[3:]


async def test_more_images_than_messages_may_be_are_refused(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir)
    message = {"role": "user", "content": "hello", "images": [""] * (MAX_ITEMS + 1)}
    answer = await s.post("/api/chat", {"model": "tiny", "messages": [message]})
    assert answer.status == 400 and "images" in answer.json["error"]


def test_many_allowed_tools_are_the_only_ones() -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_ITEMS)]
    some = [{"type": "function", "function": {"name": f"f{2 * i}"}} for i in range(200_000)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": some}}
    began = time.monotonic()
    body = openai.Chat.model_validate({"messages": MESSAGES, "tools": tools, "tool_choice": choice})
    assert body.tools == tools[::2] and body.tool_choice == "auto"
    assert time.monotonic() - began < SECONDS


async def test_a_long_name_of_a_model_is_repeated_nowhere(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir)
    answer = await s.post(CHAT, {"messages": MESSAGES, "model": "claude-" + LONG})
    assert answer.status == 404 and len(answer.body) < 1000
    assert (await s.post(CHAT, {"messages": MESSAGES, "model": "claude-x"})).status == 200


async def test_a_schema_that_takes_long_holds_up_no_other(tokenizer: Any, model_dir: Any) -> None:
    """Neither a prompt, nor an answer by another schema."""
    s = server(tokenizer, model_dir)
    schema = {"properties": {f"k{i}": {} for i in range(10_000)}}

    def asked(schema: Any) -> Any:
        return {"messages": MESSAGES, "format": schema}

    assert (await s.post("/api/chat", asked({"const": "hello"}))).status == 200
    slow = Connection(s.app, "/api/chat", asked(schema))
    await asyncio.sleep(0.3)
    assert (await s.post("/api/chat", asked({"enum": ["hello"]}))).status == 200
    assert (await s.chat()).status == 200
    assert not slow.task.done()
    answer = await slow.answer()
    assert answer.status == 400 and answer.json["error"].startswith("format cannot be honoured")


async def test_a_client_that_leaves_while_its_schema_compiles(
    tokenizer: Any, model_dir: Any
) -> None:
    s = server(tokenizer, model_dir)
    schema = {"properties": {f"k{i}": {} for i in range(9999)}}
    slow = Connection(s.app, "/api/chat", {"messages": MESSAGES, "format": schema})
    await asyncio.sleep(0.3)
    slow.leave()
    assert (await slow.answer()).status == 499
    assert not s.engine.submitted


async def test_all_bodies_that_are_being_read_have_a_bound(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir, config=Config(max_body_mb=1))
    part = b'{"messages": "' + b"x" * ((1 << 20) - 20)
    kept = [Connection(s.app, CHAT, chunks=[part]) for _ in range(MAX_BODIES)]
    for one in kept:
        one._receive = _unfinished(part)  # type: ignore[method-assign]
    await asyncio.sleep(0.05)
    full = await s.post(CHAT, chunks=[part, b'"}'])
    assert full.status == 429 and int(dict(full.headers)["retry-after"]) > 0
    assert full.error["message"].startswith("other requests have large bodies")
    for one in kept:
        one.task.cancel()
    await asyncio.gather(*(one.task for one in kept), return_exceptions=True)
    assert s.app.state.server.unread == 0
    assert (await s.post(CHAT, chunks=[part, b'"}'])).status == 400  # no messages


LARGE: Any = [[f"{i}"] for i in range(30_000)]  # 3.5 MB when it was parsed, and in no prompt
SAID: Any = {"messages": MESSAGES, "stream": True}
ASKED: dict[str, Any] = {
    CHAT: {**SAID, "chat_template_kwargs": {"a": LARGE}},
    "/v1/chat/completions?": {**SAID, "messages": [{**MESSAGES[0], "extra": LARGE}]},
    "/v1/completions": {"prompt": "a", "stream": True, "extra": LARGE},
    "/v1/messages": {
        **SAID,
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {"a": LARGE}, "defer_loading": True}],
    },
    "/v1/responses": {"input": "a", "stream": True, "extra": LARGE},
    "/api/chat": {**SAID, "options": {"extra": LARGE}},
    "/api/generate": {"prompt": "a", "extra": LARGE},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKED)
async def test_what_was_parsed_is_let_go_before_the_answer(
    path: str, tokenizer: Any, model_dir: Any
) -> None:
    s = server(tokenizer, model_dir, holds=True)
    for _ in range(2):  # what is made once
        slow = Connection(s.app, path.strip("?"), ASKED[path])
        await s.engine.until(lambda: s.engine.submitted)
        slow.leave()
        await slow.task
    gc.collect()
    gc.disable()  # what is let go is so at once
    try:
        tracemalloc.start()
        slow_ones: list[Any] = []
        grown = []  # bytes; threads of other tests may allocate beside one round, what stays in all
        for _ in range(3):
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(4):
                number = len(s.engine.submitted)
                slow_ones.append(Connection(s.app, path.strip("?"), ASKED[path]))
                await s.engine.until(lambda n=number: len(s.engine.submitted) > n)  # type: ignore[misc]
            await asyncio.sleep(0.05)
            assert not [one for one in gc.get_objects() if isinstance(one, Body)]
            grown.append(tracemalloc.get_traced_memory()[0] - before)
        assert min(grown) < 1 << 20, grown
        assert s.app.state.server.unread == 0
    finally:
        tracemalloc.stop()
        gc.enable()
    s.engine.push("hello", "stop")
    assert (await slow_ones[-1].answer()).status == 200
    for one in slow_ones[:-1]:
        one.leave()
        await one.task


@pytest.mark.parametrize("field", ["metadata", "user", "tools", "text", "input"])
async def test_what_a_response_repeats_has_a_bound(
    field: str, tokenizer: Any, model_dir: Any
) -> None:
    s = server(tokenizer, model_dir)
    given: Any = {
        "metadata": {"a": LARGE},
        "user": "a" * (1 << 22),
        "tools": [{"type": "web_search", "a": LARGE}],
        "text": {"format": {"type": "text"}, "a": LARGE},
        "input": [{"role": "user", "content": "a", "extra": LARGE}],
    }[field]
    answer = await s.post("/v1/responses", {"input": "a", field: given})
    assert answer.status == 400 and answer.error["param"] == field
    assert "send less of it" in answer.error["message"]


async def test_bodies_that_wait_for_the_text_thread_are_counted(
    tokenizer: Any, model_dir: Any
) -> None:
    """By what they take when they are parsed."""
    s = server(tokenizer, model_dir, config=Config(max_body_mb=1))
    state, gate = s.app.state.server, asyncio.Event()
    loop = asyncio.get_running_loop()

    def stand() -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

    state.later(stand)
    body = {"messages": MESSAGES, "extra": [[]] * 6000}  # 24 KB, 2 MB when it was parsed
    kept = [Connection(s.app, CHAT, body) for _ in range(20)]
    await asyncio.sleep(0.5)
    assert state.unread < (MAX_BODIES + 20) << 20
    assert sum(one.task.done() for one in kept) > 8
    assert not (small := Connection(s.app, CHAT, {"messages": MESSAGES})).task.done()
    gate.set()
    statuses = {(await one.answer()).status for one in kept}
    assert statuses == {200, 429} and (await small.answer()).status == 200
    assert state.unread == 0


@pytest.mark.parametrize("lark", only(["start: nothing", "start: /(?=a)/"], 0))
async def test_what_a_refused_grammar_took_is_let_go_at_once(
    lark: str, tokenizer: Any, model_dir: Any
) -> None:
    s = server(tokenizer, model_dir)
    assert (await s.chat(grammar=lark)).status == 400
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert (await s.chat(grammar=lark)).status == 400
        for _ in range(100):  # the thread that compiled may not have let go of its result yet
            kinds = (Generation, RejectedRequest)
            found = [one for one in gc.get_objects() if isinstance(one, kinds)]
            if not found:
                break
            del found
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("only the garbage collector would free them")
    finally:
        gc.enable()


def _unfinished(part: bytes) -> Any:
    parts = [part]

    async def receive() -> Any:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": True}
        await asyncio.Event().wait()

    return receive


def test_a_port_on_which_another_server_listens_first_is_named(
    tokenizer: Any, model_dir: Any
) -> None:
    """Both were bound before either listened: they may share an address until then."""
    s = server(tokenizer, model_dir)
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        with process.bind(Config(port=port)) as second:
            first.listen()
            s.app.state.server.config = Config(port=port)
            with pytest.raises(ConfigError, match=f"port = {port}.*another --port"):
                process.serve(s.app, second)

"""Anthropic's own client over a real socket, against a scripted engine that reasons and calls
tools."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.support.live import live
from tests.support.scripted import INFO, MESSAGES, Server, server

pytestmark = pytest.mark.anyio

ROOMY = replace(INFO, context=8192)
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
THOUGHT = "<think>\nI look.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "/é", "deep": true}}\n</tool_call>'
ASK: Any = {"model": "claude-any", "max_tokens": 256, "messages": MESSAGES}


@contextmanager
def served(agent: tuple[Any, Path], **script: Any) -> Iterator[tuple[Server, Anthropic]]:
    s = server(*agent, **{"info": ROOMY, **script})
    with (
        live(s.app) as base,
        Anthropic(base_url=base, api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield s, client


def test_a_message(agent: Any, anyio_backend: str) -> None:
    with served(agent, says=(THOUGHT + "hello é🦊",), cached=4) as (s, client):
        found = client.messages.create(**ASK, system="be kind", thinking={"type": "adaptive"})
        thought, text = found.content
        assert (thought.type, text.type) == ("thinking", "text")
        assert thought.thinking == "I look." and thought.signature and text.text == "hello é🦊"
        assert found.stop_reason == "end_turn" and found.model == "tiny"
        counts, [request] = found.usage, s.engine.submitted
        assert counts.input_tokens + counts.cache_read_input_tokens == len(request.prompt)
        assert counts.cache_read_input_tokens == 4 and counts.cache_creation_input_tokens == 0
        assert found._request_id == found.id == request.id


def test_the_events_of_a_stream(agent: Any, anyio_backend: str) -> None:
    """The raw events, then what the client's own accumulator makes of them."""
    with served(agent, says=(THOUGHT + "Let me see." + CALL,), cached=4) as (_, client):
        whole = client.messages.create(**ASK, tools=[LOOK])
        raw = [event.type for event in client.messages.create(**ASK, tools=[LOOK], stream=True)]
        assert [
            kind
            for i, kind in enumerate(raw)
            if kind != "content_block_delta" or raw[i - 1] != kind
        ] == [
            "message_start",
            *("content_block_start", "content_block_delta", "content_block_stop") * 3,
            "message_delta",
            "message_stop",
        ]
        with client.messages.stream(**ASK, tools=[LOOK]) as stream:
            kinds = list(dict.fromkeys(event.type for event in stream))
            final = stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
        texts, wanted = ([b.model_dump(exclude={"id"}) for b in m.content] for m in (final, whole))
        assert texts == wanted and final.stop_reason == whole.stop_reason == "tool_use"
        assert final.usage == whole.usage and final.usage.cache_read_input_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools(agent: Any, stream: bool, anyio_backend: str) -> None:
    with served(agent, says=(THOUGHT + CALL,)) as (s, client):

        def say(messages: list[Any]) -> Any:
            if not stream:
                return client.messages.create(**ASK | {"messages": messages}, tools=[LOOK])
            with client.messages.stream(**ASK | {"messages": messages}, tools=[LOOK]) as events:
                return events.get_final_message()

        first = say(MESSAGES)
        [call] = [block for block in first.content if block.type == "tool_use"]
        assert call.name == "look" and call.input == {"at": "/é", "deep": True}
        s.engine.says = ("I see a file.",)
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": "a file",
            "is_error": True,
        }
        turns = [*MESSAGES, first.to_param(), {"role": "user", "content": [result]}]
        second = say(turns)
        assert second.stop_reason == "end_turn" and second.content[0].text == "I see a file."
        one, two = (request.prompt for request in s.engine.submitted)
        said = s.engine.tokenizer.decode(two[len(one) :])
        assert (
            two[: len(one)] == one and said.startswith(THOUGHT + CALL) and "Error: a file" in said
        )
        counted = client.messages.count_tokens(model="tiny", messages=turns, tools=[LOOK])
        assert counted.input_tokens == len(two) == second.usage.input_tokens


def test_the_beta_client(agent: Any, anyio_backend: str) -> None:
    """POST /v1/messages?beta=true, as Claude Code and others send it."""
    with served(agent) as (s, client):
        found = client.beta.messages.create(
            **ASK, betas=["context-management-2025-06-27"], context_management={}
        )
        assert found.content[0].text == "hello world"
        counted = client.beta.messages.count_tokens(model="tiny", messages=MESSAGES)
        assert counted.input_tokens == len(s.engine.submitted[0].prompt)


def test_models(agent: Any, anyio_backend: str) -> None:
    with served(agent) as (_, client):
        [found] = client.models.list()
        assert found == client.models.retrieve("claude-any")
        assert (found.id, found.type, found.max_input_tokens) == ("tiny", "model", ROOMY.context)
        assert found.created_at.timestamp() == ROOMY.created
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("other")


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "no model 'other' here; send "),
        (
            {"extra_body": {"temperature": 3}},
            anthropic.BadRequestError,
            "temperature = 3",
        ),
        ({"extra_body": {"grammar": 1}}, anthropic.BadRequestError, "grammar = 1 is not supported"),
        (
            {"messages": [{"role": "user", "content": "é" * 9000}]},
            anthropic.BadRequestError,
            f"prompt is too long: 9012 tokens > {ROOMY.context} maximum",
        ),
    ],
)
def test_errors(agent: Any, options: Any, kind: Any, said: str, anyio_backend: str) -> None:
    with served(agent) as (_, client):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.messages.create(**ASK | options, stream=stream)
            assert caught.value.body["error"]["message"].startswith(said)


def test_a_full_queue_is_tried_again(agent: Any, anyio_backend: str) -> None:
    with served(agent, busy=1) as (s, client):
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(**ASK)
        assert caught.value.response.headers["retry-after"] == "1"
        submit, tries = s.engine.submit, []

        def once_more(request: Any) -> Any:
            tries.append(request)
            s.engine.busy = 2 - len(tries)
            return submit(request)

        s.engine.submit = once_more  # type: ignore[method-assign]
        assert client.with_options(max_retries=1).messages.create(**ASK).stop_reason == "end_turn"
        assert len(tries) == 2


def test_an_error_in_a_stream_is_raised(agent: Any, anyio_backend: str) -> None:
    with served(agent) as (s, client):
        choice = s.engine.choice
        s.engine.choice = lambda *a: (  # type: ignore[method-assign]
            replace(output, finish="error", error="out of memory") if output.finish else output
            for output in choice(*a)
        )
        with pytest.raises(anthropic.APIStatusError, match="the engine failed: out of memory"):
            list(client.messages.create(**ASK, stream=True))


def test_the_tool_runner_falls_back_to_whole_conversations(agent: Any, anyio_backend: str) -> None:
    """Its default is a thread that the server keeps, of which it sends the new messages only."""
    with served(agent, says=(CALL,)) as (s, client):

        @anthropic.beta_tool
        def look(at: str, deep: bool = False) -> str:
            """Looks."""
            s.engine.says = ("It is a file.",)
            return "what is there"

        final = client.beta.messages.tool_runner(**ASK, tools=[look]).until_done()
        assert final.content[0].type == "text" and final.content[0].text == "It is a file."
        first, second = (request.prompt for request in s.engine.submitted)
        assert second[: len(first)] == first
        assert "what is there" in s.engine.tokenizer.decode(second)


async def test_a_closed_stream_aborts(agent: Any) -> None:
    s = server(*agent, info=ROOMY, holds=True)
    aborted = threading.Event()
    s.engine.abort = lambda *a: aborted.set()  # type: ignore[method-assign]
    with live(s.app) as base:
        async with AsyncAnthropic(
            base_url=base, api_key="none", max_retries=0, timeout=30
        ) as client:
            stream = await client.messages.create(**ASK, stream=True)
            assert (await anext(aiter(stream))).type == "message_start" and not aborted.is_set()
            await stream.close()
            assert await asyncio.to_thread(aborted.wait, 5)


def test_is_anybody_there(agent: Any, anyio_backend: str) -> None:
    with served(agent) as (_, client), httpx.Client(base_url=str(client.base_url)) as plain:
        assert [plain.head(path).status_code for path in ("/", "/api/hello")] == [200, 200]
        body = {**ASK, "stream": True, "system": [{"type": "text", "text": json.dumps({})}]}
        answer = plain.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "a,b"})
        assert answer.status_code == 200 and answer.text.endswith(
            'data: {"type":"message_stop"}\n\n'
        )


def test_the_input_of_a_call_grows(agent: Any, anyio_backend: str) -> None:
    """The client reads the input so far after each piece, without a string that has no end."""
    at = "/é" + "hello you, " * 9
    with served(agent, says=(CALL.replace("/é", at),)) as (_, client):
        with client.messages.stream(**ASK, tools=[LOOK]) as stream:
            seen = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        assert len(seen) > 30 and "".join(seen) == json.dumps(
            final.content[-1].input, ensure_ascii=False
        )
        assert final.content[-1].input == {"at": at, "deep": True}  # type: ignore[union-attr]
        with client.messages.stream(**ASK | {"max_tokens": 60}, tools=[LOOK]) as stream:
            cut = stream.get_final_message()
        assert cut.stop_reason == "max_tokens" and cut.content[-1].type == "tool_use"

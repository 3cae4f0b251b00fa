"""OpenAI's own client and /v1/responses over a real socket: scripted answers, then the real engine,
tiny."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import encode
from mlxspec.types import ModelInfo
from tests.support import tiny
from tests.support.live import live
from tests.support.scripted import END, INFO, Server, server

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WIDE = replace(INFO, context=8192)
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"arguments": {"path":"a"},  "name": "read"}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n"}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "read", "parameters": PARAMETERS, "strict": True},
    {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    },
    {"type": "web_search"},
]
STREAMED = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
def s(agent: tuple[Any, Path]) -> Server:
    return server(*agent, info=WIDE, group=200)


@pytest.fixture
def client(s: Server) -> Iterator[OpenAI]:
    with (
        live(s.app) as base,
        OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=30) as made,
    ):
        yield made


def ask(client: OpenAI, said: Any = "hello", **kw: Any) -> Any:
    return client.responses.create(model="tiny", input=said, **kw)


def strictly(response: Any) -> Any:
    """The response, if it is one by the letter of the SDK's types, which the SDK itself does not
    check."""
    Response.model_validate(response.to_dict())
    return response


def test_a_whole_answer(client: OpenAI) -> None:
    made = strictly(
        ask(client, instructions="you", metadata={"a": "b"}, reasoning={"effort": "low"})
    )
    assert made.output_text == "hello world" and made.status == "completed"
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_counting_tokens(client: OpenAI, s: Server) -> None:
    found = client.responses.input_tokens.count(model="tiny", input="hello", tools=TOOLS)
    assert found.object == "response.input_tokens"
    assert found.input_tokens == ask(client, tools=TOOLS).usage.input_tokens


def test_a_stream_has_its_events_in_their_order(client: OpenAI, s: Server) -> None:
    s.engine.says = (f"{THOUGHT}I look.\n{CALL}\n{PATCH}",)
    found = list(ask(client, tools=TOOLS, stream=True, include=["reasoning.encrypted_content"]))
    assert [event.type for event in found] == STREAMED
    for k, event in enumerate(found):
        assert (
            type(EVENT.validate_python(event.to_dict())) is type(event)
            and event.sequence_number == k
        )
    strictly(found[-1].response)


def test_what_the_client_adds_up_is_the_answer(client: OpenAI, s: Server) -> None:
    """Although events that say nothing are in between."""
    s.app.state.server.config = Config(keepalive_s=0.02)
    s.engine.holds = True
    text = f"{THOUGHT}I look.\n{CALL}"
    with client.responses.stream(model="tiny", input="hello", tools=TOOLS[:1]) as stream:
        seen: list[Any] = []
        for event in stream:
            seen.append(event)
            if event.type == "response.in_progress" and text:
                s.engine.push(text[:7], None if text[7:] else "stop")
                text = text[7:]
        final = stream.get_final_response()
    assert [event.type for event in seen].count("response.in_progress") > 5
    assert final.output_text == "I look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].parsed_arguments == {"path": "a"}  # type: ignore[union-attr]


def test_tools_go_round(client: OpenAI, s: Server, agent: tuple[Any, Path]) -> None:
    """The client sends everything back, as agents do, and the prompt repeats what was generated."""
    says = (f"{THOUGHT}I look.\n{CALL}", f"{THOUGHT}{PATCH}", "hello world")
    items: list[Any] = [{"role": "user", "content": "hello"}]
    made: Any = None
    for words in says:
        s.engine.says = (words,)
        made = strictly(ask(client, items, tools=TOOLS, store=False))
        items += [item.to_dict() for item in made.output]
        for item in made.output:
            if item.type == "function_call":
                assert (item.name, item.arguments) == ("read", '{"path": "a"}')
                items.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": "text"}
                )
            elif item.type == "custom_tool_call":
                assert (item.name, item.input) == ("patch", "*** Begin\n")
                items.append(
                    {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Done"}
                )
    assert made.output_text == "hello world"
    prompts = [request.prompt for request in s.engine.submitted]
    for words, before, after in zip(says, prompts, prompts[1:], strict=False):
        whole = (*before, *encode(agent[0], words, special=False), END)
        assert after[: len(whole)] == whole


def test_going_on_from_what_is_kept(client: OpenAI, s: Server, agent: tuple[Any, Path]) -> None:
    first = ask(client)
    second = ask(client, "and on", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    one, other = (request.prompt for request in s.engine.submitted)
    said = (*one, *encode(agent[0], "hello world", special=False), END)
    assert other[: len(said)] == said and "and on" in agent[0].decode(other[len(said) :])
    assert client.responses.retrieve(second.id) == strictly(second)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message"] * 3 and len(
        {item.id for item in items}
    ) == 3
    client.responses.delete(first.id)
    for fails in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            fails()
    assert ask(client, "and on", previous_response_id=second.id)  # has its whole conversation
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "and on", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("options", "kind", "code", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, None, "temperature"),
        ({"said": "word " * 9000}, openai.BadRequestError, "context_length_exceeded", "input"),
        ({"tools": [{"name": "f"}]}, openai.BadRequestError, None, "tools[0]"),
        ({"truncation": "auto"}, openai.BadRequestError, "unsupported_parameter", "truncation"),
        ({"extra_body": {"model": "other"}}, openai.NotFoundError, "model_not_found", "model"),
    ],
)
def test_errors(client: OpenAI, options: Any, kind: Any, code: str | None, param: str) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            ask(client, stream=stream, **options)
        assert (caught.value.code, caught.value.param) == (code, param)


def test_a_failure_in_a_stream(client: OpenAI, s: Server) -> None:
    s.engine.holds = True
    stream = ask(client, stream=True)
    assert next(stream).type == "response.created"
    s.engine.push(finish="error", error="no memory")
    last = list(stream)[-1]
    assert last.type == "response.failed" and "no memory" in strictly(last.response).error.message


def test_a_cancelled_stream_aborts(client: OpenAI, s: Server) -> None:
    s.engine.holds = True
    aborted = threading.Event()
    s.engine.abort = lambda *a: aborted.set()  # type: ignore[method-assign]
    stream = ask(client, stream=True)
    assert next(stream).type == "response.created"
    stream.close()
    assert aborted.wait(10)


def test_a_conversation_with_the_real_engine(tokenizer: Any, model_dir: Path) -> None:
    """The second turn finds the first in the prefix cache."""

    def start() -> Any:
        engine = tiny.engine(tiny.model("llama"), blocks=256, context=512, vocab=tiny.VOCAB)
        return engine, ModelInfo("tiny", 512, tiny.VOCAB, "rows", 8, 1, 1, 1_700_000_000)

    worker = EngineThread(tiny.manager(start), max_sequences=8, max_queue=16)
    worker.launch()
    try:
        app = create_app(worker, tokenizer, model_dir, Config())
        with (
            live(app) as base,
            OpenAI(base_url=base, api_key="none", max_retries=0, timeout=30) as client,
        ):
            options = {"max_output_tokens": 24, "extra_body": {"ignore_eos": True, "seed": 1}}
            first = strictly(ask(client, "hello world, and you, and the system", **options))
            assert first.status == "incomplete" and first.usage.output_tokens == 24
            events = list(ask(client, "and", previous_response_id=first.id, stream=True, **options))
            second = strictly(events[-1].response)
            cached = second.usage.input_tokens_details.cached_tokens
            assert first.usage.input_tokens - 8 <= cached < second.usage.input_tokens
            assert (
                "".join(e.delta for e in events if e.type == "response.output_text.delta")
                == second.output_text
            )
    finally:
        worker.stop()


def test_the_arguments_of_a_call_grow(client: OpenAI, s: Server) -> None:
    """In both of OpenAI's APIs, as their own client adds them up."""
    path, s.engine.group = "hello you, " * 9, 1
    s.engine.says = (
        f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{path}"}}}}\n</tool_call>',
    )
    with client.responses.stream(model="tiny", input="hello", tools=TOOLS[:1]) as stream:
        kind = "response.function_call_arguments.delta"
        seen = [event.snapshot for event in stream if event.type == kind]
        [item] = stream.get_final_response().output
    assert len(set(seen)) > 30 and item.parsed_arguments == {"path": path}  # type: ignore[union-attr]
    function = {"name": "read", "parameters": PARAMETERS, "strict": True}
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
    ) as chat:
        grown = [e.arguments for e in chat if e.type == "tool_calls.function.arguments.delta"]
        [choice] = chat.get_final_completion().choices
    assert len(set(grown)) > 30 and choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.function.parsed_arguments == {"path": path}  # type: ignore[union-attr]

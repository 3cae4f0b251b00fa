"""OpenAI's own client over a real socket: against a scripted engine, then against the real one,
tiny."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import encode
from tests.support import tiny
from tests.support.live import live, tiny_worker
from tests.support.scripted import MESSAGES, server

pytestmark = pytest.mark.anyio

CONTEXT = 512


@pytest.fixture(scope="module")
def worker() -> Iterator[EngineThread]:
    with tiny_worker("llama", CONTEXT, max_sequences=8, max_queue=16) as made:
        yield made


@pytest.fixture(scope="module")
def url(worker: EngineThread, tokenizer: Any, model_dir: Any) -> Iterator[str]:
    with live(create_app(worker, tokenizer, model_dir, Config())) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def ask(client: Any, text: str = "hello world", **kw: Any) -> Any:
    options = {
        "model": "tiny",
        "seed": 1,
        "max_tokens": 24,
        "extra_body": {"ignore_eos": True},
    } | kw
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **options)


def text_of(stream: Any, index: int = 0) -> str:
    return "".join(
        c.delta.content or "" for event in stream for c in event.choices if c.index == index
    )


def running(worker: EngineThread) -> int:
    stats = tiny.stats(worker)
    return stats.running + stats.waiting


async def test_scripted(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir, says=("hello é🦊",))
    with live(s.app) as base:
        async with AsyncOpenAI(
            base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:
            whole = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, logprobs=True
            )  # type: ignore[arg-type]
            assert (
                whole.choices[0].message.content == "hello é🦊"
                and whole.choices[0].finish_reason == "stop"
            )
            assert (
                whole.usage
                and whole.usage.total_tokens
                == whole.usage.prompt_tokens + whole.usage.completion_tokens
            )
            assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
            stream = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True
            )  # type: ignore[call-overload]
            events = [event async for event in stream]
            assert "".join(e.choices[0].delta.content or "" for e in events) == "hello é🦊"
            done = await client.completions.create(model="tiny", prompt="hello", logprobs=1)
            assert done.choices[0].text == "hello é🦊" and done.choices[0].logprobs
            assert [m.id async for m in client.models.list()] == ["tiny"]


async def test_retry_after_is_honoured(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir, busy=1)
    with live(s.app) as base:
        async with AsyncOpenAI(
            base_url=f"{base}/v1", api_key="none", max_retries=1, timeout=30
        ) as client:
            asking = asyncio.ensure_future(
                client.chat.completions.create(model="tiny", messages=MESSAGES)
            )  # type: ignore[arg-type]
            with pytest.raises(openai.RateLimitError) as caught:
                await client.with_options(max_retries=0).completions.create(
                    model="tiny", prompt="a"
                )
            assert caught.value.response.headers["retry-after"] == "1"
            s.engine.busy = 0
            assert (await asking).choices[0].message.content == "hello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_connection_aborts(tokenizer: Any, model_dir: Any, stream: bool) -> None:
    """While nothing has been generated yet."""
    s = server(tokenizer, model_dir, holds=True)
    aborted = threading.Event()
    s.engine.abort = lambda *a: aborted.set()  # type: ignore[method-assign]
    with live(s.app) as base:
        async with httpx.AsyncClient() as client:
            body = {"messages": MESSAGES, "stream": stream}
            task = asyncio.ensure_future(client.post(f"{base}/v1/chat/completions", json=body))
            while not s.engine.submitted:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.wait([task])
        assert await asyncio.to_thread(aborted.wait, 5)


def test_whole_and_streamed_say_the_same(client: OpenAI, anyio_backend: str) -> None:
    whole = ask(client)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 24
    events = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert text_of(events) == whole.choices[0].message.content != ""
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == 24
    assert events[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert events[-2].choices[0].finish_reason == "length"
    assert len({event.id for event in events}) == 1


def test_seeds_and_greed(client: OpenAI, anyio_backend: str) -> None:
    said = [ask(client, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]
    cold = [ask(client, seed=seed, temperature=0).choices[0].message.content for seed in (1, 2)]
    assert cold[0] == cold[1]


def test_choices_share_their_prompt(client: OpenAI, anyio_backend: str) -> None:
    answer = ask(client, n=2)
    texts = [choice.message.content for choice in answer.choices]
    assert texts[0] != texts[1] and answer.usage.completion_tokens == 48
    events = list(ask(client, n=2, stream=True))
    assert [text_of(events, i) for i in range(2)] == texts
    assert texts[0] == ask(client).choices[0].message.content


def test_log_probabilities(client: OpenAI, tokenizer: Any, anyio_backend: str) -> None:
    # A prompt that is computed whole and one whose prefix is cached differ in the last bits, so both
    # answers have it cached, also where this test comes first.
    ask(client, temperature=0)
    answer = ask(client, logprobs=True, top_logprobs=3, temperature=0)
    content = answer.choices[0].logprobs.content
    assert len(content) == 24 and all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(
        entry.logprob == entry.top_logprobs[0].logprob for entry in content
    )  # greedy: the best
    raw = bytes(b for entry in content for b in entry.bytes)
    assert raw.decode("utf-8", "replace").removeprefix(" ") == answer.choices[0].message.content
    streamed = list(ask(client, logprobs=True, top_logprobs=3, temperature=0, stream=True))
    assert [
        e for event in streamed for c in event.choices if c.logprobs for e in c.logprobs.content
    ] == content


def test_stop_strings(client: OpenAI, worker: EngineThread, anyio_backend: str) -> None:
    whole = ask(client, max_tokens=64).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    expected = whole[: whole.index(stop)]
    for answer in (
        ask(client, max_tokens=64, stop=stop),
        ask(client, max_tokens=64, stop=[stop, "never said"]),
    ):
        assert (
            answer.choices[0].message.content == expected
            and answer.choices[0].finish_reason == "stop"
        )
        assert answer.usage.completion_tokens < 64
    assert text_of(ask(client, max_tokens=64, stop=stop, stream=True)) == expected


def test_a_prediction_changes_no_token(client: OpenAI, anyio_backend: str) -> None:
    plain = ask(client)
    for content in (plain.choices[0].message.content, [{"type": "text", "text": "hello world"}]):
        prediction = {"type": "content", "content": content}
        for kw in ({"temperature": 0}, {"n": 2}, {"stream": True}):
            said = [ask(client, **kw, **extra) for extra in ({}, {"prediction": prediction})]
            if "stream" in kw:
                assert text_of(said[0]) == text_of(said[1]) == plain.choices[0].message.content
            else:
                assert said[0].choices == said[1].choices
    details = plain.usage.completion_tokens_details
    assert details.accepted_prediction_tokens <= plain.usage.completion_tokens
    assert details.rejected_prediction_tokens >= 0


def test_completions_continue_the_prompt(
    client: OpenAI, tokenizer: Any, anyio_backend: str
) -> None:
    ids = encode(tokenizer, "hello world")
    options = {
        "model": "tiny",
        "max_tokens": 16,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    by_text = client.completions.create(prompt="hello world", **options)
    by_ids = client.completions.create(prompt=ids, logprobs=0, **options)
    assert by_text.choices[0].text == by_ids.choices[0].text
    said = by_ids.choices[0].logprobs
    assert (
        len(said.tokens) == 16
        and said.text_offset[0] == 0
        and said.text_offset == sorted(said.text_offset)
    )


@pytest.mark.parametrize(
    ("options", "kind", "code", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 3}, openai.BadRequestError, None, "temperature"),
        ({"n": 9}, openai.BadRequestError, None, "n"),
        (
            {"extra_body": {"documents": [{"text": "x"}]}},
            openai.BadRequestError,
            "unsupported_parameter",
            "documents",
        ),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, None, "tools[0]"),
        ({"text": "word " * 600}, openai.BadRequestError, "context_length_exceeded", "messages"),
    ],
)
def test_errors(
    client: OpenAI, options: Any, kind: Any, code: str | None, param: str, anyio_backend: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            ask(client, stream=stream, **options)
        assert (caught.value.code, caught.value.param) == (code, param)


class Trip(BaseModel):
    """What a random model can be made to say."""

    city: Literal["Paris", "Rome"]
    days: list[Literal[1, 2, 3]] = Field(max_length=2)
    note: str | None = Field(max_length=4)


class Pick(BaseModel):
    n: Literal[1, 2]


def test_structured_answers(client: OpenAI, worker: EngineThread, anyio_backend: str) -> None:
    """By the SDK's own schema, of weights that mean nothing, streamed and whole."""
    messages: Any = [{"role": "user", "content": "hello"}]
    for seed in range(6):
        options: Any = {
            "model": "tiny",
            "messages": messages,
            "seed": seed,
            "response_format": Trip,
        }
        made = client.chat.completions.parse(**options).choices[0].message.parsed
        assert isinstance(made, Trip)
        with client.chat.completions.stream(**options) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == made
    whole = client.chat.completions.create(
        model="tiny", messages=messages, response_format={"type": "json_object"}, max_tokens=300
    )
    assert whole.choices[0].message.content.startswith("{")


def test_a_tool_that_must_be_called(client: OpenAI, anyio_backend: str) -> None:
    tool = openai.pydantic_function_tool(Pick)
    choice: Any = {"type": "function", "function": {"name": "Pick"}}
    for pick in ("required", choice):
        [picked] = client.chat.completions.parse(
            model="tiny",
            messages=MESSAGES,
            tools=[tool],
            tool_choice=pick,
            parallel_tool_calls=False,  # type: ignore[arg-type]
        ).choices
        assert picked.finish_reason == "tool_calls"
        assert isinstance(picked.message.tool_calls[0].function.parsed_arguments, Pick)


def test_a_schema_that_cannot_be_honoured(client: OpenAI, anyio_backend: str) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        ask(client, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.slow
def test_max_tokens_beyond_the_window_is_clamped(client: OpenAI, anyio_backend: str) -> None:
    answer = ask(client, max_tokens=131_072)
    assert answer.usage.total_tokens == CONTEXT and answer.choices[0].finish_reason == "length"


def test_a_cancelled_stream_frees_its_blocks(
    client: OpenAI, worker: EngineThread, anyio_backend: str
) -> None:
    stream = ask(client, max_tokens=CONTEXT, stream=True, text="a long one")
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while running(worker) or tiny.stats(worker).blocks_used:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_sixteen_streams_at_once(url: str, worker: EngineThread) -> None:
    """Each says what it says alone, although they share the engine's steps."""
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:

        async def one(i: int) -> tuple[str, int]:
            stream = await ask(
                client, f"question {i}", seed=i, stream=True, stream_options={"include_usage": True}
            )
            events = [event async for event in stream]
            return text_of(events), events[-1].usage.completion_tokens

        together = await asyncio.gather(*(one(i) for i in range(16)))
        assert [count for _, count in together] == [24] * 16
        assert len({text for text, _ in together}) == 16
        alone = [await one(i) for i in (0, 7, 15)]
        assert alone == [together[0], together[7], together[15]]
    assert worker.alive() and not running(worker)

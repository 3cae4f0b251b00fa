"""How an answer ends early, and what it leaves behind: aborts, keep-alives, errors, log line,
counters."""

import asyncio
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.server import generate as module
from mlxspec.types import Finish, Output
from tests.support.scripted import MESSAGES, Connection, Server, server

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


@pytest.fixture
def make(tokenizer: Any, model_dir: Any) -> Callable[..., Server]:
    return lambda config=None, **kw: server(tokenizer, model_dir, config, **kw)


def ask(s: Server, **body: Any) -> Connection:
    return Connection(s.app, CHAT, {"messages": MESSAGES, **body})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["", "hello"])
async def test_a_client_that_leaves_ends_its_request(
    make: Callable[..., Server], stream: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """During the prefill, before any output, and in the middle of the answer."""
    s = make(holds=True)
    connection = ask(s, stream=stream, n=2)
    await s.engine.until(lambda: s.engine.submitted)
    if said:
        s.engine.push(said)
    if stream:
        await connection.until(said.encode() or b'"role"')
    connection.leave()
    await s.engine.until(lambda: s.engine.aborted)
    assert s.engine.aborted == [(s.engine.submitted[0].id, None)]
    with caplog.at_level(logging.INFO, "mlxspec"):
        async with asyncio.timeout(10):
            await connection.task
    assert not stream or b"[DONE]" not in connection.body


async def test_a_client_that_leaves_while_its_prompt_is_rendered(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = make()
    began, go = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **kw: Any) -> list[int]:
        began.set()
        await go.wait()
        return [64]

    monkeypatch.setattr(type(s.app.state.server), "on_text_thread", slow)
    connection = ask(s)
    await began.wait()
    connection.leave()
    answer = await connection.answer()
    assert answer.status == 499 and s.engine.submitted == []


async def test_only_what_still_runs_is_aborted(make: Callable[..., Server]) -> None:
    s = make(holds=True)
    connection = Connection(s.app, "/v1/completions", {"prompt": ["hello", "you"], "stream": True})
    await s.engine.until(lambda: len(s.engine.submitted) == 2)
    s.engine.push(" world", finish="stop")  # the second prompt's answer
    await connection.until(b'"finish_reason":"stop"')
    connection.leave()
    await connection.task
    assert s.engine.aborted == [(s.engine.submitted[0].id, None)]


async def test_a_stalled_reader_can_still_leave(make: Callable[..., Server]) -> None:
    """A client that does not read blocks the sending; its leaving must be seen all the same."""
    s = make(holds=True)
    connection = ask(s, stream=True)
    blocked = asyncio.Event()
    plain = connection._send

    async def stuck(message: Any) -> None:
        if b"hello" in message.get("body", b""):
            blocked.set()
            await asyncio.Event().wait()
        await plain(message)

    connection._send = stuck  # type: ignore[method-assign]
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push("hello")
    await blocked.wait()
    connection.leave()
    await s.engine.until(lambda: s.engine.aborted)
    await connection.task


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue(make: Callable[..., Server], stream: bool) -> None:
    s = make(busy=7)
    for path, body in ((CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "hello"})):
        answer = await s.post(path, {**body, "stream": stream})
        assert answer.status == 429 and answer.headers["retry-after"] == "7"
        assert (
            answer.error["type"] == "rate_limit_error"
            and answer.error["code"] == "rate_limit_exceeded"
        )
        assert "try again in 7 s" in answer.error["message"]


async def test_a_dead_engine(make: Callable[..., Server]) -> None:
    answer = await make(lives=False).chat(stream=True)
    assert answer.status == 503 and answer.error["type"] == "server_error"


@pytest.mark.parametrize(
    ("finish", "status", "words"),
    [("error", 500, "the engine failed: broken"), ("abort", 503, "is stopping")],
)
async def test_an_engine_that_gives_up(
    make: Callable[..., Server], finish: Finish, status: int, words: str
) -> None:
    s = make(holds=True)
    whole, streamed = ask(s), None
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push("hello")
    s.engine.push(finish=finish, error="broken")
    answer = await whole.answer()
    assert answer.status == status and words in answer.error["message"]
    streamed = ask(s, stream=True)
    await s.engine.until(lambda: len(s.engine.submitted) == 2)
    s.engine.push("hello")
    s.engine.push(finish=finish, error="broken")
    answer = await streamed.answer()
    assert (
        words in answer.events[-1]["error"]["message"]
        and answer.events[-1]["error"]["type"] == "server_error"
    )
    assert answer.events[-2]["choices"][0]["delta"] == {"content": "hello"}


async def test_the_stream_begins_before_the_engine_does(make: Callable[..., Server]) -> None:
    s = make(holds=True)
    connection = ask(s, stream=True)
    await connection.until(b'"role"')
    assert connection.sent[0]["status"] == 200
    connection.leave()
    await connection.task


async def test_keep_alives(make: Callable[..., Server]) -> None:
    s = make(Config(keepalive_s=0.1), holds=True)
    connection = ask(s, stream=True)
    await connection.until(b": keep-alive\n\ndata: ")
    await connection.until(b'"delta":{"content":""}')  # some clients ignore comments
    s.engine.push("hello", finish="stop")
    answer = await connection.answer()
    assert [e["choices"][0]["delta"].get("content") for e in answer.events[-3:-1]] == [
        "hello",
        None,
    ]


@pytest.mark.parametrize(
    "asks", [{}, {"return_progress": True}, {"stream_options": {"include_progress": True}}]
)
@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
async def test_how_much_of_the_prompt_was_read(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, asks: Any, path: str, body: Any
) -> None:
    """In comments, once for each value, and in events where the client asks for them."""
    monkeypatch.setattr(module, "PROGRESS_S", 0.005)
    s = make(holds=True)
    connection = Connection(s.app, path, {**body, "stream": True, **asks})
    await s.engine.until(lambda: s.engine.submitted)
    [request] = s.engine.submitted
    size = len(request.prompt)
    for read in (0, 1, 3):
        s.engine.running_requests = ((request.id, 1, read), (request.id, 0, 0), ("other", 0, 9))
        if read:
            await connection.until(b": prompt %d of %d\n\n" % (read, size))
        await asyncio.sleep(0.05)
    s.engine.push("hello", finish="stop")
    answer = await connection.answer()
    assert answer.body.count(b": prompt ") == 2
    told = [json.loads(line[6:]) for line in answer.body.splitlines() if b'_progress":' in line]
    assert len(told) == 2 * bool(asks)
    for chunk, read in zip(told, (1, 3), strict=False):
        assert chunk["choices"] == [] and chunk["prompt_progress"].pop("time_ms") >= 0
        assert chunk["prompt_progress"] == {"total": size, "cache": 1, "processed": read}


async def test_a_body_and_a_prompt_that_waits_tell_no_progress(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRESS_S", 0.005)
    s = make(holds=True)
    whole, waits = ask(s, return_progress=True), ask(s, stream=True, return_progress=True)
    await s.engine.until(lambda: len(s.engine.submitted) == 2)
    s.engine.running_requests = ((s.engine.submitted[0].id, 0, 3),)
    await asyncio.sleep(0.05)
    assert not whole.sent and b"prompt" not in waits.body
    for connection in (whole, waits):
        connection.leave()
        await connection.task


async def test_a_text_completion_gets_events_without_text(make: Callable[..., Server]) -> None:
    s = make(Config(keepalive_s=0.05), holds=True)
    connection = Connection(s.app, "/v1/completions", {"prompt": "hello", "stream": True})
    await connection.until(b'"text":""')
    connection.leave()
    await connection.task


async def test_outputs_without_text_are_no_sign_of_life(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is held back for a stop string keeps the client waiting as a prefill does."""
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    s = make(Config(keepalive_s=15), holds=True)  # the engine's own silence would take too long
    connection = ask(s, stream=True, stop="hello world")
    await connection.until(b'"role"')
    s.engine.push("hello")
    now = 16.0
    s.engine.push(" ")
    await connection.until(b": keep-alive\n\n")
    connection.leave()
    await connection.task


async def test_the_log_line(make: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    s = make(cached=4)
    with caplog.at_level(logging.INFO, "mlxspec"):
        await s.chat(n=2)
    [request] = s.engine.submitted
    [line] = [r.getMessage() for r in caplog.records if request.id in r.getMessage()]
    begin = f"{request.id}: {len(request.prompt)} in, 4 cached, 6 out, first after 0."
    assert line.startswith(begin) and line.endswith(" tokens/s, 6 rounds, stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_line_tells_of_drafts(
    make: Callable[..., Server], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    s = make(says=("hello world the system",), group=2, drafted=4)
    with caplog.at_level(logging.INFO, "mlxspec"):
        await s.chat(stream=stream)
    told = "2.0 tok/round, 25% of drafts kept"
    assert "6 out, first after 0." in caplog.text and f"/s, 3 rounds, {told}, stop" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_line_of_a_client_that_left(
    make: Callable[..., Server], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    s = make(holds=True)
    connection = ask(s, stream=stream)
    await s.engine.until(lambda: s.engine.submitted)
    with caplog.at_level(logging.INFO, "mlxspec"):
        connection.leave()
        await connection.task
    assert "0 out, none after" in caplog.text and caplog.text.rstrip().endswith("0 rounds, gone")


async def test_every_refusal_is_counted_and_logged(
    make: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    """An error has one format, from the access checks, the router, an endpoint and the engine."""
    caplog.set_level(logging.INFO, "mlxspec")
    s = make()
    await s.get("/v1/models", headers={"host": "evil.example"})
    await s.get("/no/such\npath")
    await s.get("/v1/chat/completions")
    await s.chat(model="other")
    s.engine.busy = 3
    await s.chat()
    s.engine.ending = True
    assert (await s.chat()).headers["retry-after"] == "5"
    page = (await s.get("/metrics")).body.decode()
    for status, count in ((403, 1), (404, 2), (405, 1), (429, 1), (503, 1)):
        assert f'mlxspec_refused_total{{status="{status}"}} {count}.0' in page
    lines = [record.getMessage() for record in caplog.records if record.getMessage()[-1] == ")"]
    assert len(lines) == 6 and lines[1].startswith(
        "GET /no/such?path: GET /no/such?path: Not Found"
    )
    assert lines[3].startswith("POST /v1/chat/completions: no model 'other'") and lines[3].endswith(
        "(404)"
    )


async def test_counters(make: Callable[..., Server]) -> None:
    s = make()
    await s.chat()
    await s.chat(stream=True, max_tokens=1)
    await s.chat(temperature=9)
    page = (await s.get("/metrics")).body.decode()
    assert 'mlxspec_request_seconds_count{finish="stop",model="tiny"} 1.0' in page
    assert 'mlxspec_request_seconds_count{finish="length",model="tiny"} 1.0' in page
    assert 'mlxspec_first_token_seconds_count{model="tiny"} 2.0' in page
    assert 'mlxspec_between_tokens_seconds_count{model="tiny"} 2.0' in page
    assert 'mlxspec_refused_total{status="400"} 1.0' in page


async def test_grouped_tokens_are_counted_one_by_one(make: Callable[..., Server]) -> None:
    s = make(says=("hello world the system",), group=2)
    await s.chat()
    page = (await s.get("/metrics")).body.decode()
    count = next(
        line
        for line in page.splitlines()
        if line.startswith("mlxspec_between_tokens_seconds_count")
    )
    assert (
        float(count.split()[1]) == len(s.engine.tokenizer.encode("hello world the system")) + 1 - 2
    )


@pytest.mark.parametrize("count", [1, 3])
async def test_no_pause_loses_an_output(make: Callable[..., Server], count: int) -> None:
    """The wait is given up at every pause, also in the moment of an output."""
    s = make(Config(keepalive_s=0.001), holds=True)
    body = {"prompt": ["hello"] * count, "stream": True}
    connection = Connection(s.app, "/v1/completions", body)
    await s.engine.until(lambda: len(s.engine.submitted) == count)
    for n in range(50):
        for request in s.engine.submitted:
            end: Finish | None = "length" if n == 49 else None
            mailbox = s.engine.mailboxes[request.id]
            mailbox.put(Output(request.id, 0, (64 + n % 20,), finish=end))
            await asyncio.sleep(0.0005 * (n % 5))
    answer = await connection.answer()
    texts = [""] * count
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [s.engine.tokenizer.decode([64 + n % 20 for n in range(50)])] * count
    assert b": keep-alive" in answer.body

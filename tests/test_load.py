"""The whole server under load, on real sockets: many clients, those that leave, read slowly, say
nothing.

Rule: an accepted request is answered once, as in a quiet run, and nothing of it is left afterwards.
The large versions are `slow`.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from mlxspec.config import Config
from mlxspec.engine import worker as door
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from mlxspec.types import ModelInfo
from tests.support import tiny
from tests.support.drafters import attach_head
from tests.support.live import serving
from tests.tiny_tokenizer import PSM, save_tokenizer

SLOTS, QUEUE = 4, 60
BLOCKS = 200
LIMIT = 120.0  # seconds that any wait may take
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
STORMED = PATHS | {"ollama": "/api/chat", "fim": "/v1/fim/completions"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
Json = dict[str, Any]


@dataclass
class Served:
    worker: EngineThread
    server: uvicorn.Server
    app: Any
    port: int
    engine: Any

    def metrics(self, name: str) -> Counter[str]:
        """How often each way of ending, or each status, was counted."""
        found: Counter[str] = Counter()
        for line in self.app.state.server.metrics.render().decode().splitlines():
            if seen := re.match(name + r'{.*(?:finish|status)="([^"]+)".*} (.*)', line):
                found[seen[1]] += int(float(seen[2]))
        return found


@contextmanager
def served(
    root: Path, slots: int = SLOTS, queue: int = QUEUE, buffer: int = 0, head: bool = False
) -> Iterator[Served]:
    """`head`: with one that drafts three tokens in every step."""
    made = []

    def start() -> Any:
        engine = tiny.engine(
            tiny.model("qwen3"), block=8, blocks=BLOCKS, max_sequences=slots, vocab=tiny.VOCAB
        )
        if head:
            attach_head(engine, depth=3, kind="eagle3")
        made.append(engine)
        return engine, ModelInfo("tiny", 512, tiny.VOCAB, "rows", 8, 1, 1, 1_700_000_000)

    path = save_tokenizer(root / "model", extra=PSM)
    worker = EngineThread(tiny.manager(start), max_sequences=slots, max_queue=queue)
    worker.launch()
    try:
        app = create_app(
            worker, load_tokenizer(path), path, Config(max_sequences=slots, max_queue=queue)
        )
        with serving(app, slots + queue, buffer) as (server, port):
            yield Served(worker, server, app, port, made[0])
    finally:
        worker.stop()


def soon(seen: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not seen() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(seen())


def at_rest(s: Served) -> None:
    """Nothing is left of what was asked: streams, rows, tasks, sequences, blocks."""
    state = s.app.state.server
    written = state._text.submit(int)  # behind all that is to be kept of answers
    assert soon(
        lambda: (
            not (s.worker._mailboxes or s.worker._busy or state.live or s.server.server_state.tasks)
            and not state.text_jobs
            and written.done()
            and s.worker._inbox.empty()
        )
    )
    s.engine.check()
    stats = tiny.stats(s.worker)
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.blocks_cached + stats.blocks_free == BLOCKS - 1


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


# ---- a client
# ----------------------------------------------------------------------------------------------


def body_of(api: str, seed: int, length: int, n: int, stream: bool, **more: Any) -> Json:
    """A request whose answer its seed decides; of the three APIs one has no seeds, and only one has
    n."""
    text = f"hello {seed % 7} world " * (1 + seed % 5)
    asked: Json = {"temperature": 0.0, "stream": stream, **more}
    if api == "fim":
        asked |= {"prompt": text, "suffix": "and you"}
    if api != "messages":
        asked |= {"seed": seed, "temperature": 0.8, "ignore_eos": True}
    if api == "responses":
        return asked | {"input": text, "max_output_tokens": length}
    if api != "fim":
        asked |= {"messages": [{"role": "user", "content": text}]}
    return asked | {"max_tokens": length} | ({"n": n} if n > 1 else {})


def request(path: str, body: Json) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def events(self) -> list[Any]:
        lines = self.body.decode().splitlines()
        data = [line[6:] for line in lines if line.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in data]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection that asks again and again."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None

    async def send(self, data: bytes) -> None:
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(data)

    async def reply(self, leave_after: int | None = None) -> Reply | None:
        """The answer, or None where the client left after so many pieces of its body."""
        assert self.reader is not None
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = b""
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            pieces = 0
            while size := int(await self.reader.readline(), 16):
                if pieces == leave_after:
                    self.leave()
                    return None
                body += (await self.reader.readexactly(size + 2))[:-2]
                pieces += 1
            await self.reader.readline()
        if headers.get("connection") == "close":
            self.leave()
        return Reply(int(head[0].split()[1]), headers, body)

    def leave(self) -> None:
        if self.reader is not None:
            self.writer.transport.abort()
        self.reader = None


def said(api: str, reply: Reply, streamed: bool, n: int) -> tuple[str, list[tuple[Any, Any]]]:
    """(id, what each choice said and how it finished), of an answer that ends once and as it
    should."""
    if api == "ollama":
        lines = [json.loads(line) for line in reply.body.splitlines()]
        assert [line["done"] for line in lines] == [False for _ in lines[1:]] + [True]
        text = "".join(line["message"]["content"] for line in lines)
        return "", [(text, lines[-1]["done_reason"])]
    if not streamed:
        body = reply.json
        if api in ("chat", "fim"):
            assert sorted(c["index"] for c in body["choices"]) == list(range(n))
            return body["id"], [
                (c["message"]["content"] or "", c["finish_reason"]) for c in body["choices"]
            ]
        if api == "responses":
            return body["id"], [(_text(body["output"]), body["status"])]
        return body["id"], [("".join(c["text"] for c in body["content"]), body["stop_reason"])]
    events = reply.events
    if api in ("chat", "fim"):
        assert events.count("[DONE]") == 1 and events.pop() == "[DONE]"
        [name] = {e["id"] for e in events}
        texts, ends = [""] * n, [[] for _ in range(n)]  # type: ignore[var-annotated]
        for choice in (c for e in events for c in e["choices"]):
            texts[choice["index"]] += choice["delta"].get("content") or ""
            ends[choice["index"]] += [choice["finish_reason"]] * (
                choice["finish_reason"] is not None
            )
        assert all(len(end) == 1 for end in ends)
        return name, list(zip(texts, (end[0] for end in ends), strict=True))
    kinds = Counter(e["type"] for e in events)
    if api == "responses":
        ended = [e for e in events if e["type"] in ("response.completed", "response.incomplete")]
        assert len(ended) == 1 and ended[0] is events[-1] and kinds["response.created"] == 1
        done = ended[0]["response"]
        text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        assert text == _text(done["output"])
        return done["id"], [(text, done["status"])]
    assert kinds["message_stop"] == kinds["message_start"] == kinds["message_delta"] == 1
    assert events[-1]["type"] == "message_stop"
    text = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
    [end] = [e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta"]
    return events[0]["message"]["id"], [(text, end)]


def _text(output: Any) -> str:
    return "".join(part["text"] for item in output for part in item.get("content", []))


# ---- the storm
# ---------------------------------------------------------------------------------------------


@dataclass
class Ask:
    api: str
    seed: int
    length: int
    n: int
    stream: bool

    @property
    def data(self) -> bytes:
        return request(
            STORMED[self.api], body_of(self.api, self.seed, self.length, self.n, self.stream)
        )


def asks(count: int, rng: random.Random) -> list[Ask]:
    """Requests of which many come again, so that answers can be compared."""
    kinds = []
    for seed in range(min(count // 4, 60)):
        api = rng.choice(list(STORMED))
        n = rng.choice([1, 1, 2]) if api == "chat" else 1
        kinds.append(Ask(api, seed, rng.choice([1, 5, 12, 30]), n, rng.random() < 0.6))
    return [rng.choice(kinds) for _ in range(count)]


async def quiet(s: Served, all_of: list[Ask]) -> dict[int, Any]:
    """What each says alone, one after the other."""
    client, found = Client(s.port), {}
    for ask in {a.seed: a for a in all_of}.values():
        await client.send(ask.data)
        reply = await client.reply()
        assert reply and reply.status == 200, reply
        found[ask.seed] = said(ask.api, reply, ask.stream, ask.n)[1]
    client.leave()
    return found


async def storm(
    s: Served, all_of: list[Ask], connections: int, seen: Counter[str], ids: list[str]
) -> None:
    rng, truth, todo = random.Random(5), await quiet(s, all_of), list(all_of)
    seen["quiet"] = len(truth)

    async def one(client: Client, ask: Ask) -> None:
        how = rng.random()
        await client.send(ask.data)
        if how < 0.1:  # at admission, while queued, before the first token
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.002, 0.02, 0.1]))
            client.leave()
            seen["left early"] += 1
            return
        reply = await client.reply(rng.randint(0, 8) if how < 0.3 and ask.stream else None)
        if reply is None:
            seen["left in the middle"] += 1
            return
        assert reply.status == 200, reply
        name, answers = said(ask.api, reply, ask.stream, ask.n)
        if name:
            ids.append(name)
        assert answers == truth[ask.seed], f"{ask}: {answers} instead of {truth[ask.seed]}"
        seen["answered"] += 1

    async def each() -> None:
        client = Client(s.port)
        while todo:
            await one(client, todo.pop())
        client.leave()

    async with asyncio.timeout(LIMIT * 5):
        await asyncio.gather(*(each() for _ in range(connections)))


@pytest.mark.parametrize(
    "count, head",
    [
        (100, False),
        *(pytest.param(1000, head, marks=pytest.mark.slow) for head in (False, True)),
    ],
)
def test_every_request_is_answered_once_as_in_a_quiet_run(
    tmp_path: Path, count: int, head: bool
) -> None:
    """32 connections, five APIs; one client in five leaves: before they are heard, queued, in the
    middle."""
    seen, ids = Counter[str](), list[str]()
    with served(tmp_path, head=head) as s:
        asyncio.run(
            storm(s, asks(10, random.Random(1)), 4, Counter(), [])
        )  # what is opened once is open now
        at_rest(s)
        assert soon(lambda: not s.server.server_state.connections)
        before, booked = descriptors(), s.metrics("mlxspec_request_seconds_count")
        asyncio.run(storm(s, asks(count, random.Random(1)), 32, seen, ids))
        at_rest(s)
        assert soon(lambda: not s.server.server_state.connections and descriptors() <= before)
        booked = s.metrics("mlxspec_request_seconds_count") - booked
        assert s.app.state.server.metrics.refused == {}
        assert bool(s.engine.spec_metrics.drafted) == head
    print(dict(seen), dict(booked))
    assert seen["answered"] + seen["left early"] + seen["left in the middle"] == count
    assert len(set(ids)) == len(ids) and seen["answered"] > count / 2
    assert min(seen["left early"], seen["left in the middle"]) > count / 30
    # A client may leave behind its last byte, or before it was heard at all.
    ended = booked["length"] + booked["stop"]
    assert seen["answered"] <= ended - seen["quiet"] <= count - booked["gone"]
    assert booked["gone"] <= seen["left early"] + seen["left in the middle"]
    assert set(booked) <= {"length", "stop", "gone"}


# ---- slow readers
# ------------------------------------------------------------------------------------------


def slow_reader(s: Served) -> socket.socket:
    """It has asked for much, and has taken the first bytes of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", s.port))
    more = {"logprobs": True, "top_logprobs": 20}
    sock.sendall(request(PATHS["chat"], body_of("chat", 1, 400, 2, True, **more)))
    assert sock.recv(10) == b"HTTP/1.1 2"
    return sock


def test_a_slow_reader_stalls_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read an answer of 2 MB: what is held for it is bounded, its blocks are
    freed while it is still connected, and others are answered."""
    monkeypatch.setattr(door, "MAX_UNREAD", 50)
    with served(tmp_path, buffer=4096) as s:
        [its] = (slow := slow_reader(s)) and s.server.server_state.connections
        queues, held = [0], [0]

        async def others() -> None:
            client, end = Client(s.port), time.monotonic() + 20
            while s.worker._mailboxes and time.monotonic() < end:
                await client.send(request(PATHS["chat"], body_of("chat", 3, 5, 1, False)))
                reply = await client.reply()
                assert reply and reply.status == 200
                held.append(its.transport.get_write_buffer_size())
                queues.extend(each.unread.qsize() for each in list(s.worker._mailboxes.values()))
            client.leave()

        asyncio.run(others())
        assert not s.worker._mailboxes, "its blocks are kept as long as its connection"
        assert 0 < max(queues) <= 100 + 4 and max(held) < 1 << 18
        slow.close()
        at_rest(s)


# ---- many connections
# --------------------------------------------------------------------------------------


POOR = """
import resource, sys, logging
from pathlib import Path
from mlxspec.config import Config
from mlxspec.server.process import bind, serve
from mlxspec.text.chat import load_tokenizer
from tests.support.scripted import server
from tests.tiny_tokenizer import save_tokenizer
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # behind mlx_lm, which sets its own
path = save_tokenizer(Path(sys.argv[1]))
made = server(load_tokenizer(path), path)
sys.exit(serve(made.app, bind(Config(port=0))))
"""


def healthy(sock: socket.socket) -> bool:
    sock.sendall(HEALTH)
    got = b""
    while not got.endswith(b"}"):
        got += sock.recv(1000)
    return got.startswith(b"HTTP/1.1 200")


def test_out_of_file_descriptors_it_waits_says_so_and_goes_on(tmp_path: Path) -> None:
    """100 of them, and 200 clients; when those have left, the next is answered. The log is not
    flooded."""
    log = tmp_path / "log"
    with log.open("w") as told:
        run = [sys.executable, "-c", POOR, str(tmp_path / "model")]
        process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=told, text=True)
    assert process.stdout
    try:
        port = int(process.stdout.readline().split("/v1")[0].rpartition(":")[2])
        with ExitStack() as opened:
            socks = [
                opened.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                for _ in range(200)
            ]
            assert healthy(socks[0])
            assert soon(lambda: "Too many open files" in log.read_text())
            time.sleep(2.5)
            assert healthy(socks[0])
        with socket.create_connection(("127.0.0.1", port), 10) as new:
            assert healthy(new)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    lines = log.read_text().splitlines()
    print(f"{len(lines)} lines in the log")
    assert len(lines) <= 500, lines[:20]


# ---- overflow
# ----------------------------------------------------------------------------------------------


def test_beyond_the_queue_is_told_when_to_come_again(tmp_path: Path) -> None:
    """Each API's own error, with Retry-After; who keeps to it gets through, and nothing is lost."""
    statuses, kinds = Counter[int](), set[str]()

    async def patient(s: Served, number: int) -> None:
        api = list(PATHS)[number % 3]
        client = Client(s.port)
        async with asyncio.timeout(LIMIT):
            while True:
                await client.send(request(PATHS[api], body_of(api, number, 20, 1, number % 2 > 0)))
                reply = await client.reply()
                assert reply is not None
                statuses[reply.status] += 1
                if reply.status == 200:
                    break
                assert reply.status == 429 and 1 <= int(reply.headers["retry-after"]) <= 60, reply
                error = reply.json["error"]
                assert error["type"] == "rate_limit_error" and "message" in error
                assert (reply.json.get("type") == "error") == (api == "messages")
                kinds.add(api)
                await asyncio.sleep(int(reply.headers["retry-after"]))
        said(api, reply, number % 2 > 0, 1)
        client.leave()

    async def all_at_once(s: Served) -> None:
        await asyncio.gather(*(patient(s, i) for i in range(20)))

    with served(tmp_path, slots=2, queue=6) as s:
        asyncio.run(all_at_once(s))
        at_rest(s)
        assert s.metrics("mlxspec_refused_total")["429"] == statuses[429] > 0
        assert sum(s.metrics("mlxspec_request_seconds_count").values()) == statuses[200] == 20
    print(dict(statuses))
    assert kinds == set(PATHS)


def test_half_requests_pipelines_and_aborts_leave_nothing(tmp_path: Path) -> None:
    """Halves of requests and bodies, five requests in one write, clients gone before they are
    heard: who asks as one should is answered all the while, and pipelined answers come in order."""

    async def main(s: Served) -> None:
        half = request(PATHS["chat"], body_of("chat", 1, 10, 1, True))
        opened = [await asyncio.open_connection("127.0.0.1", s.port) for _ in range(60)]
        for i, (_, writer) in enumerate(opened):
            writer.write(half[: 30 if i % 2 else len(half) - 5])
        piped = Client(s.port)
        lengths = [3, 1, 7, 2, 5]
        await piped.send(
            b"".join(request(PATHS["chat"], body_of("chat", 9, n, 1, False)) for n in lengths)
        )
        for length in lengths:
            reply = await piped.reply()
            assert reply and reply.json["usage"]["completion_tokens"] == length
        piped.leave()
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", s.port)
            writer.write(half)
            await asyncio.sleep(0)
            writer.transport.abort()
        last, status = Client(s.port), 429
        while status in (429, 503):  # those that left may have their places still
            await last.send(request(PATHS["messages"], body_of("messages", 1, 5, 1, False)))
            reply = await last.reply()
            assert reply
            status = reply.status
            await asyncio.sleep(0.1)
        assert status == 200
        last.leave()
        for _, writer in opened:
            writer.transport.abort()

    with served(tmp_path, slots=2, queue=30) as s:
        asyncio.run(asyncio.wait_for(main(s), LIMIT))
        assert soon(lambda: not s.server.server_state.connections)
        at_rest(s)
        assert set(s.metrics("mlxspec_request_seconds_count")) <= {"length", "stop", "gone"}

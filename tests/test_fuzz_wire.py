"""Malformed, unfinished, silent and greedy clients of a real server, beside a stream: it goes on, a
health check is answered at once, and the log has no traceback.

`FUZZ_SECONDS=300 scripts/test -s -m slow tests/test_fuzz_wire.py` does so for longer than the
usual seconds a kind; figures are printed.
"""

import asyncio
import json
import os
import random
import re
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import SO_LINGER, SO_RCVBUF, SOL_SOCKET, create_connection, socket
from threading import Event

import pytest

from mlxspec.server.app import ENDPOINTS
from tests.support.processes import Server
from tests.support.served_model import save

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("FUZZ_SECONDS", "6"))  # of each kind of clients
EXTRA_S = 0.5  # that the stream's longest gap, and a health check, may take beyond a quiet time
TRIES = 3  # for a machine on which others work too
GROWTH = 64 << 20  # bytes of the process
KEY = "sesame"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass
class Place:
    server: Server
    key: str
    rng: random.Random = field(default_factory=lambda: random.Random(44))
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    @property
    def auth(self) -> bytes:
        return f"Authorization: Bearer {self.key}\r\n".encode() if self.key else b""

    async def connect(self, buffer: int = 0) -> "Client":
        sock = socket()
        if buffer:
            sock.setsockopt(SOL_SOCKET, SO_RCVBUF, buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        except BaseException:
            sock.close()
            raise
        return Client(sock)

    def footprint(self) -> int:
        status = Path(f"/proc/{self.server.process.pid}/status")
        if not status.exists():
            return 0
        return int(re.findall(r"VmRSS:\s+(\d+)", status.read_text())[0]) << 10


class Client:
    """A raw connection."""

    def __init__(self, sock: socket) -> None:
        self.sock, self.loop = sock, asyncio.get_running_loop()

    async def send(self, data: bytes, seconds: float = 2.0) -> None:
        async with asyncio.timeout(seconds):
            await self.loop.sock_sendall(self.sock, data)

    async def read(self, seconds: float = 2.0) -> bytes:
        async with asyncio.timeout(seconds):
            return await self.loop.sock_recv(self.sock, 1 << 16)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def reset(self) -> None:
        self.sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@pytest.fixture(scope="module", params=["", KEY])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("fuzz")
    words = [str(save(root / "m")), "--cache-dir", str(root / "cache"), "--speculate", "off"]
    words += ["--kv-blocks", "300", "--cache-gb", "0", "--max-body-mb", "4"]
    with Server(words, HOME=str(root), MLXSPEC_API_KEY=request.param) as server:
        yield Place(server, request.param)
        assert server.stop() == 0
    assert "Traceback" not in server.said and "ERROR" not in server.said, server.said[-3000:]


# ---- who is not to notice
# --------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """The longest gap in a stream, the longest health check, and the longest that a thread of ours
    slept beyond its time, in seconds; most memory."""

    gap: float = 0.0
    health: float = 0.0
    lag: float = 0.0
    footprint: int = 0
    pieces: int = 0


def watch_stream(place: Place, seen: Seen, over: Event) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    data = json.dumps(body | {"max_tokens": 300, "ignore_eos": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += place.auth + b"Content-Length: %d\r\n\r\n" % len(data)
    while not over.is_set():
        with create_connection(("127.0.0.1", place.port), 60) as sock:
            sock.sendall(head + data)
            got, last = sock.recv(1 << 16), time.monotonic()
            assert got.startswith(b"HTTP/1.1 200"), got
            while sock.recv(1 << 16) and not over.is_set():
                now = time.monotonic()
                seen.gap, seen.pieces, last = max(seen.gap, now - last), seen.pieces + 1, now


def watch_health(place: Place, seen: Seen, over: Event) -> None:
    while not over.is_set():
        began = time.monotonic()
        with create_connection(("127.0.0.1", place.port), 60) as sock:
            sock.sendall(HEALTH)
            got = sock.recv(1 << 16)
        assert got.startswith(b"HTTP/1.1 200"), got
        seen.health = max(seen.health, time.monotonic() - began)
        seen.footprint = max(seen.footprint, place.footprint())
        over.wait(0.02)


def watch_clock(place: Place, seen: Seen, over: Event) -> None:
    while not over.is_set():
        began = time.monotonic()
        time.sleep(0.01)
        seen.lag = max(seen.lag, time.monotonic() - began - 0.01)


Noise = Callable[[Place], Awaitable[None]]


def beside(place: Place, noise: Noise | None) -> Seen:
    """What a stream and a health check see meanwhile. Raises what one of them raised."""
    seen, over = Seen(), Event()
    with ThreadPoolExecutor() as pool:
        watches = (watch_stream, watch_health, watch_clock)
        jobs = [pool.submit(watch, place, seen, over) for watch in watches]
        try:
            asyncio.run(for_a_while(noise(place) if noise else asyncio.sleep(SECONDS)))
        finally:
            over.set()
    for job in jobs:
        job.result()
    return seen


async def for_a_while(noise: Awaitable[None]) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(noise, SECONDS)


# ---- who does all that is wrong
# --------------------------------------------------------------------------------------------


async def keep(clients: list[Client]) -> None:
    """Hold them until the time is over."""
    try:
        await asyncio.Event().wait()
    finally:
        for client in clients:
            client.reset()


def doing(
    number: int, *sent: bytes, buffer: int = 0, again: bytes = b"", pause: float = 0.0
) -> Noise:
    """So many clients that send this, and `again` as often as it is taken, but read nothing."""

    async def one(place: Place, clients: list[Client]) -> None:
        while True:
            client = await place.connect(buffer)
            clients.append(client)
            try:
                for data in sent:
                    await client.send(data.replace(b"AUTH\r\n", place.auth))
                while again:
                    await client.send(again.replace(b"AUTH\r\n", place.auth), 60)
                    await asyncio.sleep(pause)
                return
            except (OSError, TimeoutError):
                client.reset()
                clients.remove(client)
                await asyncio.sleep(0.2)

    async def noise(place: Place) -> None:
        clients: list[Client] = []
        sending = [asyncio.create_task(one(place, clients)) for _ in range(number)]
        try:
            await keep(clients)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    return noise


def request(target: str, headers: str = "", body: bytes = b"") -> bytes:
    """An honest request, with its key."""
    method, _, path = target.partition(" ")
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}AUTH\r\n\r\n"
    return head.encode() + body


CHAT = "POST /v1/chat/completions"
LONG = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "ignore_eos": true'
LONG += b', "stream": true, "logprobs": true, "top_logprobs": 20}'
STREAM = request(CHAT, f"Content-Length: {len(LONG)}\r\n", LONG)
HALF = request(CHAT, "Content-Length: 99\r\n", b"{")
CHUNKS = request(CHAT, "Transfer-Encoding: chunked\r\n")
LINES = b"a:b\r\n" * 3000
KINDS: dict[str, Noise] = {
    "200 silent": doing(200),
    "300 bodies by the byte": doing(300, HALF, again=b" ", pause=0.2),
    "1000 silent": doing(1000),
    "200 heads by the byte": doing(200, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", again=b"a", pause=0.2),
    "200 idle": doing(200, request("GET /health")),
    "200 halves of a body": doing(200, HALF),
    "8 in chunks of a byte": doing(8, CHUNKS, again=b"1\r\n \r\n" * 2000),
    "8 refused, in chunks of a byte": doing(8, CHUNKS.replace(b"AUTH\r\n", b""), again=b"1\r\n \r\n" * 2000),
    "4 with 3000 headers": doing(4, again=request("GET /health").replace(b"AUTH\r\n", LINES)),
    "8 with 100,000 trailers": doing(8, again=CHUNKS + b"0\r\n" + b"a:b\r\n" * 100_000 + b"\r\n"),
    "8 of requests without a pause": doing(8, again=request("GET /health") * 300, buffer=2048),
    "8 pages that are not read": doing(8, again=request("GET /page/figures.js") * 50, buffer=2048),
    "12 streams that are not read": doing(12, STREAM, buffer=2048),
}  # fmt: skip


def mutated(place: Place) -> bytes:
    """A request to any endpoint, with some faults."""
    rng = place.rng
    endpoint = rng.choice([*ENDPOINTS, "GET /nope", "GET /health"])
    methods, path = endpoint.split()
    method = rng.choice([*methods.split(",") * 6, "HEAD", "OPTIONS", "CONNECT", "get", "PRI", ""])
    path = path.replace("{name:path}", "m").replace("{name}", "page.js").replace("{id}", "r")
    prefix = rng.choice(
        ["", "", "", "http://localhost", "http://[", "//[", "*", "/%00", "/v1", "/"]
    )
    version = rng.choice(
        ["HTTP/1.1"] * 6 + ["HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "http/1.1", "", "HTTP/9"]
    )
    body = rng.choice([b"", b"{}", b"[", LONG, b"\0" * 70_000, b" " * 5_000_000, bytes(range(256))])
    hosts = ["localhost"] * 8 + ["", "evil.example", "[", "[::1]:x", "localhost:99999", "a b", "\0"]
    lines = [f"Host: {rng.choice(hosts)}", place.auth.decode().strip()]
    lines += rng.sample(
        [
            *("Connection: close", "Connection: keep-alive, Upgrade", "Upgrade: websocket", "Expect: 100-continue"),
            *("Expect: gold", "Content-Length: -1", "Content-Length: 5", "Transfer-Encoding: gzip, chunked", "TE: x"),
            *("Transfer-Encoding: chunked", "Origin: file://", "Origin: null", "anthropic-version: 1", ": x", "X", "X:"),
            *(" folded", "X: \r", "X: \x00", "X: é", "Content-Length: " + "9" * 400, "Trailer: X", "X: y\r\n" * 200),
        ],
        rng.randint(0, 4),
    )  # fmt: skip
    if rng.random() < 0.5:
        lines.append(f"Content-Length: {len(body)}")
    elif rng.random() < 0.7:
        lines.append("Transfer-Encoding: chunked")
        size = rng.choice([1, 7, 1000, 1 << 20])
        some = [body[at : at + size] for at in range(0, min(len(body), 2000 * size), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in some)
        body += rng.choice(
            [b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\nX\r\n\r\n", b"ZZ\r\n", b"-1\r\n", b""]
        )
    head = "\r\n".join([f"{method} {prefix}{path} {version}", *filter(None, lines)]) + "\r\n\r\n"
    data = bytearray(head.encode("latin-1") + body)
    for _ in range(rng.choice([0, 0, 1, 3])):
        at = rng.randrange(min(len(data), 400))
        piece = rng.choice(
            [b"", b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b"\xff", bytes(data[:at])]
        )
        data[at : at + rng.choice([0, 1, 5])] = piece
    if rng.random() < 0.2:
        data += rng.choice([request("GET /health"), b"garbage\r\n\r\n", b"\r\n\r\n"])
    return bytes(data[: rng.randrange(len(data)) + 1] if rng.random() < 0.3 else data)


async def mutants(place: Place) -> None:
    """Sixteen clients, who read or not, and leave in several ways."""

    async def one() -> None:
        while True:
            client, data, cut = await place.connect(), mutated(place), place.rng.random()
            try:
                at = int(len(data) * cut)
                await client.send(data[:at])
                if cut < 0.5:
                    await asyncio.sleep(cut / 20)
                await client.send(data[at:])
                if cut < 0.1:
                    client.sock.shutdown(1)
                if cut < 0.8 and (got := await client.read(0.5)):
                    place.statuses[int(got[9:12])] += 1
                    assert got.startswith(b"HTTP/1.1 ") and got[9:10] in b"12345", got
            except (OSError, TimeoutError):
                place.statuses[0] += 1
            finally:
                client.reset() if cut < 0.6 else client.sock.close()

    await asyncio.gather(*(one() for _ in range(16)))


@pytest.mark.parametrize("name", [*KINDS, "mutants"])
def test_nobody_else_notices(name: str, place: Place) -> None:
    for _ in range(TRIES):
        quiet, seen = beside(place, None), beside(place, KINDS.get(name, mutants))
        print(
            f"\n{name}: longest gap {seen.gap:.3f} s, quiet {quiet.gap:.3f}; longest health check"
            f" {seen.health:.3f} s, quiet {quiet.health:.3f}; our lag {seen.lag:.3f} s, quiet"
            f" {quiet.lag:.3f}; {seen.pieces} pieces, quiet {quiet.pieces};"
            f" {seen.footprint >> 20} MiB, quiet {quiet.footprint >> 20}"
        )
        assert seen.pieces and seen.footprint <= quiet.footprint + GROWTH
        slow = EXTRA_S + 4 * seen.lag  # a core that we wait for, the server waits for too
        if seen.gap <= slow + quiet.gap and seen.health <= slow:
            break
    else:
        pytest.fail("the stream stood still, or the health check did")
    assert not [status for status in place.statuses if status >= 500 and status != 503]
    if name == "mutants":
        print(dict(place.statuses))
        assert place.statuses.total() > 50 and place.statuses[400]

"""Connections whose clients do nothing, too little or too much, on real sockets: none holds a place,
and everybody else is answered meanwhile."""

import json
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.server import connections, process
from mlxspec.server.app import ENDPOINTS
from tests.support.live import serving
from tests.support.parameter_rows import diagonal
from tests.support.scripted import MESSAGES, Server, server

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": MESSAGES}).encode()
WAIT_S = 20.0  # for what should come at once


def post(path: str, body: bytes = BODY, headers: str = "", size: int | None = None) -> bytes:
    length = len(body) if size is None else size
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {length}\r\n\r\n"
    return head.encode() + body


class Place:
    """A server, its uvicorn and clients of it."""

    def __init__(self, made: Server, uvicorn: Any, port: int, stack: ExitStack) -> None:
        self.made, self.uvicorn, self.port, self.stack = made, uvicorn, port, stack

    def connect(self, *data: bytes, buffer: int = 0) -> socket.socket:
        """A connection that sends `data`, one after the other."""
        sock = self.stack.enter_context(socket.socket())
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.settimeout(WAIT_S)
        sock.connect(("127.0.0.1", self.port))
        for one in data:
            sock.sendall(one)
        return sock

    def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """The answer to `data` on a connection that is closed then."""
        with self.connect(data) as sock:
            return answer(sock)

    def soon(self, seen: Callable[[], object]) -> bool:
        end = time.monotonic() + WAIT_S
        while not seen() and time.monotonic() < end:
            time.sleep(0.005)
        return bool(seen())


@pytest.fixture
def start(tokenizer: Any, model_dir: Path) -> Iterator[Any]:
    """Makes a server for `most` requests and as many connections as it may have beyond them."""
    with ExitStack() as stack:

        def started(
            most: int = 1, config: Config | None = None, buffer: int = 0, **script: Any
        ) -> Place:
            made = server(tokenizer, model_dir, config, **script)
            uvicorn, port = stack.enter_context(serving(made.app, most, buffer))
            return Place(made, uvicorn, port, stack)

        yield started


def answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer."""
    with sock.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while (line := file.readline().decode().strip()) != "":
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, file.read(int(headers["content-length"]))


def closed(sock: socket.socket, seconds: float = WAIT_S) -> bool:
    """Whether the server closes it in time; what it says before is passed over."""
    sock.settimeout(seconds)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


# ---- time
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        (),
        (b"GET /hea",),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",),
        (b"\r\n",),
        (HEALTH, b"G"),
        (HEALTH + b"GET /health HTTP/1.1\r\nHost: loc",),
        (post("/nope", b"{", size=1 << 20),),
        (post("/nope", b"{}"), post("/health", b"", size=9)),
        (b"POST /nope HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",),
        (b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7\r\n\r\nabc",),
    ],
)
@pytest.mark.parametrize("drips", [False, True])
def test_a_request_that_is_not_finished(
    start: Any, sent: tuple[bytes, ...], drips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a byte comes now and then."""
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    place = start()
    sock = place.connect(*sent)
    if drips:
        end = time.monotonic() + WAIT_S
        try:
            while time.monotonic() < end:
                sock.sendall(b"a")
                time.sleep(0.05)
        except ConnectionError:
            return
    assert not drips and closed(sock)


def test_an_idle_connection_has_longer_than_a_half_request(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    place = start()
    sock = place.connect()
    for _ in range(3):
        for part in (HEALTH[:9], HEALTH[9:]):
            sock.sendall(part)
        assert answer(sock)[0] == 200
        time.sleep(0.4)


@pytest.mark.parametrize(("n", "headers"), [(8, ""), (1, ""), (1, "Connection: close\r\n")])
def test_a_stream_that_is_not_read(
    start: Any, n: int, headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is closed while the answer is written, or when all of it waits to be sent."""
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)
    monkeypatch.setattr(process, "KEEP_ALIVE_S", 1)
    place = start(buffer=4096, says=("hello world " * 500,))
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 60 * n, "n": n}
    sock = place.connect(post(CHAT, json.dumps(body).encode(), headers), buffer=2048)
    assert sock.recv(10) == b"HTTP/1.1 2"
    state = place.uvicorn.server_state
    assert place.soon(lambda: not (state.connections or state.tasks))


def test_answers_that_are_never_read(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests in one write, also while bytes go on to come."""
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)
    place = start(buffer=4096)
    socks = [place.connect(buffer=2048) for _ in range(3)]
    for sock in socks:
        sock.setblocking(False)
    page = b"GET /page/figures.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    end = time.monotonic() + WAIT_S
    alive = {*socks}
    while alive and time.monotonic() < end:
        for sock in [*alive]:
            try:
                sock.send(page)
            except BlockingIOError:
                pass
            except ConnectionError:
                alive.discard(sock)
        time.sleep(0.02)
    assert not alive


def test_who_reads_slowly_is_waited_for(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as something is read in each UNREAD_S, however long the whole takes."""
    monkeypatch.setattr(connections, "UNREAD_S", 1.5)
    place = start(buffer=4096)
    page = b"GET /page/figures.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    whole = place.ask(page)[2]
    sock = place.connect(page, buffer=2048)
    got, began = b"", time.monotonic()
    while data := sock.recv(max(512, len(whole) // 20)):
        got += data
        time.sleep(0.12)
    assert time.monotonic() - began > 2 and got.endswith(whole)


# ---- number
# ----------------------------------------------------------------------------------------------


def test_the_oldest_idle_connection_goes_first(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    places = 50
    monkeypatch.setattr(connections, "WAITING", places)
    place = start(most=1)
    first, second, *_ = socks = [place.connect() for _ in range(places)]
    assert place.soon(lambda: len(place.uvicorn.server_state.connections) == places)
    assert answer(place.connect(HEALTH))[0] == 200
    assert closed(first) and not closed(second, 0.05)
    for sock in socks[1:]:
        sock.settimeout(WAIT_S)
    second.sendall(HEALTH)  # which is the youngest now
    assert answer(second)[0] == 200
    more = [place.connect() for _ in range(places - 2)]
    assert all(map(closed, socks[2:])) and not closed(second, 0.05)
    assert not any(closed(sock, 0.001) for sock in more)


@pytest.mark.parametrize("sent", [b"", b"GET / HTT", HEALTH, post(CHAT, b"{", size=99)])
def test_five_hundred_that_do_nothing(
    start: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half a request, behind an answer, before the end of a body: a request is answered all
    the while, and one that was there before goes on."""
    monkeypatch.setattr(connections, "WAITING", 100)
    place = start(most=8, holds=True)
    running = place.connect(post(CHAT))
    assert place.soon(lambda: place.made.engine.submitted)
    socks = []
    for _ in range(10):
        socks += [place.connect(sent) for _ in range(50)]
        assert place.ask(HEALTH)[0] == 200
    assert len(place.uvicorn.server_state.connections) < 200
    place.made.engine.push("hello", finish="stop")
    assert place.ask(HEALTH)[0] == 200 and answer(running)[0] == 200


def full(place: Place) -> list[socket.socket]:
    """A request in each place."""
    socks = []
    for n in range(1 + connections.SPARE):
        socks.append(place.connect(post(CHAT)))
        assert place.soon(lambda n=n: len(place.made.engine.submitted) == n + 1)
    return socks


@pytest.mark.parametrize(
    ("path", "read"),
    [
        (CHAT, lambda body: (body["error"]["type"], body["error"]["message"])),
        ("/v1/messages", lambda body: (body["error"]["type"], body["error"]["message"])),
        ("/v1/responses", lambda body: (body["error"]["type"], body["error"]["message"])),
        ("/api/chat", lambda body: ("", body["error"])),
    ],
)
def test_no_place_is_told_in_the_format_of_the_api(
    start: Any, path: str, read: Callable[[Any], tuple[str, str]]
) -> None:
    place = start(most=1, holds=True)
    running = full(place)
    status, headers, body = place.ask(post(path))
    kind, message = read(json.loads(body))
    assert status == 503 and int(headers["retry-after"]) >= 1 and headers["connection"] == "close"
    assert kind in ("", "server_error", "overloaded_error") and "again in" in message
    assert (kind == "overloaded_error") == (path == "/v1/messages")
    assert place.ask(HEALTH)[0] == 200
    running.pop().close()
    assert place.soon(lambda: len(place.uvicorn.server_state.tasks) < len(running) + 1)
    asked = len(place.made.engine.submitted)
    place.connect(post(CHAT))
    assert place.soon(lambda: len(place.made.engine.submitted) > asked)


def test_some_places_are_for_this_machine(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if other clients came from elsewhere: they get neither the last places nor the last
    connections."""
    monkeypatch.setattr(connections, "WAITING", 100)
    own = set[int]()
    monkeypatch.setattr(
        connections.Connection, "local", property(lambda self: self.client[1] in own)
    )

    def at_home(*data: bytes) -> socket.socket:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        own.add(port)
        made = place.stack.enter_context(socket.socket())
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.settimeout(WAIT_S)
        made.bind(("127.0.0.1", port))
        made.connect(("127.0.0.1", place.port))
        for one in data:
            made.sendall(one)
        return made

    place = start(most=1, holds=True)
    idle = at_home(HEALTH)
    assert answer(idle)[0] == 200
    for _ in range(2):
        remote = [place.connect() for _ in range(connections.WAITING)]
        assert place.ask(HEALTH)[0] == 200
        assert not closed(idle, 0.05)
    for sock in remote:
        sock.close()
    for n in range(1 + connections.SPARE - connections.LOCAL):
        place.connect(post(CHAT))
        assert place.soon(lambda n=n: len(place.made.engine.submitted) == n + 1)
    assert place.ask(post(CHAT))[0] == 503 and place.ask(HEALTH)[0] == 200
    asked = len(place.made.engine.submitted)
    at_home(post(CHAT))
    assert place.soon(lambda: len(place.made.engine.submitted) > asked)


# ---- what is refused
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 10, 4 << 20])
@pytest.mark.parametrize(
    ("header", "status"), [("", 401), ("Origin: http://evil.example\r\n", 403)]
)
def test_a_refused_request_closes_the_connection_behind_a_whole_answer(
    start: Any, header: str, status: int, size: int
) -> None:
    """Also where a long body is on its way, which would reset the connection."""
    place = start(config=Config(api_key="sesame"))
    sock = place.connect(post(CHAT, b" " * size, header))
    got, headers, body = answer(sock)
    assert got == status and headers["connection"] == "close" and json.loads(body)["error"]
    assert closed(sock)


def test_a_refused_client_that_sends_for_ever(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.server.security.LINGER_S", 0.2)
    sock = start(config=Config(api_key="sesame")).connect(post(CHAT, b"{", size=1 << 40))
    assert answer(sock)[0] == 401
    end = time.monotonic() + WAIT_S
    with pytest.raises(ConnectionError):
        while time.monotonic() < end:
            sock.sendall(b"a")
            time.sleep(0.01)


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "no size": CHUNKED + b"ZZ\r\n",
    "no size behind a chunk": CHUNKED + b"2\r\n{}\r\nZZ\r\n",
    "no end of a chunk": CHUNKED + b"2\r\n{}XX",
    "broken trailers": CHUNKED + b"2\r\n{}\r\n0\r\nnot a header\r\n\r\n",
    "told to go on": b"Expect: 100-continue\r\n" + CHUNKED + b"ZZ\r\n",
    "and closes": b"Connection: close\r\n" + CHUNKED + b"ZZ\r\n",
    "an upgrade": b"Connection: Upgrade\r\nUpgrade: websocket\r\n" + CHUNKED + b"ZZ\r\n",
    "garbage behind a body": b"Content-Length: 2\r\n\r\n{}\0\0\0\r\n\r\n",
    "garbage behind no body": b"\r\n\0\0\0\r\n\r\n",
    "a header without a name": b": x\r\n\r\n",
}


@pytest.mark.parametrize("name, key", diagonal(list(BROKEN), ["", "sesame"]))
def test_what_is_no_http_prints_no_traceback(
    start: Any, name: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """To every endpoint by every method, in one write and in two."""
    place = start(config=Config(api_key=key))
    heads = [
        f"{method} {path.replace('{name:path}', 'tiny').replace('{name}', 'page.js')} HTTP/1.1\r\n"
        f"Host: localhost\r\n"
        for endpoint in [*ENDPOINTS, "GET,HEAD,POST /nope", "HEAD,OPTIONS,CONNECT,DELETE /health"]
        for methods, path in [endpoint.split()]
        for method in methods.split(",")
    ]
    heads += ["POST /v1/models HTTP/1.1\r\nHost: evil.example\r\n", "POST / HTTP/1.0\r\n"]
    with caplog.at_level(logging.WARNING):
        for head in heads:
            for cut in (len(BROKEN[name]), BROKEN[name].find(b"\r\n\r\n") + 4):
                first, rest = head.encode() + BROKEN[name][:cut], BROKEN[name][cut:]
                sock = place.connect(first)
                if rest:
                    sock.sendall(rest)
                sock.settimeout(WAIT_S)
                got = sock.recv(1 << 16)
                assert not got or 100 <= int(got[9:12]) < 500, (head, got)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()  # by a reset
        assert place.ask(HEALTH)[0] == 200
        assert place.soon(lambda: not place.uvicorn.server_state.tasks)
    bad = [r for r in caplog.records if r.exc_info or "Traceback" in r.getMessage()]
    assert not bad and not [r for r in caplog.records if r.levelno > logging.WARNING]
    assert "500" not in place.made.app.state.server.metrics.refused


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 300 + b"\r\n", "256 headers"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX y\r\n\r\n", "illegal header line"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"ZZ\r\n", "chunk"),
    ],
)
def test_what_is_no_http_is_told_why(start: Any, sent: bytes, why: str) -> None:
    status, headers, body = start().ask(sent)
    assert status == 400 and headers["connection"] == "close"
    assert why in json.loads(body)["error"]["message"]


@pytest.mark.slow
def test_a_body_in_chunks_of_a_byte(start: Any) -> None:
    """It is taken, and others have their turn all the while: a chunk costs more than its byte."""
    place = start()
    body = json.dumps({"messages": MESSAGES, "user": "x" * 150_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    sock = place.connect(head.encode())
    sending = threading.Thread(target=sock.sendall, args=(chunks,))
    sending.start()
    turns = 0
    while sending.is_alive() or not select.select([sock], [], [], 0)[0]:
        assert place.ask(HEALTH)[0] == 200
        turns += 1
    sending.join()
    assert answer(sock)[0] == 200 and turns > 5  # 1 or 2, if the body held the loop to its end

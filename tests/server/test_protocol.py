"""Connections are bounded in time and in number; on real sockets."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from mlxspec.server import protocol
from mlxspec.server.state import while_connected
from tests.server.live import live, serving
from tests.server.scripted import MESSAGES, server

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def address(
    tokenizer: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(protocol, "HEADERS_S", 0.3)
    monkeypatch.setattr(protocol, "SPARE", 2)
    monkeypatch.setattr(protocol, "FRESH_S", 0.0)
    with live(server(tokenizer, model_dir).app, most=1) as url:
        yield "127.0.0.1", int(url.rsplit(":", 1)[1])


def read(sock: socket.socket) -> bytes:
    """All until the other side closes; b"" also where it cuts the connection."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionError:
        pass
    return data


def ask(sock: socket.socket, data: bytes = GET) -> dict[str, Any]:
    """The JSON of one answer on a connection that stays open."""
    sock.sendall(data)
    with sock.makefile("rb") as file:
        length = 0
        while (line := file.readline().lower()) != b"\r\n":
            assert line, "closed without an answer"
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        found: dict[str, Any] = json.loads(file.read(length))
    return found


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc", GET[:-2]])
def test_a_client_that_does_not_ask_is_cut_off(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address, 10) as sock:
        began = time.monotonic()
        sock.sendall(sent)
        assert read(sock) == b"" and time.monotonic() - began < 5


def test_a_trickle_of_headers_does_not_wind_the_clock(address: tuple[str, int]) -> None:
    with socket.create_connection(address, 10) as sock:
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 5:
                sock.sendall(b"G")
                time.sleep(0.02)


def test_a_second_request_is_on_the_clock_too_but_not_the_pause_before_it(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address, 10) as sock:
        assert ask(sock)["status"] == "ok"
        time.sleep(0.6)  # idle: longer than a request's headers may take
        assert ask(sock)["status"] == "ok"
        sock.sendall(GET[:10])
        assert read(sock) == b""


def test_an_answer_may_take_longer(
    tokenizer: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADERS_S", 0.1)
    s = server(tokenizer, model_dir, holds=True)
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        live(s.app) as url,
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 10) as sock,
    ):
        sock.sendall(head.encode() + body)
        got = b""
        while b"assistant" not in got:
            got += sock.recv(65536)
        time.sleep(0.4)
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):  # still open, and silent
            sock.recv(1)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 hello\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_told_so(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address, 10) as sock:
        sock.sendall(sent)
        head, _, body = read(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "breaks HTTP/1.1" in json.loads(body)["error"]["message"]
    with socket.create_connection(address, 10) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b'mlxspec_refused_total{status="400"} 1.0' in read(sock)


def test_an_idle_connection_makes_room(address: tuple[str, int]) -> None:
    with ExitStack() as opened:
        socks = [opened.enter_context(socket.create_connection(address, 10)) for _ in range(3)]
        for sock in socks:
            assert ask(sock)["status"] == "ok"
        for _ in range(3):
            newest = opened.enter_context(socket.create_connection(address, 10))
            assert ask(newest)["status"] == "ok"
        for sock in socks:
            assert read(sock) == b""


def test_too_many_with_work_are_told_and_more_are_cut(
    tokenizer: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with work, two spare; two that are told, but for /health; then none."""
    monkeypatch.setattr(protocol, "SPARE", 2)
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    post = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    with live(server(tokenizer, model_dir, holds=True).app, most=1) as url, ExitStack() as opened:
        address = "127.0.0.1", int(url.rsplit(":", 1)[1])
        for _ in range(3):
            sock = opened.enter_context(socket.create_connection(address, 10))
            sock.sendall(post + body)
            assert sock.recv(10) == b"HTTP/1.1 2"
        told = opened.enter_context(socket.create_connection(address, 10))
        assert ask(told)["status"] == "ok"
        refused = ask(told, GET.replace(b"/health", b"/v1/models"))
        assert "too many connections" in refused["error"]["message"]
        assert read(told) == b""  # closed behind the answer
        for _ in range(2):
            sock = opened.enter_context(socket.create_connection(address, 10))
            sock.sendall(post + body)
            assert b"503" in sock.recv(20)


def test_a_client_that_does_not_read_is_cut_off(
    tokenizer: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "CLIENT_S", 0.3)
    with serving(server(tokenizer, model_dir).app, buffer=4096) as (_, port):
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            began = time.monotonic()
            with pytest.raises(ConnectionError):
                while time.monotonic() - began < 10:
                    sock.sendall(GET.replace(b"/health", b"/metrics") * 100)


async def pour(scope: Any, receive: Any, send: Any) -> None:
    """As many bytes as the path says, or without end."""
    await send({"type": "http.response.start", "status": 200, "headers": []})

    async def chunks() -> None:
        for left in range(int(scope["path"][1:] or 1 << 40), 0, -1000):
            await send(
                {"type": "http.response.body", "body": b"x" * min(left, 1000), "more_body": True}
            )
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    await while_connected(receive, chunks())


def soon(seen: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not seen() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(seen())


@contextmanager
def unread(
    monkeypatch: pytest.MonkeyPatch, path: bytes
) -> Iterator[tuple[socket.socket, set[Any]]]:
    """A client that has asked for bytes and reads none of them, and the connections of its
    server."""
    monkeypatch.setattr(protocol, "CLIENT_S", 0.4)
    with serving(pour, buffer=4096) as (server, port), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        there = server.server_state.connections
        assert soon(
            lambda: any(
                c.transport.get_write_buffer_size() > min(10_000, protocol.HELD) for c in there
            )
        )
        yield sock, there


@pytest.mark.parametrize("sent", [b"", b"GET", GET])
@pytest.mark.parametrize("path", [b"", b"40000", b"4000000"])
def test_whatever_a_client_sends_it_has_to_read(
    monkeypatch: pytest.MonkeyPatch, path: bytes, sent: bytes
) -> None:
    """An endless answer, one that has ended but for the client, a long one: bytes of a next request
    stop no clock, and what is held of an answer is bounded."""
    with unread(monkeypatch, path) as (sock, there):
        sock.sendall(sent)
        held, began = [0], time.monotonic()
        while there and time.monotonic() - began < 5:
            held += [c.transport.get_write_buffer_size() for c in list(there)]
            time.sleep(0.01)
        assert not there and max(held) <= protocol.HELD + 2000


def test_closing_does_not_stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with unread(monkeypatch, b"40000") as (sock, there):
        sock.shutdown(socket.SHUT_WR)
        assert soon(lambda: not there)


def test_a_byte_now_and_then_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an answer that goes on, and of one that has ended."""
    for path in (b"", b"40000"):
        with unread(monkeypatch, path) as (sock, there):
            began = time.monotonic()
            while there and time.monotonic() - began < 5:
                sock.recv(1)
                time.sleep(0.02)
            assert not there


def test_a_client_that_reads_slowly_but_enough_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than its clock: what it takes in that time is more than HELD."""
    monkeypatch.setattr(protocol, "HELD", 1500)
    with unread(monkeypatch, b"120000") as (sock, there):
        got, began = 0, time.monotonic()
        while there and time.monotonic() - began < 10:
            got += len(sock.recv(2000))
            time.sleep(0.025)
            if got >= 120_000:
                break
        assert got >= 120_000 and time.monotonic() - began > 2 * protocol.CLIENT_S


def test_a_burst_stays_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have been idle for longest go, not those whose request is on its way."""
    seen, own = [], protocol.Bounded.connection_made

    def made(self: protocol.Bounded, transport: Any) -> None:
        own(self, transport)
        seen.append(len(self.connections))

    monkeypatch.setattr(protocol.Bounded, "connection_made", made)
    with serving(pour, most=1) as (server, port), ExitStack() as opened:
        there = server.server_state.connections

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", port), 10))

        old = [connect() for _ in range(protocol.SPARE + 1)]
        for sock in old:
            sock.sendall(GET.replace(b"/health", b"/1"))
            assert sock.recv(10)
        time.sleep(2 * protocol.FRESH_S)
        new = [connect() for _ in range(protocol.SPARE)]
        for sock in new:
            sock.sendall(GET.replace(b"/health", b"/1"))
        assert all(sock.recv(10) == b"HTTP/1.1 2" for sock in new)
        assert len(there) <= 1 + protocol.SPARE
        many = [connect() for _ in range(6 * protocol.SPARE)]
        assert soon(
            lambda: len(seen) == 1 + 8 * protocol.SPARE and len(there) <= 1 + 2 * protocol.SPARE
        )
        time.sleep(2 * protocol.FRESH_S)
        last = connect()
        last.sendall(GET.replace(b"/health", b"/1"))
        assert last.recv(10) == b"HTTP/1.1 2"
        assert soon(lambda: len(there) <= 1 + protocol.SPARE) and len(many)


def test_a_body_that_nobody_waits_for_may_still_be_sent(address: tuple[str, int]) -> None:
    """A refusal comes before the body; a client that sends it in pieces gets the refusal, not a
    cut."""
    with socket.create_connection(address, 10) as sock:
        sock.sendall(b"POST /no/such/path HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            time.sleep(0.08)
            sock.sendall(b"x")
        assert "nothing at" in ask(sock, b"")["error"]["message"]
        time.sleep(0.5)
        assert ask(sock)["status"] == "ok"

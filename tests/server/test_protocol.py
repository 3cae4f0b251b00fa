"""Connections are bounded in time and in number; on real sockets."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mlxspec.server import protocol
from tests.server.live import live
from tests.server.scripted import MESSAGES, server

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def address(tokenizer: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(protocol, "HEADERS_S", 0.3)
    monkeypatch.setattr(protocol, "SPARE", 2)
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


def test_a_second_request_is_on_the_clock_too_but_not_the_pause_before_it(address: tuple[str, int]) -> None:
    with socket.create_connection(address, 10) as sock:
        assert ask(sock)["status"] == "ok"
        time.sleep(0.6)  # idle: longer than a request's headers may take
        assert ask(sock)["status"] == "ok"
        sock.sendall(GET[:10])
        assert read(sock) == b""


def test_an_answer_may_take_longer(tokenizer: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADERS_S", 0.1)
    s = server(tokenizer, model_dir, holds=True)
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with live(s.app) as url, socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 10) as sock:
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
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
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
    with live(server(tokenizer, model_dir).app) as url:
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 10) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            began = time.monotonic()
            with pytest.raises(ConnectionError):
                while time.monotonic() - began < 10:
                    sock.sendall(GET.replace(b"/health", b"/metrics") * 100)


def test_a_body_that_nobody_waits_for_may_still_be_sent(address: tuple[str, int]) -> None:
    """A refusal comes before the body; a client that sends it in pieces gets the refusal, not a cut."""
    with socket.create_connection(address, 10) as sock:
        sock.sendall(b"POST /no/such/path HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            time.sleep(0.08)
            sock.sendall(b"x")
        assert "nothing at" in ask(sock, b"")["error"]["message"]
        time.sleep(0.5)
        assert ask(sock)["status"] == "ok"

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


def test_what_is_no_http_is_told_so(address: tuple[str, int]) -> None:
    with socket.create_connection(address, 10) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = read(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "no HTTP request" in json.loads(body)["error"]["message"]


def test_too_many_connections_are_told_and_more_are_cut(address: tuple[str, int]) -> None:
    """One with work, two spare; two that are told; then none."""
    with ExitStack() as opened:
        socks = [opened.enter_context(socket.create_connection(address, 10)) for _ in range(6)]
        assert read(socks[5]) == b""
        for k in (0, 1, 2):
            assert ask(socks[k])["status"] == "ok"
        for k in (3, 4):
            assert "too many connections" in ask(socks[k])["error"]["message"]
            assert read(socks[k]) == b""  # closed behind the answer
        with socket.create_connection(address, 10) as again:
            assert "too many connections" in ask(again)["error"]["message"]
    until = time.monotonic() + 10  # those of before are closed, and soon not counted any more
    while True:
        with socket.create_connection(address, 10) as sock:
            if ask(sock).get("status") == "ok":
                break
        assert time.monotonic() < until

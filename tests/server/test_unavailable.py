"""What answers while no server can: many clients at once, each with the whole reason."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mlxspec.server import unavailable
from mlxspec.server.unavailable import UnavailableResponder

REASON = "half an emoji \ud83d, " + "a long reason " * 1000


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    before = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made
    end = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.01)


def connect(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname(), timeout=10)


def is_whole(client: socket.socket, kind: bytes = b"*/*") -> bool:
    """Whether a client that sends a long request gets all of its answer."""
    client.sendall(b"POST / HTTP/1.1\r\nAccept: " + kind + b"\r\n\r\n" + b"x" * 200_000)
    data = b""
    while more := client.recv(1 << 16):
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    if kind == b"text/html":
        assert body.endswith(b"a long reason ")
    else:
        assert json.loads(body)["error"] == {
            "message": REASON,
            "type": "unavailable",
            "code": "loading",
        }
    return head.startswith(b"HTTP/1.1 503 ") and b"Content-Length: %d\r\n" % len(body) in head


def test_silent_clients_keep_nobody_waiting(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unavailable, "CLIENT_S", 20.0)
    with UnavailableResponder(listener, REASON, "loading"), ExitStack() as silent:
        for _ in range(unavailable.MOST - 1):
            silent.enter_context(connect(listener))
        for kind in (b"*/*", b"text/html", b"*/*"):
            with connect(listener) as client:
                assert is_whole(client, kind)


def test_more_clients_than_are_answered_at_once(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait; no more threads work than the bound says."""
    monkeypatch.setattr(unavailable, "MOST", 4)
    monkeypatch.setattr(unavailable, "CLIENT_S", 0.2)
    before, most, whole = threading.active_count(), 0, []

    def ask() -> None:
        with connect(listener) as client:
            whole.append(is_whole(client))

    with UnavailableResponder(listener, REASON, "loading"), ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(connect(listener))
        asking = [threading.Thread(target=ask) for _ in range(30)]
        for one in asking:
            one.start()
        while alive := sum(one.is_alive() for one in asking):
            most = max(most, threading.active_count() - before - alive)
            time.sleep(0.01)
    assert whole == [True] * 30 and most <= 4 + 1


def test_who_was_accepted_is_answered_after_the_end(listener: socket.socket) -> None:
    with UnavailableResponder(listener, REASON, "loading"):
        client = connect(listener)
        time.sleep(0.1)  # until it is accepted
    with client:
        assert is_whole(client)

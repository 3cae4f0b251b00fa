"""A server that answers anything: the chat and `mlxspec status` say so."""

import http.client
import socket
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxspec import cli
from mlxspec.cli import app
from mlxspec.commands import chat, plain_output
from mlxspec.service import client, status
from mlxspec.service.client import ClientError
from tests.support.bad_values import VALUES


class Said:
    """A response of a server that is none."""

    def __init__(self, data: bytes) -> None:
        self.lines = data.splitlines(keepends=True)

    def readline(self, most: int) -> bytes:
        return self.lines.pop(0) if self.lines else b""


@pytest.mark.parametrize("value", VALUES)
def test_a_server_that_answers_anything(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat and `mlxspec status` say so, whatever it is."""
    body = VALUES[value].encode()

    class Connection:
        def __init__(self, *_: object, **__: object) -> None: ...
        def request(self, *_: object, **__: object) -> None: ...
        def close(self) -> None: ...
        def getresponse(self) -> Any:
            return type("Response", (Said,), {"status": 200, "read": lambda self, *_: body})(
                b"data: " + body
            )

    monkeypatch.setattr("http.client.HTTPConnection", Connection)
    with pytest.raises(ClientError):
        chat.Chat(("http://localhost:1", "")).ask("hello")
    assert status.get_status("http://localhost:1").state in ("unwell", "stopped")
    for around in (
        b'{"models": %s}',
        b'{"models": [{"stats": {"generated_tokens": 1}}], "requests": %s, "time": 1}',
    ):
        body = around % VALUES[value].encode()
        assert status.get_status("http://localhost:1").state in ("unwell", "stopped")
    for around in (
        b'{"choices": [{"index": 0, "delta": {"reasoning_content": %s}}]}\n',
        b'{"choices": [{"index": 0, "delta": {"content": %s}}]}\n',
        b'{"choices": [], "usage": {"completion_tokens": %s}}\n',
    ):
        body = around % VALUES[value].encode() + b"data: [DONE]"
        with suppress(ClientError):
            chat.Chat(("http://localhost:1", "")).ask("hello")


@pytest.mark.parametrize("command", ["run", "chat", "launch", "load", "stop"])
def test_a_listener_that_never_answers(
    command: str, monkeypatch: pytest.MonkeyPatch, bare_settings: None
) -> None:
    """What is waited for is said soon, and the wait is far shorter than for an answer's text."""
    seconds: list[float] = []

    def connect(host: str, port: int, timeout: float) -> http.client.HTTPConnection:
        seconds.append(timeout)
        return http.client.HTTPConnection(host, port, timeout=timeout / 50)

    assert 1 <= plain_output.LATE_S <= 3
    monkeypatch.setattr(plain_output, "LATE_S", plain_output.LATE_S / 50)
    monkeypatch.setitem(client.CONNECTIONS, "http", connect)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        words = {"run": ["tiny", "hello"], "chat": [], "launch": ["--print", "opencode"]}
        given = words.get(command, ["tiny"])
        done = CliRunner().invoke(app, [command, "--url", url, *given])
        talk = chat.Chat((url, ""))
        with pytest.raises(ClientError, match="has not answered for"):
            talk.ask("hello")
    assert isinstance(done.exception, ClientError)
    told = str(done.exception)
    assert f"{url} has not answered for 15 s" in told and "another program has the port" in told
    assert seconds == [15, 120]
    assert f"waiting for {url} to answer\n" in done.stderr


@pytest.mark.parametrize("command", ["load", "stop"])
def test_a_server_that_goes_mute_while_it_loads(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again and again, and given up long before the longest load ends."""
    asked = []

    def answer() -> None:
        while True:
            peer, _ = mute.accept()
            peers.append(peer)
            asked.append(peer.recv(1 << 16).split(b" ", 2)[:2])
            if asked[-1][0] == b"GET" and len(asked) < 4:
                body = b'{"data": []}'
                peer.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    assert 30 <= cli.MUTE_S <= 120
    monkeypatch.setattr(cli, "MUTE_S", 0.5)
    monkeypatch.setattr(cli, "POLL_S", 0.05)
    peers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as mute:
        Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        done = CliRunner().invoke(app, [command, "--url", url, "tiny"])
    assert isinstance(done.exception, ClientError)
    assert f"{url} has not answered" in str(done.exception)
    verb = {"load": b"load", "stop": b"unload"}[command]
    listing = [b"GET", b"/v1/models"]
    assert asked == [listing, [b"POST", b"/v1/models/" + verb], listing, listing]

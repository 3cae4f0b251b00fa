"""A server that answers anything: the chat and `mlxspec status` say so."""

from contextlib import suppress
from typing import Any

import pytest

from mlxspec.client import ClientError
from mlxspec.commands import chat
from mlxspec.service import status
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

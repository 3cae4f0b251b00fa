"""`mlxspec run`: a chat with a model, on the running server or on one that it starts.

Rule: the started server ends with the chat, however that ends: its terminal is ours, and hangs up.
"""

import fcntl
import json
import os
import pty
import signal
import sys
import termios
import time
from contextlib import suppress
from threading import Thread
from typing import Annotated
from urllib.parse import urlsplit

import typer

from mlxspec.commands.chat import Chat, Settings, System, converse, new_chat
from mlxspec.commands.options import FreeText, Key, ModelName, Url, names_on_disk
from mlxspec.commands.plain_output import note
from mlxspec.config import LOOPBACK, load_config, url_of
from mlxspec.files import MODULE
from mlxspec.service.client import POLL_S, STREAM_S, ClientError, NotRunning, request, when_loaded

LAST = 2000  # bytes that are shown of a server that ends during the chat


def run(
    model: Annotated[
        ModelName,
        typer.Argument(
            parser=ModelName,
            metavar="MODEL",
            help="A served model, or one to serve: a directory or a Hugging Face id.",
            autocompletion=names_on_disk,
        ),
    ],
    prompt: Annotated[
        FreeText | None,
        typer.Argument(
            parser=FreeText,
            metavar="PROMPT",
            help="Answer this and end.",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
    api_key: Key = None,
    system: System = "",
    settings: Settings = None,
) -> None:
    """Chat with MODEL: on the running server, else on one that is started for this chat.

    A running server of this machine serves a model of its disk from then on. One that is started
    has the settings that serve would use, and stops at the end.
    """
    talk = new_chat(url, api_key, system, settings)
    try:
        _connect(talk, model)
    except NotRunning:
        if url:
            raise
        config = load_config({})
        talk.server = url_of(config.host, config.port), talk.server[1]
        note(f"no server runs; starting one: mlxspec serve {model}")
        with _Serving(model) as started:
            while not _is_up(talk.server):
                started.check()
                time.sleep(POLL_S)
            started.shown = False
            _connect(talk, "")
            _answer(talk, prompt)
    else:
        _answer(talk, prompt)


def _connect(talk: Chat, model: str) -> None:
    """Go on with a model of the server. Raises ClientError."""
    try:
        when_loaded(lambda: talk.use(model), report=note)
    except ClientError as error:
        here = urlsplit(talk.server[0]).hostname in LOOPBACK  # else the disk is another one
        if error.code != "model_not_found" or not here or model not in names_on_disk():
            raise
        note("it is on this disk; the server serves it from now on")
        with request(*talk.server, "POST", "/api/pull", {"model": model}, STREAM_S) as lines:
            *_, last = map(json.loads, lines)
            if "error" in last:  # what is missing, such as its head, could not be fetched
                raise ClientError(last["error"]) from error
        talk.use(model)


def _answer(talk: Chat, prompt: str | None) -> None:
    if prompt is None:
        converse(talk)
    else:
        talk.ask(prompt)


def _is_up(server: tuple[str, str]) -> bool:
    with suppress(ClientError), request(*server, "GET", "/health"):
        return True
    return False


class _Serving:
    """A server with a terminal of its own, so that Ctrl-C stops an answer and not the server. What
    it writes is `shown` while it loads; if it ends later, the last of it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.shown = True
        self.ending = False

    def __enter__(self) -> "_Serving":
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the greeting
            os.execv(sys.executable, [*MODULE, "mlxspec", "serve", self.model])
        with suppress(OSError):
            size = fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, size)
        Thread(target=self._relay, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending = True
        if self.pid:
            note("stopping the server that was started for this chat")
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)

    def check(self) -> None:
        """Raises ClientError if the server has ended."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
            raise ClientError("the server has ended; what it said is above")

    def _relay(self) -> None:
        last = b""
        with suppress(OSError):  # it has ended
            while data := os.read(self.terminal, 1 << 12):
                last = (last + data)[-LAST:]
                if self.shown:
                    os.write(2, data)
        if not self.shown and not self.ending:
            os.write(2, b"\n" + last)

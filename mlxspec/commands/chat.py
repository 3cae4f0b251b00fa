"""`mlxspec chat`: a chat in the terminal with a running server.

Answers go to stdout and everything else to stderr, reasoning too, so that a pipe gets only the
answers.
"""

import http.client
import importlib
import json
import sys
import unicodedata
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from mlxspec.client import MAX_LINE, ClientError, request
from mlxspec.commands.options import Key, Url, server_of
from mlxspec.types import Json, printable

HELP = "/exit or Ctrl-D ends the chat, /reset starts a new conversation"


def chat(
    url: Url = None,
    api_key: Key = None,
    system: Annotated[
        str,
        typer.Option(metavar="<text>", help="A system message for the conversation."),
    ] = "",
    temperature: Annotated[
        float | None,
        typer.Option(min=0, metavar="<float>", help="0 is greedy; default: the model's own."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="<file>", help="An image for the first message; may be repeated."),
    ] = None,
) -> None:
    """Chat with the running server: /reset starts again, /exit ends, Ctrl-C stops an answer."""
    server = server_of(url, api_key)
    with request(*server, "GET", "/v1/models") as response:
        info = json.load(response)["data"][0]
    model = info["id"]
    images = [_image_part(file) for file in image or ()]
    if images and "image" not in info.get("input_modalities", ()):
        raise ClientError(f"--image: {model} reads text only; serve a model that sees images")
    opening = [{"role": "system", "content": system}] if system else []
    body: Json = {"model": model, "messages": opening, "stream": True}
    if temperature is not None:
        body["temperature"] = temperature
    interactive = sys.stdin.isatty()
    if interactive:
        _note(f"{model} at {server[0]}. {HELP}. Ctrl-C stops an answer.")
    for line in _prompt() if interactive else sys.stdin:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            body["messages"] = opening
        elif text:
            try:
                answer(*server, body, [*images, {"type": "text", "text": text}] if images else text)
                if body["messages"] != opening:  # they are part of the conversation now
                    images = []
            except ClientError as error:
                if not interactive:  # at a terminal only a missing server ends the chat
                    raise
                _note(f"error: {error}")


def answer(url: str, api_key: str, body: Json, content: str | list[Json]) -> None:
    """Print one answer and its reasoning as they stream, and append question and answer to
    `body["messages"]`. Ctrl-C stops it; a partial answer stays in the conversation."""
    messages = [*body["messages"], {"role": "user", "content": content}]
    payload = body | {"messages": messages}
    reply, thinking = "", False
    try:
        with request(url, api_key, "POST", "/v1/chat/completions", payload) as response:
            for event in _events(response):
                for choice in event["choices"]:
                    if thought := choice["delta"].get("reasoning_content"):
                        thinking = True
                        _note(_dim(thought), end="")
                    if piece := choice["delta"].get("content"):
                        if thinking:
                            _note("\n")
                        thinking = False
                        reply += piece
                        print(_plain(piece), end="", flush=True)
    except KeyboardInterrupt:
        _note("stopped")
    finally:
        if reply:
            print(flush=True)
            body["messages"] = [*messages, {"role": "assistant", "content": reply}]


def _image_part(file: Path) -> Json:
    """An image's file as a part of a message. Raises ClientError."""
    try:
        data = b64encode(file.expanduser().read_bytes()).decode()
    except OSError as error:
        raise ClientError(f"--image: {file}: {error.strerror}; give a file") from error
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}


def _events(response: http.client.HTTPResponse) -> Iterator[Json]:
    """The JSON events of a stream, which is complete only with its [DONE]."""
    while line := response.readline(MAX_LINE):
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ClientError(printable(event["error"]["message"]))
            yield event
    raise ClientError("the answer was cut off; see the server's log")


def _prompt() -> Iterator[str]:
    """The lines that a user types."""
    with suppress(ImportError):
        importlib.import_module("readline")  # line editing and history, where Python has it
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            _note(f"\n{HELP}")


def _plain(text: str) -> str:
    """The text without control characters: a model must not control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _dim(text: str) -> str:
    return f"\x1b[2m{_plain(text)}\x1b[0m" if sys.stderr.isatty() else _plain(text)


def _note(text: str, end: str = "\n") -> None:
    print(text, file=sys.stderr, flush=True, end=end)

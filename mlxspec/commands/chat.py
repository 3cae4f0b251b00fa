"""`mlxspec chat`: a chat in the terminal with a running server.

Answers go to stdout and everything else to stderr, so that a pipe gets only the answers.
"""

import http.client
import importlib
import json
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mlxspec.client import MAX_LINE, ClientError, printable, request

HELP = "/exit or Ctrl-D ends the chat, /reset starts a new conversation"


@dataclass(slots=True)
class Chat:
    """One conversation with the server at `url`. `temperature` None: the model's default."""

    url: str
    api_key: str = ""
    temperature: float | None = None
    model: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)


def run(url: str, api_key: str, system: str, temperature: float | None) -> None:
    """Chat until stdin ends or /exit. In a terminal, only a missing server raises ClientError."""
    with request(url, api_key, "GET", "/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    opening = []
    if system:
        opening.append({"role": "system", "content": system})
    chat = Chat(url, api_key, temperature, model, list(opening))
    interactive = sys.stdin.isatty()
    if interactive:
        _note(f"{model} at {url}. {HELP}. Ctrl-C stops an answer.")
    for line in _prompt() if interactive else sys.stdin:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            chat.messages = list(opening)
        elif text:
            try:
                answer(chat, text)
            except ClientError as error:
                if not interactive:
                    raise
                _note(f"error: {error}")


def answer(chat: Chat, text: str) -> None:
    """Print one answer as it streams. Ctrl-C stops it; what came stays in the conversation."""
    messages = [*chat.messages, {"role": "user", "content": text}]
    body: dict[str, Any] = {"model": chat.model, "messages": messages, "stream": True}
    if chat.temperature is not None:
        body["temperature"] = chat.temperature
    body["stream_options"] = {"include_usage": True}
    reply, note, began, first = "", "", time.perf_counter(), 0.0
    try:
        with request(chat.url, chat.api_key, "POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if not reply:
                        first = time.perf_counter()
                    reply += piece
                    print(_plain(piece), end="", flush=True)
                if event.get("usage"):
                    tokens, now = event["usage"]["completion_tokens"], time.perf_counter()
                    rate = (tokens - 1) / (now - first)  # the first token's time is the prompt's
                    note = f"{tokens} tokens, {rate:.1f} tokens/s"
                    note += f", first token after {first - began:.2f} s"
    except KeyboardInterrupt:
        note = "stopped"
    finally:
        if reply:
            print(flush=True)
    if reply:
        chat.messages = [*messages, {"role": "assistant", "content": reply}]
    if note:
        _note(note)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
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
    """Without control characters: a model must not control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

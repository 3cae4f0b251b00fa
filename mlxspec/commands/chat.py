"""The terminal chat: the standard library's HTTP against a running server, nothing else.

Answers go to stdout, all else to stderr, so that a piped chat (one turn per line) yields only
answers.
"""

import http.client
import importlib
import importlib.util
import json
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 120  # of silence: more than any keep-alive pause that a server may be set to
LINE = 1 << 20  # bytes of one event
ELSE = "give another --url, or end it"
END = "/exit or Ctrl-D ends the chat, /reset starts it anew"


class ChatError(Exception):
    """The answer cannot be had. The message says what to do."""


class Absent(ChatError):
    """Nobody listens there."""


class Locked(ChatError):
    """The API key is wrong, or missing."""


@dataclass(slots=True)
class Chat:
    """One conversation with the server at `url`. `temperature` None leaves it to the model's own
    setting."""

    url: str
    api_key: str = ""
    temperature: float | None = None
    model: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)


def run(url: str, api_key: str = "", system: str = "", temperature: float | None = None) -> None:
    """Chats until stdin ends or /exit. Raises ChatError; at a terminal only if the server is not
    there."""
    opening = [{"role": "system", "content": system}] if system else []
    chat = Chat(url, api_key, temperature)
    with call(chat.url, chat.api_key, "GET", "/v1/models") as response:
        chat.model = json.load(response)["data"][0]["id"]
    chat.messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        _note(f"{chat.model} at {url}. {END}. Ctrl-C stops an answer.")
    for line in _turns() if interactive else sys.stdin:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            chat.messages = list(opening)
        elif text:
            try:
                answer(chat, text)
            except ChatError as error:
                if not interactive:
                    raise
                _note(f"error: {error}")


def answer(chat: Chat, text: str) -> None:
    """Asks for one answer and prints it as it comes. Ctrl-C stops it; what came stays in the
    conversation."""
    messages = [*chat.messages, {"role": "user", "content": text}]
    body: dict[str, Any] = {"model": chat.model, "messages": messages, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if chat.temperature is not None:
        body["temperature"] = chat.temperature
    said, tokens, started, first, stopped = "", 0, time.perf_counter(), 0.0, False
    try:
        with call(chat.url, chat.api_key, "POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first or time.perf_counter()
                        said += piece
                        print(_plain(piece), end="", flush=True)
    except KeyboardInterrupt:
        stopped = True
    finally:
        if said:
            print(flush=True)
    if said or not stopped:
        chat.messages = [*messages, {"role": "assistant", "content": said}]
    seconds = time.perf_counter() - (first or started)
    if stopped:
        _note(f"stopped after {time.perf_counter() - started:.1f} s")
    elif tokens > 1 and first:
        rate = f"{(tokens - 1) / seconds:.1f} tokens/s"  # the first token's time is the prompt's
        _note(f"{tokens} tokens, {rate}, the first after {first - started:.2f} s")


@contextmanager
def call(
    at: str, api_key: str, method: str, path: str, body: Any = None, patience: float = TIMEOUT_S
) -> Iterator[http.client.HTTPResponse]:
    """The response of the server at the URL `at` with status 200; `patience` is in seconds of
    silence. Raises ChatError, also for what goes wrong while it is read."""
    if not _is_url(at):
        raise ChatError(f"--url = {at!r} is not a URL; give one like http://127.0.0.1:8080")
    url = urlsplit(at)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = kind(url.hostname or "", url.port, timeout=patience)
    try:
        connection.request(
            method, url.path.rstrip("/") + path, json.dumps(body) if body else None, headers
        )
        response = connection.getresponse()
        if response.status != 200:
            raise (Locked if response.status == 401 else ChatError)(_refused(response, at))
        yield response
    except ConnectionRefusedError as error:
        raise Absent(f"no server at {at}; start one with: mlxspec serve") from error
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(
            f"{at}: {str(error) or type(error).__name__}; see the server's log"
        ) from error
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ChatError(f"something else answers at {at} ({error!r}); {ELSE}") from error
    finally:
        connection.close()


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no port
        return False


def clean(found: Any) -> Any:
    """What a server sent, without characters that could steer the terminal."""
    if isinstance(found, dict):
        return {clean(key): clean(value) for key, value in found.items()}
    if isinstance(found, list):
        return [clean(one) for one in found]
    return (
        "".join(c if c.isprintable() else "?" for c in found) if isinstance(found, str) else found
    )


def _refused(response: http.client.HTTPResponse, at: str) -> str:
    try:
        message = clean(str(json.loads(response.read(LINE))["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return f"something else answers at {at} ({response.status}); {ELSE}"
    mend = "; give --api-key" if response.status == 401 else ""
    return f"the server answered {response.status}: {message}{mend}"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream up to its end mark; a stream without one was cut off."""
    while line := response.readline(LINE):
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ChatError(clean(event["error"]["message"]))
            yield event
    raise ChatError("the answer was cut off; see the server's log")


def _turns() -> Iterator[str]:
    if importlib.util.find_spec("readline"):  # line editing and history, where Python has it
        importlib.import_module("readline")
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            _note(f"\n{END}")


def _plain(text: str) -> str:
    """Without control characters: a model must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

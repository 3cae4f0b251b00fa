"""`mlxspec chat`: a chat in the terminal with a running server.

Answers go to stdout. Where that is not a terminal they are plain text, and everything else goes to
stderr, reasoning too.
"""

import http.client
import json
import sys
import time
from base64 import b64encode
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from mlxspec.commands.options import Key, Url, server_of
from mlxspec.commands.plain_output import PlainAnswer, dim, note, waiting
from mlxspec.commands.terminal_input import HISTORY, no_echo, read_messages, split_messages
from mlxspec.config import load_config
from mlxspec.profiles import ROWS
from mlxspec.service.client import MAX_LINE, STREAM_S, ClientError, request, when_loaded
from mlxspec.settings import checked
from mlxspec.types import Json, UserError, printable, shown

HINT = "/help lists the commands; Ctrl-D or /exit ends the chat, Ctrl-C stops an answer"
HELP = '''/model [NAME]        show the served models, or go on with that one
/system [TEXT]       show the system message, or set it; "" is none
/set [NAME [VALUE]]  show or set fields of the requests, such as temperature
                     0.2; without VALUE the model's own is used again
/image FILE          send an image with the next message
/save [FILE]         write the conversation: Markdown, or JSON for .json
/reset               start a new conversation
/exit                end the chat, as Ctrl-D does
""" begins and ends a message of several lines; a paste is one message. A
message that begins with / needs a blank before it.'''
COMMANDS = ("/help", *(line.split()[0] for line in HELP.splitlines() if line.startswith("/")))
# Of the API's fields those that make sense here. Numbers have the limits of a profile's table.
FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "reasoning_effort",
    "reasoning",
    "chat_template_kwargs",
    "response_format",
    "loop_guard",
    "priority",
)
TEXTS = ("stop", "reasoning_effort")
Pieces = Generator[tuple[str, str], None, None]  # what to show: kind and text
LEAST_S = 0.1  # of an answer whose speed is told

System = Annotated[
    str,
    typer.Option(metavar="<text>", help="A system message for the conversation."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="<name=value>",
        help="A field of the requests, as in the API, such as top_p=0.9; may be repeated.",
    ),
]


def chat(
    url: Url = None,
    api_key: Key = None,
    model: Annotated[
        str,
        typer.Option(metavar="<name>", help="A served model; default: the first."),
    ] = "",
    system: System = "",
    temperature: Annotated[
        float | None,
        typer.Option(min=0, metavar="<float>", help="0 is greedy; default: the model's own."),
    ] = None,
    settings: Settings = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="<file>", help="An image for the first message; may be repeated."),
    ] = None,
) -> None:
    """Chat with the running server: /help lists the commands, Ctrl-C stops an answer."""
    talk = new_chat(url, api_key, system, settings)
    if temperature is not None:
        talk.set("temperature", str(temperature))
    when_loaded(lambda: talk.use(model), report=note)
    for file in image or ():
        talk.attach(str(file))
    converse(talk)


def new_chat(
    url: str | None,
    api_key: str | None,
    system: str,
    settings: list[str] | None,
) -> "Chat":
    """A conversation as the options of a command say, without a model. Raises UserError."""
    talk = Chat(server_of(url, api_key), system)
    for pair in settings or ():
        talk.set(*pair.partition("=")[::2])
    return talk


def converse(talk: "Chat") -> None:
    """Answer what is typed, or the lines of stdin where that is not a terminal. There an error ends
    it; at a terminal only the user does."""
    interactive = sys.stdin.isatty()
    messages: Iterator[str] = split_messages(sys.stdin)
    if interactive:
        from mlxspec.model.hub import cache_of

        note(f"{printable(talk.model)} at {talk.server[0]}. {HINT}.")
        words = [*COMMANDS, *FIELDS]
        messages = read_messages(cache_of(load_config({})) / HISTORY, words, HINT)
    for text in messages:
        word = text.split(maxsplit=1)[0] if text.startswith("/") else ""
        try:
            if word in ("/exit", "/bye", "/quit"):
                return
            if word in COMMANDS or (interactive and word[1:].isalpha()):
                talk.command(word, text[len(word) :].strip())
            elif text:
                summary = talk.ask(text)
                if interactive:
                    note(dim(summary))
        except UserError as error:
            if not interactive:
                raise
            fix = ""
            if isinstance(error, ClientError) and error.code == "context_length_exceeded":
                fix = "; /reset starts a new conversation"
            note(f"error: {error}{fix}")


@dataclass
class Chat:
    """A conversation with one of the models of `server`, its URL and key. `fields` are those of
    the requests beside the messages; `images` wait for the next message."""

    server: tuple[str, str]
    system: str = ""
    model: str = ""
    context: int = 0  # tokens, 0: unknown
    sees: bool = False
    fields: Json = field(default_factory=dict)
    images: list[Json] = field(default_factory=list)
    messages: list[Json] = field(default_factory=list)

    def use(self, name: str) -> None:
        """Go on with a served model, or begin with the first. Raises ClientError."""
        path = f"/v1/models/{quote(name)}" if name else "/v1/models"
        with waiting(self.server[0]), request(*self.server, "GET", path) as response:
            info = json.load(response)
            info = info["data"][0] if "data" in info else info
            self.model = str(info["id"])
            self.context = int(info.get("context_window", 0))
            self.sees = "image" in info.get("input_modalities", ())

    def command(self, word: str, rest: str) -> None:
        """Carry out a command that was typed. Raises ClientError."""
        match word:
            case "/help":
                note(HELP)
            case "/model" if rest:
                self.use(rest)
                note(f"now {printable(self.model)}")
            case "/model":
                self._list_models()
            case "/system":
                self.system = {"": self.system, '""': ""}.get(rest, rest)
                note(f"system message: {self.system or 'none'}")
            case "/set":
                name, _, value = rest.partition(" ")
                if name:
                    self.set(name, value.strip())
                pairs = (f"{name} = {json.dumps(value)}" for name, value in self.fields.items())
                note(", ".join(pairs) or "all fields are the model's own")
            case "/image":
                self.attach(rest)
                note(f"{rest} goes with the next message")
            case "/save":
                note(f"saved to {self.save(rest)}")
            case "/reset":
                self.messages, self.images = [], []
                note("a new conversation")
            case _:
                why = "begin with a blank to send it to the model"
                raise ClientError(f"there is no command {word}; /help lists them all; {why}")

    def _list_models(self) -> None:
        lines = []
        with request(*self.server, "GET", "/v1/models") as response:
            for info in json.load(response)["data"]:
                mark = "*" if info["id"] == self.model else " "
                lines.append(printable(f"{mark} {info['id']} ({info.get('status', 'served')})"))
        note("\n".join(lines))

    def set(self, name: str, value: str) -> None:
        """Set a field of the next requests, or with "" leave it to the model. Raises
        UserError."""
        if name not in FIELDS:
            raise ClientError(f"there is no field {name!r}; give one of {', '.join(FIELDS)}")
        if not value:
            self.fields.pop(name, None)
        elif name in ROWS:
            self.fields[name] = checked(ROWS, name, value, "/set needs a number")
        else:
            self.fields[name] = _parsed(name, value)

    def attach(self, file: str) -> None:
        """Send an image with the next message. Raises ClientError."""
        if not self.sees:
            raise ClientError(
                f"--image: {self.model} reads text only; serve a model that sees images",
            )
        try:
            data = b64encode(Path(file).expanduser().read_bytes()).decode()
        except OSError as error:
            raise ClientError(f"--image: {file}: {error.strerror}; give a file") from error
        url = {"url": f"data:;base64,{data}"}
        self.images.append({"type": "image_url", "image_url": url})

    def save(self, name: str) -> Path:
        """Write the conversation to a new file. Raises ClientError."""
        file = Path(name or time.strftime("chat-%Y-%m-%d-%H%M%S.md")).expanduser()
        messages = self._opening + self.messages
        text = json.dumps(messages, indent=2, ensure_ascii=False)
        if file.suffix != ".json":
            parts = (f"## {one['role']}\n\n{_text(one['content'])}\n" for one in messages)
            text = "\n".join(parts)
        try:
            with file.open("x", encoding="utf-8", errors="replace") as out:
                out.write(text)
        except OSError as error:
            raise ClientError(f"{file}: {error.strerror}; give another name") from error
        return file

    @property
    def _opening(self) -> list[Json]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> str:
        """Show an answer as it streams, keep question and answer, and return what it took. Ctrl-C
        stops it; a partial answer stays in the conversation. Raises ClientError."""
        content = [*self.images, {"type": "text", "text": text}] if self.images else text
        question = {"role": "user", "content": content}
        body = self.fields | {
            "model": self.model,
            "messages": [*self._opening, *self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
        answer, view = Answer(), _view()
        try:
            with (
                no_echo(),
                view,
                closing(self._stream(body, answer)) as pieces,
            ):
                for kind, piece in pieces:
                    view.write(kind, piece)
        except KeyboardInterrupt:
            note("stopped")
        finally:
            if answer.text:
                reply = {"role": "assistant", "content": answer.text}
                self.messages += [question, reply]
                self.images = []
        return self._summary(answer)

    def _stream(self, body: Json, answer: "Answer") -> Pieces:
        path = "/v1/chat/completions"
        with request(*self.server, "POST", path, body, timeout=STREAM_S) as response:
            for event in _events(response):
                yield from answer.take(event)

    def _summary(self, answer: "Answer") -> str:
        """What an answer took, and why it was cut."""
        parts = []
        if answer.seconds > LEAST_S:
            rate = (answer.tokens - 1) / answer.seconds
            parts.append(f"{answer.tokens} tokens, {rate:.1f} tokens/s")
        if answer.tokens and self.context:
            share = answer.used / self.context
            parts.append(f"context: {answer.used:,} of {self.context:,} tokens ({share:.0%})")
        if answer.loops:
            note("ended: it repeated itself; /set loop_guard false lets it")
        if answer.finish == "length":
            limit = self.fields.get("max_tokens")
            if limit and answer.tokens >= limit:
                note(f"cut off after max_tokens = {limit}; ask the model to continue")
            else:
                note("cut off: the context is full; /reset starts a new conversation")
        return " · ".join(parts)


@dataclass
class Answer:
    """One answer while it streams. `used`: tokens of the context with it; `seconds`: from its first
    text to its end."""

    text: str = ""
    finish: str = ""
    tokens: int = 0
    used: int = 0
    loops: int = 0
    seconds: float = 0.0
    began: float = 0.0

    def take(self, event: Json) -> Pieces:
        """What to show of one event of the stream. Any error is the server's."""
        if read := event.get("prompt_progress"):
            share = read["processed"] / max(1, read["total"])
            yield "progress", f"reading the prompt: {share:.0%} of {read['total']:,} tokens"
        for choice in event["choices"]:
            self.finish = choice.get("finish_reason") or ""
            delta = choice["delta"]
            thought, piece = delta.get("reasoning_content") or "", delta.get("content") or ""
            self.text += piece
            if thought or piece:
                self.began = self.began or time.monotonic()
                self.seconds = time.monotonic() - self.began
            if thought:
                yield "reasoning", "" + thought
            if piece:
                yield "content", piece
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]
            self.used = usage.get("prompt_tokens", 0) + self.tokens
            details = usage.get("completion_tokens_details") or {}
            self.loops = details.get("loops_ended", 0)


def _parsed(name: str, text: str) -> Any:
    """The value of a field other than a number. Raises ClientError."""
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    if name in TEXTS:
        return value if isinstance(value, str | list) else text
    switch = name == "loop_guard"
    if not isinstance(value, bool if switch else dict):
        fix = "true or false" if switch else 'an object in JSON, such as {"a": 1}'
        raise ClientError(f"/set: {name} = {shown(text)} is not allowed; give {fix}")
    return value


def _view() -> Any:
    """What shows an answer: a LiveAnswer on a terminal that can be drawn to, else a PlainAnswer."""
    if not sys.stdout.isatty():
        return PlainAnswer()
    output = import_module("mlxspec.commands.terminal_output")
    screen = output.LiveAnswer()
    return PlainAnswer() if screen.console.is_dumb_terminal else screen


def _text(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "(an image)") for part in content)


def _events(response: http.client.HTTPResponse) -> Iterator[Json]:
    """The JSON events of a stream, which is complete only with its [DONE]."""
    while line := response.readline(MAX_LINE):
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                error = event["error"]
                raise ClientError(printable(error["message"]), code=error.get("code"))
            yield event
    raise ClientError("the answer was cut off; see the server's log")

"""From the engine's outputs to pieces of an answer, and the protocol by which an API writes them.
Pure: no connection, no clock.

Rule: a stream and a whole body say the same, because both are made from the same pieces.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxspec.server.errors import ApiError, Json, unavailable
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.text.output_parser import Call, OutputParser, Part
from mlxspec.types import Finish, Logprob, Output, Request

SSE = "text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

NO_OUTPUT = Output("", 0, ())


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output adds to a choice: its text, and the parts that are certain with it; a call's
    arguments come over several pieces. `starts` is where each token's text begins in the choice's
    text."""

    text: str
    parts: tuple[Part, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    starts: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Choice:
    """One answer of a request. `index` is the one that the client sees."""

    index: int
    reader: Detokenizer
    parser: OutputParser | None = None  # splits a chat's text into reasoning, content and calls
    single: bool = False  # the first call ends the answer
    ids: list[int] = field(default_factory=list)  # its tokens, end token included
    finish: Finish | None = None
    output: Output = NO_OUTPUT  # the last one; its counts are of the whole choice
    pieces: list[Piece] = field(default_factory=list)  # all so far
    _logprobs: deque[Logprob] = field(default_factory=deque)  # until their text is released

    def take(self, output: Output) -> Piece:
        """Add an output. Raises ApiError where the engine could not answer."""
        if output.finish in ("error", "abort"):
            raise failure(output)
        reader, read = self.reader, self.reader.count
        text = reader.feed(output.tokens)
        self.output = output
        self.ids += output.tokens[: reader.count - read]
        if output.finish is not None:
            text += reader.finish()
        self.finish = "stop" if reader.stopped is not None else output.finish
        parts = self._parse(text)
        self._logprobs.extend(output.logprobs)
        starts = tuple(reader.released)
        reader.released.clear()
        logprobs: tuple[Logprob, ...] = ()
        if self._logprobs:
            logprobs = tuple(self._logprobs.popleft() for _ in starts)
        self.pieces.append(Piece(text, tuple(parts), logprobs, starts, self.finish))
        return self.pieces[-1]

    def _parse(self, text: str) -> list[Part]:
        if self.parser is None:
            return [Part("content", text)] if text else []
        parts = self.parser.feed(text)
        if self.finish is not None:
            parts += self.parser.finish(cut=self.finish == "length")
        if self.single:
            for i, part in enumerate(parts):
                if part.ends:
                    del parts[i + 1 :], self.calls[1:]
                    self.finish = "stop"
                    break
        return parts

    @property
    def calls(self) -> list[Call]:
        return self.parser.calls if self.parser else []

    @property
    def kept(self) -> int:
        """Drafted tokens that are part of the answer. A round brings its accepted tokens and one
        more; the engine's count goes beyond a stop among them."""
        return min(self.output.accepted, max(0, self.reader.count - self.output.rounds + 1))


Choices = Sequence[Choice]  # of one response


def failure(output: Output) -> ApiError:
    """Why the engine ended a choice without an answer."""
    if output.finish == "abort":
        return ApiError(503, "the server is stopping; send the request again")
    if output.fault == "model":
        return unavailable(output.error)
    if output.fault == "prompt":
        return ApiError(400, output.error, None, "context_length_exceeded")
    if output.fault == "client":
        return ApiError(408, "too much of the answer was not read in time; read it as it comes")
    return ApiError(500, f"the engine failed: {output.error}")


@dataclass(slots=True)
class Usage:
    """Token counts of a response, in `rounds` that sampled. Of `drafted` tokens, `kept` are part of
    the answers. `first` and `seconds` are times since the request arrived: of the first token, 0
    before there is one, and now."""

    prompt: int = 0
    generated: int = 0
    cached: int = 0
    drafted: int = 0
    kept: int = 0
    rounds: int = 0
    first: float = 0.0
    seconds: float = 0.0


class ResponseWriter(Protocol):
    """The format of one API; one per response, called in order."""

    id: str

    def opening(self, usage: Usage) -> bytes:
        """The first events of a stream; only `usage.prompt` is known yet."""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece, b"" if it has none."""

    def still_here(self) -> bytes:
        """An event without content, for clients that ignore comments."""

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        """The last events of a stream."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""

    def body(self, choices: Choices, usage: Usage) -> Json:
        """The whole response."""


def event(data: Json) -> bytes:
    """A server-sent event."""
    return f"data: {ENCODER.encode(data)}\n\n".encode()


def typed_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event with its type, which is also the event's name."""
    name = f"event: {kind}\n".encode()
    return name + event({"type": kind, **fields})


def message(choice: Choice) -> Json:
    """An answer as the chat message that the client sends back with the next turn."""
    texts = {"content": "", "reasoning": "", "call": ""}
    for piece in choice.pieces:
        for part in piece.parts:
            texts[part.kind] += part.text
    made: Json = {"role": "assistant", "content": texts["content"]}
    if texts["reasoning"]:
        made["reasoning_content"] = texts["reasoning"]
    if choice.calls:
        made["tool_calls"] = [spelled(call) for call in choice.calls]
        made["content"] = texts["content"] or None
    return made


def spelled(call: Call) -> Json:
    """A call in OpenAI's chat format."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def usage(requests: Sequence[Request], choices: Choices) -> Usage:
    """Token counts; `choices` are grouped by request. A prompt counts once for all its choices."""
    made = Usage()
    first = 0  # index of the request's first choice
    for request in requests:
        made.prompt += len(request.prompt)
        made.cached += choices[first].output.cached
        first += request.n
    for choice in choices:
        made.generated += choice.reader.count
        made.drafted += choice.output.drafted
        made.kept += choice.kept
        made.rounds += choice.output.rounds
    return made

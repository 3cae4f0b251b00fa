"""From the engine's outputs to the pieces of an answer. Pure: no connection, no clock.

Rule: a stream and a whole body say the same, because both are made of the same pieces.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxspec.server.errors import ApiError, unavailable
from mlxspec.text.detokenizer import Reader
from mlxspec.text.output_parser import Call, Part, Parts
from mlxspec.types import Finish, Logprob, Output, Request

COMMENT = b": keep-alive\n\n"
MODEL = "model"  # the one source of drafts that does not copy
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Json = dict[str, Any]


class Failed(Exception):
    """The engine ended a choice without an answer: it broke (500), the model cannot be had or the
    server is stopping (503), the prompt is too long for a model whose window was not known
    (400)."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output adds to a choice: its text, and the parts that this text completes. `starts`
    says where each token's text begins in the choice's text."""

    text: str
    parts: tuple[Part, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    starts: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Choice:
    """One answer on its way. `index` is the one that the client sees."""

    index: int
    reader: Reader
    parts: Parts | None = None  # of a chat
    single: bool = False  # the first call ends the answer
    ids: list[int] = field(default_factory=list)  # that were read, end token included
    finish: Finish | None = None
    cached: int = 0  # prompt tokens that were not computed
    rounds: int = 0
    drafted: int = 0
    accepted: dict[str, int] = field(default_factory=dict)  # by source; the engine's count
    _waiting: deque[Logprob] = field(default_factory=deque)  # until their text is shown

    def take(self, output: Output) -> Piece:
        """Read an output. Raises Failed where there is none to read."""
        if output.finish == "error":
            raise Failed(_failure(output))
        if output.finish == "abort":
            raise Failed(ApiError(503, "the server is stopping; send the request again"))
        self.cached, self.rounds = output.cached, output.rounds
        self.drafted, self.accepted = output.drafted, dict(output.accepted)
        read = self.reader.count
        text = self.reader.feed(output.tokens)
        self.ids += output.tokens[: self.reader.count - read]
        if output.finish is not None:
            text += self.reader.finish()
        self.finish = "stop" if self.reader.stopped is not None else output.finish
        parts = self._parts(text)
        self._waiting.extend(output.logprobs)
        starts = tuple(self.reader.released)
        self.reader.released.clear()
        logprobs = tuple(self._waiting.popleft() for _ in starts) if self._waiting else ()
        return Piece(text, tuple(parts), logprobs, starts, self.finish)

    def _parts(self, text: str) -> list[Part]:
        if self.parts is None:
            return []
        made = self.parts.feed(text)
        if self.finish is not None:
            made += self.parts.finish()
        if self.single and self.parts.calls:
            del self.parts.calls[1:]
            self.finish = "stop"
            first = next(n for n, part in enumerate(made) if part.kind == "call")
            del made[first + 1 :]
        return made

    @property
    def calls(self) -> list[Call]:
        return self.parts.calls if self.parts else []

    @property
    def ended_by_itself(self) -> bool:
        cut = self.single and self.calls  # what came behind the call is not part of the answer
        return self.finish == "stop" and self.reader.stopped is None and not cut

    @property
    def kept(self) -> int:
        """Drafted tokens that are part of the answer. A round brings those it accepted and one
        more; where the answer ended among them, the engine's count goes beyond that end."""
        return min(sum(self.accepted.values()), max(0, self.reader.count - self.rounds + 1))


def _failure(output: Output) -> ApiError:
    if output.fault == "model":
        return unavailable(output.error)
    if output.fault == "prompt":
        return ApiError(400, output.error, code="context_length_exceeded")
    if output.fault == "client":
        return ApiError(
            408, "the answer ends here: too much of it was not read in time; read it as it comes"
        )
    return ApiError(500, f"the engine failed: {output.error}")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response. `kept` of `drafted` tokens were accepted and are part of the
    answers."""

    prompt: int
    generated: int
    cached: int
    drafted: int
    kept: int


class ResponseWriter(Protocol):
    """How an API says things; made anew for each response, and told everything in order."""

    @property
    def id(self) -> str: ...

    def opening(self, usage: Usage) -> bytes:
        """What a stream begins with; of the usage, only the prompt is known yet."""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece; none where there is nothing to say."""

    def still_here(self) -> bytes:
        """An event that says nothing: some clients count comments as silence."""

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """What a stream ends with."""

    def failed(self, error: ApiError) -> bytes:
        """What a stream ends with that cannot go on."""

    def body(
        self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: Usage
    ) -> Json:
        """The whole response; `pieces[i]` are those of `choices[i]`."""


def event(data: Json, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + ENCODER.encode(data).encode() + b"\n\n"


def message(choice: Choice, pieces: Iterable[Piece]) -> Json:
    """An answer as the message that a client sends back with the next turn."""
    texts = {"reasoning": "", "content": ""}
    for part in (part for piece in pieces for part in piece.parts if part.call is None):
        texts[part.kind] += part.text
    made: Json = {"role": "assistant", "content": texts["content"]}
    if texts["reasoning"]:
        made["reasoning_content"] = texts["reasoning"]
    if choice.calls:
        made["tool_calls"] = [spelled(call) for call in choice.calls]
        made["content"] = texts["content"] or None
    return made


def spelled(call: Call) -> Json:
    """A call in OpenAI's chat form."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def usage(requests: Sequence[Request], choices: Sequence[Choice]) -> Usage:
    """Token counts. A prompt counts once, however many choices it has; `choices` are grouped by
    request."""
    first, cached = 0, 0
    for request in requests:
        cached += choices[first].cached
        first += request.n
    return Usage(
        prompt=sum(len(request.prompt) for request in requests),
        generated=sum(choice.reader.count for choice in choices),
        cached=cached,
        drafted=sum(choice.drafted for choice in choices),
        kept=sum(choice.kept for choice in choices),
    )


def speculation(choices: Sequence[Choice]) -> str:
    """For the log: tokens per round, the share of drafted tokens that were kept, and of those the
    share that each kind of drafter brought; empty where nothing was drafted."""
    drafted = sum(choice.drafted for choice in choices)
    if not drafted:
        return ""
    kept = sum(choice.kept for choice in choices)
    rate = sum(choice.reader.count for choice in choices) / sum(choice.rounds for choice in choices)
    said = f"{rate:.1f} tok/round, {100 * kept / drafted:.0f} % of drafts kept"
    if not kept:
        return said
    by_model = sum(choice.accepted.get(MODEL, 0) for choice in choices)
    model = round(100 * by_model / sum(sum(choice.accepted.values()) for choice in choices))
    shares = (("copy", 100 - model), ("model", model))
    return f"{said}, " + " / ".join(f"{name} {share} %" for name, share in shares if share)

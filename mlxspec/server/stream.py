"""The pieces of an answer, made from the engine's outputs, and the protocol by which an API writes
them. Pure: no connection, no clock.

Rule: a stream and a whole body have the same content, because both are made from the same pieces.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mlxspec.server.errors import ApiError, Json, unavailable
from mlxspec.text.detokenizer import Detokenizer, StopStrings
from mlxspec.text.output_parser import Call, OutputParser, Part
from mlxspec.types import Finish, Logprob, Output, Request

NO_OUTPUT = Output("", 0, ())
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class Piece:
    """What one output, or all so far, added to a choice. Later text does not change `parts`; the
    arguments of a call may span several pieces. `logprobs` are those of the tokens with this text,
    `starts` the offset of each token in the choice's text, in characters."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    finish: Finish | None = None


@dataclass
class Choice:
    """One answer of a request. `index` is its index for the client."""

    index: int
    request: Request
    detokenizer: Detokenizer
    parser: OutputParser | None = None  # splits a chat's text into reasoning, content and calls
    single: bool = False  # the first call ends the answer
    ids: list[int] = field(default_factory=list)  # its tokens, end token included
    finish: Finish | None = None
    output: Output = NO_OUTPUT  # the last one; its counts are of the whole choice
    whole: Piece = field(default_factory=Piece)  # all pieces so far as one
    _logprobs: list[Logprob] = field(default_factory=list)  # until their text is released
    _starts: list[int] = field(default_factory=list)  # of tokens whose text may be held back
    _sure: int = 0  # how many of these may be shown

    def __post_init__(self) -> None:
        self.stops = self.detokenizer.stops
        if self.parser:
            self.detokenizer.stops = StopStrings()

    def take(self, output: Output) -> Piece:
        """Add an output. Raises ApiError if the engine could not answer."""
        if output.finish in ("error", "abort"):
            self.finish = output.finish
            raise failure(output)
        read = self.detokenizer.count
        self.output = output
        parts = self._parts(output) if self.parser else self._text(output)
        self.ids += output.tokens[: self.detokenizer.count - read]
        self.finish = "stop" if self.stops.stopped is not None else output.finish
        ends = [n for n, part in enumerate(parts, 1) if part.ends]
        if self.single and ends:
            del parts[ends[0] :], self.calls[1:]
            self.finish = "stop"
        self._release()
        if self.stops.stopped is None and self.finish:
            self._sure = len(self._starts)
        starts = self._starts[: self._sure]
        del self._starts[: self._sure]
        self._sure = 0
        self._logprobs += output.logprobs
        logprobs = self._logprobs[: len(starts)]
        del self._logprobs[: len(starts)]
        self.whole.parts += parts
        self.whole.logprobs += logprobs
        self.whole.starts += starts
        return Piece(parts, logprobs, starts, finish=self.finish)

    def _release(self) -> None:
        """Take the tokens whose text the detokenizer has released. Before a stop string, and where
        none may have begun, they may be shown."""
        self._starts += self.detokenizer.released
        self.detokenizer.released = []
        hidden = len(self.stops.pending) if self.parser else 0
        if self.stops.stopped is not None:
            self._sure = sum(start < self.detokenizer.shown - hidden for start in self._starts)
        elif not hidden:
            self._sure = len(self._starts)

    def _text(self, output: Output) -> list[Part]:
        text = self.detokenizer.feed(output.tokens)
        if output.finish is not None:
            text += self.detokenizer.finish()
        return [Part("content", text)] if text else []

    def _parts(self, output: Output) -> list[Part]:
        """The parts of an output's tokens, up to a stop string in the content; those in reasoning
        and calls do not count. No token after it is read."""
        assert self.parser
        parts: list[Part] = []
        groups = [[token] for token in output.tokens] if self.stops.strings else [output.tokens]
        for tokens in groups:
            parts += self._up_to_stop(self.parser.feed(self.detokenizer.feed(tokens)))
            parts += self._stop_in_space(self.parser.space)
            if self.stops.stopped is not None:
                return parts
            self._release()
        if output.finish is not None:
            last = self.parser.feed(self.detokenizer.finish())
            cut = output.finish == "length" or output.loops > 0
            last += self.parser.finish(cut=cut)
            parts += self._up_to_stop(last)
            if self.stops.stopped is None and self.stops.pending:
                parts.append(Part("content", self.stops.flush()))
        return parts

    def _stop_in_space(self, space: str) -> list[Part]:
        """The content up to a stop string of white space, which the parser holds back."""
        stops = replace(self.stops)
        text = stops.feed(space)
        if not space or stops.stopped is None:
            return []
        self.stops = stops
        return [Part("content", text)] if text else []

    def _up_to_stop(self, parts: Sequence[Part]) -> list[Part]:
        shown = []
        for part in parts:
            if part.kind != "content":
                shown += [Part("content", self.stops.flush()), part]
                continue
            shown.append(Part("content", self.stops.feed(part.text)))
            if self.stops.stopped is not None:
                break
        return [part for part in shown if part.text or part.call]

    @property
    def calls(self) -> list[Call]:
        return self.parser.calls if self.parser else []

    @property
    def called(self) -> bool:
        """Whether it finished with tool calls, none of them cut by a stop string or the loop
        guard."""
        ends = [part.ends for part in self.whole.parts if part.call]
        whole = ends and (ends[-1] or not (self.stops.stopped or self.output.loops))
        return bool(whole) and self.finish == "stop"

    @property
    def kept_drafts(self) -> int:
        """Drafted tokens that are part of the answer. A round yields its accepted tokens and one
        more; the engine also counts those after a stop string."""
        return min(self.output.accepted, max(0, self.detokenizer.count - self.output.rounds + 1))


Choices = Sequence[Choice]  # of one response


def failure(output: Output) -> ApiError:
    """Why the engine ended a choice without an answer."""
    if output.finish == "abort":
        return ApiError(503, "the server is stopping; send the request again")
    if output.fault == "model":
        return unavailable(output.error)
    if output.fault == "numbers":
        return ApiError(500, output.error)
    if output.fault == "prompt":
        return ApiError(400, output.error, None, code="context_length_exceeded")
    if output.fault == "grammar":
        return ApiError(400, f"{output.error}; send a simpler schema or grammar")
    if output.fault == "client":
        return ApiError(408, "too much of the answer was not read in time; read it as it comes")
    return ApiError(500, f"the engine failed: {output.error}")


@dataclass
class Usage:
    """The figures of a response: token counts, and the `rounds` that sampled. Of `drafted` tokens,
    `kept` are part of the answers; `read` counts prompt tokens while the prompt is read. `first`
    and `seconds` are seconds since the request arrived: at the first token, 0 before it, and now.
    `rate` is in tokens/s after the first token. `loops` are those that the loop guard ended."""

    prompt: int = 0
    generated: int = 0
    cached: int = 0
    drafted: int = 0
    kept: int = 0
    rounds: int = 0
    first: float = 0.0
    seconds: float = 0.0
    read: int = 0
    rate: float = 0.0
    loops: int = 0

    @property
    def loops_ended(self) -> dict[str, int]:
        """The field of the APIs' usage, which is there where the guard ended an answer, or its
        reasoning."""
        return {"loops_ended": self.loops} if self.loops else {}


class ResponseWriter(Protocol):
    """The format of one API; one per response, called in order."""

    id: str
    media: str = "text/event-stream"
    comment: bytes = b": keep-alive\n\n"  # empty in formats without comments

    def opening(self, usage: Usage) -> bytes:
        """The first events of a stream; only `usage.prompt` is known yet."""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece, b"" if it has none."""

    def progress(self, usage: Usage, as_event: bool) -> bytes:
        """How much of the prompt was read: a comment and, with `as_event`, llama.cpp's event."""
        data = b": prompt %d of %d\n\n" % (usage.read, usage.prompt)
        if as_event:
            counts = {
                "total": usage.prompt,
                "cache": usage.cached,
                "processed": usage.read,
                "time_ms": round(1e3 * usage.seconds),
            }
            data += event({"choices": [], "prompt_progress": counts})
        return data

    def keepalive(self) -> bytes:
        """An event without content, for clients that ignore comments."""

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        """The last events of a stream."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""

    def body(self, choices: Choices, usage: Usage) -> Json:
        """The whole response."""

    def generated(self, choices: Choices, usage: Usage) -> Json:
        """Fields of a response that fails, beside its error: none."""
        return {}


def event(data: Json) -> bytes:
    """A server-sent event."""
    return f"data: {ENCODER.encode(data)}\n\n".encode()


def typed_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event with its type, which is also the event's name."""
    name = f"event: {kind}\n".encode()
    return name + event({"type": kind, **fields})


def texts(piece: Piece) -> dict[str, str]:
    """The text of its parts, by their kind."""
    joined = {"content": "", "reasoning": "", "call": ""}
    for part in piece.parts:
        joined[part.kind] += part.text
    return joined


def message(choice: Choice) -> Json:
    """An answer as the chat message that the client sends back with the next turn."""
    text = texts(choice.whole)
    turn: Json = {"role": "assistant", "content": text["content"]}
    if text["reasoning"]:
        turn["reasoning_content"] = text["reasoning"]
    if choice.calls:
        turn["tool_calls"] = [call_object(call) for call in choice.calls]
        turn["content"] = text["content"] or None
    return turn


def call_object(call: Call) -> Json:
    """A call in OpenAI's chat format."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def usage(choices: Choices) -> Usage:
    """Token counts. A prompt counts once for all its choices."""
    total = Usage()
    for choice in choices:
        if choice.index % choice.request.n == 0:  # the first one of its request
            total.prompt += len(choice.request.prompt)
            total.cached += choice.output.cached
        total.generated += choice.detokenizer.count
        total.drafted += choice.output.drafted
        total.kept += choice.kept_drafts
        total.rounds += choice.output.rounds
        total.loops += choice.output.loops
    return total

"""From the engine's outputs to pieces of an answer, and the protocol by which an API writes them.
Pure: no connection, no clock.

Rule: a stream and a whole body say the same, because both are made from the same pieces.
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
    """What a choice gained by one output, or by all so far. `parts`: those that later text cannot
    change; a call's arguments may come over several pieces. `logprobs`: of the tokens whose text
    this is. `starts`: where each one's begins in the choice's text, in characters."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    finish: Finish | None = None


@dataclass
class Choice:
    """One answer of a request. `index` is the one that the client sees."""

    index: int
    request: Request
    reader: Detokenizer
    parser: OutputParser | None = None  # splits a chat's text into reasoning, content and calls
    single: bool = False  # the first call ends the answer
    ids: list[int] = field(default_factory=list)  # its tokens, end token included
    finish: Finish | None = None
    output: Output = NO_OUTPUT  # the last one; its counts are of the whole choice
    whole: Piece = field(default_factory=Piece)  # all pieces so far as one
    _logprobs: list[Logprob] = field(default_factory=list)  # until their text is released
    _starts: list[int] = field(default_factory=list)  # of tokens whose text may be held back
    _sure: int = 0  # of these may be shown

    def __post_init__(self) -> None:
        self.stops = self.reader.stops
        if self.parser:
            self.reader.stops = StopStrings()

    def take(self, output: Output) -> Piece:
        """Add an output. Raises ApiError where the engine could not answer."""
        if output.finish in ("error", "abort"):
            self.finish = output.finish
            raise failure(output)
        reader, read = self.reader, self.reader.count
        self.output = output
        parts = self._parts(output) if self.parser else self._text(output)
        self.ids += output.tokens[: reader.count - read]
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
        """Take the tokens whose text the reader has shown. They are sure where no stop string may
        begin in it, and up to one that has."""
        self._starts += self.reader.released
        self.reader.released = []
        hidden = len(self.stops.pending) if self.parser else 0
        if self.stops.stopped is not None:
            self._sure = sum(start < self.reader.shown - hidden for start in self._starts)
        elif not hidden:
            self._sure = len(self._starts)

    def _text(self, output: Output) -> list[Part]:
        text = self.reader.feed(output.tokens)
        if output.finish is not None:
            text += self.reader.finish()
        return [Part("content", text)] if text else []

    def _parts(self, output: Output) -> list[Part]:
        """The parts of more tokens, up to a stop string in the content: in the reasoning and in
        calls it is none. No token behind it is read."""
        assert self.parser
        made: list[Part] = []
        groups = [[token] for token in output.tokens] if self.stops.strings else [output.tokens]
        for tokens in groups:
            made += self._up_to_stop(self.parser.feed(self.reader.feed(tokens)))
            made += self._stop_in_space(self.parser.space)
            if self.stops.stopped is not None:
                return made
            self._release()
        if output.finish is not None:
            last = self.parser.feed(self.reader.finish())
            last += self.parser.finish(cut=output.finish == "length")
            made += self._up_to_stop(last)
            if self.stops.stopped is None and self.stops.pending:
                made.append(Part("content", self.stops.flush()))
        return made

    def _stop_in_space(self, space: str) -> list[Part]:
        """The content up to a stop string of white space, which the parser holds back."""
        stops = replace(self.stops)
        text = stops.feed(space)
        if not space or stops.stopped is None:
            return []
        self.stops = stops
        return [Part("content", text)] if text else []

    def _up_to_stop(self, parts: Sequence[Part]) -> list[Part]:
        made = []
        for part in parts:
            if part.kind != "content":
                made += [Part("content", self.stops.flush()), part]
                continue
            made.append(Part("content", self.stops.feed(part.text)))
            if self.stops.stopped is not None:
                break
        return [part for part in made if part.text or part.call]

    @property
    def calls(self) -> list[Call]:
        return self.parser.calls if self.parser else []

    @property
    def called(self) -> bool:
        """Whether it finished with tool calls. A stop string that cuts a call is
        the reason of its own."""
        ends = [part.ends for part in self.whole.parts if part.call]
        whole = ends and (ends[-1] or self.stops.stopped is None)
        return bool(whole) and self.finish == "stop"

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
    """The figures of a response: token counts, in `rounds` that sampled. Of `drafted` tokens,
    `kept` are part of the answers; `read` counts the prompt while it is read. `first` and `seconds`
    are times since the request arrived: of the first token, 0 before there is one, and now. `rate`
    is in tokens/s after the first one."""

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


class ResponseWriter(Protocol):
    """The format of one API; one per response, called in order."""

    id: str
    media: str = "text/event-stream"
    comment: bytes = b": keep-alive\n\n"  # empty where there are none

    def opening(self, usage: Usage) -> bytes:
        """The first events of a stream; only `usage.prompt` is known yet."""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece, b"" if it has none."""

    def progress(self, usage: Usage, asked: bool) -> bytes:
        """How much of the prompt was read: a comment and, if `asked` for, llama.cpp's event."""
        data = b": prompt %d of %d\n\n" % (usage.read, usage.prompt)
        if asked:
            counts = {
                "total": usage.prompt,
                "cache": usage.cached,
                "processed": usage.read,
                "time_ms": round(1e3 * usage.seconds),
            }
            data += event({"choices": [], "prompt_progress": counts})
        return data

    def still_here(self) -> bytes:
        """An event without content, for clients that ignore comments."""

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        """The last events of a stream."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""

    def body(self, choices: Choices, usage: Usage) -> Json:
        """The whole response."""

    def generated(self, choices: Choices, usage: Usage) -> Json:
        """What a response that fails says beside its error: nothing."""
        return {}


def event(data: Json) -> bytes:
    """A server-sent event."""
    return f"data: {ENCODER.encode(data)}\n\n".encode()


def typed_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event with its type, which is also the event's name."""
    name = f"event: {kind}\n".encode()
    return name + event({"type": kind, **fields})


def texts(piece: Piece) -> dict[str, str]:
    """What its parts of each kind say."""
    made = {"content": "", "reasoning": "", "call": ""}
    for part in piece.parts:
        made[part.kind] += part.text
    return made


def message(choice: Choice) -> Json:
    """An answer as the chat message that the client sends back with the next turn."""
    said = texts(choice.whole)
    made: Json = {"role": "assistant", "content": said["content"]}
    if said["reasoning"]:
        made["reasoning_content"] = said["reasoning"]
    if choice.calls:
        made["tool_calls"] = [spelled(call) for call in choice.calls]
        made["content"] = said["content"] or None
    return made


def spelled(call: Call) -> Json:
    """A call in OpenAI's chat format."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def usage(choices: Choices) -> Usage:
    """Token counts. A prompt counts once for all its choices."""
    made = Usage()
    for choice in choices:
        if choice.index % choice.request.n == 0:  # the first one of its request
            made.prompt += len(choice.request.prompt)
            made.cached += choice.output.cached
        made.generated += choice.reader.count
        made.drafted += choice.output.drafted
        made.kept += choice.kept
        made.rounds += choice.output.rounds
    return made

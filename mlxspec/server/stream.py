"""From the engine's outputs to the pieces of an answer, and those to what OpenAI's endpoints say.
Pure: no connection, no clock.

Rule: a stream and a whole body say the same, because both are made of the same pieces.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlxspec.server.errors import ApiError, unavailable
from mlxspec.text.chat import Tokenizer
from mlxspec.text.detokenizer import Detokenizer, token_bytes
from mlxspec.text.output_parser import Call, OutputParser, Part
from mlxspec.types import Finish, Logprob, Output, Request

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
MODEL = "model"  # the one source of drafts that does not copy
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Json = dict[str, Any]
Api = Literal["chat", "completions"]


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
    reader: Detokenizer
    parts: OutputParser | None = None  # of a chat
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


@dataclass(slots=True)
class OpenAI:
    """The dialect of both completions endpoints, by `api`; the rest is what the request asked to
    see."""

    api: Api
    id: str
    model: str
    created: int  # unix seconds
    tokenizer: Tokenizer
    indexes: Sequence[int] = (0,)  # of the choices
    logprobs: bool = False
    include_usage: bool = False
    echoes: tuple[str, ...] = ()  # per choice, the prompt to repeat; empty: none
    _called: dict[int, int] = field(default_factory=dict)  # calls so far, by choice

    def opening(self, usage: Usage) -> bytes:
        """The role of each choice, or the prompt that is to be repeated."""
        made = []
        for i in self.indexes:
            if self.api == "chat":
                made.append(self._chunk(i, {"role": "assistant", "content": ""}))
            elif self.echoes:
                made.append(self._chunk(i, self.echoes[i]))
        return b"".join(made)

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        i, made = choice.index, []
        logprobs = self._logprobs(i, [piece]) if self.logprobs and piece.logprobs else None
        if self.api == "completions" and (piece.text or logprobs):
            made.append(self._chunk(i, piece.text, logprobs))
        elif self.api == "chat":
            said = [self._delta(i, part) for part in piece.parts] or ([{}] if logprobs else [])
            made += [
                self._chunk(i, delta, logprobs if n == 0 else None) for n, delta in enumerate(said)
            ]
        if piece.finish is not None:
            last: Json | str = {} if self.api == "chat" else ""
            made.append(self._chunk(i, last, finish=self._finish(choice)))
        return b"".join(made)

    def still_here(self) -> bytes:
        return self._chunk(self.indexes[0], {"content": ""} if self.api == "chat" else "")

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        if not self.include_usage:
            return DONE
        return event({**self._head(True), "choices": [], "usage": told(usage)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def body(
        self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: Usage
    ) -> Json:
        made = []
        for choice, some in zip(choices, pieces, strict=True):
            said: Json = {"index": choice.index}
            if self.api == "chat":
                said["message"] = {**message(choice, some), "refusal": None}
            else:
                echo = self.echoes[choice.index] if self.echoes else ""
                said["text"] = echo + "".join(piece.text for piece in some)
            said["logprobs"] = self._logprobs(choice.index, some) if self.logprobs else None
            said["finish_reason"] = self._finish(choice)
            made.append(said)
        return {**self._head(False), "choices": made, "usage": told(usage)}

    def _head(self, streamed: bool) -> Json:
        kind = "text_completion"
        if self.api == "chat":
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _finish(self, choice: Choice) -> str | None:
        return "tool_calls" if choice.calls and choice.finish == "stop" else choice.finish

    def _delta(self, index: int, part: Part) -> Json:
        if part.call is None:
            return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}
        at = self._called.get(index, 0)
        self._called[index] = at + 1
        return {"tool_calls": [{"index": at, **spelled(part.call)}]}

    def _chunk(
        self, index: int, said: Json | str, logprobs: Json | None = None, finish: str | None = None
    ) -> bytes:
        choice: Json = {"index": index, "delta" if self.api == "chat" else "text": said}
        choice |= {"logprobs": logprobs, "finish_reason": finish}
        data = {**self._head(True), "choices": [choice]}
        return event(data | {"usage": None} if self.include_usage else data)

    def _logprobs(self, index: int, pieces: Iterable[Piece]) -> Json:
        if self.api == "chat":
            entries = [_entry(self.tokenizer, lp) for p in pieces for lp in p.logprobs]
            return {"content": entries, "refusal": None}
        made: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            for lp, start in zip(piece.logprobs, piece.starts, strict=True):
                made["tokens"].append(_name(self.tokenizer, lp.token, "bytes:"))
                made["token_logprobs"].append(_finite(lp.logprob))
                best = {_name(self.tokenizer, token, "bytes:"): _finite(p) for token, p in lp.top}
                made["top_logprobs"].append({made["tokens"][-1]: _finite(lp.logprob)} | best)
                made["text_offset"].append(start + (len(self.echoes[index]) if self.echoes else 0))
        return made


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


def told(usage: Usage) -> Json:
    """Usage as both completions endpoints tell it."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.kept,
            "rejected_prediction_tokens": usage.drafted - usage.kept,
        },
    }


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


def _entry(tokenizer: Tokenizer, lp: Logprob) -> Json:
    top = [_alternative(tokenizer, token, p) for token, p in lp.top]
    return _alternative(tokenizer, lp.token, lp.logprob) | {"top_logprobs": top}


def _alternative(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    raw = token_bytes(tokenizer, token)
    return {"token": _name(tokenizer, token, ""), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's floor stands for it."""
    return max(logprob, -9999.0)


def _name(tokenizer: Tokenizer, token: int, prefix: str) -> str:
    """A token as text; as OpenAI has it, a part of a character is spelled in hexadecimal bytes."""
    raw = token_bytes(tokenizer, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)

"""From the engine's outputs to pieces of an answer, and the protocol by which an API writes them.
Pure: no connection, no clock.

Rule: a stream and a whole body say the same, because both are made from the same pieces.
"""

import json
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlxspec.server.errors import ApiError, unavailable
from mlxspec.text.chat import Tokenizer
from mlxspec.text.detokenizer import Reader, token_bytes
from mlxspec.text.output_parser import Call, Part, Parts
from mlxspec.types import Finish, Logprob, Output, Request

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Json = dict[str, Any]
Api = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output adds to a choice: its text, and the parts which that text completes. `starts`
    is where each token's text begins in the choice's text."""

    text: str
    parts: tuple[Part, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    starts: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Choice:
    """One answer of a request. `index` is the one that the client sees."""

    index: int
    reader: Reader
    parts: Parts | None = None  # splits a chat's text into reasoning, content and calls
    single: bool = False  # the first call ends the answer
    ids: list[int] = field(default_factory=list)  # its tokens, end token included
    finish: Finish | None = None
    cached: int = 0  # prompt tokens from the prefix cache
    rounds: int = 0
    drafted: int = 0
    accepted: dict[str, int] = field(default_factory=dict)  # by source, as the engine counts
    _logprobs: deque[Logprob] = field(default_factory=deque)  # until their text is released

    def take(self, output: Output) -> Piece:
        """Add an output. Raises ApiError where the engine could not answer."""
        if output.finish in ("error", "abort"):
            raise _failure(output)
        self.cached, self.rounds = output.cached, output.rounds
        self.drafted, self.accepted = output.drafted, dict(output.accepted)
        read = self.reader.count
        text = self.reader.feed(output.tokens)
        self.ids += output.tokens[: self.reader.count - read]
        if output.finish is not None:
            text += self.reader.finish()
        self.finish = "stop" if self.reader.stopped is not None else output.finish
        parts = self._parse(text)
        self._logprobs.extend(output.logprobs)
        starts = tuple(self.reader.released)
        self.reader.released.clear()
        logprobs = tuple(self._logprobs.popleft() for _ in starts) if self._logprobs else ()
        return Piece(text, tuple(parts), logprobs, starts, self.finish)

    def _parse(self, text: str) -> list[Part]:
        if self.parts is None:
            return []
        parts = self.parts.feed(text)
        if self.finish is not None:
            parts += self.parts.finish()
        if self.single and self.parts.calls:
            del self.parts.calls[1:]
            self.finish = "stop"
            first = next(n for n, part in enumerate(parts) if part.kind == "call")
            del parts[first + 1 :]
        return parts

    @property
    def calls(self) -> list[Call]:
        return self.parts.calls if self.parts else []

    @property
    def ended_by_itself(self) -> bool:
        """By an end token of the model: not by a stop string, nor behind its only call."""
        cut = self.reader.stopped is not None or (self.single and self.calls)
        return self.finish == "stop" and not cut

    @property
    def kept(self) -> int:
        """Drafted tokens that are part of the answer. A round brings its accepted tokens and one
        more; the engine's count goes beyond a stop among them."""
        return min(sum(self.accepted.values()), max(0, self.reader.count - self.rounds + 1))


def _failure(output: Output) -> ApiError:
    """Why the engine ended a choice without an answer."""
    if output.finish == "abort":
        return ApiError(503, "the server is stopping; send the request again")
    if output.fault == "model":
        return unavailable(output.error)
    if output.fault == "prompt":
        return ApiError(400, output.error, code="context_length_exceeded")
    if output.fault == "client":
        why = "the answer ends here: too much of it was not read in time; read it as it comes"
        return ApiError(408, why)
    return ApiError(500, f"the engine failed: {output.error}")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response. Of `drafted` tokens, `kept` are part of the answers."""

    prompt: int
    generated: int
    cached: int
    drafted: int
    kept: int


class ResponseWriter(Protocol):
    """The format of one API; one per response, called in order."""

    @property
    def id(self) -> str: ...

    def opening(self, usage: Usage) -> bytes:
        """The first events of a stream; only `usage.prompt` is known yet."""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece, b"" if it has none."""

    def still_here(self) -> bytes:
        """An event without content, for clients that ignore comments."""

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The last events of a stream."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""

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
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {ENCODER.encode(data)}\n\n".encode()


def message(choice: Choice, pieces: Iterable[Piece]) -> Json:
    """An answer as the chat message that the client sends back with the next turn."""
    texts = {"reasoning": "", "content": ""}
    for piece in pieces:
        for part in piece.parts:
            if part.call is None:
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


def usage(requests: Sequence[Request], choices: Sequence[Choice]) -> Usage:
    """Token counts; `choices` are grouped by request. A prompt counts once for all its choices."""
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
    """For the log: tokens per round, and the share of drafted tokens that were kept, by source; ""
    where nothing was drafted."""
    drafted = sum(choice.drafted for choice in choices)
    if not drafted:
        return ""
    tokens = sum(choice.reader.count for choice in choices)
    rounds = sum(choice.rounds for choice in choices)
    kept = sum(choice.kept for choice in choices)
    sources = Counter[str]()
    for choice in choices:
        sources.update(choice.accepted)
    accepted = ", ".join(f"{count} by {source}" for source, count in sources.items() if count)
    text = f"{tokens / rounds:.1f} tok/round, {100 * kept / drafted:.0f} % of drafts kept"
    return f"{text} ({accepted})" if accepted else text


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

"""Writes OpenAI's chat and text completions, as one body or as server-sent events.

Rule: each piece of an answer is written once, by the same code for a body and for a stream.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxspec.server.errors import ApiError
from mlxspec.server.stream import Choice, Json, Piece, Usage, event, message, spelled
from mlxspec.text.chat import Tokenizer
from mlxspec.text.detokenizer import token_bytes
from mlxspec.text.output_parser import Part
from mlxspec.types import Logprob

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's; JSON has no infinity

Api = Literal["chat", "completions"]


@dataclass(slots=True)
class CompletionWriter:
    """The ResponseWriter of both completion endpoints."""

    api: Api
    id: str
    model: str
    created: int  # unix seconds
    tokenizer: Tokenizer
    indexes: Sequence[int] = (0,)  # of the choices
    logprobs: bool = False
    include_usage: bool = False
    echoes: Sequence[str] = ()  # the prompt that each choice repeats; empty: none
    _calls: dict[int, int] = field(default_factory=dict)  # tool calls written so far, by choice

    def opening(self, usage: Usage) -> bytes:
        """The role of each choice, or the prompt that it repeats."""
        if self.api == "chat":
            role = {"role": "assistant", "content": ""}
            return b"".join(self._chunk(index, role) for index in self.indexes)
        return b"".join(self._chunk(*echo) for echo in zip(self.indexes, self.echoes, strict=False))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        index, data = choice.index, b""
        empty: Any = {} if self.api == "chat" else ""
        logprobs = self._logprobs(index, [piece]) if piece.logprobs else None
        contents: list[Any] = [piece.text] if piece.text else []
        if self.api == "chat":
            contents = [self._delta(index, part) for part in piece.parts]
        if logprobs and not contents:
            contents = [empty]
        for content in contents:
            data += self._chunk(index, content, logprobs)
            logprobs = None
        if piece.finish is not None:
            data += self._chunk(index, empty, finish=_finish_reason(choice))
        return data

    def still_here(self) -> bytes:
        return self._chunk(self.indexes[0], {"content": ""} if self.api == "chat" else "")

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        if not self.include_usage:
            return DONE
        return event({**self._head(True), "choices": [], "usage": usage_object(usage)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def body(
        self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: Usage
    ) -> Json:
        written = []
        for choice, own in zip(choices, pieces, strict=True):
            if self.api == "chat":
                content: Json = {"message": {**message(choice, own), "refusal": None}}
            else:
                echo = self.echoes[choice.index] if self.echoes else ""
                content = {"text": echo + "".join(piece.text for piece in own)}
            end = {
                "logprobs": self._logprobs(choice.index, own),
                "finish_reason": _finish_reason(choice),
            }
            written.append({"index": choice.index, **content, **end})
        return {**self._head(False), "choices": written, "usage": usage_object(usage)}

    def _head(self, streamed: bool) -> Json:
        kind = "text_completion"
        if self.api == "chat":
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _delta(self, index: int, part: Part) -> Json:
        if part.call is None:
            return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}
        number = self._calls.get(index, 0)
        self._calls[index] = number + 1
        return {"tool_calls": [{"index": number, **spelled(part.call)}]}

    def _chunk(
        self, index: int, content: Any, logprobs: Json | None = None, finish: str | None = None
    ) -> bytes:
        key = "delta" if self.api == "chat" else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": finish}
        data = {**self._head(True), "choices": [choice]}
        if self.include_usage:
            data["usage"] = None
        return event(data)

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> Json | None:
        if not self.logprobs:
            return None
        if self.api == "chat":
            content = [_entry(self.tokenizer, lp) for piece in pieces for lp in piece.logprobs]
            return {"content": content, "refusal": None}
        offset = len(self.echoes[index]) if self.echoes else 0
        return _text_logprobs(self.tokenizer, pieces, offset)


def usage_object(usage: Usage) -> Json:
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


def _finish_reason(choice: Choice) -> str | None:
    return "tool_calls" if choice.calls and choice.finish == "stop" else choice.finish


def _entry(tokenizer: Tokenizer, lp: Logprob) -> Json:
    """A token of a chat completion with its alternatives."""
    top = [_alternative(tokenizer, token, logprob) for token, logprob in lp.top]
    return {**_alternative(tokenizer, lp.token, lp.logprob), "top_logprobs": top}


def _alternative(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    raw = token_bytes(tokenizer, token)
    return {"token": _name(raw), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}


def _text_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece], offset: int) -> Json:
    """The log-probabilities of a text completion, whose text begins at `offset`."""

    def named(token: int) -> str:
        return _name(token_bytes(tokenizer, token), "bytes:")

    tokens: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for piece in pieces:
        for lp, start in zip(piece.logprobs, piece.starts, strict=True):
            best = {
                named(token): max(p, MIN_LOGPROB) for token, p in [(lp.token, lp.logprob), *lp.top]
            }
            tokens.append(named(lp.token))
            logprobs.append(best[tokens[-1]])
            tops.append(best)
            offsets.append(offset + start)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _name(raw: bytes, prefix: str = "") -> str:
    """A token's text; the bytes of an incomplete character are written in hexadecimal."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)

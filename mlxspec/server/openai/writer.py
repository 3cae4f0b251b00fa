"""Writes OpenAI's chat and text completions, as one body or as server-sent events.

Rule: each piece of an answer is written once, by the same code for a body and for a stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxspec.server.errors import ApiError
from mlxspec.server.stream import Choice, Json, Piece, Usage, event, message, spelled
from mlxspec.text.chat import Tokenizer
from mlxspec.text.detokenizer import token_bytes
from mlxspec.text.output_parser import Part
from mlxspec.types import Logprob

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's; JSON has no infinity


@dataclass(slots=True)
class CompletionWriter:
    """The ResponseWriter of both completion endpoints."""

    chat: bool  # not a text completion
    id: str
    model: str
    created: int  # unix seconds
    tokenizer: Tokenizer
    choices: int = 1
    logprobs: bool = False
    include_usage: bool = False
    echoes: Sequence[str] = ()  # the prompt that each choice repeats; empty: none
    _calls: dict[int, int] = field(default_factory=dict)  # tool calls written so far, by choice

    def opening(self, usage: Usage) -> bytes:
        """The role of each choice, or the prompt that it repeats."""
        contents: Sequence[Any] = self.echoes
        if self.chat:
            contents = [{"role": "assistant", "content": ""}] * self.choices
        return b"".join(self._chunk(i, content) for i, content in enumerate(contents))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        data, index = b"", choice.index
        contents: list[Any] = [piece.text] if piece.text else []
        if self.chat:
            contents = [self._delta(index, part) for part in piece.parts]
        logprobs = self._logprobs(index, [piece]) if piece.logprobs else None
        if logprobs and not contents:
            contents = [self._empty]
        for content in contents:
            data += self._chunk(index, content, logprobs)
            logprobs = None
        if piece.finish is not None:
            data += self._chunk(index, self._empty, finish=_finish_reason(choice))
        return data

    def still_here(self) -> bytes:
        return self._chunk(0, {"content": ""} if self.chat else "")

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
            if self.chat:
                content: Json = {"message": {**message(choice, own), "refusal": None}}
            else:
                content = {"text": self._echo(choice.index) + "".join(p.text for p in own)}
            content["logprobs"] = self._logprobs(choice.index, own)
            content["finish_reason"] = _finish_reason(choice)
            written.append({"index": choice.index, **content})
        return {**self._head(False), "choices": written, "usage": usage_object(usage)}

    @property
    def _empty(self) -> Any:
        return {} if self.chat else ""

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""

    def _head(self, streamed: bool) -> Json:
        kind = "text_completion"
        if self.chat:
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
        key = "delta" if self.chat else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": finish}
        data = {**self._head(True), "choices": [choice]}
        if self.include_usage:
            data["usage"] = None
        return event(data)

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> Json | None:
        if not self.logprobs:
            return None
        if self.chat:
            content = [self._entry(lp) for piece in pieces for lp in piece.logprobs]
            return {"content": content, "refusal": None}
        logprobs = [lp for piece in pieces for lp in piece.logprobs]
        offset = len(self._echo(index))
        return {
            "tokens": [self._name(lp.token, "bytes:") for lp in logprobs],
            "token_logprobs": [max(lp.logprob, MIN_LOGPROB) for lp in logprobs],
            "top_logprobs": [self._top(lp) for lp in logprobs],
            "text_offset": [offset + start for piece in pieces for start in piece.starts],
        }

    def _top(self, lp: Logprob) -> dict[str, float]:
        """The alternatives of a text completion's token, itself included."""
        pairs = [(lp.token, lp.logprob), *lp.top]
        return {self._name(token, "bytes:"): max(p, MIN_LOGPROB) for token, p in pairs}

    def _entry(self, lp: Logprob) -> Json:
        """A token of a chat completion with its alternatives."""
        token, *top = [
            {
                "token": self._name(token),
                "logprob": max(p, MIN_LOGPROB),
                "bytes": list(token_bytes(self.tokenizer, token)),
            }
            for token, p in [(lp.token, lp.logprob), *lp.top]
        ]
        return {**token, "top_logprobs": top}

    def _name(self, token: int, prefix: str = "") -> str:
        """A token's text; the bytes of an incomplete character are written in hexadecimal."""
        raw = token_bytes(self.tokenizer, token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


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

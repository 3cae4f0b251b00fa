"""Writes OpenAI's chat and text completions, as one body or as server-sent events.

Rule: each piece of an answer is written once, by the same code for a body and for a stream.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxspec.server.errors import ApiError
from mlxspec.server.openai.schema import Chat, Completion
from mlxspec.server.state import Model
from mlxspec.server.stream import Choice, Json, Piece, Usage, event, message, spelled
from mlxspec.text.detokenizer import token_bytes
from mlxspec.text.output_parser import Part
from mlxspec.types import Logprob

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's; JSON has no infinity


@dataclass(slots=True)
class CompletionWriter:
    """The ResponseWriter of both completion endpoints."""

    model: Model
    request: Chat | Completion
    chat: bool  # not a text completion
    id: str
    created: int = field(default_factory=lambda: int(time.time()))  # unix seconds
    echoes: list[str] = field(
        default_factory=list
    )  # the prompt that each choice repeats; empty: none

    def opening(self, usage: Usage) -> bytes:
        """The role of each choice, or the prompt that it repeats."""
        contents: Sequence[Any] = self.echoes
        if self.chat:
            contents = [{"role": "assistant", "content": ""} for _ in range(self.request.n)]
        return b"".join(self._chunk(i, content) for i, content in enumerate(contents))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        empty: Any = {} if self.chat else ""
        contents: list[Any] = [piece.text] if piece.text else []
        if self.chat:
            contents = [_delta(choice, part) for part in piece.parts]
        logprobs = self._logprobs([piece]) if piece.logprobs else None
        if logprobs and not contents:
            contents = [empty]
        data = b""
        for content in contents:
            data += self._chunk(choice.index, content, logprobs)
            logprobs = None
        if piece.finish is not None:
            data += self._chunk(choice.index, empty, finish=_finish_reason(choice))
        return data

    def still_here(self) -> bytes:
        return self._chunk(0, {"content": ""} if self.chat else "")

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        if not self.request.stream_options.include_usage:
            return DONE
        return event({**self._head(".chunk"), "choices": [], "usage": usage_object(usage)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def body(self, choices: Sequence[Choice], usage: Usage) -> Json:
        written = []
        for choice in choices:
            if self.chat:
                content: Json = {"message": {**message(choice), "refusal": None}}
            else:
                text = self.echoes[choice.index] if self.echoes else ""
                content = {"text": text + "".join(piece.text for piece in choice.pieces)}
            content["logprobs"] = self._logprobs(choice.pieces)
            content["finish_reason"] = _finish_reason(choice)
            written.append({"index": choice.index, **content})
        return {**self._head(), "choices": written, "usage": usage_object(usage)}

    def _head(self, chunk: str = "") -> Json:
        kind = f"chat.completion{chunk}" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}

    def _chunk(
        self, index: int, content: Any, logprobs: Json | None = None, finish: str | None = None
    ) -> bytes:
        key = "delta" if self.chat else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": finish}
        data = {**self._head(".chunk"), "choices": [choice]}
        if self.request.stream_options.include_usage:
            data["usage"] = None
        return event(data)

    def _logprobs(self, pieces: Sequence[Piece]) -> Json | None:
        if self.request.alternatives is None:
            return None
        tokens = [self._entries(lp) for piece in pieces for lp in piece.logprobs]
        if self.chat:
            content = [{**token, "top_logprobs": top} for token, *top in tokens]
            return {"content": content, "refusal": None}
        return {
            "tokens": [entries[0]["token"] for entries in tokens],
            "token_logprobs": [entries[0]["logprob"] for entries in tokens],
            "top_logprobs": [{e["token"]: e["logprob"] for e in entries} for entries in tokens],
            "text_offset": [start for piece in pieces for start in piece.starts],
        }

    def _entries(self, lp: Logprob) -> list[Json]:
        """A token and its alternatives; bytes of an incomplete character are in hexadecimal."""
        entries = []
        for token, logprob in ((lp.token, lp.logprob), *lp.top):
            raw = token_bytes(self.model.tokenizer, token)
            try:
                name = raw.decode()
            except UnicodeDecodeError:
                name = "" if self.chat else "bytes:"
                name += "".join(f"\\x{byte:02x}" for byte in raw)
            logprob = max(logprob, MIN_LOGPROB)
            entries.append({"token": name, "logprob": logprob, "bytes": list(raw)})
        return entries


def _delta(choice: Choice, part: Part) -> Json:
    if part.call is not None:
        index = choice.calls.index(part.call)
        return {"tool_calls": [{"index": index, **spelled(part.call)}]}
    return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}


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

"""Writes OpenAI's chat and text completions, as one body or as server-sent events.

Rule: each piece of an answer is written once, by the same code for a body and for a stream.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from mlxspec.server.errors import ApiError, Json
from mlxspec.server.openai.schema import Chat, Completion, Infill
from mlxspec.server.state import TextModel
from mlxspec.server.stream import (
    Choice,
    Choices,
    Piece,
    ResponseWriter,
    Usage,
    event,
    message,
    texts,
)
from mlxspec.text.detokenizer import token_bytes
from mlxspec.text.output_parser import Part
from mlxspec.types import Logprob

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's; JSON has no infinity


@dataclass(slots=True)
class CompletionWriter(ResponseWriter):
    """The ResponseWriter of the completion endpoints."""

    model: TextModel
    request: Chat | Completion
    chat: bool  # not a text completion
    id: str
    created: int = field(default_factory=lambda: int(time.time()))  # unix seconds
    legacy: bool = False  # calls are written as `function_call`

    def opening(self, usage: Usage) -> bytes:
        """The role of each choice of a chat."""
        data = b""
        if self.chat:
            for i in range(self.request.n):
                data += self._chunk(i, {"role": "assistant", "content": ""})
        return data

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        deltas = [_delta(choice, part) for part in piece.parts]
        logprobs = None
        if piece.logprobs:
            logprobs = self._logprobs(piece)
            deltas = deltas or [{}]
        data = b""
        for delta in deltas:
            data += self._chunk(choice.index, delta, logprobs)
            logprobs = None
        if piece.finish is not None:
            data += self._chunk(choice.index, {}, finish=_finish_reason(choice))
        return data

    def still_here(self) -> bytes:
        return self._chunk(0, {"content": ""})

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        if not self.request.stream_options.include_usage:
            return DONE
        return event(self._head(".chunk", choices=[], usage=usage_object(usage))) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def body(self, choices: Choices, usage: Usage) -> Json:
        if isinstance(self.request, Infill):
            return {
                "content": texts(choices[0].whole)["content"],
                "stop": True,
                "tokens_predicted": usage.generated,
                "tokens_evaluated": usage.prompt,
                "tokens_cached": usage.cached,
            }
        written = []
        for choice in choices:
            made = self._choice(
                choice.index,
                {"message": {**message(choice), "refusal": None}},
                self._logprobs(choice.whole),
                _finish_reason(choice),
            )
            written.append(made)
        return self._head(choices=written, usage=usage_object(usage))

    def _head(self, chunk: str = "", **fields: Any) -> Json:
        kind = f"chat.completion{chunk}" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            **fields,
        }

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None
    ) -> bytes:
        choice = self._choice(index, {"delta": delta}, logprobs, finish)
        data = self._head(".chunk", choices=[choice])
        if self.request.stream_options.include_usage:
            data["usage"] = None
        return event(data)

    def _choice(self, index: int, said: Json, logprobs: Json | None, finish: str | None) -> Json:
        """A choice of a body or chunk, in the form that the request has. `said` is a chat's message
        or delta."""
        [message] = said.values()
        if not self.chat:
            said = {"text": message.get("content", "")}
        elif self.legacy:
            if calls := message.pop("tool_calls", None):
                message["function_call"] = calls[0]["function"]
            if finish == "tool_calls":
                finish = "function_call"
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, piece: Piece) -> Json | None:
        if self.request.alternatives is None:
            return None
        content = [self._entry(lp) for lp in piece.logprobs]
        if self.chat:
            return {"content": content, "refusal": None}
        tops = []
        for entry in content:
            tops.append({e["token"]: e["logprob"] for e in (entry, *entry["top_logprobs"])})
        return {
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": tops,
            "text_offset": piece.starts,
        }

    def _entry(self, lp: Logprob) -> Json:
        """A token and its alternatives; bytes of an incomplete character are in hexadecimal."""
        entries = []
        for token, logprob in ((lp.token, lp.logprob), *lp.top):
            raw = token_bytes(self.model.tokenizer, token)
            name = raw.decode("utf-8", "backslashreplace")
            if not self.chat and name.encode() != raw:
                name = f"bytes:{name}"
            logprob = max(logprob, MIN_LOGPROB)
            entries.append({"token": name, "logprob": logprob, "bytes": list(raw)})
        return {**entries[0], "top_logprobs": entries[1:]}


def _delta(choice: Choice, part: Part) -> Json:
    if call := part.call:
        function = {"arguments": part.text}
        entry: Json = {"index": choice.calls.index(call), "function": function}
        if part.opens:
            function["name"] = call.name
            entry |= {"id": call.id, "type": "function"}
        return {"tool_calls": [entry]}
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
    return "tool_calls" if choice.called else choice.finish

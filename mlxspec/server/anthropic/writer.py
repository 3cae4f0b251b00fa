"""Writes Anthropic's messages, as one body or as server-sent events.

Rule: a stream has the blocks of the body, in the order in which the model generated them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.server.errors import ApiError
from mlxspec.server.stream import Choice, Json, Piece, Usage, event
from mlxspec.text.output_parser import Part

SIGNATURE = "bWx4c3BlYw=="  # says nothing; clients send reasoning back only with one


@dataclass(slots=True)
class MessageWriter:
    """The ResponseWriter of /v1/messages."""

    id: str
    model: str
    _type: str = ""  # of the open block; "": none
    _index: int = 0  # of the open block, or of the next one

    def opening(self, usage: Usage) -> bytes:
        """Its usage counts the whole prompt: what is cached is only known at the end."""
        end = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=self._message([], end, usage)) + self.still_here()

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        data = b""
        for part in piece.parts:
            block = _block(part)
            kind = block["type"]
            if kind != self._type or part.call:
                data += self._close()
                self._type = kind
                empty = {**block, "input": {}} if part.call else {**block, kind: ""}
                if kind == "thinking":
                    empty["signature"] = ""
                data += self._block_event("start", content_block=empty)
            delta = {"type": f"{kind}_delta", kind: part.text}
            if part.call:
                delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
            data += self._block_event("delta", delta=delta)
        return data

    def still_here(self) -> bytes:
        return _event("ping")

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        end = _event("message_delta", delta=_end(choices[0]), usage=usage_object(usage))
        return self._close() + end + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return event(error.anthropic(), "error")

    def body(self, choices: Sequence[Choice], usage: Usage) -> Json:
        content: list[Json] = []
        for part in (part for piece in choices[0].pieces for part in piece.parts):
            block = _block(part)
            kind = block["type"]
            if content and content[-1]["type"] == kind and not part.call:
                content[-1][kind] += part.text
            else:
                content.append(block)
        return self._message(content, _end(choices[0]), usage)

    def _message(self, content: list[Json], end: Json, usage: Usage) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **end, "usage": usage_object(usage)}

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        if not self._type:
            return b""
        data = b""
        if self._type == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            data = self._block_event("delta", delta=delta)
        data += self._block_event("stop")
        self._type = ""
        self._index += 1
        return data

    def _block_event(self, kind: str, **fields: Json) -> bytes:
        return _event(f"content_block_{kind}", index=self._index, **fields)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _block(part: Part) -> Json:
    if part.call is not None:
        call = part.call
        arguments = json.loads(call.arguments)
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    return {"type": "text", "text": part.text}


def _end(choice: Choice) -> Json:
    stopped = choice.reader.stopped
    reason = "end_turn" if stopped is None else "stop_sequence"
    if choice.finish == "length":
        reason = "max_tokens"
    elif choice.calls:
        reason, stopped = "tool_use", None
    return {"stop_reason": reason, "stop_sequence": stopped}


def usage_object(usage: Usage) -> Json:
    """`input_tokens` leaves out the cached ones. Writing to the cache costs nothing."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }

"""Writes Anthropic's messages, as one body or as server-sent events.

Rule: a stream has the blocks of the body, in the order in which the model generated them.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlxspec.server.errors import ApiError
from mlxspec.server.stream import Choice, Json, Piece, Usage, event
from mlxspec.text.output_parser import Part

SIGNATURE = "bWx4c3BlYw=="  # says nothing; clients send reasoning back only with one
TYPES = {"reasoning": "thinking", "content": "text"}  # of blocks, by the kind of a part
EMPTY: Json = {"input": {}, "text": "", "thinking": "", "signature": ""}  # when a block starts
PING = event({"type": "ping"}, "ping")


@dataclass(slots=True)
class MessageWriter:
    """The ResponseWriter of /v1/messages."""

    id: str
    model: str
    _open: str = ""  # the kind of part that the open block holds
    _index: int = 0  # of the open block, or of the next one

    def opening(self, usage: Usage) -> bytes:
        """Its usage counts the whole prompt: what is cached is only known at the end."""
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return event({"type": "message_start", "message": message}, "message_start") + PING

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        return b"".join(self._part(part) for part in piece.parts)

    def still_here(self) -> bytes:
        return PING

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        end = {"type": "message_delta", "delta": _end(choices[0]), "usage": usage_object(usage)}
        stop = event({"type": "message_stop"}, "message_stop")
        return self._close() + event(end, "message_delta") + stop

    def failed(self, error: ApiError) -> bytes:
        return event(error.anthropic(), "error")

    def body(
        self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: Usage
    ) -> Json:
        content = blocks(part for piece in pieces[0] for part in piece.parts)
        return self._message(content, _end(choices[0]), usage)

    def _message(self, content: list[Json], end: Json, usage: Usage) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **end, "usage": usage_object(usage)}

    def _part(self, part: Part) -> bytes:
        data = b""
        if part.call is not None or part.kind != self._open:
            data = self._close()
            block = {name: EMPTY.get(name, value) for name, value in _block(part).items()}
            data += self._event("content_block_start", content_block=block)
            self._open = part.kind
        if part.call is not None:
            delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
        else:
            kind = TYPES[part.kind]
            delta = {"type": f"{kind}_delta", kind: part.text}
        return data + self._event("content_block_delta", delta=delta)

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        if not self._open:
            return b""
        data = b""
        if self._open == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            data = self._event("content_block_delta", delta=delta)
        data += self._event("content_block_stop")
        self._open = ""
        self._index += 1
        return data

    def _event(self, kind: str, **fields: Json) -> bytes:
        return event({"type": kind, "index": self._index, **fields}, kind)


def blocks(parts: Iterable[Part]) -> list[Json]:
    """One block for each call and for each run of text of one kind."""
    made: list[Json] = []
    for part in parts:
        kind = TYPES.get(part.kind, "")
        if made and made[-1]["type"] == kind:
            made[-1][kind] += part.text
        else:
            made.append(_block(part))
    return made


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

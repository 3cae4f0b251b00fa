"""Writes Anthropic's messages, as one body or as server-sent events.

Rule: a stream has the blocks of the body, in the order in which the model generated them.
"""

from dataclasses import dataclass, field

from mlxspec.server.errors import ApiError, Json
from mlxspec.server.stream import Choice, Choices, Piece, ResponseWriter, Usage, typed_event
from mlxspec.text.tool_calls import as_object

KINDS = {"content": "text", "reasoning": "thinking", "call": "tool_use"}
# What a block of each type begins with in a stream.
EMPTY: dict[str, Json] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
SIGNATURE = "bWx4c3BlYw=="  # says nothing; clients send reasoning back only with one


@dataclass(slots=True)
class MessageWriter(ResponseWriter):
    """The ResponseWriter of /v1/messages. The last block of `content` is open until the end."""

    id: str
    model: str
    content: list[Json] = field(default_factory=list)

    def opening(self, usage: Usage) -> bytes:
        """Its usage counts the whole prompt: what is cached is only known at the end."""
        message = self._message({"stop_reason": None, "stop_sequence": None}, usage)
        return typed_event("message_start", message=message) + self.still_here()

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        data = b""
        for part in piece.parts:
            kind, call = KINDS[part.kind], part.call
            if part.opens or not self.content or self.content[-1]["type"] != kind:
                data += self._close()
                block = {"type": kind, **EMPTY[kind]}
                self.content.append(block)
                if call:
                    block |= {"id": call.id, "name": call.name}
                data += self._block_event("start", content_block=block)
                if call:  # all of it in a whole body
                    block["input"] = as_object(call.arguments)
            if call:
                delta = {"type": "input_json_delta", "partial_json": part.text}
            else:
                delta = {"type": f"{kind}_delta", kind: part.text}
                self.content[-1][kind] += part.text
            data += self._block_event("delta", delta=delta)
        return data

    def still_here(self) -> bytes:
        return typed_event("ping")

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        end = typed_event("message_delta", delta=_end(choices[0]), usage=usage_object(usage))
        return self._close() + end + typed_event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return typed_event("error", **error.anthropic())

    def body(self, choices: Choices, usage: Usage) -> Json:
        for part in choices[0].whole.parts:
            self.chunk(choices[0], Piece([part]))
        self._close()
        return self._message(_end(choices[0]), usage)

    def _message(self, end: Json, usage: Usage) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.content,
            **end,
            "usage": usage_object(usage),
        }

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        if not self.content:
            return b""
        data = b""
        if self.content[-1]["type"] == "thinking":
            self.content[-1]["signature"] = SIGNATURE
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            data = self._block_event("delta", delta=delta)
        return data + self._block_event("stop")

    def _block_event(self, kind: str, **fields: Json) -> bytes:
        return typed_event(f"content_block_{kind}", index=len(self.content) - 1, **fields)


def _end(choice: Choice) -> Json:
    reason, stopped = "end_turn", choice.reader.stopped
    if choice.finish == "length":
        reason = "max_tokens"
    elif choice.called:
        reason, stopped = "tool_use", None
    elif stopped:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stopped}


def usage_object(usage: Usage) -> Json:
    """`input_tokens` leaves out the cached ones. Writing to the cache costs nothing."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }

"""Writes OpenAI's Responses, as one body or as server-sent events.

Rule: the body is the response in the last event of the stream, so both are made by the same calls.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlxspec.server.errors import ApiError
from mlxspec.server.responses.schema import Tool
from mlxspec.server.stream import Choice, Json, Piece, Usage, event
from mlxspec.text.chat import Tokenizer
from mlxspec.text.output_parser import Call, Part

PREFIXES = {"function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}


@dataclass(frozen=True, slots=True)
class TextItem:
    """How text of one kind is written: the type of its item, the field with its one part, the names
    of the events, the empty part, and further fields of the text's events."""

    type: str
    field: str
    part_event: str
    text_event: str
    empty: Json
    extra: Json


# Reasoning is written as a summary, the form that clients show and send back.
REASONING = TextItem(
    "reasoning",
    "summary",
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    {"type": "summary_text", "text": ""},
    {},
)
CONTENT = TextItem(
    "message",
    "content",
    "response.content_part",
    "response.output_text",
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    {"logprobs": []},
)


@dataclass(slots=True)
class ResponsesWriter:
    """The ResponseWriter of /v1/responses. `head` is the response before its answer, `encrypted`
    the `encrypted_content` of reasoning; `store` is called with the finished response."""

    id: str
    head: Json
    tools: Mapping[str, Tool]  # by the names in calls
    tokenizer: Tokenizer
    encrypted: str | None = None
    store: Callable[[Json], None] | None = None
    _events: int = 0
    _output: list[Json] = field(default_factory=list)  # finished items
    _open: Json = field(default_factory=dict)  # the item that text is added to; empty: none
    _kind: TextItem = CONTENT  # of the open item
    _at: Json = field(default_factory=dict)  # what its events say of its place
    _text: list[str] = field(default_factory=list)  # of the open item
    _final: Json = field(default_factory=dict)

    def opening(self, usage: Usage) -> bytes:
        return self._event("response.created", response=self.head) + self.still_here()

    def still_here(self) -> bytes:
        return self._event("response.in_progress", response=self.head)

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        return b"".join(self._part(part) for part in piece.parts)

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        status, details = "completed", None
        if choices[0].finish == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        data = self._close(status)
        self._final = {
            **self.head,
            "status": status,
            "incomplete_details": details,
            "output": self._output,
            "usage": usage_object(usage, self._reasoning_tokens(choices[0].ids)),
        }
        if self.store is not None:
            self.store(self._final)
        return data + self._event(f"response.{status}", response=self._final)

    def failed(self, error: ApiError) -> bytes:
        problem = {"code": "server_error", "message": error.message}
        response = {**self.head, "status": "failed", "error": problem, "output": self._output}
        return self._event("response.failed", response=response)

    def body(
        self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: Usage
    ) -> Json:
        for piece in pieces[0]:
            self.chunk(choices[0], piece)
        self.closing(choices, usage)
        return self._final

    def _event(self, kind: str, **fields: object) -> bytes:
        number = self._events
        self._events += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _part(self, part: Part) -> bytes:
        if part.call is not None:
            return self._close() + self._call(part.call)
        kind, data = REASONING if part.kind == "reasoning" else CONTENT, b""
        if not self._open or self._kind is not kind:
            data = self._close() + self._begin(kind)
        self._text.append(part.text)
        return data + self._text_event("delta", delta=part.text)

    def _begin(self, kind: TextItem) -> bytes:
        self._kind, id = kind, new_id(kind.type)
        self._open = {"type": kind.type, "id": id, "status": "in_progress", kind.field: []}
        self._at = {"item_id": id, "output_index": len(self._output), f"{kind.field}_index": 0}
        if kind is CONTENT:
            self._open["role"] = "assistant"
        else:
            self._open["encrypted_content"] = self.encrypted
        return self._added(self._open) + self._part_event("added", kind.empty)

    def _close(self, status: str = "completed") -> bytes:
        """Ends the open item, if there is one."""
        if not self._open:
            return b""
        kind, text = self._kind, "".join(self._text)
        part = {**kind.empty, "text": text}
        data = self._text_event("done", text=text) + self._part_event("done", part)
        data += self._done({**self._open, "status": status, kind.field: [part]})
        self._open = {}
        self._text.clear()
        return data

    def _call(self, call: Call) -> bytes:
        tool = self.tools.get(call.name) or Tool(call.name)
        kind, key, text = "function_call", "arguments", call.arguments
        if tool.custom:
            kind, key, text = "custom_tool_call", "input", plain_input(text)
        item = {"type": kind, "id": new_id(kind), "call_id": call.id, "name": tool.name}
        if tool.namespace:
            item["namespace"] = tool.namespace
        at = {"item_id": item["id"], "output_index": len(self._output)}
        return (
            self._added({**item, key: "", "status": "in_progress"})
            + self._event(f"response.{kind}_{key}.delta", **at, delta=text)
            + self._event(f"response.{kind}_{key}.done", **at, **{key: text})
            + self._done({**item, key: text, "status": "completed"})
        )

    def _added(self, item: Json) -> bytes:
        index = len(self._output)
        return self._event("response.output_item.added", output_index=index, item=item)

    def _done(self, item: Json) -> bytes:
        index = len(self._output)
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _text_event(self, what: str, **fields: str) -> bytes:
        kind = self._kind
        return self._event(f"{kind.text_event}.{what}", **self._at, **fields, **kind.extra)

    def _part_event(self, what: str, part: Json) -> bytes:
        return self._event(f"{self._kind.part_event}.{what}", **self._at, part=part)

    def _reasoning_tokens(self, ids: Sequence[int]) -> int:
        """Tokens up to the end of the reasoning; 0 if no token ends it."""
        types = [item["type"] for item in self._output]
        if REASONING.type not in types or not self.tokenizer.has_thinking:
            return 0
        find: Callable[[Sequence[int]], int] = self.tokenizer.find_think_end
        end = find(ids)
        if end >= 0:
            return end + len(self.tokenizer.think_end_tokens)
        return len(ids) if len(types) == 1 else 0


def new_id(kind: str) -> str:
    """An id for an item of this type."""
    return f"{PREFIXES.get(kind, 'msg')}_{secrets.token_hex(16)}"


def usage_object(usage: Usage, reasoning: int) -> Json:
    """Writing to the cache costs nothing."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.prompt + usage.generated,
    }


def plain_input(arguments: str) -> str:
    """The text for a custom tool, from a call's JSON arguments; the JSON itself if it holds more
    than one text."""
    found = json.loads(arguments)
    texts = [found["input"]] if "input" in found else list(found.values())
    if len(texts) != 1 or not isinstance(texts[0], str):
        return arguments
    return texts[0].encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair

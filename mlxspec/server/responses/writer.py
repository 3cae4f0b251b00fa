"""Writes OpenAI's Responses, as one body or as server-sent events.

Rule: the body is the response in the last event of the stream, so both are made by the same calls.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mlxspec.server.errors import ApiError, Json
from mlxspec.server.responses.schema import Tool
from mlxspec.server.stream import Choice, Choices, Piece, ResponseWriter, Usage, typed_event
from mlxspec.text.chat import Tokenizer
from mlxspec.text.formats import format_of
from mlxspec.text.output_parser import Call, Part
from mlxspec.text.tool_calls import as_object

# The `encrypted_content` of reasoning: clients send reasoning back only with one.
NOT_ENCRYPTED = "not encrypted: the summary is all of it"


@dataclass(frozen=True)
class ItemType:
    """How items of one type are written: the prefix of their ids, the field with the text, the name
    of the text's events. Where `part` is set, the field is a list of one part, with events of its
    own, and the part's `text` has the text."""

    prefix: str
    key: str
    text_event: str
    part_event: str = ""
    part: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)  # fields of the text's events

    @property
    def text_key(self) -> str:
        return "text" if self.part else self.key


TYPES = {
    "message": ItemType(
        "msg",
        "content",
        "output_text",
        part_event="content_part",
        part={"type": "output_text", "annotations": [], "logprobs": []},
        extra={"logprobs": []},
    ),
    "reasoning": ItemType(  # as a summary, the form that clients show and send back
        "rs",
        "summary",
        "reasoning_summary_text",
        part_event="reasoning_summary_part",
        part={"type": "summary_text"},
    ),
    "function_call": ItemType("fc", "arguments", "function_call_arguments"),
    "custom_tool_call": ItemType("ctc", "input", "custom_tool_call_input"),
}


@dataclass
class ResponsesWriter(ResponseWriter):
    """The ResponseWriter of /v1/responses. `response` has no answer until the end, when `store` is
    called with it."""

    id: str
    response: Json
    tools: Mapping[str, Tool]  # by the names in calls
    tokenizer: Tokenizer
    store: Callable[[Json], None] = lambda response: None
    _data: bytes = b""  # events that have not been returned yet
    _events: int = 0
    _output: list[Json] = field(default_factory=list)  # finished items
    _item: Json = field(default_factory=dict)  # the open item, to which text is added; empty: none
    _at: Json = field(default_factory=dict)  # the position of its text, for events
    _part: Json = field(default_factory=dict)  # the object with its text: its part, or the item
    _call: Call | None = None  # the call that the open item is, if any

    def opening(self, usage: Usage) -> bytes:
        self._event("created", response=self.response)
        return self.keepalive()

    def keepalive(self) -> bytes:
        self._event("in_progress", response=self.response)
        return self._written()

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        for part in piece.parts:
            if part.call is not None:
                self._add_call(part, part.call)
            elif part.kind == "reasoning":
                self._add("reasoning", part.text, encrypted_content=NOT_ENCRYPTED)
            else:
                self._add("message", part.text, role="assistant")
        return self._written()

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        status, details = "completed", None
        if choices[0].finish == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        self._close(status)
        reasoning, ids = 0, choices[0].ids
        if any(item["type"] == "reasoning" for item in self._output):
            form = format_of(self.tokenizer)
            reasoning = form.reasoning_length(ids) if form.think_start else 0
        counts = {
            "input_tokens": usage.prompt,
            # Writing to the cache costs nothing.
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": reasoning, **usage.loops_ended},
            "total_tokens": usage.prompt + usage.generated,
        }
        self._end(status, incomplete_details=details, usage=counts)
        self.store(self.response)
        return self._written()

    def failed(self, error: ApiError) -> bytes:
        self._end("failed", error={"code": "server_error", "message": error.message})
        return self._written()

    def body(self, choices: Choices, usage: Usage) -> Json:
        for part in choices[0].whole.parts:
            self.chunk(choices[0], Piece([part]))
        self.closing(choices, usage)
        return self.response

    def _event(self, kind: str, **fields: object) -> None:
        self._data += typed_event(f"response.{kind}", sequence_number=self._events, **fields)
        self._events += 1

    def _written(self) -> bytes:
        data, self._data = self._data, b""
        return data

    def _end(self, status: str, **fields: object) -> None:
        self.response |= {"status": status, "output": self._output, **fields}
        self._event(status, response=self.response)

    def _add(self, kind: str, text: str, **fields: object) -> None:
        """Add text to the open item, or to a new one with these `fields`."""
        form = TYPES[kind]
        if self._item.get("type") != kind:
            self._close()
            head = {"type": kind, "id": new_id(kind), "status": "in_progress"}
            self._item = self._part = {**head, **fields, form.key: [] if form.part else ""}
            index = len(self._output)
            self._event("output_item.added", output_index=index, item=self._item)
            self._at = {"output_index": index, "item_id": head["id"]}
            if form.part:
                self._at[f"{form.key}_index"] = 0
                self._part = {**form.part, "text": ""}
                self._event(f"{form.part_event}.added", **self._at, part=self._part)
        if text:
            self._part[form.text_key] += text
            self._event(f"{form.text_event}.delta", **self._at, delta=text, **form.extra)

    def _add_call(self, part: Part, call: Call) -> None:
        tool = self.tools.get(call.name) or Tool(type="function", name=call.name)
        kind, text = "function_call", part.text
        if tool.type == "custom":  # which argument is the text is only known at its end
            kind, text = "custom_tool_call", ""
        fields = {"call_id": call.id, "name": tool.name}
        if tool.namespace:
            fields["namespace"] = tool.namespace
        self._add(kind, text, **fields)
        self._call = call
        if part.ends:
            self._close(ended=True)

    def _close(self, status: str = "completed", ended: bool = False) -> None:
        """End the open item, if there is one. A call that has not `ended` is incomplete."""
        item, call = self._item, self._call
        if not item:
            return
        form = TYPES[item["type"]]
        if call and item["type"] == "custom_tool_call":
            self._add(item["type"], plain_input(call.arguments))
        text = {form.text_key: self._part[form.text_key]}
        self._event(f"{form.text_event}.done", **self._at, **text, **form.extra)
        if form.part:
            self._event(f"{form.part_event}.done", **self._at, part=self._part)
            item[form.key] = [self._part]
        item["status"] = "incomplete" if call and not ended else status
        self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item, self._call = {}, None


def new_id(kind: str) -> str:
    """An id for an item of this type."""
    prefix = TYPES[kind].prefix if kind in TYPES else "msg"
    return f"{prefix}_{secrets.token_hex(16)}"


def plain_input(arguments: str) -> str:
    """The text for a custom tool, from a call's JSON arguments; the JSON itself if it holds more
    than one text."""
    fields = as_object(arguments)
    text = fields.get("input")
    if len(fields) == 1:
        [text] = fields.values()
    if isinstance(text, str):
        return text
    return arguments

"""OpenAI's Responses API: the endpoints, the dialect of its events, and the responses that are
kept.

Rule: a stream and a whole body are one sequence of events; the body is the response that the last
one holds. What is kept is bounded, and a response whose beginnings were dropped cannot be gone on
from.
"""

import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from mlxspec.server.chat_request import ChatRequest, converse, template_options
from mlxspec.server.errors import ApiError, unfit
from mlxspec.server.responses.schema import (
    Create,
    Json,
    Tool,
    chat_messages,
    missing,
    parsed,
    toolbox,
)
from mlxspec.server.state import Model, ServerState, read_body
from mlxspec.server.stream import ENCODER, Choice, Piece, Usage, event
from mlxspec.text.chat import Tokenizer
from mlxspec.text.output_parser import Call, Part

log = logging.getLogger("mlxspec")

MOST_RESPONSES = 1 << 12
MOST_BYTES = 1 << 26  # of all kept responses together, as JSON
MOST_ONE = 1 << 22  # of one of them
MOST_THREAD = 1 << 24  # of those that make up one conversation
PAGE, MOST_PAGE = 20, 100  # of input items

# What an item's `encrypted_content` says where a client will not send reasoning back without one.
NOT_ENCRYPTED = "not encrypted: the summary is all of it"
PREFIXES = {"function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}
# What of the request stands in the response, and what stands there where it was silent.
DEFAULTS: Json = {
    **dict.fromkeys(
        ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user")
    ),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier")),
    "background": False,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}


@dataclass(frozen=True, slots=True)
class Spoken:
    """How text of one kind is told: the type of its item and the field that holds its one part,
    that part, and the names of the events. `extra` is what those of the text carry besides."""

    kind: str
    holds: str
    index: str
    part: str
    text: str
    empty: Json
    extra: Json


# As a summary, since that is what clients show and send back; none reads the other form alone.
REASONING = Spoken(
    "reasoning",
    "summary",
    "summary_index",
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    {"type": "summary_text", "text": ""},
    {},
)
CONTENT = Spoken(
    "message",
    "content",
    "content_index",
    "response.content_part",
    "response.output_text",
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    {"logprobs": []},
)


@dataclass(slots=True)
class Store:
    """The latest used responses, each with the input items that are its own."""

    most: int = MOST_RESPONSES
    most_bytes: int = MOST_BYTES
    _kept: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _items: dict[str, str] = field(
        default_factory=dict
    )  # ids of items, and the response that has them
    _bytes: int = 0

    def keep(self, response: Json, items: Sequence[Json]) -> None:
        data = ENCODER.encode({"response": response, "input": items}).encode()
        if len(data) > MOST_ONE:  # it would hold up all others whenever it is looked at
            return log.info("%s is too large to be kept", response["id"])
        self._kept[response["id"]] = data
        self._items |= dict.fromkeys(
            (item["id"] for item in [*items, *response["output"]]), response["id"]
        )
        self._bytes += len(data)
        while len(self._kept) > self.most or self._bytes > self.most_bytes:
            self.drop(next(iter(self._kept)))

    def get(self, id: str, param: str | None = None) -> tuple[Json, list[Json]]:
        """A response and its own input items. Raises ApiError where it is not there."""
        if id not in self._kept:
            raise missing(id, param)
        self._kept.move_to_end(id)
        found = json.loads(self._kept[id])
        return found["response"], found["input"]

    def drop(self, id: str) -> None:
        """Raises ApiError where it is not there."""
        response, items = self.get(id)
        self._bytes -= len(self._kept.pop(id))
        for item in [*items, *response["output"]]:
            if self._items.get(item["id"]) == id:
                del self._items[item["id"]]

    def thread(self, id: str | None) -> list[Json]:
        """All items up to the end of a response, first to last. Raises ApiError where some are not
        there."""
        turns, left = [], MOST_THREAD
        while id is not None:
            response, items = self.get(id, "previous_response_id")
            turns.append([*items, *response["output"]])
            left -= len(self._kept[id])
            if left < 0:
                raise unfit(
                    "previous_response_id",
                    f"previous_response_id = {id!r}: the conversation is longer than"
                    f" {MOST_THREAD >> 20} MB; send what matters of it as input",
                )
            id = response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]

    def item(self, item: Json, at: str) -> Json:
        """The item itself, or the one that it refers to. Raises ApiError where that is not
        there."""
        id = item.get("id")
        if item.get("type") != "item_reference":
            return item
        if not isinstance(id, str) or id not in self._items:
            raise missing(str(id), f"{at}.id")
        response, items = self.get(self._items[id])
        return next(one for one in [*items, *response["output"]] if one["id"] == id)


async def create(http: HttpRequest) -> ASGIApp:
    arrived, store = time.monotonic(), http.app.state.responses
    front: ServerState = http.app.state.front
    body, ignored = parsed(await read_body(http))
    model = await front.model(body.model)
    items = [store.item(item, f"input[{i}]") for i, item in enumerate(body.input)]
    tools = toolbox(body)
    messages, left_out = chat_messages(store.thread(body.previous_response_id), items)
    if not messages:
        raise unfit("input", "input holds nothing that can be read here; send a message")
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    effort = body.reasoning.effort if body.reasoning else None
    options, unread = template_options(model, body.chat_template_kwargs, reasoning_effort=effort)
    ask = ChatRequest.from_body(
        body,
        messages=messages,
        tools=tools.told,
        tool_choice=tools.choice,
        options=options,
        format=body.format,
        source="input",
    )

    def dialect(name: str) -> Responses:
        head = _head(model, body, name)
        secret = NOT_ENCRYPTED if "reasoning.encrypted_content" in (body.include or ()) else None
        keep = (lambda response: store.keep(response, _identified(items))) if body.store else None
        return Responses(name, head, tools.named, model.tokenizer, secret, keep)

    name = f"{body.prefix}_{secrets.token_hex(16)}"
    unread = ["reasoning.effort" if path == "reasoning_effort" else path for path in unread]
    ignored += [*tools.ignored, *left_out, *unread]
    return await converse(
        http, model, ask, dialect, name, bool(body.stream), list(dict.fromkeys(ignored)), arrived
    )


async def stored(http: HttpRequest) -> Response:
    """GET and DELETE of one response."""
    store: Store = http.app.state.responses
    id = http.path_params["id"]
    if http.method == "DELETE":
        store.drop(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})
    if http.query_params.get("stream", "false").lower() != "false":
        raise unfit("stream", "stream = true: what is kept is whole; leave it out")
    return JSONResponse(store.get(id)[0])


async def input_items(http: HttpRequest) -> Response:
    """What a response answered, with what went before it, a page at a time; newest first unless
    asked."""
    store: Store = http.app.state.responses
    response, own = store.get(http.path_params["id"])
    items, asked = [*store.thread(response["previous_response_id"]), *own], http.query_params
    if (order := asked.get("order", "desc")) not in ("asc", "desc"):
        raise unfit("order", f"order = {order[:20]!r} is neither asc nor desc; send one of them")
    if order == "desc":
        items.reverse()
    if after := asked.get("after"):
        at = next((n for n, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise unfit("after", f"after = {after[:200]!r} is none of the items; send one's id")
        items = items[at + 1 :]
    most = asked.get("limit", str(PAGE))
    if not (most.isascii() and most.isdigit() and len(most) < 9 and 1 <= int(most) <= MOST_PAGE):
        raise unfit(
            "limit", f"limit = {most[:20]!r} is not a number from 1 to {MOST_PAGE}; send one"
        )
    page = items[: int(most)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return JSONResponse(
        {"object": "list", "data": page, **ends, "has_more": len(page) < len(items)}
    )


def _identified(items: Sequence[Json]) -> list[Json]:
    """Items as they are kept: each with an id, a message's text as its parts."""
    made = []
    for item in items:
        kind = item.get("type") or "message"
        id = item.get("id")
        item = {**item, "type": kind, "id": id if id and isinstance(id, str) else _id(kind)}
        if kind == "message" and isinstance(item["content"], str):
            part = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": item["content"]}]
        made.append(item)
    return made


def _id(kind: str) -> str:
    return f"{PREFIXES.get(kind, 'msg')}_{secrets.token_hex(16)}"


def _head(model: Model, body: Create, name: str) -> Json:
    """What of a response is known before there is an answer: what was asked, and its defaults."""
    drawn = {"temperature": model.defaults.temperature, "top_p": model.defaults.top_p}
    given = body.model_dump(include={*DEFAULTS, *drawn}, exclude_unset=True, by_alias=True)
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": model.name,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **DEFAULTS,
        **drawn,
        **given,
    }


@dataclass(slots=True)
class Responses:
    """The dialect of POST /v1/responses. `head` is the response before there is an answer, `named`
    the tools by what a call may name them, `secret` what stands for encrypted reasoning; `keep` is
    told the end."""

    id: str
    head: Json
    named: Mapping[str, Tool]
    tokenizer: Tokenizer
    secret: str | None = None
    keep: Callable[[Json], None] | None = None
    _sent: int = 0  # events
    _output: list[Json] = field(default_factory=list)  # items that have ended
    _open: Json | None = None  # the item that text is added to, and that text
    _said: list[str] = field(default_factory=list)
    _final: Json = field(default_factory=dict)

    def opening(self, usage: Usage) -> bytes:
        return self._event("response.created", response=self.head) + self.still_here()

    def still_here(self) -> bytes:
        return self._event("response.in_progress", response=self.head)

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        return b"".join(self._part(part) for part in piece.parts)

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        choice = choices[0]
        status = "incomplete" if choice.finish == "length" else "completed"
        made = self._close(status)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        end: Json = {"status": status, "incomplete_details": details, "output": self._output}
        self._final = {**self.head, **end, "usage": self._usage(choice, usage)}
        if self.keep:
            self.keep(self._final)
        return made + self._event(f"response.{status}", response=self._final)

    def failed(self, error: ApiError) -> bytes:
        told = {"code": "server_error", "message": error.message}
        response = {**self.head, "status": "failed", "error": told, "output": self._output}
        return self._event("response.failed", response=response)

    def body(
        self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: Usage
    ) -> Json:
        for piece in pieces[0]:
            self.chunk(choices[0], piece)
        self.closing(choices, usage)
        return self._final

    def _event(self, kind: str, **told: object) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **told}, kind)

    def _part(self, part: Part) -> bytes:
        if part.call is not None:
            return self._close() + self._call(part.call)
        spoken = REASONING if part.kind == "reasoning" else CONTENT
        made = b""
        if self._open is None or self._open["type"] != spoken.kind:
            made = self._close() + self._begin(spoken)
        self._said.append(part.text)
        return made + self._event(
            f"{spoken.text}.delta", **self._at(spoken), delta=part.text, **spoken.extra
        )

    def _begin(self, spoken: Spoken) -> bytes:
        self._open = {
            "type": spoken.kind,
            "id": _id(spoken.kind),
            "status": "in_progress",
            spoken.holds: [],
        }
        self._open |= (
            {"role": "assistant"} if spoken is CONTENT else {"encrypted_content": self.secret}
        )
        made = self._event(
            "response.output_item.added", output_index=len(self._output), item=self._open
        )
        return made + self._event(f"{spoken.part}.added", **self._at(spoken), part=spoken.empty)

    def _close(self, status: str = "completed") -> bytes:
        """End the item that text is added to, if there is one."""
        if self._open is None:
            return b""
        spoken = CONTENT if self._open["type"] == CONTENT.kind else REASONING
        at, text = self._at(spoken), "".join(self._said)
        part = {**spoken.empty, "text": text}
        item = {**self._open, "status": status, spoken.holds: [part]}
        self._open = None
        self._said.clear()
        made = self._event(f"{spoken.text}.done", **at, text=text, **spoken.extra)
        return made + self._event(f"{spoken.part}.done", **at, part=part) + self._end(item)

    def _call(self, call: Call) -> bytes:
        tool = self.named.get(call.name) or Tool(call.name, None, False)
        kind, key = ("custom_tool_call", "input") if tool.custom else ("function_call", "arguments")
        said = _plain(call.arguments) if tool.custom else call.arguments
        item = {"type": kind, "id": _id(kind), "call_id": call.id, "name": tool.name}
        item |= {"namespace": tool.namespace} if tool.namespace else {}
        at = {"item_id": item["id"], "output_index": len(self._output)}
        begun = {**item, key: "", "status": "in_progress"}
        name = f"response.{kind}_{key}"
        return (
            self._event("response.output_item.added", output_index=at["output_index"], item=begun)
            + self._event(f"{name}.delta", **at, delta=said)
            + self._event(f"{name}.done", **at, **{key: said})
            + self._end({**item, key: said, "status": "completed"})
        )

    def _end(self, item: Json) -> bytes:
        self._output.append(item)
        return self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=item
        )

    def _at(self, spoken: Spoken) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output), spoken.index: 0}

    def _usage(self, choice: Choice, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": 0,
            },  # it is free
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": self._reasoned(choice)},
            "total_tokens": usage.prompt + usage.generated,
        }

    def _reasoned(self, choice: Choice) -> int:
        """Tokens up to the end of the reasoning; 0 where no token ends it."""
        kinds = [item["type"] for item in self._output]
        if REASONING.kind not in kinds or not self.tokenizer.has_thinking:
            return 0
        find: Callable[[Sequence[int]], int] = self.tokenizer.find_think_end
        at = find(choice.ids)
        if at < 0:
            return len(choice.ids) if len(kinds) == 1 else 0
        return at + len(self.tokenizer.think_end_tokens)


def _plain(arguments: str) -> str:
    """The input of a tool that takes text, from a call with JSON; the JSON where there is more in
    it."""
    found = json.loads(arguments)
    texts = [found["input"]] if "input" in found else list(found.values())
    if len(texts) != 1 or not isinstance(texts[0], str):
        return arguments
    return texts[0].encode("utf-8", "replace").decode()  # JSON can spell half a character

"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API round the same conversation.

Rule: a stream's blocks are those of the whole body, in the order in which the model wrote them.
"""

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from mlxspec.server.anthropic import schema as schema
from mlxspec.server.chat_request import (
    ChatRequest,
    Format,
    converse,
    render_prompt,
    template_options,
)
from mlxspec.server.errors import ApiError
from mlxspec.server.state import Model, ServerState, read_body, while_connected
from mlxspec.server.stream import Choice, Json, Piece, Usage, event
from mlxspec.text.messages import TooLong
from mlxspec.text.output_parser import Part
from mlxspec.types import ModelInfo

SIGNATURE = "bWx4c3BlYw=="  # clients want one to send reasoning back; it says nothing
TYPES = {
    "reasoning": "thinking",
    "content": "text",
}  # of blocks, each with its text under the same name
PING = event({"type": "ping"}, "ping")


async def messages(http: HttpRequest) -> ASGIApp:
    arrived = time.monotonic()
    front: ServerState = http.app.state.front
    body, said, ignored = schema.parsed(schema.Messages, await read_body(http))
    model = await front.model(body.model)
    drawn = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    ask, unread = _ask(
        model, body, said, sampling=drawn, limit=body.max_tokens, stop=body.stop_sequences
    )
    name, dialect = f"msg_{secrets.token_hex(12)}", partial(Messages, model=model.name)
    return await converse(
        http, model, ask, dialect, name, bool(body.stream), [*ignored, *unread], arrived
    )


async def count_tokens(http: HttpRequest) -> Response:
    """The length of the prompt that /v1/messages would make of the same body."""
    front: ServerState = http.app.state.front
    body, said, ignored = schema.parsed(schema.Prompt, await read_body(http))
    model = await front.model(body.model)
    ask, unread = _ask(model, body, said)
    count = await while_connected(http.receive, front.on_text_thread(_count, model, ask))
    return JSONResponse({"input_tokens": count}, headers=front.report([*ignored, *unread]))


def _count(model: Model, ask: ChatRequest) -> int:
    """Reckoned where a text is far beyond the context: whoever asks wants to know how much to leave
    out."""
    try:
        return len(render_prompt(model, ask)[1].ids)
    except TooLong as error:
        return error.tokens


def _ask(
    model: Model, body: schema.Prompt, said: list[Json], **own: Any
) -> tuple[ChatRequest, list[str]]:
    """What is asked, and what of it this model's template does not look at. Raises ApiError."""
    wanted = {"enabled": True, "disabled": False}.get(body.thinking.type) if body.thinking else None
    options, unread = template_options(model, None, enable_thinking=wanted)
    form = body.output_config and body.output_config.format
    ask = ChatRequest(
        messages=said,
        tools=body.functions,
        deferred=body.deferred,
        tool_choice=body.choice,
        single=body.single,
        options=options,
        format=Format("schema", "output_config.format.schema", form.schema_) if form else None,
        **own,
    )
    return ask, ["thinking"] if unread else []


def model_of(info: ModelInfo) -> Json:
    """Anthropic's model object; the window under its names and under ours."""
    return {
        "type": "model",
        "id": info.name,
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(info.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": info.context,
        "max_tokens": info.context,
        "context_window": info.context,
    }


def models_of(infos: Iterable[ModelInfo]) -> Json:
    made = [model_of(info) for info in infos]
    return {"data": made, "has_more": False, "first_id": made[0]["id"], "last_id": made[-1]["id"]}


@dataclass(slots=True)
class Messages:
    """The dialect of /v1/messages: blocks are opened and closed as the parts change."""

    id: str
    model: str
    _open: str = ""  # the kind of the block that is being written
    _at: int = 0  # its index, or the next one's

    def opening(self, usage: Usage) -> bytes:
        """What was cached is not known yet; the last event says it."""
        head = self._head([], {"stop_reason": None, "stop_sequence": None}, usage)
        return event({"type": "message_start", "message": head}, "message_start") + PING

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        return b"".join(self._part(part) for part in piece.parts)

    def still_here(self) -> bytes:
        return PING

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        end = {"type": "message_delta", "delta": _end(choices[0]), "usage": told(usage)}
        return (
            self._close()
            + event(end, "message_delta")
            + event({"type": "message_stop"}, "message_stop")
        )

    def failed(self, error: ApiError) -> bytes:
        return event(error.anthropic(), "error")

    def body(
        self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: Usage
    ) -> Json:
        content = blocks(part for piece in pieces[0] for part in piece.parts)
        return self._head(content, _end(choices[0]), usage)

    def _head(self, content: list[Json], end: Json, usage: Usage) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **end, "usage": told(usage)}

    def _part(self, part: Part) -> bytes:
        made = b""
        if part.call is not None or part.kind != self._open:
            made = self._close() + self._event(
                "content_block_start", content_block=_emptied(_block(part))
            )
            self._open = part.kind
        if part.call is not None:
            delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
        else:
            kind = TYPES[part.kind]
            delta = {"type": f"{kind}_delta", kind: part.text}
        return made + self._event("content_block_delta", delta=delta)

    def _close(self) -> bytes:
        """The end of the open block, if there is one."""
        if not self._open:
            return b""
        made = b""
        if self._open == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            made = self._event("content_block_delta", delta=delta)
        made += self._event("content_block_stop")
        self._open = ""
        self._at += 1
        return made

    def _event(self, kind: str, **rest: Json) -> bytes:
        return event({"type": kind, "index": self._at, **rest}, kind)


def blocks(parts: Iterable[Part]) -> list[Json]:
    """Content blocks: a call each, and one for each run of text of a kind."""
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
        return {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": json.loads(call.arguments),
        }
    kind = TYPES[part.kind]
    return {
        "type": kind,
        kind: part.text,
        **({"signature": SIGNATURE} if kind == "thinking" else {}),
    }


def _emptied(block: Json) -> Json:
    """As it is when it starts: what comes in deltas is empty."""
    empty: Json = {"input": {}, "text": "", "thinking": "", "signature": ""}
    return {name: empty.get(name, value) for name, value in block.items()}


def _end(choice: Choice) -> Json:
    """Why the answer ended, and at which of the request's strings."""
    stopped = choice.reader.stopped
    if choice.finish == "length":
        reason = "max_tokens"
    elif choice.calls:
        reason, stopped = "tool_use", None
    else:
        reason = "end_turn" if stopped is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stopped}


def told(usage: Usage) -> Json:
    """Usage as Anthropic tells it: a prompt's cached tokens are counted apart. Nothing is told as
    created: every prompt goes into the cache, unasked and at no cost."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }

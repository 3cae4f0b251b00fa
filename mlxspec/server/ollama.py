"""Ollama's API: /api/chat, /api/generate, and the lists of models.

Rule: `options` count as fields of the body, so they are checked, refused and reported like others.
Each line of a stream has the fields of the whole body; the last one has its counts. What this
server does not support (Modelfiles, uploads) is refused with what to do instead. Its pull and
delete are in `library`.
"""

import json
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator
from starlette.responses import JSONResponse, Response

from mlxspec.server.body import MAX_ITEMS, Items, Many, endpoint
from mlxspec.server.chat_request import OBJECT, AnswerFormat, ChatRequest, prepare_chat
from mlxspec.server.content import READABLE
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.generate import Generation, respond
from mlxspec.server.openai.completions import prepare_completion
from mlxspec.server.openai.schema import Common
from mlxspec.server.state import TextModel
from mlxspec.server.stream import Choice, Choices, Piece, ResponseWriter, Usage, texts
from mlxspec.text.formats import format_of
from mlxspec.text.messages import as_list
from mlxspec.text.tool_calls import as_object
from mlxspec.types import ModelInfo


def _turn(message: Any) -> Any:
    """A message of Ollama's as one of OpenAI's."""
    if not isinstance(message, dict):
        return message
    images = as_list(message.get("images") or [])
    if len(images) > MAX_ITEMS:
        raise ValueError(f"it has more than {MAX_ITEMS} images; send fewer")
    parts: list[Json] = [{"type": "image", "data": image} for image in images]
    parts.append({"type": "text", "text": message.get("content") or ""})
    fields = {"reasoning_content": message.get("thinking"), "name": message.get("tool_name")}
    return {**fields, **message, "content": parts}


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, as some clients write them: 40.0."""
    return isinstance(value, float) and value.is_integer()


def _tool(tool: Any) -> Any:
    """A tool of Ollama's, which needs no type."""
    return {"type": "function", **tool} if isinstance(tool, dict) else tool


class Chat(Common):
    """The body of /api/chat, and of /api/show, which reads `model` alone."""

    parallel_tool_calls: ClassVar[bool] = True

    model: str | None = Field(None, validation_alias=AliasChoices("model", "name"))
    n: Literal[1] = 1
    stream: bool = True
    messages: Many[Annotated[Json, READABLE, BeforeValidator(_turn)]] = []
    tools: Many[Annotated[Any, BeforeValidator(_tool)]] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None  # Ollama has no maximum
    options: Json = {}
    form: Literal["", "json"] | Json = Field("", alias="format")
    think: bool | str | None = None
    num_predict: int = -1  # below 1: no limit

    @model_validator(mode="before")
    @classmethod
    def _with_options(cls, value: Any) -> Any:
        match value:
            case {"options": dict(options)}:
                whole = {k: int(v) for k, v in options.items() if _is_whole(v)}
                return {**options, **whole, **value}
        return value

    @property
    def limit(self) -> int | None:
        return self.num_predict if self.num_predict > 0 else super().limit

    @property
    def format(self) -> AnswerFormat | None:
        schema = OBJECT if self.form == "json" else self.form
        return AnswerFormat("format", schema) if schema else None


class Generate(Chat):
    """The body of /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    images: Items = []
    raw: bool = False  # without the chat template

    @model_validator(mode="before")
    @classmethod
    def _as_messages(cls, value: Any) -> Any:
        match value:
            case {"prompt": str(prompt)} if prompt:
                turn = {"role": "user", "content": prompt, "images": value.get("images")}
                first = {"role": "system", "content": value.get("system")}
                return {**value, "messages": [first, turn] if first["content"] else [turn]}
        return value


ASCII = json.JSONEncoder(separators=(",", ":"))  # some clients end lines at U+2028 too


@dataclass
class LineWriter(ResponseWriter):
    """The ResponseWriter of /api/chat and /api/generate. `model` is the name the client sent."""

    id: str
    model: str
    chat: bool  # not /api/generate

    media = "application/x-ndjson"
    comment = b""

    def opening(self, usage: Usage) -> bytes:
        return b""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if not any(part.ends or not part.call for part in piece.parts):
            return b""
        return _encoded(self.line(piece))

    def keepalive(self) -> bytes:
        return _encoded(self.line(Piece()))

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        return _encoded(self.line(Piece()) | _end(choices[0], usage))

    def failed(self, error: ApiError) -> bytes:
        return _encoded({"error": error.message})

    def body(self, choices: Choices, usage: Usage) -> Json:
        return self.line(choices[0].whole) | _end(choices[0], usage)

    def line(self, piece: Piece) -> Json:
        """The line for a piece of the answer."""
        text, parts = texts(piece), piece.parts
        fields: Json = {"content" if self.chat else "response": text["content"]}
        if text["reasoning"]:
            fields["thinking"] = text["reasoning"]
        calls = []
        for call in [part.call for part in parts if part.call and part.ends]:
            function = {"name": call.name, "arguments": as_object(call.arguments)}
            calls.append({"id": call.id, "function": function})
        if calls:
            fields["tool_calls"] = calls
        if self.chat:
            fields = {"message": {"role": "assistant", **fields}}
        return {
            "model": self.model,
            "created_at": datetime.now(UTC).isoformat(),
            **fields,
            "done": False,
        }


def _encoded(line: Json) -> bytes:
    return ASCII.encode(line).encode() + b"\n"


def _end(choice: Choice, usage: Usage) -> Json:
    """The fields of the last line. Durations are in nanoseconds; waiting, also for the model to
    load, counts as part of reading the prompt."""
    first = usage.first or usage.seconds
    return {
        "done": True,
        "done_reason": "length" if choice.finish == "length" else "stop",
        "total_duration": int(usage.seconds * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": int(first * 1e9),
        "eval_count": usage.generated,
        "eval_duration": int((usage.seconds - first) * 1e9),
        **usage.loops_ended,
    }


INSTEAD = {
    "/api/copy": "copy is not supported; name a model with --name when the server is started",
    "/api/create": "create is not supported; send system and options with each request",
    "/api/push": "push is not supported; upload the model's directory yourself",
}


async def version(http: HttpRequest) -> Response:
    """The version of Ollama with this API: clients refuse old ones."""
    return JSONResponse({"version": "0.32.15"})


async def models(http: HttpRequest) -> Response:
    """The served models; of /api/ps, those that are loaded."""
    entries = []
    for served in http.app.state.server.served.values():
        if served.status == "loaded" or http.url.path != "/api/ps":
            entries.append(_model(served.info))
    return JSONResponse({"models": entries})


def _model(info: ModelInfo) -> Json:
    name = info.name if ":" in info.name else f"{info.name}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(info.created, UTC).isoformat(),
        "size": info.weight_bytes,
        "size_vram": info.weight_bytes,
        "context_length": info.context,
        "digest": sha256(f"{name} {info.created}".encode()).hexdigest(),
        "details": {
            "format": "mlx",
            "family": "mlx",
            "parameter_size": "",  # Zed reads no list without these two
            "quantization_level": "",
        },
        "model_info": {
            "general.architecture": "mlx",  # the prefix of the other names
            "general.basename": info.name,
            "mlx.context_length": info.context,
        },
    }


async def show(http: HttpRequest, body: Chat, model: TextModel) -> Response:
    capabilities = ["completion", "tools"]
    if format_of(model.tokenizer).think_start:
        capabilities.append("thinking")
    if model.info.sees:
        capabilities.append("vision")
    described = _model(model.server.served[model.name].info)
    return JSONResponse({**described, "capabilities": capabilities})


async def answer(http: HttpRequest, body: Chat, model: TextModel) -> Response | Generation:
    """POST /api/chat and /api/generate. Without a message, only loads or unloads the model."""
    chats = http.url.path == "/api/chat"
    writer = LineWriter(f"ollama-{secrets.token_hex(12)}", body.model or model.name, chats)
    if isinstance(body, Generate) and (body.suffix or (body.raw and body.prompt)):
        unused = {"format": body.form, "system": body.system, "tools": body.tools}
        if model.server.config.strict_content:
            unused["images"] = body.images
        for name, value in unused.items():
            if value:
                raise invalid(name, f"{name} with raw or suffix: send one of them")
        return await respond(model, body, writer, prepare_completion)
    if not body.messages:
        keep = str((body.model_extra or {}).get("keep_alive"))
        action = "unload" if re.fullmatch(r"0+(\.0*)?[a-zµ]*", keep) else "load"
        if action == "unload":
            await model.server.unload(model.base)
        else:  # a negative time pins it
            await model.server.worker.load(model.base, keep.startswith("-") or None)
        return JSONResponse(writer.line(Piece()) | {"done": True, "done_reason": action})
    source = "messages" if chats else "prompt"
    variable = "reasoning_effort" if isinstance(body.think, str) else "enable_thinking"
    last = body.messages[-1]
    chat_request = ChatRequest(
        body.messages,
        body.tools,
        options={variable: body.think},
        source=source,
        images=body.seen_images,
        continued=last.get("role") == "assistant" and not (last.get("tool_calls") or body.format),
    )
    return await respond(model, body, writer, prepare_chat, chat_request)


async def refuse(http: HttpRequest) -> Response:
    raise ApiError(400, INSTEAD[http.url.path])


ENDPOINTS: Json = {
    "POST /api/chat": endpoint(Chat, answer),
    "POST /api/generate": endpoint(Generate, answer),
    "POST /api/show": endpoint(Chat, show),
    "GET /api/ps": models,
    "GET /api/tags": models,
    "GET /api/version": version,
    **{f"POST,DELETE {path}": refuse for path in INSTEAD},
}

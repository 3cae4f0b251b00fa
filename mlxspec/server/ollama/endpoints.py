"""Ollama's API: /api/chat, /api/generate, and what tells of the models.

Rule: what this server does not do (Modelfiles, uploads) is refused with what to do instead.
"""

import secrets
from datetime import UTC, datetime
from hashlib import sha256

from starlette.responses import JSONResponse, Response

from mlxspec.server.body import takes
from mlxspec.server.chat_request import ChatRequest, prepare_chat
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.generate import Generation, respond
from mlxspec.server.ollama.schema import Chat, Generate
from mlxspec.server.ollama.writer import LineWriter
from mlxspec.server.openai.endpoints import prepare_completion
from mlxspec.server.state import TextModel
from mlxspec.server.stream import Piece
from mlxspec.types import ModelInfo

INSTEAD = {
    "/api/copy": "copy is not supported; name a model with --name when the server is started",
    "/api/create": "create is not supported; send system and options with each request",
    "/api/delete": "delete is not supported; start the server without the model",
    "/api/pull": "pull is not supported; start the server with the model, which downloads it",
    "/api/push": "push is not supported; upload the model's directory yourself",
}


async def version(http: HttpRequest) -> Response:
    """Of the Ollama whose API this is: clients refuse old ones."""
    return JSONResponse({"version": "0.32.15"})


async def models(http: HttpRequest) -> Response:
    """The served models; of /api/ps, those that are loaded."""
    found = []
    for served in http.app.state.server.worker.models.values():
        if served.status == "loaded" or http.url.path != "/api/ps":
            found.append(_model(served.info))
    return JSONResponse({"models": found})


def _model(info: ModelInfo) -> Json:
    name = f"{info.name}:latest"
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
            "general.architecture": "mlx",  # begins the other names
            "general.basename": info.name,
            "mlx.context_length": info.context,
        },
    }


async def show(http: HttpRequest, body: Chat, model: TextModel) -> Response:
    capabilities = ["completion", "tools"]
    if model.tokenizer.has_thinking:
        capabilities.append("thinking")
    return JSONResponse({**_model(model.info), "capabilities": capabilities})


async def answer(http: HttpRequest, body: Chat, model: TextModel) -> Response | Generation:
    """POST /api/chat and /api/generate. Without a message, only loads or unloads the model."""
    chats = http.url.path == "/api/chat"
    writer = LineWriter(f"ollama-{secrets.token_hex(12)}", body.model or model.name, chats)
    if isinstance(body, Generate) and (body.suffix or (body.raw and body.prompt)):
        unread = {"format": body.form, "system": body.system, "tools": body.tools}
        if model.server.config.strict_content:
            unread["images"] = body.images
        for name, value in unread.items():
            if value:
                raise invalid(name, f"{name} with raw or suffix: send one of them")
        return await respond(model, body, writer, prepare_completion)
    if not body.messages:
        keep = str((body.model_extra or {}).get("keep_alive"))
        return JSONResponse(writer.line(Piece()) | await _load(model, keep))
    source = "messages" if chats else "prompt"
    variable = "reasoning_effort" if isinstance(body.think, str) else "enable_thinking"
    last = body.messages[-1]
    asked = ChatRequest(
        body.messages,
        body.tools,
        options={variable: body.think},
        source=source,
        continued=last.get("role") == "assistant" and not (last.get("tool_calls") or body.format),
    )
    return await respond(model, body, writer, prepare_chat, asked)


async def _load(model: TextModel, keep: str) -> Json:
    """Unload the model where `keep` is 0, else load it, to stay where `keep` is negative. Raises
    ApiError."""
    server, unloads = model.server, keep in ("0", "0s", "0m")
    pin = keep.startswith("-") or None
    await (server.unload(model.name) if unloads else server.worker.load(model.name, pin))
    return {"done": True, "done_reason": "unload" if unloads else "load"}


async def refuse(http: HttpRequest) -> Response:
    raise ApiError(400, INSTEAD[http.url.path])


ENDPOINTS: Json = {
    "POST /api/chat": takes(Chat, answer),
    "POST /api/generate": takes(Generate, answer),
    "POST /api/show": takes(Chat, show),
    "GET /api/ps": models,
    "GET /api/tags": models,
    "GET /api/version": version,
    **{f"POST,DELETE {path}": refuse for path in INSTEAD},
}

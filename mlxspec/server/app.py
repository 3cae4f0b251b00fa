"""The application: its routes, and the endpoints that generate nothing.

Rule: endpoints are functions of a request, and share the `ServerState`.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mlxspec import metrics
from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.metrics import Metrics
from mlxspec.model.hub import cache_of
from mlxspec.server import anthropic, embeddings, library, ollama, page, rerank
from mlxspec.server.body import FIRST, Body, Items, Token, endpoint, report_ignored
from mlxspec.server.chat_request import ChatRequest, check_ids, encode_prompt, render_prompt
from mlxspec.server.content import READABLE
from mlxspec.server.errors import HANDLERS, HttpRequest, Json, invalid
from mlxspec.server.openai import completions as openai
from mlxspec.server.openai.schema import RENDERING, TemplateFields
from mlxspec.server.responses import endpoints as responses
from mlxspec.server.security import protect
from mlxspec.server.state import ServerState, TextModel
from mlxspec.text.chat import Tokenizer
from mlxspec.training.recorder import Recorder
from mlxspec.types import Served


def create_app(
    worker: EngineThread,
    tokenizer: Tokenizer,
    path: Path,
    config: Config,
    others: Mapping[str, Path] | None = None,
) -> Starlette:
    """The server's application. `tokenizer` and the directory `path` are the default model's,
    `others` the directories of the other models by name."""
    routes = []
    for pattern, handler in ENDPOINTS.items():
        methods, url = pattern.split()
        for alias in {url, url.removeprefix("/v1")}:
            routes.append(Route(alias, handler, methods=methods.split(",")))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(protect, config=config), Middleware(report_ignored)],
        exception_handlers=HANDLERS,
    )
    name = worker.info.name
    paths = {name: path, **(others or {})}
    app.state.server = ServerState(worker, config, Metrics(lambda: worker.models), paths=paths)
    if config.record:
        app.state.server.recorder = Recorder(cache_of(config) / "answers", paths)
    app.state.server.open(name, tokenizer)
    app.state.responses = responses.Store()
    return app


async def index(http: HttpRequest) -> Response:
    """The page for a browser, else the text by which Ollama's clients detect a server."""
    if "text/html" in http.headers.get("accept", ""):
        return await page.file(http)
    return PlainTextResponse("Ollama is running", headers={"vary": "accept"})


async def hello(http: HttpRequest) -> Response:
    """Claude Code calls this at its start to find out whether it is online."""
    return Response()


async def health(http: HttpRequest) -> Response:
    """200 while the engine accepts requests and makes progress, else 503 with the reason."""
    state: ServerState = http.app.state.server
    reason = state.unwell()
    if reason:
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
    served = state.worker.models.items()
    loaded = [name for name, model in served if model.status == "loaded"]
    body: Json = {"status": "ok", "loaded": loaded}
    if state.note:
        body["note"] = state.note
    return JSONResponse(body)


async def prometheus(http: HttpRequest) -> Response:
    body = http.app.state.server.metrics.render()
    return Response(body, media_type=metrics.CONTENT_TYPE)


async def models(http: HttpRequest) -> Response:
    """OpenAI's list and Anthropic's in one."""
    data = list(map(_model, http.app.state.server.served.values()))
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return JSONResponse({"object": "list", "data": data, "has_more": False, **ends})


async def model(http: HttpRequest) -> Response:
    state: ServerState = http.app.state.server
    if not http.path_params["name"]:  # a slash too many
        return await models(http)
    name = state.resolve_name(http.path_params["name"])
    return JSONResponse(_model(state.served[name]))


def _model(served: Served) -> Json:
    """OpenAI's model object and Anthropic's in one, with vLLM's names for the context and the model
    that a profile is of, and the model's status."""
    info = served.info
    body = {
        "id": info.name,
        "object": "model",
        "type": "model",
        "display_name": info.name,
        "created": info.created,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.created)),
        "owned_by": "mlxspec",
        "root": info.parent or info.name,
        "parent": info.parent,
        "lifecycle": "active",
        "context_window": info.context,
        "max_model_len": info.context,
        "max_input_tokens": info.context,
        "max_tokens": info.context,
        "input_modalities": ["text", "image"] if info.sees else ["text"],  # OpenRouter's name
        "status": served.status,
        "pinned": served.pinned,
        "weight_bytes": info.weight_bytes,
    }
    if served.error:
        body["error"] = served.error
    return body


class Load(Body):
    """`pin` is for a load, `force` for the unload of a pinned model."""

    model: str  # no default
    pin: bool | None = None
    force: bool = False


async def load(http: HttpRequest, body: Load, model: TextModel) -> Response:
    """The model's object and the seconds it took, when the model is loaded or, for
    /v1/models/unload, its memory is free; 409 if it is pinned or stays busy."""
    server, name, began = model.server, model.base, time.monotonic()
    if http.url.path.endswith("/unload"):
        await server.unload(name, body.force)
    else:
        await server.worker.load(name, body.pin)
    seconds = round(time.monotonic() - began, 3)
    return JSONResponse({**_model(server.served[model.name]), "seconds": seconds})


class Tokenize(Body, TemplateFields):
    """A prompt, with `add_special_tokens`, or messages, with the fields after that and those of the
    template."""

    unsupported: ClassVar[Json] = RENDERING

    prompt: str | None = None
    messages: Annotated[Items, Field(min_length=1), READABLE] | None = None
    tools: Items | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


async def tokenize(http: HttpRequest, body: Tokenize, model: TextModel) -> Response:
    """vLLM's POST /tokenize: the ids of a prompt, or of messages as the model would see them."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "prompt, messages: send exactly one of them")
    ids = await model.server.on_text_thread(_tokens, model, body)
    counts = {"count": len(ids), "max_model_len": model.info.context, "tokens": ids}
    return JSONResponse(counts)


def _tokens(model: TextModel, body: Tokenize) -> list[int]:
    if body.messages is None:
        return encode_prompt(model, body.prompt or "", body.add_special_tokens)
    chat = ChatRequest(body.messages, body.tools, options=body.options, images=body.seen_images)
    return render_prompt(model, chat, body.add_generation_prompt)[-1].ids


class Detokenize(Body):
    tokens: Annotated[list[Token], FIRST]


async def detokenize(http: HttpRequest, body: Detokenize, model: TextModel) -> Response:
    """vLLM's POST /detokenize."""
    check_ids(model, body.tokens, "tokens")
    text = await model.server.on_text_thread(model.tokenizer.decode, body.tokens)
    return JSONResponse({"prompt": text})


ENDPOINTS: Json = {  # each path with and without /v1
    "GET /": index,
    "GET /health": health,
    "GET /metrics": prometheus,
    "GET /api/hello": hello,
    "GET /page/now": page.now,
    **library.ENDPOINTS,
    "GET /page/{name:path}": page.file,
    "GET /v1/models": models,
    "POST /v1/models/load": endpoint(Load, load),
    "POST /v1/models/unload": endpoint(Load, load),
    "GET /v1/models/{name:path}": model,
    "POST /v1/tokenize": endpoint(Tokenize, tokenize),
    "POST /v1/detokenize": endpoint(Detokenize, detokenize),
    **embeddings.ENDPOINTS,
    **rerank.ENDPOINTS,
    **openai.ENDPOINTS,
    **anthropic.ENDPOINTS,
    **responses.ENDPOINTS,
    **ollama.ENDPOINTS,
}

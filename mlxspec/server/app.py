"""The application: its routes, and the endpoints that generate nothing.

Rule: an endpoint is a function of a request; what they share is the `ServerState`.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxspec import __version__, metrics
from mlxspec.config import Config
from mlxspec.engine.worker import Worker
from mlxspec.metrics import Metrics
from mlxspec.server import page
from mlxspec.server.admin import Detokenize, Load, Tokenize, Unload
from mlxspec.server.anthropic import endpoints as anthropic
from mlxspec.server.body import parse, receive
from mlxspec.server.chat_request import check_ids, encode_prompt, template_options
from mlxspec.server.errors import HANDLERS, ApiError, dead, invalid, unavailable
from mlxspec.server.openai import endpoints as openai
from mlxspec.server.responses import endpoints as responses
from mlxspec.server.responses.store import Store
from mlxspec.server.security import protect, wants_html
from mlxspec.server.state import Model, ServerState, read_body, while_connected
from mlxspec.text.chat import Tokenizer, conversation_of, render
from mlxspec.types import Dead, Served, UserError

ANTHROPIC_HEADER = "anthropic-version"  # sent by all of Anthropic's clients


def create_app(
    worker: Worker,
    tokenizer: Tokenizer,
    path: Path,
    config: Config,
    others: Mapping[str, Path] | None = None,
    verdicts: Mapping[str, Any] | None = None,
) -> Starlette:
    """The server's application. `tokenizer` and the directory `path` are the default model's,
    `others` the directories of the other models by name, `verdicts` the kernels' verdicts."""
    routes = []
    for endpoint, do in ENDPOINTS.items():
        methods, place = endpoint.split()
        for each in {place, place.removeprefix("/v1")}:
            routes.append(Route(each, do, methods=methods.split(",")))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(protect, config=config)],
        exception_handlers=HANDLERS,
    )
    name = worker.info.name
    paths = {name: path, **(others or {})}
    app.state.server = ServerState(worker, config, Metrics(worker.models), paths, verdicts or {})
    app.state.server.open(name, tokenizer)
    app.state.responses = Store()
    return app


async def index(http: HttpRequest) -> Response:
    """The page for a browser, else the list of endpoints."""
    if wants_html(http.headers):
        return await page.file(http)
    body = {
        "name": "mlxspec",
        "version": __version__,
        "model": http.app.state.server.worker.info.name,
        "endpoints": [endpoint.replace(":path", "") for endpoint in ENDPOINTS],
    }
    return JSONResponse(body, headers={"vary": "accept"})


async def hello(http: HttpRequest) -> Response:
    """Claude Code calls this at its start to find out whether it is online."""
    return Response()


async def health(http: HttpRequest) -> Response:
    """200 while the engine accepts requests and makes progress, else 503 with the reason."""
    state: ServerState = http.app.state.server
    reason = state.unwell()
    if reason:
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
    served = state.worker.models()
    running = sum(model.stats.running for model in served.values())
    waiting = sum(model.stats.waiting for model in served.values())
    loaded = [name for name, model in served.items() if model.status == "loaded"]
    body = {"status": "ok", "running": running, "waiting": waiting, "loaded": loaded}
    if state.note:
        body["note"] = state.note
    return JSONResponse(body)


async def prometheus(http: HttpRequest) -> Response:
    body = http.app.state.server.metrics.render()
    return Response(body, media_type=metrics.CONTENT_TYPE)


async def models(http: HttpRequest) -> Response:
    """In Anthropic's format for its clients, else in OpenAI's."""
    served = http.app.state.server.worker.models().values()
    if ANTHROPIC_HEADER in http.headers:
        return JSONResponse(anthropic.models_of(one.info for one in served))
    return JSONResponse({"object": "list", "data": [_model(one) for one in served]})


async def model(http: HttpRequest) -> Response:
    state: ServerState = http.app.state.server
    served = state.worker.models()[state.resolve_name(http.path_params["name"])]
    anthropics = ANTHROPIC_HEADER in http.headers
    return JSONResponse(anthropic.model_of(served.info) if anthropics else _model(served))


def _model(served: Served) -> dict[str, Any]:
    """OpenAI's model object, with the context under vLLM's name too, and the model's status."""
    info = served.info
    body = {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "mlxspec",
        "context_window": info.context,
        "max_model_len": info.context,
        "status": served.status,
        "pinned": served.pinned,
        "weight_bytes": info.weight_bytes,
    }
    if served.error:
        body["error"] = served.error
    return body


async def load(http: HttpRequest) -> Response:
    """Responds when the model is loaded."""
    state: ServerState = http.app.state.server
    body, ignored = parse(Load, await read_body(http))
    name = state.resolve_name(body.model, exact=True)
    return await _change(http, name, state.worker.load(name, body.pin), ignored)


async def unload(http: HttpRequest) -> Response:
    """Responds when the model's memory is free; 409 if it is pinned or stays busy."""
    state: ServerState = http.app.state.server
    body, ignored = parse(Unload, await read_body(http))
    name = state.resolve_name(body.model, exact=True)
    if state.worker.models()[name].pinned and not body.force:
        why = f"{name} is pinned; send force: true, or load it with pin: false"
        raise ApiError(409, why, "model")
    seconds = max(1.0, state.config.drain_s)
    try:
        async with asyncio.timeout(seconds):
            return await _change(http, name, state.worker.unload(name), ignored)
    except TimeoutError as error:
        why = f"{name} was still busy after {seconds:.0f} s and stays loaded; try again later"
        raise ApiError(409, why, "model") from error


async def _change(
    http: HttpRequest, name: str, work: Coroutine[Any, Any, None], ignored: list[str]
) -> Response:
    """The model's object after `work` on it, and the seconds that it took."""
    state: ServerState = http.app.state.server
    began = time.monotonic()
    try:
        await while_connected(http.receive, work)
    except UserError as error:
        raise unavailable(str(error)) from error
    except Dead as error:
        raise dead(state.worker) from error
    body = _model(state.worker.models()[name])
    body["seconds"] = round(time.monotonic() - began, 3)
    return JSONResponse(body, headers=state.report(ignored))


async def tokenize(http: HttpRequest) -> Response:
    """vLLM's POST /tokenize: the ids of a prompt, or of messages as the model would see them."""
    body, ignored, model = await receive(http, Tokenize)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "prompt, messages: send exactly one of them")
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    options, unread = template_options(model, kwargs, reasoning_effort=effort)
    work = model.server.on_text_thread(_tokens, model, body, options)
    ids = await while_connected(http.receive, work)
    counts = {
        "count": len(ids),
        "max_model_len": model.info.context,
        "tokens": ids,
    }
    return JSONResponse(counts, headers=model.server.report(ignored + unread))


def _tokens(model: Model, body: Tokenize, options: dict[str, Any]) -> list[int]:
    if body.messages is None:
        return encode_prompt(model, body.prompt or "", body.add_special_tokens)
    talk = conversation_of(body.messages, body.tools, options, model.history)
    prompted, context = body.add_generation_prompt, model.info.context
    return render(model.tokenizer, talk, model.history, prompted, context).ids


async def detokenize(http: HttpRequest) -> Response:
    """vLLM's POST /detokenize."""
    body, ignored, model = await receive(http, Detokenize)
    check_ids(model, body.tokens, "tokens")
    work = model.server.on_text_thread(model.tokenizer.decode, body.tokens)
    text = await while_connected(http.receive, work)
    return JSONResponse({"prompt": text}, headers=model.server.report(ignored))


ENDPOINTS: dict[str, Any] = {  # each path with and without /v1
    "GET /": index,
    "GET /health": health,
    "GET /metrics": prometheus,
    "GET /api/hello": hello,
    "GET /page/now": page.now,
    "GET /page/events": page.events,
    "GET /page/{name}": page.file,
    "POST /v1/chat/completions": openai.chat,
    "POST /v1/completions": openai.completions,
    "POST /v1/messages": anthropic.messages,
    "POST /v1/messages/count_tokens": anthropic.count_tokens,
    "POST /v1/responses": responses.create,
    "GET,DELETE /v1/responses/{id}": responses.stored,
    "GET /v1/responses/{id}/input_items": responses.input_items,
    "GET /v1/models": models,
    "POST /v1/models/load": load,
    "POST /v1/models/unload": unload,
    "GET /v1/models/{name:path}": model,
    "POST /v1/tokenize": tokenize,
    "POST /v1/detokenize": detokenize,
}

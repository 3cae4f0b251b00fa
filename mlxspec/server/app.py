"""The application: its routes, and the endpoints that ask nothing of the engine but what it knows.

Rule: an endpoint is a function of a request; what they share is the `Front`.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxspec import __version__, metrics
from mlxspec.config import Config
from mlxspec.metrics import Metrics
from mlxspec.server import Engine, page
from mlxspec.server.admin import Detokenize, Load, Tokenize, Unload
from mlxspec.server.anthropic import endpoints as anthropic
from mlxspec.server.ask import encode_prompt, template_options
from mlxspec.server.body import parse
from mlxspec.server.errors import (
    ApiError,
    dead,
    on_api_error,
    on_crash,
    on_http_error,
    unavailable,
    unfit,
)
from mlxspec.server.openai import endpoints as openai
from mlxspec.server.responses import endpoints as responses
from mlxspec.server.responses.store import Store
from mlxspec.server.security import for_browser, guard
from mlxspec.server.state import Gone, Model, ServerState, on_gone, read_body, while_connected
from mlxspec.text.chat import Tokenizer, render, talk_of
from mlxspec.types import Dead, Served, UserError

VERSION = "anthropic-version"  # a header that all of Anthropic's clients send


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    path: Path,
    config: Config,
    others: Mapping[str, Path] | None = None,
    verdicts: Mapping[str, Any] | None = None,
) -> Starlette:
    """The server's application. `tokenizer` and the directory `path` are the default model's,
    `others` the directories of the other models by name, `verdicts` those of the machine's
    kernels."""
    app = Starlette(
        routes=_routes(),
        middleware=[Middleware(guard, config=config)],
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_error,
            Gone: on_gone,
            Exception: on_crash,
        },
    )
    name = engine.info.name
    paths = {name: path, **(others or {})}
    app.state.front = ServerState(engine, config, Metrics(engine.models), paths, verdicts or {})
    app.state.front.open(name, tokenizer)
    app.state.responses = Store()
    return app


def _routes() -> list[Route]:
    """OpenAI's, vLLM's and Anthropic's paths, each with and without /v1."""
    both = [
        ("/chat/completions", openai.chat, "POST"),
        ("/completions", openai.completions, "POST"),
        ("/messages", anthropic.messages, "POST"),
        ("/messages/count_tokens", anthropic.count_tokens, "POST"),
        ("/responses", responses.create, "POST"),
        ("/responses/{id}", responses.stored, "GET DELETE"),
        ("/responses/{id}/input_items", responses.input_items, "GET"),
        ("/models", models, "GET"),
        ("/models/load", load, "POST"),
        ("/models/unload", unload, "POST"),
        ("/models/{name:path}", model, "GET"),
        ("/tokenize", tokenize, "POST"),
        ("/detokenize", detokenize, "POST"),
    ]
    routes = [
        Route(f"{at}{path}", do, methods=how.split())
        for path, do, how in both
        for at in ("/v1", "")
    ]
    once = [
        ("/", index),
        ("/health", health),
        ("/metrics", prometheus),
        ("/api/hello", hello),
        ("/page/now", now),
        ("/page/events", page.events),
        ("/page/{name}", page.file),
    ]
    return routes + [Route(path, do, methods=["GET"]) for path, do in once]


async def index(http: HttpRequest) -> Response:
    """What this is, for whoever opens it: the page in a browser."""
    if for_browser(http.headers.raw):
        return await page.file(http)
    front: ServerState = http.app.state.front
    paths = [
        f"{how} {r.path_format}" for r in http.app.routes for how in sorted(r.methods - {"HEAD"})
    ]
    told = {
        "name": "mlxspec",
        "version": __version__,
        "model": front.engine.info.name,
        "endpoints": paths,
    }
    return JSONResponse(told, headers={"vary": "accept"})


async def hello(http: HttpRequest) -> Response:
    """Claude Code asks at its start whether there is a network."""
    return Response()


async def now(http: HttpRequest) -> Response:
    """The page's snapshot, once, and what else `mlxspec status` and the menu bar show."""
    front: ServerState = http.app.state.front
    more = {"pid": os.getpid(), "idle_ttl": front.config.idle_ttl}
    return JSONResponse(page.snapshot(front) | more, headers=page.DATA)


async def health(http: HttpRequest) -> Response:
    """200 while the engine takes requests and gets on with its work, else 503 with the reason."""
    front: ServerState = http.app.state.front
    engine = front.engine
    if reason := front.unwell():
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
    stats = engine.stats()
    loaded = [name for name, served in engine.models().items() if served.status == "loaded"]
    found = {"status": "ok", "running": stats.running, "waiting": stats.waiting, "loaded": loaded}
    return JSONResponse(found | {"note": front.note} if front.note else found)


async def prometheus(http: HttpRequest) -> Response:
    page = http.app.state.front.metrics.render()
    return Response(page, headers={"content-type": metrics.CONTENT_TYPE})


async def models(http: HttpRequest) -> Response:
    """In Anthropic's shape for its clients, else in OpenAI's."""
    front: ServerState = http.app.state.front
    found = front.engine.models().values()
    if VERSION in http.headers:
        return JSONResponse(anthropic.models_of(served.info for served in found))
    return JSONResponse({"object": "list", "data": [_model(served) for served in found]})


async def model(http: HttpRequest) -> Response:
    front: ServerState = http.app.state.front
    served = front.engine.models()[front.named(http.path_params["name"])]
    return JSONResponse(
        anthropic.model_of(served.info) if VERSION in http.headers else _model(served)
    )


def _model(served: Served) -> dict[str, Any]:
    """OpenAI's model object, and how the model is; the window under vLLM's name, and under the
    plain one."""
    info = served.info
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "mlxspec",
        "context_window": info.context,
        "max_model_len": info.context,
        "status": served.status,
        "pinned": served.pinned,
        "weight_bytes": info.weight_bytes,
        **({"error": served.error} if served.error else {}),
    }


async def load(http: HttpRequest) -> Response:
    """Answers when the model is loaded."""
    front: ServerState = http.app.state.front
    body, ignored = parse(Load, await read_body(http))

    async def work(name: str) -> None:
        await asyncio.gather(front.engine.load(name, body.pin), front.model(name))

    return await _carried_out(http, ignored, body.model, work)


async def unload(http: HttpRequest) -> Response:
    """Answers when the model's memory is free, or 409."""
    front: ServerState = http.app.state.front
    body, ignored = parse(Unload, await read_body(http))
    patience = max(1.0, front.config.drain_s)

    async def work(name: str) -> None:
        if front.engine.models()[name].pinned and not body.force:
            raise ApiError(
                409,
                f"{name} is pinned; send force: true, or load it with pin: false",
                param="model",
            )
        try:
            async with asyncio.timeout(patience):
                await front.engine.unload(name)
        except TimeoutError as error:
            other = front.engine.loading()
            why = f"{other} is being loaded" if other else f"{name} has not ended its answers"
            why = f"{why} in {patience:.0f} s; {name} stays, try again later"
            raise ApiError(409, why, param="model") from error

    return await _carried_out(http, ignored, body.model, work)


async def _carried_out(
    http: HttpRequest,
    ignored: list[str],
    asked: str,
    work: Callable[[str], Coroutine[Any, Any, None]],
) -> Response:
    """The model's object after `work` on it, and the seconds that it took."""
    front: ServerState = http.app.state.front
    name, began = front.named(asked, exact=True), time.monotonic()
    try:
        await while_connected(http.receive, work(name))
    except UserError as error:
        raise unavailable(str(error)) from error
    except Dead as error:
        raise dead(front.engine) from error
    done = {**_model(front.engine.models()[name]), "seconds": round(time.monotonic() - began, 3)}
    return JSONResponse(done, headers=front.report(ignored))


async def tokenize(http: HttpRequest) -> Response:
    """vLLM's POST /tokenize: the ids of a prompt, or of messages as the model would see them."""
    front: ServerState = http.app.state.front
    body, ignored = parse(Tokenize, await read_body(http))
    model = await front.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise unfit("prompt", "prompt, messages: send one of them, and only one")
    if body.messages is not None:
        kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
        options, unread = template_options(model, kwargs, reasoning_effort=effort)
        ignored += unread
        work = front.on_text_thread(_tokens, model, body, options)
        ignored += ["add_special_tokens"] if "add_special_tokens" in body.model_fields_set else []
    else:
        given = body.model_fields_set
        ignored += sorted(
            given & {"tools", "add_generation_prompt", "reasoning_effort", "chat_template_kwargs"}
        )
        work = front.on_text_thread(encode_prompt, model, body.prompt, body.add_special_tokens)
    ids = await while_connected(http.receive, work)
    found = {"count": len(ids), "max_model_len": model.info.context, "tokens": ids}
    return JSONResponse(found, headers=front.report(ignored))


def _tokens(model: Model, body: Tokenize, options: dict[str, Any]) -> list[int]:
    talk = talk_of(body.messages or [], body.tools, options, model.history)
    prompted, context = body.add_generation_prompt, model.info.context
    return render(model.tokenizer, talk, model.history, prompted, context).ids


async def detokenize(http: HttpRequest) -> Response:
    """vLLM's POST /detokenize."""
    front: ServerState = http.app.state.front
    body, ignored = parse(Detokenize, await read_body(http))
    model = await front.model(body.model)
    vocab = model.info.vocab
    if body.tokens and max(body.tokens) >= vocab:
        raise unfit(
            "tokens", f"tokens has the id {max(body.tokens)}; ids run from 0 to {vocab - 1}"
        )
    text = await while_connected(
        http.receive, front.on_text_thread(model.tokenizer.decode, body.tokens)
    )
    return JSONResponse({"prompt": text}, headers=front.report(ignored))

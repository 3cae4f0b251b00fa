"""The application: its routes, and the endpoints that ask nothing of the engine but what it knows.

Rule: an endpoint is a function of a request; what they share is the `Front`.
"""

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
from mlxspec.server import Engine, anthropic, openai, responses
from mlxspec.server.ask import template_options
from mlxspec.server.errors import ApiError, on_api_error, on_crash, on_http_error, unfit
from mlxspec.server.front import Front, Gone, on_gone, read_body, while_connected
from mlxspec.server.schema_openai import Detokenize, Tokenize, parse
from mlxspec.server.security import guard
from mlxspec.text.grammar import Grammars
from mlxspec.text.prompt import Tokenizer, encode, generation_defaults, render, talk_of

VERSION = "anthropic-version"  # a header that all of Anthropic's clients send
STALLED_S = 60.0  # without progress while there is work: longer than any step that is well


def create_app(engine: Engine, tokenizer: Tokenizer, path: Path, config: Config) -> Starlette:
    """The server's application. `path` is the model's directory, for its sampling defaults."""
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
    defaults, grammars = generation_defaults(path), Grammars(tokenizer, engine.info.vocab)
    app.state.front = Front(engine, tokenizer, defaults, config, Metrics(engine.stats), grammars)
    app.state.responses = responses.Store()
    return app


def _routes() -> list[Route]:
    """OpenAI's, vLLM's and Anthropic's paths, each with and without /v1."""
    both = [
        ("/chat/completions", openai.chat, "POST"),
        ("/completions", openai.completions, "POST"),
        ("/messages", anthropic.messages, "POST"),
        ("/messages/count_tokens", anthropic.count_tokens, "POST"),
        ("/responses", responses.create, "POST"),
        ("/responses/{id}", responses.stored, "GET"),
        ("/responses/{id}", responses.stored, "DELETE"),
        ("/responses/{id}/input_items", responses.input_items, "GET"),
        ("/models", models, "GET"),
        ("/models/{name:path}", model, "GET"),
        ("/tokenize", tokenize, "POST"),
        ("/detokenize", detokenize, "POST"),
    ]
    routes = [Route(f"{at}{path}", do, methods=[how]) for path, do, how in both for at in ("/v1", "")]
    for path, do in (("/", index), ("/health", health), ("/metrics", prometheus), ("/api/hello", hello)):
        routes.append(Route(path, do, methods=["GET"]))
    return routes


async def index(http: HttpRequest) -> Response:
    """What this is, for whoever opens it."""
    front: Front = http.app.state.front
    paths = [f"{min(r.methods - {'HEAD'})} {r.path_format}" for r in http.app.routes]
    return JSONResponse(
        {"name": "mlxspec", "version": __version__, "model": front.engine.info.name, "endpoints": paths}
    )


async def hello(http: HttpRequest) -> Response:
    """Claude Code asks at its start whether there is a network."""
    return Response()


async def health(http: HttpRequest) -> Response:
    """200 while the engine takes requests and gets on with its work, else 503 with the reason."""
    engine = http.app.state.front.engine
    reason = ""
    if not engine.alive():
        reason = "the engine has stopped"
    elif engine.draining():
        reason = "the server is stopping"
    elif (seconds := engine.stalled()) > STALLED_S:
        reason = f"the engine has made no progress for {seconds:.0f} s"
    if reason:
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
    now = engine.stats()
    return JSONResponse({"status": "ok", "running": now.running, "waiting": now.waiting})


async def prometheus(http: HttpRequest) -> Response:
    page = http.app.state.front.metrics.render()
    return Response(page, headers={"content-type": metrics.CONTENT_TYPE})


async def models(http: HttpRequest) -> Response:
    """In Anthropic's shape for its clients, else in OpenAI's."""
    front: Front = http.app.state.front
    if VERSION in http.headers:
        return JSONResponse(anthropic.models_of(front))
    return JSONResponse({"object": "list", "data": [_model(front)]})


async def model(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    front.check_model(http.path_params["name"])
    return JSONResponse(anthropic.model_of(front) if VERSION in http.headers else _model(front))


def _model(front: Front) -> dict[str, Any]:
    """OpenAI's model object; the window under vLLM's name, and under the plain one."""
    info = front.engine.info
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "mlxspec",
        "context_window": info.context,
        "max_model_len": info.context,
    }


async def tokenize(http: HttpRequest) -> Response:
    """vLLM's POST /tokenize: the ids of a prompt, or of messages as the model would see them."""
    front: Front = http.app.state.front
    body, ignored = parse(Tokenize, await read_body(http))
    front.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise unfit("prompt", "prompt, messages: send one of them, and only one")
    if body.messages is not None:
        kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
        options, unread = template_options(front, kwargs, reasoning_effort=effort)
        ignored += unread
        work = front.on_text_thread(_tokens, front, body, options)
        ignored += ["add_special_tokens"] if "add_special_tokens" in body.model_fields_set else []
    else:
        given = body.model_fields_set
        ignored += sorted(given & {"add_generation_prompt", "reasoning_effort", "chat_template_kwargs"})
        work = front.on_text_thread(encode, front.tokenizer, body.prompt, body.add_special_tokens)
    ids = await while_connected(http.receive, work)
    found = {"count": len(ids), "max_model_len": front.engine.info.context, "tokens": ids}
    return JSONResponse(found, headers=front.report(ignored))


def _tokens(front: Front, body: Tokenize, options: dict[str, Any]) -> list[int]:
    talk = talk_of(body.messages or [], body.tools, options, front.history)
    return render(front.tokenizer, talk, front.history, body.add_generation_prompt).ids


async def detokenize(http: HttpRequest) -> Response:
    """vLLM's POST /detokenize."""
    front: Front = http.app.state.front
    body, ignored = parse(Detokenize, await read_body(http))
    front.check_model(body.model)
    vocab = front.engine.info.vocab
    if body.tokens and max(body.tokens) >= vocab:
        raise unfit("tokens", f"tokens has the id {max(body.tokens)}; ids run from 0 to {vocab - 1}")
    text = await while_connected(http.receive, front.on_text_thread(front.tokenizer.decode, body.tokens))
    return JSONResponse({"prompt": text}, headers=front.report(ignored))

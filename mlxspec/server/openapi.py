"""GET /openapi.json: what this server takes and answers, as OpenAPI 3.1.

Rule: paths come from the application's routes, bodies from the models that parse them; an endpoint that is
told nothing about here fails the tests.
"""

import re
from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxspec import __version__
from mlxspec.server import schema_anthropic, schema_openai, schema_responses, shapes
from mlxspec.server.responses import MOST_PAGE
from mlxspec.server.schema_openai import Strict
from mlxspec.server.shapes import form

Json = dict[str, Any]
AT = "#/components/schemas/{model}"
BODIES: dict[str, type[Strict]] = {  # by the endpoint's name
    "chat": schema_openai.Chat,
    "completions": schema_openai.Completion,
    "messages": schema_anthropic.Messages,
    "count_tokens": schema_anthropic.Prompt,
    "create": schema_responses.Create,
    "load": schema_openai.Load,
    "unload": schema_openai.Unload,
    "tokenize": schema_openai.Tokenize,
    "detokenize": schema_openai.Detokenize,
}
STREAMS = ("chat", "completions", "messages", "create")  # as server-sent events if the body asks for it
OPEN = ("health",)
LEFT_OUT = ("file",)  # the page's own files
WHY = {
    400: "A field, or a Host header, that is wrong; the message says which and what to send.",
    401: "No API key, or a wrong one.",
    403: "A Host or an Origin that is none of this server's.",
    404: "No such model, or no such response.",
    408: "The body did not arrive in time.",
    409: "The model is pinned or busy.",
    413: "The body is too large.",
    429: "Too much waits already; Retry-After says when to come again.",
    500: "A bug; the server's log says more.",
    503: "The model cannot be had, there are too many connections, or the server is stopping.",
}
OTHER = {"prometheus": "text/plain", "events": "text/event-stream", "index": "text/html", "hello": ""}
TWO_KINDS = ("models", "model")  # as the API has it whose header is there
_WHOSE = [("header", "anthropic-version", form("string"))]
PARAMETERS: dict[str, list[tuple[str, str, Json]]] = {
    **dict.fromkeys(TWO_KINDS, _WHOSE),
    "stored": [("query", "stream", {"type": "string", "pattern": "^[Ff][Aa][Ll][Ss][Ee]$"})],
    "input_items": [
        ("query", "order", form({"asc", "desc"})),
        ("query", "after", form("string")),
        ("query", "limit", {"type": "integer", "minimum": 1, "maximum": MOST_PAGE}),
    ],
}


async def description(http: HttpRequest) -> Response:
    """Made when it is first asked for."""
    state = http.app.state
    if not hasattr(state, "openapi"):
        state.openapi = JSONResponse(describe(http.app.routes, bool(state.front.config.api_key)))
    return state.openapi  # type: ignore[no-any-return]


def describe(routes: Iterable[Route], key: bool) -> Json:
    """The document; with `key` it says that one is needed."""
    paths: Json = {}
    for route in routes:
        if route.name not in LEFT_OUT:
            for method in (route.methods or set()) - {"HEAD"}:
                paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, method, key)
    made: Json = {"openapi": "3.1.0", "info": {"title": "mlxspec", "version": __version__}, "paths": paths}
    made["components"] = {"schemas": _schemas()}
    if key:
        bearer, own = {"type": "http", "scheme": "bearer"}, {"type": "apiKey", "in": "header"}
        made["components"]["securitySchemes"] = {"bearer": bearer, "key": {**own, "name": "x-api-key"}}
        made["security"] = [{"bearer": []}, {"key": []}]
    return made


def _operation(route: Route, method: str, key: bool) -> Json:
    name = "deleted" if method == "DELETE" else route.name
    told = [("path", each, form("string")) for each in route.param_convertors] + PARAMETERS.get(name, [])
    made: Json = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{route.path_format}").rstrip("_"),
        "summary": (route.endpoint.__doc__ or name).split("\n\n")[0],
        "parameters": [{"in": a, "name": n, "schema": s, "required": a == "path"} for a, n, s in told],
        "responses": {"200": _answer(name), **_errors(route, name, key)},
    }
    if name in BODIES:
        schema = {"$ref": AT.format(model=BODIES[name].__name__)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if name in OPEN:
        made["security"] = []
    return made


def _answer(name: str) -> Json:
    kinds = [OTHER[name]] if name in OTHER else ["text/event-stream"] if name in STREAMS else []
    content: Json = {kind: {} for kind in kinds if kind}
    if name not in OTHER or name in shapes.ANSWERS:
        content["application/json"] = {"schema": shapes.ANSWERS[name]}
    made: Json = {"description": "Done.", "content": content}
    if name in BODIES:
        made["headers"] = {"x-mlxspec-ignored": {"schema": form("string")}}
    if name == "create":
        told = {"id": "$response.body#/id"}
        steps = ("get_v1_responses_id", "delete_v1_responses_id", "get_v1_responses_id_input_items")
        made["links"] = {step: {"operationId": step, "parameters": told} for step in steps}
    return made


def _errors(route: Route, name: str, key: bool) -> Json:
    """Those of the guard, and the endpoint's own."""
    statuses = {400, 403, 413, 500, 503} | ({401} if key and name not in OPEN else set())
    if name in BODIES:
        statuses |= {404, 408} | ({409} if name == "unload" else set() if name == "load" else {429})
    statuses |= {404} if route.param_convertors else {429} if name == "events" else set()
    refs: list[Json] = [{"$ref": AT.format(model=kind)} for kind in ("Error", "AnthropicError")]
    error = form((*refs,)) if name in TWO_KINDS else refs["/messages" in route.path]
    made: Json = {}
    for status in sorted(statuses):
        schema = shapes.UNHEALTHY if (name, status) == ("health", 503) else error
        made[str(status)] = {"description": WHY[status], "content": {"application/json": {"schema": schema}}}
    if 429 in statuses:
        made["429"]["headers"] = {"Retry-After": {"required": True, "schema": form("integer")}}
    return made


def _schemas() -> Json:
    """Of all bodies, with the shapes that pydantic cannot see and the values of what is refused."""
    kinds = list(BODIES.values())
    _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=AT)
    made: Json = {**found["$defs"], **shapes.ERRORS}
    for (name, field), schema in shapes.INSIDE.items():
        made[name]["properties"][field] = schema
    for kind in kinds:
        own = made[kind.__name__]
        own["maxProperties"] = schema_openai.MOST_FIELDS
        refused = {name: {"enum": list(neutral)} for name, (neutral, _) in kind.refuses.items()}
        fields = {**{n: s for n, s in refused.items() if n not in kind.model_fields}, **own["properties"]}
        own["properties"] = {
            name: schema if name in own.get("required", ()) else form((schema, "null"))
            for name, schema in fields.items()
        }  # null is as if it were not there
    for name, more in shapes.WHOLE.items():
        made[name] |= more
    return made

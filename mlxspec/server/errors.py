"""Errors in the format of the API that was called: Anthropic's under /v1/messages, Ollama's under
/api, else OpenAI's.

Rule: a message names the field, the value and the fix. Every error is logged and counted when its
response is made.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from mlxspec import log
from mlxspec.text.messages import RejectedRequest
from mlxspec.types import Busy, Dead, UserError, printable
from mlxspec.types import Json as Json

HttpRequest = Request  # the engine's Request is another

OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
ANTHROPIC_TYPES = {
    **OPENAI_TYPES,
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
DOUBLED = re.compile(r"/+(v1|api)/+\1(?![^/])")
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


@dataclass(eq=False)
class ApiError(Exception):
    """An HTTP error response. `param` is the request field at fault; `code` is for programs, as are
    `details`, in Anthropic's format. `generated`: fields with what was generated before it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None
    details: Json | None = None
    generated: Json | None = None

    def body(self, anthropic: bool = False) -> Json:
        """The body in OpenAI's format, or in Anthropic's."""
        types = ANTHROPIC_TYPES if anthropic else OPENAI_TYPES
        kind = types.get(self.status, "invalid_request_error")
        error: Json = {"type": kind, "message": self.message}
        if not anthropic:
            code = self.code or CODES.get(self.status)
            return {"error": error | {"param": self.param, "code": code}, **(self.generated or {})}
        if self.details:
            error["details"] = self.details
        return {"type": "error", "error": error}


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error in the format of the API that `scope` called; also logs and counts it."""
    line = f"{scope['method']} {scope['path'][:200]}: {error.message}"
    log.info("%s (%d)", printable(line), error.status)
    scope["app"].state.server.metrics.refused[str(error.status)] += 1
    path = re.sub("^(/v1)+(?=/)", "", scope["path"])
    if path.startswith("/api/"):
        status = 503 if error.status == 429 else error.status  # Ollama has no 429
        return JSONResponse({"error": error.message}, status, error.headers)
    # The header is sent by all of Anthropic's clients.
    anthropic = path.startswith("/messages") or "anthropic-version" in Headers(scope=scope)
    return JSONResponse(error.body(anthropic), error.status, error.headers)


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """400: the field `param` has to be changed."""
    return ApiError(400, message, param, code=code)


def unavailable(why: str) -> ApiError:
    """503: a configured model cannot be loaded now."""
    return ApiError(503, why, "model", code="model_not_loaded", headers={"Retry-After": "10"})


async def on_error(http: HttpRequest, error: Any) -> Response:
    """The response to any exception of an endpoint or of the layers below. Any other type is a bug,
    whose traceback is in the log."""
    why = str(error)
    match error:
        case ClientDisconnect():
            return Response(status_code=499)  # for the log of a proxy in front
        case ApiError():
            pass
        case RejectedRequest():
            error = ApiError(400, why, error.field, code=error.code)
        case UserError():
            error = unavailable(why)
        case Busy():
            error = ApiError(429, why, headers={"Retry-After": str(error.retry_after)})
        case Dead():
            why = "the engine has stopped; the server's log says why"
            if http.app.state.server.worker.draining:
                why = "the server is stopping; send the request again in 5 s"
            error = ApiError(503, why, headers={"Retry-After": "5"})
        case HTTPException():  # an unknown path or method
            path = http.scope["path"]
            fix = "docs/api.md lists all"
            if twice := DOUBLED.match(path):
                fix = f"/{twice[1]} is there twice: take it off the end of the client's base URL"
            why = f"{http.method} {path[:200]}: {error.detail}; {fix}"
            error = ApiError(error.status_code, why, headers=error.headers)
        case _:
            why = f"the server failed: {type(error).__name__}; its log says more"
            error = ApiError(500, why)
    return error_response(http.scope, error)


HANDLERS = dict.fromkeys(
    (ApiError, UserError, Busy, Dead, ClientDisconnect, HTTPException, Exception),
    on_error,
)

"""Errors in the format of the API that was called: OpenAI's, or Anthropic's under /v1/messages.

Rule: a message names the field, the value and the fix. Every error is logged and counted when its
response is made.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from mlxspec.engine.worker import Worker
from mlxspec.types import Busy

log = logging.getLogger("mlxspec")

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
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


@dataclass(eq=False)
class ApiError(Exception):
    """An HTTP error response. `param` is the request field at fault, `code` is for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The body in OpenAI's format."""
        error = {
            "message": self.message,
            "type": OPENAI_TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code or CODES.get(self.status),
        }
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's format."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error in the format of the API that `scope` called; also logs and counts it."""
    line = f"{scope['method']} {scope['path'][:200]}: {error.message}"
    log.info("%s (%d)", "".join(c if c.isprintable() else "?" for c in line), error.status)
    scope["app"].state.server.metrics.refused.labels(str(error.status)).inc()
    body = error.body()
    path = scope["path"].removeprefix("/v1")
    # The header is sent by all of Anthropic's clients.
    if path.startswith("/messages") or "anthropic-version" in Headers(scope=scope):
        body = error.anthropic()
    return JSONResponse(body, error.status, error.headers)


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """400: the field `param` has to be changed."""
    return ApiError(400, message, param, code)


def unavailable(why: str) -> ApiError:
    """503: a configured model cannot be loaded now."""
    return ApiError(503, why, "model", "model_not_loaded", {"Retry-After": "10"})


def dead(worker: Worker) -> ApiError:
    """503: the engine accepts no more requests."""
    if not worker.draining():
        return ApiError(503, "the engine has stopped; the server's log says why")
    why = "the server is stopping; send the request again in 5 s"
    return ApiError(503, why, headers={"Retry-After": "5"})


def busy(error: Busy) -> ApiError:
    """429: the queue is full."""
    return ApiError(429, str(error), headers={"Retry-After": str(error.retry_after)})


class Gone(Exception):
    """The client has disconnected."""


async def on_api_error(http: HttpRequest, error: Any) -> Response:
    return error_response(http.scope, error)


async def on_gone(http: HttpRequest, error: Exception) -> Response:
    """499, for the log of a proxy in front; the client does not read it."""
    return Response(status_code=499)


async def on_http_error(http: HttpRequest, error: Any) -> Response:
    """Errors of the router: unknown path or method."""
    path = http.scope["path"][:200]
    message = f"{http.method} is not a method of {path}; use the one of the Allow header"
    if error.status_code == 404:
        message = f"there is nothing at {path}; GET / lists the endpoints"
    return error_response(http.scope, ApiError(error.status_code, message, headers=error.headers))


async def on_crash(http: HttpRequest, error: Exception) -> Response:
    """Any other exception is a bug of the server; its traceback is in the log."""
    why = f"the server failed: {type(error).__name__}; its log says more"
    return error_response(http.scope, ApiError(500, why))


HANDLERS = {
    ApiError: on_api_error,
    Gone: on_gone,
    HTTPException: on_http_error,
    Exception: on_crash,
}

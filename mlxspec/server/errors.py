"""Refusals in the shape of the API that was called: OpenAI's, or Anthropic's under /v1/messages.

Rule: a message names the field, the value and the mend. Each is logged and counted where it is
sent, whoever refuses: the guard, the router or an endpoint.
"""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlxspec.server import Engine
from mlxspec.types import Busy

log = logging.getLogger("mlxspec")

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RELOAD_S = 10  # until a model that failed to load is tried again
RESTART_S = 5  # until whatever watches the process has started the next
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class ApiError(Exception):
    """Ends a request with `status`. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or CODES.get(status)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = (
            "server_error"
            if self.status >= 500
            else KINDS.get(self.status, "invalid_request_error")
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def anthropic(self) -> dict[str, Any]:
        """The body as Anthropic has it."""
        kind = ANTHROPIC_KINDS.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self) -> Response:
        return Refusal(self)


class Refusal(Response):
    """An error on its way to the client."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self.error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, path = self.error, scope["path"]
        book(scope["app"], f"{scope['method']} {path[:200]}", error)
        body = error.anthropic() if speaks_anthropic(scope) else error.body()
        await JSONResponse(body, error.status, headers=error.headers)(scope, receive, send)


def speaks_anthropic(scope: Scope) -> bool:
    """By the path, or, where both APIs have it, by the header that Anthropic's clients send."""
    path = scope["path"].removeprefix("/v1")
    return path.startswith("/messages") or (
        path.startswith("/models")
        and any(name == b"anthropic-version" for name, _ in scope["headers"])
    )


def book(app: Any, asked: str, error: ApiError) -> None:
    """Count and log a refusal of `app`, the application that carries the `Front`."""
    said = "".join(c if c.isprintable() else "?" for c in f"{asked}: {error.message}")
    log.info("%s (%d)", said, error.status)
    app.state.front.metrics.refused.labels(str(error.status)).inc()


def unfit(param: str, message: str, code: str | None = None) -> ApiError:
    """What the client can mend: 400."""
    return ApiError(400, message, param=param, code=code)


def unavailable(why: str) -> ApiError:
    """A model that is served here, and cannot be had now."""
    headers = {"Retry-After": str(RELOAD_S)}
    return ApiError(503, why, param="model", code="model_not_loaded", headers=headers)


def stopping() -> ApiError:
    return ApiError(
        503,
        f"the server is stopping; send the request again in {RESTART_S} s",
        headers={"Retry-After": str(RESTART_S)},
    )


def dead(engine: Engine) -> ApiError:
    """That it takes nothing more."""
    if engine.draining():
        return stopping()
    return ApiError(503, "the engine has stopped; the server's log says why")


def busy(error: Busy) -> ApiError:
    return ApiError(429, str(error), headers={"Retry-After": str(error.retry_after)})


async def on_api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    """What the router refuses: no such path, no such method."""
    status = getattr(error, "status_code", 500)
    path = http.url.path[:200]
    message = {
        404: f"there is nothing at {path}; GET / lists the endpoints",
        405: f"{http.method} is not a method of {path}; use the one of the Allow header",
    }.get(status, str(getattr(error, "detail", error)))
    return ApiError(status, message, headers=getattr(error, "headers", None)).response()


async def on_crash(http: HttpRequest, error: Exception) -> Response:
    """A bug of ours; the traceback is in the log."""
    return ApiError(500, f"the server failed: {type(error).__name__}; its log says more").response()

"""Access control around the whole application: API key, Host and Origin. Plain ASGI.

Rule: a refused request does not reach the application. Web pages of other sites cannot use the
server: their Origin is foreign, and a DNS name rebound to this address is not an allowed Host.
Pages of this machine, and origins that the settings name, may read the answers (CORS).
"""

import asyncio
import hmac
import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxspec.config import LOOPBACK, Config
from mlxspec.server.errors import ApiError, error_response
from mlxspec.server.page import FILES

# The values of a Host and of an Origin header, and the name in them.
HOST = re.compile(r"(\[[0-9a-f.]*:[0-9a-f:.]*\]|[^\s:/?#@\[\]\\]+)(?::\d{0,5})?")
ORIGIN = re.compile("https?://" + HOST.pattern)
PREFLIGHT = "access-control-request-method"
EXPOSED = ("x-request-id", "x-mlxspec-ignored", "x-mlxspec-scaled", "retry-after")
HEALTH = "/health"
NO_KEY = {"/", HEALTH, *(f"/page/{name}" for name in FILES)}  # these hold no data
FULL = "mlxspec.full"  # in a request's scope: the server has no slot for it
RETRY_S = 2
LINGER_S = 2.0  # for the rest of a refused request


def protect(app: ASGIApp, config: Config) -> ASGIApp:
    """`app`, called after the checks."""

    app = CORSMiddleware(
        app,
        allow_origin_regex=".*",  # of those that pass the check
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED,
    )

    async def protected(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # A browser's preflight has no key.
        preflight = scope["method"] == "OPTIONS" and PREFLIGHT in headers
        try:
            _check_host(headers, config)
            _check_origins(headers, config)
            if config.api_key and scope["path"] not in NO_KEY and not preflight:
                _check_key(headers, config.api_key)
            if "content-length" in headers and "transfer-encoding" in headers:
                # A proxy in front could end the body elsewhere (smuggling).
                why = "the body has a Content-Length and a Transfer-Encoding; send one of them"
                raise ApiError(400, why, headers={"Connection": "close"})
            if scope.get(FULL) and scope["path"] != HEALTH:
                why = f"too many requests at the same time; send it again in {RETRY_S} s"
                raise ApiError(503, why, headers={"Retry-After": str(RETRY_S)})
        except ApiError as error:
            response = error_response(scope, error)
            if error.status != 403 and "origin" in headers:
                response.headers["access-control-allow-origin"] = headers["origin"]
                response.headers["access-control-expose-headers"] = ", ".join(EXPOSED)
                response.headers["vary"] = "Origin"
            return await _refuse(response, scope, receive, send=send)
        await app(scope, receive, send)

    return protected


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a whole response, let the client finish what it sends, then close the connection: an
    earlier close would cut the response off (RFC 9112, 9.6)."""
    response.headers["connection"] = "close"

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (await receive()).get("more_body"):
                        pass
            message = {"type": "http.response.body"}
        await send(message)

    await response(scope, receive, closing)


def _allowed_hosts(config: Config) -> set[str]:
    return LOOPBACK | {name.lower() for name in (config.host, *config.allowed_hosts)}


def _check_host(headers: Headers, config: Config) -> None:
    """Refuse names that are not this server's. If it listens on any address, every IP address is
    allowed: unlike a name, it cannot be rebound."""
    host = headers.get("host", "")
    name, listens = _name(HOST, host), _address(config.host)
    if listens and listens.is_unspecified and _address(name):
        return
    if not name or name not in _allowed_hosts(config):
        why = f"{host[:200]!r} is not a name of this server; start it with --allowed-hosts NAME"
        raise ApiError(403, why, code="host_not_allowed")


def _check_origins(headers: Headers, config: Config) -> None:
    """Refuse pages of other sites: neither of an allowed host nor listed in the settings, whose
    hosts may be origins too."""
    hosts = _allowed_hosts(config) | {_name(HOST, headers.get("host", ""))}
    named = {name.lower().rstrip("/") for name in config.allowed_origins + config.allowed_hosts}
    for origin in headers.getlist("origin"):
        name = _name(ORIGIN, origin)
        listed = ("://" in origin or origin == "null") and origin.lower() in named
        if not listed and not (name and name in hosts):
            at = origin[:200]
            why = f"pages of {at!r} may not use this server; start it with --allowed-origins ORIGIN"
            raise ApiError(403, why, code="origin_not_allowed")


def _name(form: re.Pattern[str], value: str) -> str:
    """The host name in the value of a header, "" if that is malformed."""
    match = form.fullmatch(value.lower())
    return match[1].strip("[]").removesuffix(".") if match else ""


def _address(name: str) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        return ip_address(name)
    return None


def _check_key(headers: Headers, key: str) -> None:
    keys = headers.getlist("x-api-key")
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        keys.append(token.strip())
    for candidate in keys:
        if hmac.compare_digest(candidate.encode("latin-1"), key.encode()):
            return
    why = "the API key is missing or wrong; send it as Authorization: Bearer, or as x-api-key"
    raise ApiError(401, why, headers={"WWW-Authenticate": "Bearer"})

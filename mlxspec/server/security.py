"""Access control around the whole application: API key, Host and Origin. Plain ASGI.

Rule: a refused request does not reach the application. Web pages of other sites cannot use the
server: their Origin is foreign, and a DNS name rebound to this address is not an allowed Host.
There is no CORS.
"""

import asyncio
import hmac
import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxspec.config import Config
from mlxspec.server.errors import ApiError, error_response
from mlxspec.server.page import FILES

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
# The values of a Host and of an Origin header, and the name in them.
HOST = re.compile(r"(\[[0-9a-f.]*:[0-9a-f:.]*\]|[^\s:/?#@\[\]\\]+)(?::\d{0,5})?")
ORIGIN = re.compile("https?://" + HOST.pattern)
HEALTH = "/health"
NO_KEY = {"/", HEALTH, *(f"/page/{name}" for name in FILES)}  # these hold no data
FULL = "mlxspec.full"  # in a request's scope: no place is left for it
RETRY_S = 2
LINGER_S = 2.0  # for the rest of a refused request


def protect(app: ASGIApp, config: Config) -> ASGIApp:
    """`app`, called after the checks."""

    async def protected(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            _check_host(headers, config)
            if config.api_key and scope["path"] not in NO_KEY:
                _check_key(headers, config.api_key)
            if "content-length" in headers and "transfer-encoding" in headers:
                # A proxy in front could go by the other end of the body (smuggling).
                why = "the body has a Content-Length and a Transfer-Encoding; send one of them"
                raise ApiError(400, why, headers={"Connection": "close"})
            if scope.get(FULL) and scope["path"] != HEALTH:
                why = f"too many requests at the same time; send it again in {RETRY_S} s"
                raise ApiError(503, why, headers={"Retry-After": str(RETRY_S)})
        except ApiError as error:
            return await _refuse(error_response(scope, error), scope, receive, send)
        await app(scope, receive, send)

    return protected


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a whole response, then close the connection; but let the client send what it has begun,
    which would cut the response off otherwise (RFC 9112, 9.6)."""
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


def _check_host(headers: Headers, config: Config) -> None:
    """Refuse names that are not this server's. Where it listens on any address, an IP address is:
    it cannot be rebound, a name can."""
    allowed = LOOPBACK | {name.lower() for name in (config.host, *config.allowed_hosts)}
    host = headers.get("host", "")
    names = [(host, _name(HOST, host))]
    listens = _address(config.host)
    if listens and listens.is_unspecified and _address(names[0][1]):
        allowed.add(names[0][1])
    names += [(origin, _name(ORIGIN, origin)) for origin in headers.getlist("origin")]
    for value, name in names:
        if not name or name not in allowed:
            at = value[:200]
            why = f"{at!r} is not a name of this server; start it with --allowed-hosts NAME"
            raise ApiError(403, why, code="host_not_allowed")


def _name(form: re.Pattern[str], value: str) -> str:
    """The host name in the value of a header, "" if that is malformed."""
    found = form.fullmatch(value.lower())
    return found[1].strip("[]").removesuffix(".") if found else ""


def _address(name: str) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        return ip_address(name)
    return None


def _check_key(headers: Headers, key: str) -> None:
    sent = headers.getlist("x-api-key")
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        sent.append(token.strip())
    for one in sent:
        if hmac.compare_digest(one.encode("latin-1"), key.encode()):
            return
    why = "the API key is missing or wrong; send it as Authorization: Bearer, or as x-api-key"
    raise ApiError(401, why, headers={"WWW-Authenticate": "Bearer"})

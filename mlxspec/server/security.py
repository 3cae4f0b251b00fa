"""Access control around the whole application: API key, Host and Origin. Plain ASGI.

Rule: a refused request does not reach the application. Web pages of other sites cannot use the
server: their Origin is foreign, and a DNS name rebound to this address is not an allowed Host.
There is no CORS.
"""

import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxspec.config import Config
from mlxspec.server.errors import ApiError, error_response
from mlxspec.server.page import FILES

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
ANY = ("0.0.0.0", "::")
# A Host or an Origin header, and the name in it.
ADDRESS = re.compile(r"(?:https?://)?(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::\d*)?")
IP = re.compile(r"[0-9.]+|.*:.*")  # of what ADDRESS takes for a name
NO_KEY = {"/", "/health", *(f"/page/{name}" for name in FILES)}  # these hold no data


def protect(app: ASGIApp, config: Config) -> ASGIApp:
    """`app`, called after the checks."""

    async def protected(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            _check_host(headers, config)
            if config.api_key and scope["path"] not in NO_KEY:
                _check_key(headers, config.api_key)
            _check_length(headers)
        except ApiError as error:
            return await error_response(scope, error)(scope, receive, send)
        await app(scope, receive, send)

    return protected


def _check_host(headers: Headers, config: Config) -> None:
    """Refuse names that are not this server's. Where it listens on any address, an IP address is:
    it cannot be rebound, a name can."""
    names = {config.host, *config.allowed_hosts}
    allowed = LOOPBACK | {name.lower() for name in names}
    host = headers.get("host", "")
    if config.host in ANY and IP.fullmatch(_name(host)):
        allowed.add(_name(host))
    for value in (host, *headers.getlist("origin")):
        if _name(value) not in allowed:
            at = value[:200]
            why = f"{at!r} is not a name of this server; start it with --allowed-hosts NAME"
            raise ApiError(403, why, code="host_not_allowed")


def _name(address: str) -> str:
    """The host name in the value of a header, "" if there is none."""
    found = ADDRESS.fullmatch(address.lower())
    if not found:
        return ""
    return found[1].strip("[]").removesuffix(".")


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


def _check_length(headers: Headers) -> None:
    """Refuse a body with two ends: a proxy in front could go by the other one (smuggling)."""
    if "content-length" in headers and "transfer-encoding" in headers:
        why = "the body has a Content-Length and a Transfer-Encoding; send one of them"
        raise ApiError(400, why, headers={"Connection": "close"})

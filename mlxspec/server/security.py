"""Access control around the whole application: API key, Host and Origin, body size. Plain ASGI.

Rule: a refused request reaches nothing behind the guard. Web pages of other sites cannot use the
server: their Origin is foreign, and a DNS name rebound to this address is not an allowed Host.
There is no CORS.
"""

import hmac
import ipaddress
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxspec.config import Config
from mlxspec.server.errors import ApiError, error_response
from mlxspec.server.page import FILES

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
ANY = ("0.0.0.0", "::")
# The whole Host header, because urlsplit ignores tabs and accepts paths.
HOST = re.compile(r"(\[[^\s\[\]]*\]|[^\s:/?#@\[\]\\]+)(:\d*)?")
NO_KEY = {"/health", *(f"/page/{name}" for name in FILES)}  # these hold no data
PAGE_ONLY = ("/page/events", "/page/now")  # for scripts of the page and clients without a browser


def guard(app: ASGIApp, config: Config) -> ASGIApp:
    """`app` behind the checks."""
    names = LOOPBACK | {name.lower() for name in (config.host, *config.allowed_hosts)}
    any_address = config.host in ANY
    most = config.max_body_mb << 20

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        headers, path = Headers(scope=scope), scope["path"]
        try:
            _check_host(headers, names, any_address)
            _check_fetch(path, headers)
            if path not in NO_KEY and not (path == "/" and wants_html(headers)):
                _check_key(headers, config.api_key)
            _check_size(headers, most)
        except ApiError as error:
            return await error_response(scope, error)(scope, receive, send)
        await app(scope, _limited(receive, most), send)

    return guarded


def wants_html(headers: Headers) -> bool:
    """Whether / should return the page, which holds no data, and not the JSON index."""
    return "text/html" in headers.get("accept", "")


def _check_host(headers: Headers, names: set[str], any_address: bool) -> None:
    hosts = headers.getlist("host")
    if len(hosts) != 1:
        raise ApiError(400, f"there are {len(hosts)} Host headers; send one")
    name = _host_name(f"//{hosts[0]}") if HOST.fullmatch(hosts[0]) else ""
    if name not in names and not (any_address and _is_address(name)):
        raise _foreign("Host", hosts[0])
    for origin in headers.getlist("origin"):
        if _host_name(origin) not in names | {name}:
            raise _foreign("Origin", origin)


def _check_fetch(path: str, headers: Headers) -> None:
    """Refuse navigations, which carry no Origin: frames in a foreign page could use up all places
    of the event stream."""
    site, kind = headers.get("sec-fetch-site"), headers.get("sec-fetch-dest", "empty")
    if path in PAGE_ONLY and (site in ("cross-site", "same-site") or kind != "empty"):
        why = f"{path} is for the scripts of the page; open / instead"
        raise ApiError(403, why, code="host_not_allowed")


def _host_name(url: str) -> str:
    """The host name in a URL, "" if it has none."""
    try:
        return (urlsplit(url).hostname or "").lower().removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    """An IP address cannot be rebound, a name can."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _foreign(header: str, value: str) -> ApiError:
    why = f"{header} = {value[:200]!r} is not a name of this server"
    return ApiError(403, f"{why}; start it with --allowed-hosts NAME", code="host_not_allowed")


def _check_key(headers: Headers, key: str) -> None:
    sent = headers.getlist("x-api-key")
    for value in headers.getlist("authorization"):
        scheme, _, rest = value.partition(" ")
        if scheme.lower() == "bearer":
            sent.append(rest.strip())
    matches = [hmac.compare_digest(one.encode("latin-1"), key.encode()) for one in sent]
    if key and not any(matches):
        why = "the API key is wrong" if sent else "an API key is needed"
        why += "; send it as Authorization: Bearer, or as x-api-key"
        raise ApiError(401, why, headers={"WWW-Authenticate": "Bearer"})


def _check_size(headers: Headers, most: int) -> None:
    """Refuse a body by its announced length."""
    size = headers.get("content-length", "0")
    if "content-length" in headers and "transfer-encoding" in headers:
        # A proxy in front could go by the other one: request smuggling.
        why = "the body has a Content-Length and a Transfer-Encoding; send one of them"
        raise ApiError(400, why, headers={"Connection": "close"})
    if not size.isdecimal() or len(size) > 18 or int(size) > most:
        raise _too_large(most)


def _too_large(most: int) -> ApiError:
    size = most >> 20
    return ApiError(413, f"the body is larger than {size} MB; send less, or raise max_body_mb")


def _limited(receive: Receive, most: int) -> Receive:
    """`receive` that raises ApiError for a body that turns out too large."""
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise _too_large(most)
        return message

    return limited

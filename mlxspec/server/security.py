"""Who may talk to the server: API key, Host and Origin, size of the body. Plain ASGI, around
everything.

Rule: nothing behind it runs for a request that it refuses. A page of some web site cannot use the
server: its Origin is foreign, and a name that was rebound to this address is not ours. CORS stays
off.
"""

import hmac
import ipaddress
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxspec.config import Config
from mlxspec.server.errors import ApiError
from mlxspec.server.page import FILES
from mlxspec.server.protocol import CROWDED

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = frozenset({"0.0.0.0", "::"})
HOST = re.compile(
    r"(\[[^\s\[\]]*\]|[^\s:/?#@\[\]\\]+)(:\d*)?"
)  # urlsplit overlooks tabs and takes paths
AT_ONCE = 8  # times the largest body, of all that are coming
SMALL = 1 << 20  # bytes of a body that always may come; connections are bounded too
OPEN = frozenset({"/health"})  # without a key: what watches a service has none
PAGE = frozenset(f"/page/{name}" for name in FILES)  # nor has a browser that has yet to ask for one
SCRIPTS = frozenset(
    {"/page/events", "/page/now"}
)  # for the page's own scripts, and what is no browser


def guard(app: ASGIApp, config: Config) -> ASGIApp:
    """`app`, for those who may use it."""
    names = LOOPBACK | {config.host.lower()} | {name.lower() for name in config.allowed_hosts}
    addresses = config.host in ANY  # then an address of ours is not known beforehand
    most = config.max_body_mb << 20
    coming = Coming(most * AT_ONCE)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        try:
            if CROWDED in scope["state"] and scope["path"] not in OPEN:
                raise _crowded("too many connections are open; close some")
            _check_names(headers, names, addresses)
            _check_fetch(scope["path"], headers)
            _check_key(headers, "" if _open(scope["path"], headers) else config.api_key)
            _check_size(headers, most)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        with coming.counted(receive, most) as bounded:
            await app(scope, bounded, send)

    return guarded


def for_browser(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether / means the page, which holds no data, and not the index, which does."""
    return any("text/html" in value for value in _values(headers, b"accept"))


def _open(path: str, headers: list[tuple[bytes, bytes]]) -> bool:
    return path in OPEN | PAGE or (path == "/" and for_browser(headers))


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key.lower() == name]


def _check_names(
    headers: list[tuple[bytes, bytes]], names: frozenset[str], addresses: bool
) -> None:
    hosts = _values(headers, b"host")
    if len(hosts) != 1:
        raise ApiError(400, f"there are {len(hosts)} Host headers; send one")
    asked = _name(f"//{hosts[0]}") if HOST.fullmatch(hosts[0]) else ""
    if asked not in names and not (addresses and _is_address(asked)):
        raise _foreign("Host", hosts[0])
    for origin in _values(headers, b"origin"):
        if _name(origin) not in names | {asked}:
            raise _foreign("Origin", origin)


def _check_fetch(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    """A navigation has no Origin, so frames of a foreign page could take all places of the
    stream."""
    sites, kinds = _values(headers, b"sec-fetch-site"), _values(headers, b"sec-fetch-dest")
    if path in SCRIPTS and ({*sites} & {"cross-site", "same-site"} or {*kinds} - {"empty"}):
        raise ApiError(
            403, f"{path} is for the scripts of the page; open / instead", code="host_not_allowed"
        )


def _name(url: str) -> str:
    """The host's name in a URL; empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").lower().removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    """An address cannot be rebound: whoever sends it was given it."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _foreign(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"{header} = {value[:200]!r} is not a name of this server; start it with --allowed-hosts NAME",
        code="host_not_allowed",
    )


def _crowded(why: str) -> ApiError:
    return ApiError(
        503,
        f"{why}, or try again in 1 s",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def _check_key(headers: list[tuple[bytes, bytes]], key: str) -> None:
    if not key:
        return
    given = _values(headers, b"x-api-key")
    for value in _values(headers, b"authorization"):
        scheme, _, rest = value.partition(" ")
        if scheme.lower() == "bearer":
            given.append(rest.strip())
    right = [hmac.compare_digest(one.encode("latin-1"), key.encode()) for one in given]
    if not any(right):
        raise ApiError(
            401,
            ("the API key is wrong" if given else "an API key is needed")
            + "; send it as Authorization: Bearer, or as x-api-key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _check_size(headers: list[tuple[bytes, bytes]], most: int) -> None:
    sizes = _values(headers, b"content-length")
    if sizes and _values(
        headers, b"transfer-encoding"
    ):  # whoever stands in front may go by the other one
        both = "Content-Length and Transfer-Encoding: the body has two lengths; send one of them"
        raise ApiError(400, both, headers={"Connection": "close"})
    for value in sizes:
        if not value.isdecimal() or len(value) > 18 or int(value) > most:
            raise _too_large(most)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {most >> 20} MB; send less, or raise max_body_mb"
    )


class Coming:
    """The bodies that have begun to come and are not whole: of all of them, `most` bytes at
    once."""

    def __init__(self, most: int) -> None:
        self.bytes, self.most = 0, most

    @contextmanager
    def counted(self, receive: Receive, most: int) -> Iterator[Receive]:
        """`receive` that refuses a body which turns out too large, whatever its headers said."""
        seen = held = 0

        async def counted() -> Message:
            nonlocal seen, held
            message = await receive()
            size = len(message.get("body", b""))
            seen, held, self.bytes = seen + size, held + size, self.bytes + size
            if seen > most:
                raise _too_large(most)
            if (
                self.bytes > self.most and held > SMALL
            ):  # or a few slow ones would shut out everybody
                raise _crowded(
                    f"bodies of {self.most >> 20} MB are on their way; send one after the other"
                )
            if not message.get("more_body"):
                held, self.bytes = 0, self.bytes - held
            return message

        try:
            yield counted
        finally:
            self.bytes -= held

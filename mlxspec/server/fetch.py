"""Fetches a file that a request names by URL: from public addresses alone, within bounds.

Rule: it connects to the very address that it checked, and checks again after each redirect, so that
no name can lead into the user's own network (SSRF, DNS rebinding).
"""

import socket
import ssl
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urljoin, urlsplit

SECONDS = 20.0  # for all of it, but for the resolver of names
REDIRECTS = 3
PART = 1 << 16  # bytes
# IPv6 addresses that stand for IPv4's, which a gateway of the user's network may reach.
COMPATIBLE, TRANSLATED = ip_network("::/96"), ip_network("64:ff9b::/96")
MOVED = (301, 302, 303, 307, 308)


class FetchError(ValueError):
    """Why a URL was not fetched."""


def fetch(url: str, most: int) -> bytes:
    """The content of a URL, of `most` bytes at most. Raises FetchError."""
    until = time.monotonic() + SECONDS
    for _ in range(1 + REDIRECTS):
        try:
            found = _get(url, most, until)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, FetchError):
                raise
            raise FetchError(f"its URL cannot be fetched: {type(error).__name__}") from error
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise FetchError(f"its URL leads to more than {REDIRECTS} others")


def is_public(address: str) -> bool:
    """Whether an address is one of the internet's; of an IPv6 address that stands for one of IPv4,
    the latter."""
    ip: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip.is_site_local or ip.teredo or ip in COMPATIBLE or ip in TRANSLATED:
            return False
        ip = inner or ip
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def _get(url: str, most: int, until: float) -> bytes | str:
    """The content of a URL, or where it has moved to."""
    parts = urlsplit(url)
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise FetchError("its URL is not one of http or https")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in known))
    if not all(map(is_public, addresses)):
        raise FetchError("its URL is in a private network")
    sock = _connect(addresses, port, until)
    # The socket's timeout starts over with each byte, so a timer ends a response that trickles.
    timer = threading.Timer(_left(until), sock.shutdown, [socket.SHUT_RDWR])
    timer.start()
    try:
        return _exchange(sock, parts, host, port=port, secure=secure, most=most, until=until)
    finally:
        timer.cancel()
        sock.close()
        _left(until)  # what was cut off is no content


def _connect(addresses: list[str], port: int, until: float) -> socket.socket:
    """A connection to the first of the addresses that answers. Raises OSError and FetchError."""
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((address, port), _left(until) / 2)
    return socket.create_connection((addresses[-1], port), _left(until))


def _exchange(
    sock: socket.socket,
    parts: SplitResult,
    host: str,
    *,
    port: int,
    secure: bool,
    most: int,
    until: float,
) -> bytes | str:
    """Ask for a file, and read it or where it has moved to."""
    connection: HTTPConnection = HTTPConnection(host, port)
    if secure:
        connection = HTTPSConnection(host, port)
        sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    connection.sock = sock
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    connection.request("GET", path, headers={"User-Agent": "mlxspec", "Accept": "image/*"})
    response = connection.getresponse()
    if response.status in MOVED:
        return response.getheader("Location") or ""
    if response.status != 200:
        raise FetchError(f"its URL answered with status {response.status}")
    data = bytearray()
    while part := response.read1(PART):
        data += part
        _left(until)
        if len(data) > most:
            raise FetchError(f"its URL has more than {most >> 20} MiB")
    return bytes(data)


def _left(until: float) -> float:
    """Seconds until then. Raises FetchError where they have passed."""
    left = until - time.monotonic()
    if left <= 0:
        raise FetchError(f"its URL took longer than {SECONDS:.0f} s")
    return left

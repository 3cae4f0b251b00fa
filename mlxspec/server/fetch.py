"""Fetches a file that a request names by URL: from public addresses alone, within bounds.

Rule: the address that was checked is the one that is connected to, after each redirect anew, so
that no name can lead into the user's own network.
"""

import socket
import ssl
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from urllib.parse import urljoin, urlsplit

SECONDS = 20.0  # for all of it
REDIRECTS = 3
PART = 1 << 16  # bytes
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
    """Whether an address is one of the internet's."""
    return ip_address(address).is_global


def _get(url: str, most: int, until: float) -> bytes | str:
    """The content of a URL, or where it has moved to."""
    parts = urlsplit(url)
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise FetchError("its URL is not one of http or https")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    addresses = {
        str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    }
    for address in addresses:
        if not is_public(address):
            raise FetchError("its URL is in a private network")
    connection: HTTPConnection = HTTPConnection(host, port)
    if secure:
        connection = HTTPSConnection(host, port)
    sock = socket.create_connection((min(addresses), port), _left(until))
    try:
        if secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        connection.sock = sock
        path = parts.path or "/"
        if parts.query:
            path += f"?{parts.query}"
        connection.request(
            "GET",
            path,
            headers={"User-Agent": "mlxspec", "Accept": "image/*"},
        )
        response = connection.getresponse()
        if response.status in MOVED:
            return response.getheader("Location") or ""
        if response.status != 200:
            raise FetchError(f"its URL answered with status {response.status}")
        data = bytearray()
        while part := response.read(PART):
            data += part
            sock.settimeout(_left(until))
            if len(data) > most:
                raise FetchError(f"its URL has more than {most >> 20} MiB")
        return bytes(data)
    finally:
        sock.close()


def _left(until: float) -> float:
    """Seconds until then. Raises FetchError where they have passed."""
    left = until - time.monotonic()
    if left <= 0:
        raise FetchError(f"its URL took longer than {SECONDS:.0f} s")
    return left

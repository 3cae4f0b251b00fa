"""The address on which the server listens: who can reach it, and who has it already.

Rule: light imports only; a start asks before BLAS is loaded.
"""

import errno
import http.client
import socket
from contextlib import closing, suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from mlxspec import log
from mlxspec.config import Config, url_of

SERVER = "mlxspec"  # the value of the header Server in all responses
ASK_S = 2.0  # for a server to say what it is
ELSEWHERE = ("192.0.2.1", 9)  # an address for documentation; no packet is sent there


def why_not(config: Config, error: Exception) -> str:
    """What to do where the server cannot listen."""
    why = f"host = {config.host!r}, port = {config.port}: "
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE and _is_ours(config):
        return f"{why}mlxspec already runs there; see mlxspec status, or give another --port"
    why += getattr(error, "strerror", None) or str(error)
    if number in (errno.EADDRINUSE, errno.EACCES):
        return f"{why}; give another --port (0: any)"
    return f"{why}; give another --host, such as 127.0.0.1"


def _is_ours(config: Config) -> bool:
    """Whether it is an mlxspec that has the address."""
    host = urlsplit(url_of(config.host, config.port)).hostname or ""
    asked = http.client.HTTPConnection(host, config.port, timeout=ASK_S)
    with closing(asked), suppress(OSError, http.client.HTTPException):
        asked.request("GET", "/health")
        return asked.getresponse().headers["Server"] == SERVER
    return False


def tell_who_reaches(listener: socket.socket, config: Config) -> None:
    """Log the URL for other machines, where they reach the server; without a key as a warning."""
    host, port = listener.getsockname()[:2]
    ip = ip_address(host.partition("%")[0])
    if ip.is_loopback:
        return
    if ip.is_unspecified:
        host = _own_address()
    url = url_of(host, port)
    if config.api_key:
        log.info("other machines reach the server at %s/v1, with the API key", url)
        return
    fix = "set --api-key, or --host 127.0.0.1"
    log.warning("without an API key, every machine that reaches %s can use it; %s", url, fix)


def _own_address() -> str:
    """This machine's address in the network, or else its name."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(ELSEWHERE)
        return str(asked.getsockname()[0])
    return socket.gethostname()

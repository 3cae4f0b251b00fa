"""The HTTP client of a running server, on the standard library only."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from mlxspec.types import UserError, printable

TIMEOUT_S = 120  # without a byte; longer than any keep-alive interval a server may have
MAX_LINE = 1 << 20  # bytes of an error, and of one event of a stream
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class ClientError(UserError):
    """The server did not answer the request. The message says what to do."""


class NotRunning(ClientError):
    """Nothing listens at the URL."""


@contextmanager
def request(
    url: str,
    api_key: str,
    method: str,
    path: str,
    body: Any = None,
    timeout: float = TIMEOUT_S,
) -> Iterator[http.client.HTTPResponse]:
    """The response with status 200 to a JSON `body`. `url` has no / at its end; `timeout` is in
    seconds without a byte.

    Raises ClientError, also for any error while the caller reads the response.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = json.dumps(body) if body else None
    try:
        parts = urlsplit(url)
        kind = CONNECTIONS.get(parts.scheme)
        if not kind or not parts.hostname:
            raise ClientError(f"--url = {url!r} is not a URL; give one like http://127.0.0.1:8080")
        with closing(kind(parts.hostname, parts.port, timeout=timeout)) as connection:
            connection.request(method, parts.path + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                message = printable(str(json.loads(response.read(MAX_LINE))["error"]["message"]))
                fix = "; give --api-key" if response.status == 401 else ""
                raise ClientError(f"the server answered {response.status}: {message}{fix}")
            yield response
    except ClientError:
        raise
    except ConnectionRefusedError as error:
        raise NotRunning(f"no server at {url}; start one with: mlxspec serve") from error
    except (OSError, http.client.HTTPException) as error:
        raise ClientError(
            f"{url}: {error or type(error).__name__}; see the server's log",
        ) from error
    except Exception as error:  # while reading the answer of another program
        raise ClientError(
            f"the program at {url} is not mlxspec ({error!r}); give another --url, or stop it",
        ) from error

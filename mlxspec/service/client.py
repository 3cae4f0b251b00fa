"""The HTTP client of a running server, on the standard library only."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from mlxspec.types import LOADING, UserError, printable

QUESTION_S = 15  # without a byte; a service that sleeps has to start first
STREAM_S = 120  # the same in an answer; longer than any keep-alive interval a server may have
POLL_S = 0.3  # between two queries whether the server has loaded its model
MAX_LINE = 1 << 20  # bytes of an error, and of one event of a stream
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class ClientError(UserError):
    """The server did not answer the request. The message says what to do; `code` is the error's in
    the API, if it has one."""

    def __init__(self, message: str, code: Any = None) -> None:
        super().__init__(message)
        self.code = code


class NotRunning(ClientError):
    """Nothing listens at the URL."""


@contextmanager
def request(
    url: str,
    api_key: str,
    method: str,
    path: str,
    body: Any = None,
    timeout: float = QUESTION_S,
) -> Iterator[http.client.HTTPResponse]:
    """The response with status 200 to a JSON `body`. `url` has no / at its end; `timeout` is in
    seconds without a byte.

    Raises ClientError, also for any error in the caller's block, which only reads and parses.
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
            connection.request(method, parts.path + path, data, headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                error = json.loads(response.read(MAX_LINE))["error"]
                error = {"message": error} if isinstance(error, str) else error  # Ollama's
                message = printable(str(error["message"]))
                fix = "; give --api-key" if response.status == 401 else ""
                why = f"the server answered {response.status}: {message}{fix}"
                raise ClientError(why, code=error.get("code"))
            yield response
    except ClientError:
        raise
    except ConnectionRefusedError as failure:
        raise NotRunning(f"no server at {url}; start one with: mlxspec serve") from failure
    except TimeoutError as failure:
        raise ClientError(
            f"{url} has not answered for {timeout:.0f} s; see the server's log, or if another"
            " program has the port, stop that or set another --url or port",
        ) from failure
    except (OSError, http.client.HTTPException) as failure:
        raise ClientError(
            f"{url}: {failure or type(failure).__name__}; see the server's log",
        ) from failure
    except Exception as failure:  # while reading the answer of another program
        raise ClientError(
            f"the program at {url} is not mlxspec ({failure!r}); give another --url, or stop it",
        ) from failure


def when_loaded(ask: Callable[[], None], report: Callable[[str], None]) -> None:
    """Ask until the server has loaded its model; report once that it has not. Raises
    ClientError."""
    told = False
    while True:
        try:
            return ask()
        except ClientError as error:
            if error.code != LOADING:
                raise
            if not told:
                report(str(error))
            told = True
        time.sleep(POLL_S)

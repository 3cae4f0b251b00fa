"""HTTP/1.1 on one connection: uvicorn's, with the bounds that it lacks.

Rule: a connection without a request in progress is on the clock, and there are no more of them than the
server has work for, and some.
"""

import asyncio
import json

from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxspec.server.errors import ApiError

HEADERS_S = 10.0  # that a client has for a request's headers, from connecting or from their first byte
SPARE = 64  # connections beyond those that may have work: idle ones, health checks
CROWDED = "crowded"  # in a request's state: its connection is one too many


def bounded(most: int) -> type[H11Protocol]:
    """uvicorn's protocol, for `most` connections with work and `SPARE` without; the next `SPARE` are answered
    that they are too many, further ones are cut off."""

    class Bounded(H11Protocol):
        _clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most + 2 * SPARE:
                transport.abort()
            elif len(self.connections) > most + SPARE:
                self.app_state = {**self.app_state, CROWDED: True}
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            if not self._answering():
                body = json.dumps(ApiError(400, "this is no HTTP request; send HTTP/1.1").body())
                head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
                self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n{body}".encode())
            self.transport.close()

        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _watch(self) -> None:
            """Start the clock where none runs; stop it once a request is being answered."""
            if self._answering():
                self._unwatch()
            elif self._clock is None:
                self._clock = self.loop.call_later(HEADERS_S, self.transport.close)

        def _unwatch(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

    return Bounded

"""HTTP/1.1 on one connection: uvicorn's, with the bounds that it lacks.

Rule: a connection is on the clock whenever the client has to do something, and there are no more connections
than the server has work for, and some. An idle one makes room for a new one.
"""

import asyncio
import json

from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxspec.server.errors import ApiError, book

HEADERS_S = 10.0  # for a request's headers, from connecting or from their first byte
CLIENT_S = 60.0  # for whatever else is the client's turn: to read, to send the rest, to ask again
SPARE = 64  # connections beyond those that may have work: idle ones, health checks
CROWDED = "crowded"  # in a request's state: its connection is one too many


class Bounded(H11Protocol):
    """For `most` connections with work and `SPARE` without. Beyond them the longest idle one is closed; where
    none is, the next `SPARE` are answered that they are too many, and more are cut."""

    most = 0
    _clock: asyncio.TimerHandle | None = None
    _seconds = 0.0  # that the clock was set to

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self.most - SPARE
        if over > 0:
            idle = [c for c in self.connections if c is not self and not c._answering()]  # type: ignore[union-attr]
            if idle:
                min(idle, key=lambda c: c._due()).transport.close()  # type: ignore[union-attr]
            elif over > SPARE:
                transport.abort()
            else:
                self.app_state = {**self.app_state, CROWDED: True}
        self._watch(HEADERS_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering():
            self._watch(0.0)
        else:  # what is left in the buffer is the beginning of a request's headers
            self._watch(HEADERS_S if self.conn.trailing_data[0] else CLIENT_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(CLIENT_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch(0.0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(0.0)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            error = ApiError(400, "the request breaks HTTP/1.1; check its request line and its headers")
            book(self.config.loaded_app, "a client", error)
            body = json.dumps(error.body())
            head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
            self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n{body}".encode())
        self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _due(self) -> float:
        timers = (self._clock, self.timeout_keep_alive_task)
        return min((timer.when() for timer in timers if timer), default=0.0)

    def _watch(self, seconds: float) -> None:
        """Set the clock, unless it runs for the same reason; 0 stops it."""
        if self._clock is not None and seconds != self._seconds:
            self._clock.cancel()
            self._clock = None
        if seconds and self._clock is None:
            self._clock, self._seconds = self.loop.call_later(seconds, self.transport.abort), seconds


def bounded(most: int) -> type[H11Protocol]:
    """The protocol for `most` connections with work."""
    return type("Bounded", (Bounded,), {"most": most})

"""HTTP/1.1 on one connection: uvicorn's, with the bounds that it lacks.

Rule: a connection is on the clock whenever the client has to do something, and there are no more
connections than the server has work for, and some. An idle one makes room for a new one.
"""

import asyncio
import json

from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxspec.server.errors import ApiError, book, speaks_anthropic

HEADERS_S = 10.0  # for a request's headers, from connecting or from their first byte
CLIENT_S = 60.0  # for whatever else is the client's turn: to read, to send the rest, to ask again
HELD = (
    1 << 16
)  # bytes of an answer that goes on, which a client may leave unread; beyond, it waits for all
FRESH_S = 0.1  # a new connection is no idle one for so long: its first request is on its way
SPARE = 64  # connections beyond those that may have work: idle ones, health checks
CROWDED = "crowded"  # in a request's state: its connection is one too many


class Bounded(H11Protocol):
    """For `most` connections with work and `SPARE` without. Beyond them the longest idle one is
    closed; where none is, the next `SPARE` are answered that they are too many, and more are
    cut."""

    most = 0
    _clock: asyncio.TimerHandle | None = None
    _turn = ""  # what the clock runs for
    _since = 0.0  # the loop's time at which it was last the client's turn to ask

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        there: list[Bounded] = [c for c in self.connections if not c._left()]  # type: ignore[union-attr, misc]
        over = len(there) - self.most - SPARE
        if over > 0:
            old = [
                c
                for c in there
                if not c._working() and (c.cycle or c._since < self._since - FRESH_S)
            ]
            for idle in sorted(old, key=lambda c: c._since)[:over]:
                idle.transport.close()
            if over - len(old) > SPARE:
                transport.abort()
            elif over > len(old):
                self.app_state = {**self.app_state, CROWDED: True}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def eof_received(self) -> None:
        self.transport.set_write_buffer_limits(
            0
        )  # it closes, when the client has read what there is

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set("", 0.0)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            error = ApiError(
                400, "the request breaks HTTP/1.1; check its request line and its headers"
            )
            book(self.config.loaded_app, "a client", error)
            anthropic = (
                self.cycle and not self.cycle.response_complete and speaks_anthropic({**self.scope})
            )
            body = json.dumps(error.anthropic() if anthropic else error.body())
            head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
            self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n{body}".encode())
        self.transport.close()

    def _answering(self) -> bool:
        running = self.cycle is not None and not self.cycle.response_complete
        return running and not self.transport.is_closing()

    def _working(self) -> bool:
        return self._answering() or self.transport.get_write_buffer_size() > 0

    def _left(self) -> bool:
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def _watch(self) -> None:
        """Put the client on the clock for what is its turn now. Behind the last byte of an answer
        that is to read all that was written; before, `HELD` bytes are not worth a clock."""
        self.transport.set_write_buffer_limits(HELD if self._answering() else 0, 0)
        if self.flow.write_paused:
            self._set("read", CLIENT_S)
        elif self._answering():
            self._set("", 0.0)
        elif self.cycle is None or self.conn.trailing_data[0]:
            self._set("headers", HEADERS_S)
        else:
            self._set("ask", CLIENT_S)

    def _set(self, turn: str, seconds: float) -> None:
        """Set the clock, unless it runs for the same reason; 0 stops it."""
        if turn != self._turn:
            if self._clock is not None:
                self._clock.cancel()
            self._turn = turn
            self._clock = self.loop.call_later(seconds, self.transport.abort) if seconds else None


def bounded(most: int) -> type[H11Protocol]:
    """The protocol for `most` connections with work."""
    return type("Bounded", (Bounded,), {"most": most})

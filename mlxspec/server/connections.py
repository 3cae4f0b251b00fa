"""uvicorn's connections, with a time limit for all that a client has to do, and a bound.

Rule: a connection that waits for its client holds no place. Where there are too many, the one that
has waited longest is closed.
"""

import asyncio
import json
import re
import sys
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxspec.server.errors import ApiError
from mlxspec.server.security import FULL

HEAD_S = 10.0  # for a request's line and headers, or for the body of one that was answered unread
UNREAD_S = 60.0  # in which a client reads nothing of what waits to be sent
WAITING = 1024  # connections that may wait for their clients
SPARE = 64  # requests beyond those that the engine takes: refusals, pages, metrics
LOCAL = 16  # places of either kind that only programs on this machine get
MAX_HEADERS = 256
EVENTS = 16  # parsed at once: chunks of a byte take 20 µs each, and 16 KB of them hold everybody up
READ = 1 << 14  # bytes at once; h11 refuses a head of more
HEAD_END = re.compile(rb"\n\r?\n")


class Parser(h11.Connection):
    """h11's, which pauses after EVENTS and parses no more than MAX_HEADERS."""

    left = EVENTS

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            head, *_ = HEAD_END.split(self.trailing_data[0], 1)
            if head.count(b"\n") > MAX_HEADERS:
                raise h11.RemoteProtocolError(f"more than {MAX_HEADERS} headers")
        if not self.left:
            return h11.PAUSED
        self.left -= 1
        return super().next_event()


class Flow(FlowControl):
    """Nothing is read while there is something to parse."""

    parsing = False

    def resume_reading(self) -> None:
        if not self.parsing:
            super().resume_reading()


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A client's connection. uvicorn's `limit_concurrency` is how many requests may be worked on
    at the same time; one that waits for its client is none of them."""

    flow: Flow
    conn: Parser

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.conn = Parser(h11.SERVER)
        self.app = self._with_place(self.app)
        self.most, self.limit_concurrency = self.limit_concurrency or SPARE, None
        self.buffer = bytearray()
        self.since = 0.0  # when the client's turn began
        self.unsent = 0  # bytes at that time

    @property
    def working(self) -> bool:
        """Whether a request is being received or answered."""
        cycle, closing = self.cycle, self.transport.is_closing()
        return cycle is not None and not (closing or cycle.response_complete)

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn: to send a request or the rest of one, or to read. A body
        of which more is there than its endpoint has taken waits for us."""
        if not self.working or self.flow.write_paused:
            return True
        return self.cycle.more_body and (self.flow.parsing or not self.flow.read_paused)

    @property
    def gone(self) -> bool:
        """Whether it is closed, and will be removed in a moment."""
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    @property
    def local(self) -> bool:
        host = self.client[0].removeprefix("::ffff:") if self.client else ""
        return host.startswith("127.") or host == "::1"

    # ---- time

    def _wait(self) -> None:
        """Begin the client's turn."""
        self.since = self.loop.time()
        self.unsent = self.transport.get_write_buffer_size()
        begun = self.cycle is None or self.conn.their_state is not h11.IDLE
        if self.flow.write_paused or self.transport.is_closing():
            self._set_timer(UNREAD_S)
        elif begun or self.conn.trailing_data[0]:
            self._set_timer(HEAD_S)
        else:
            self._set_timer(self.timeout_keep_alive)

    def _set_timer(self, seconds: float) -> None:
        """uvicorn's timer of idle connections, which it stops when something is received."""
        self._unset_keepalive_if_required()
        timer = self.loop.call_later(seconds, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = timer

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size() < self.unsent:
            self._wait()  # it reads, slowly
        else:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._wait()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def get_buffer(self, sizehint: int) -> bytearray:
        self.buffer = bytearray(READ)
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        timer, now = self.timeout_keep_alive_task, self.loop.time()
        left = timer.when() - now if timer else HEAD_S
        data, self.buffer = bytes(self.buffer[:nbytes]), bytearray()
        self.data_received(data)
        if self.flow.write_paused:
            self._set_timer(left)
        elif not self.working:
            self._set_timer(min(left, HEAD_S))
        else:
            self.since = now  # of its body, for which `receive` has a time of its own

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.working:
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_keepalive_if_required()
        if not self.working:
            self._wait()

    # ---- number

    def _make_room(self) -> None:
        """Close the connection that has waited longest, where too many wait."""
        everyone: Any = self.connections
        if len(everyone) <= WAITING - LOCAL:
            return
        waiting = [one for one in everyone if one.waits and not one.gone]
        remote = [one for one in waiting if not one.local]
        for some, most in ((remote, WAITING - LOCAL), (waiting, WAITING)):
            if len(some) > most:
                min(some, key=lambda one: one.since).transport.abort()
                return

    def _with_place(self, app: Any) -> ASGIApp:
        """`app`, which is told where no place is left for a request."""

        async def placed(scope: Scope, receive: Receive, send: Send) -> None:
            everyone: Any = self.connections
            most = self.most - (0 if self.local else LOCAL)
            busy = len(self.tasks)
            if busy > most:
                busy -= sum(one.working and one.waits for one in everyone)
            scope[FULL] = busy > most
            await app(scope, receive, send)

        return placed

    # ---- what is received

    def handle_events(self) -> None:
        self.conn.left = EVENTS
        try:
            super().handle_events()
        except h11.LocalProtocolError:  # what was answered does not go with what came then
            self._disconnect()
        if self.working and not self.flow.write_paused:
            self._unset_keepalive_if_required()
        if not self.conn.left and not self.flow.parsing:
            self.flow.parsing = True
            self.loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        self.flow.parsing = False
        if self.transport.is_closing():
            return
        self.handle_events()
        if self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, if nothing was answered yet, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            why = f"malformed HTTP: {str(sys.exception())[:200]}"
            body = json.dumps(ApiError(400, why).body()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            response = h11.Response(status_code=400, headers=headers, reason="Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._disconnect()

    def _disconnect(self) -> None:
        """Close, and end what runs as if the client had left."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _should_upgrade(self) -> bool:
        return False  # nor log that each time

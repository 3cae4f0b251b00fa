"""uvicorn's connections, bounded in number, with a time limit for everything a client has to do.

Rule: a connection that waits for its client takes no request slot. If too many wait, the one that
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

HEAD_S = 10.0  # for a request's line and headers, or for the unread body of an answered one
UNREAD_S = 60.0  # for a client that reads nothing while data waits to be sent
WAITING = 1024  # connections that may wait for their clients
SPARE = 64  # requests beyond the engine's limit: refusals, pages, metrics
LOCAL = 16  # of each, reserved for programs on this machine
MAX_HEADERS = 256
EVENTS = 16  # parsed at once: 16 KB of one-byte chunks, at 20 µs each, would hold everybody up
READ = 1 << 14  # bytes at once; h11 refuses a head of more
HEAD_END = re.compile(rb"\n\r?\n")


class Parser(h11.Connection):
    """h11's connection, which pauses after EVENTS and refuses more than MAX_HEADERS."""

    events_left = EVENTS

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            head, *_ = HEAD_END.split(self.trailing_data[0], 1)
            if head.count(b"\n") > MAX_HEADERS:
                raise h11.RemoteProtocolError(f"more than {MAX_HEADERS} headers")
        if not self.events_left:
            return h11.PAUSED
        self.events_left -= 1
        return super().next_event()


class Flow(FlowControl):
    """Flow control that reads nothing while there is something to parse."""

    parsing = False

    def resume_reading(self) -> None:
        if not self.parsing:
            super().resume_reading()


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A client's connection. uvicorn's `limit_concurrency` limits the requests that are worked on
    at the same time; those that wait for their client do not count."""

    flow: Flow
    conn: Parser

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.conn = Parser(h11.SERVER)
        self.app = self._with_limit(self.app)
        self.limit, self.limit_concurrency = self.limit_concurrency or SPARE, None
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
        that its endpoint has not yet read waits for us."""
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
        remaining = timer.when() - now if timer else HEAD_S
        data, self.buffer = bytes(self.buffer[:nbytes]), bytearray()
        self.data_received(data)
        if self.flow.write_paused:
            self._set_timer(remaining)
        elif not self.working:
            self._set_timer(min(remaining, HEAD_S))
        else:
            self.since = now  # its body has a time limit elsewhere, BODY_S

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
        """Close the connection that has waited longest, if too many wait."""
        connections: Any = self.connections
        if len(connections) <= WAITING - LOCAL:
            return
        waiting = [peer for peer in connections if peer.waits and not peer.gone]
        remote = [peer for peer in waiting if not peer.local]
        for group, limit in ((remote, WAITING - LOCAL), (waiting, WAITING)):
            if len(group) > limit:
                min(group, key=lambda peer: peer.since).transport.abort()
                return

    def _with_limit(self, app: Any) -> ASGIApp:
        """`app`, with FULL in the scope set to whether all request slots are taken."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            connections: Any = self.connections
            limit = self.limit - (0 if self.local else LOCAL)
            busy = len(self.tasks)
            if busy > limit:
                busy -= sum(peer.working and peer.waits for peer in connections)
            scope[FULL] = busy > limit
            await app(scope, receive, send)

        return limited

    # ---- receiving

    def handle_events(self) -> None:
        self.conn.events_left = EVENTS
        try:
            super().handle_events()
        except h11.LocalProtocolError:  # what came does not go with what was answered
            self._disconnect()
        if self.working and not self.flow.write_paused:
            self._unset_keepalive_if_required()
        if not self.conn.events_left and not self.flow.parsing:
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
        """Answer malformed HTTP, unless a response has begun, and close."""
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
        """Close, and end a running request as if the client had left."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _should_upgrade(self) -> bool:
        return False  # nor log each request for it

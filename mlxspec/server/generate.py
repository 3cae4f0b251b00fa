"""One answer from submission to its last byte, streamed or whole, for any API.

Rule: however it ends (last token, stop string, disconnected client, error), what still runs of it
is aborted, and it is counted and logged once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxspec.server import stream
from mlxspec.server.errors import ApiError, Gone, busy, dead
from mlxspec.server.state import Model, Row, while_connected
from mlxspec.server.stream import Choice, Json, ResponseWriter
from mlxspec.types import Busy, Dead, Output, Request

log = logging.getLogger("mlxspec")

EVENT_S = 15.0  # a silent stream gets an event at least this often: some clients ignore comments
SSE = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Outputs = Sequence[AsyncIterator[Output]]  # of each request


@dataclass(slots=True)
class Generation:
    """The response to one HTTP request, as an ASGI application that generates while it sends.
    `choices` are grouped by request, `n` of each. Times are time.monotonic()."""

    model: Model
    requests: list[Request]
    choices: list[Choice]
    writer: ResponseWriter
    streamed: bool
    headers: dict[str, str]
    arrived: float
    # Called before the last byte is sent: the client's next request may follow at once.
    on_done: Callable[[], None] = lambda: None
    first: float = 0.0  # time of the first token
    last: dict[int, float] = field(default_factory=dict)  # time of the last token, by choice
    outcome: str = ""  # "gone" or "error", where it is not the choices' finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError only before the first byte."""
        outputs = self._submit()
        self.model.server.journal.live[self.writer.id] = self._row
        try:
            if self.streamed:
                async with aclosing(self._events(outputs)) as events:
                    response = StreamingResponse(events, headers=SSE | self.headers)
                    await response(scope, receive, send)
            else:
                body = await while_connected(receive, self._body(outputs))
                await JSONResponse(body, headers=self.headers)(scope, receive, send)
        except Gone:
            pass
        except BaseException:
            self.outcome = "error"
            raise
        finally:
            self._finish()

    def _submit(self) -> Outputs:
        """Queue all requests or none. Raises ApiError."""
        worker = self.model.server.worker
        outputs: list[AsyncIterator[Output]] = []
        try:
            for request in self.requests:
                outputs.append(worker.submit(request))
        except Dead as error:
            raise dead(worker) from error
        except Busy as error:
            for request in self.requests[: len(outputs)]:
                worker.abort(request.id)
            raise busy(error) from error
        return outputs

    async def _body(self, outputs: Outputs) -> Json:
        async with aclosing(merged(outputs, None)) as found:
            async for each in found:
                if each is not None:
                    self._read(*each)
        self.on_done()
        return self.writer.body(self.choices, self._usage())

    async def _events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """The server-sent events of a streamed answer."""
        writer = self.writer
        yield writer.opening(self._usage())
        pause = min(self.model.server.config.keepalive_s, EVENT_S)
        written = time.monotonic()
        try:
            async with aclosing(merged(outputs, pause)) as found:
                async for each in found:
                    data = b""
                    if each is not None and (choice := self._read(*each)):
                        data = writer.chunk(choice, choice.pieces[-1])
                    if not data and (each is None or time.monotonic() - written > pause):
                        data = stream.COMMENT + writer.still_here()
                    if data:
                        written = time.monotonic()
                        yield data
            self.on_done()
            yield writer.closing(self.choices, self._usage())
        except ApiError as error:
            self.outcome = "error"
            yield writer.failed(error)

    def _read(self, k: int, output: Output) -> Choice | None:
        """Add an output of request `k` to its choice; None if that had finished before."""
        server, request = self.model.server, self.requests[k]
        choice = self.choices[k * request.n + output.index]
        if choice.finish is not None:
            return None
        choice.take(output)
        if output.tokens:
            now = time.monotonic()
            if not self.first:
                self.first = now
                server.metrics.first_token.labels(self.model.name).observe(now - self.arrived)
            elif choice.index in self.last:
                seconds = now - self.last[choice.index]
                server.metrics.between(self.model.name, seconds, len(output.tokens))
            self.last[choice.index] = now
        if choice.finish is not None and output.finish is None:
            server.worker.abort(request.id, output.index)
        return choice

    def _usage(self) -> stream.Usage:
        return stream.usage(self.requests, self.choices)

    def _row(self) -> Row:
        row = Row(
            id=self.writer.id,
            model=self.model.name,
            **asdict(self._usage()),
            seconds=time.monotonic() - self.arrived,
            outcome=self.outcome,
        )
        if self.first:
            row.state, row.first = "writing", self.first - self.arrived
            seconds = max(self.last.values()) - self.first
            if seconds > 0:
                row.rate = (row.generated - len(self.last)) / seconds
            return row
        # The engine lists each running choice in order; the first one has the prefix match.
        ids = [request.id for request in self.requests]
        running_requests = self.model.server.worker.models()[self.model.name].stats.running_requests
        matched = {id: cached for id, cached in reversed(running_requests) if id in ids}
        if matched:
            row.state, row.cached = "reading", sum(matched.values())
        return row

    def _finish(self) -> None:
        """Abort what still runs; count, list and log the answer."""
        server, choices = self.model.server, self.choices
        for k, request in enumerate(self.requests):
            own = choices[k * request.n :][: request.n]
            if any(choice.finish is None for choice in own):
                self.outcome = self.outcome or "gone"
                server.worker.abort(request.id)
        if not self.outcome:
            self.outcome = ",".join(dict.fromkeys(str(choice.finish) for choice in choices))
        row = self._row()
        server.journal.end(row)
        outcome = row.outcome.partition(",")[0]
        server.metrics.duration.labels(self.model.name, outcome).observe(row.seconds)
        first = f"none after {row.seconds:.2f} s"
        if row.first:
            first = f"first after {row.first:.2f} s"
        counts = f"{row.prompt} in, {row.cached} cached, {row.generated} out"
        text = f"{row.id}: {counts}, {first}, {row.rate:.1f} tokens/s, {row.rounds} rounds"
        if drafts := stream.speculation(choices):
            text += f", {drafts}"
        log.info("%s, %s", text, row.outcome)


async def merged(
    outputs: Outputs, pause: float | None
) -> AsyncGenerator[tuple[int, Output] | None, None]:
    """(index of the request, output) as they come, and None after each `pause` seconds of silence,
    until all have ended."""
    waiting: dict[asyncio.Future[Output | None], int] = {}
    for k, each in enumerate(outputs):
        waiting[asyncio.ensure_future(anext(each, None))] = k
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=pause, return_when="FIRST_COMPLETED")
            if not done:
                yield None
            for job in done:
                k, output = waiting.pop(job), job.result()
                if output is not None:
                    waiting[asyncio.ensure_future(anext(outputs[k], None))] = k
                    yield k, output
    finally:
        for job in waiting:
            job.cancel()

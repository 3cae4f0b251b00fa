"""One answer from submission to its last byte, streamed or whole, for any API.

Rule: however it ends (last token, stop string, disconnected client, error), what still runs of it
is aborted, and it is counted and logged once.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxspec import log
from mlxspec.server import stream
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.state import Model, Row, while_connected
from mlxspec.server.stream import Choice, Piece, ResponseWriter, Usage
from mlxspec.text.structured.grammar import Make
from mlxspec.types import Busy, Output, Request

PROGRESS_S = 1.0  # from one sign of how much of the prompt was read to the next
STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(slots=True)
class Generation:
    """The response to one HTTP request, as an ASGI application that generates while it sends.
    `body` has the fields of openai.schema.Common. `choices` are grouped by request, `body.n` of
    each. Times are seconds since the request `arrived`."""

    model: Model
    body: Any
    writer: ResponseWriter
    media: str = stream.SSE  # the type of a stream
    requests: list[Request] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    grammar: Future[Make] | None = None  # of the answers, being compiled
    # Called before the last byte is sent: the client's next request may follow at once.
    on_done: Callable[[], None] = lambda: None
    arrived: float = field(default_factory=time.monotonic)
    first: float = 0.0  # time of the first token
    last: dict[int, float] = field(default_factory=dict)  # time of the last token, by choice
    queue: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)  # of all requests' outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises only before the first byte."""
        id = self.writer.id
        if self.grammar:
            await while_connected(HttpRequest(scope, receive), asyncio.wrap_future(self.grammar))
        self._submit()
        headers = {"x-request-id": id, "request-id": id}
        self.model.server.live[id] = self._row
        failed = False
        try:
            if self.body.stream:
                response = StreamingResponse(self._events(), 200, headers | STREAM, self.media)
                await response(scope, receive, send)
            else:
                body = await while_connected(HttpRequest(scope, receive), self._body())
                await JSONResponse(body, headers=headers)(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception:
            failed = True
            raise
        finally:
            self._finish(failed)

    def _submit(self) -> None:
        """Queue all requests or none. Raises ApiError, Busy and Dead."""
        worker, config = self.model.server.worker, self.model.server.config
        answers, most = len(self.choices), config.max_sequences + config.max_queue
        if answers > most:
            raise invalid("n", f"{answers} answers are more than the queue's {most}; ask for fewer")
        try:
            for request in self.requests:
                worker.submit(request, self.queue)
        except Busy:
            for request in self.requests:  # the unknown ones do nothing
                worker.abort(request.id)
            raise

    def _runs(self) -> bool:
        return any(choice.finish is None for choice in self.choices)

    async def _body(self) -> Json:
        while self._runs():
            self._read(await self.queue.get())
        self.on_done()
        return self.writer.body(self.choices, self._usage())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer. A silent stream gets an event without content every
        `keepalive_s`. Where there are comments, it gets one too, because some clients ignore those,
        and while the prompt is read they tell how far."""
        writer, body = self.writer, self.body
        yield writer.opening(stream.usage(self.choices))
        pause = self.model.server.config.keepalive_s
        told = 0  # tokens of the prompt
        comments = self.media == stream.SSE
        written = time.monotonic()
        try:
            while self._runs():
                data = b""
                try:
                    async with asyncio.timeout(min(pause, PROGRESS_S)):
                        output = await self.queue.get()
                    data = writer.chunk(*self._read(output))
                except TimeoutError:
                    usage = self._usage()
                    if comments and usage.read > told:
                        told = usage.read
                        yield b": prompt %d of %d\n\n" % (told, usage.prompt)
                        if body.return_progress or body.stream_options.include_progress:
                            tells = {  # as llama.cpp has it, whichever the API is
                                "total": usage.prompt,
                                "cache": usage.cached,
                                "processed": told,
                                "time_ms": round(1e3 * usage.seconds),
                            }
                            data = stream.event({"choices": [], "prompt_progress": tells})
                if not data and time.monotonic() - written >= pause:
                    data = writer.still_here()
                    if comments:
                        data = stream.COMMENT + data
                if data:
                    written = time.monotonic()
                    yield data
            self.on_done()
            yield writer.closing(self.choices, self._usage())
        except ApiError as error:
            yield writer.failed(error)

    def _read(self, output: Output) -> tuple[Choice, Piece]:
        """Add an output to its choice, unless that has finished."""
        server = self.model.server
        first = next(one.index for one in self.choices if one.request.id == output.request)
        choice = self.choices[first + output.index]
        if choice.finish is not None:
            return choice, Piece()
        piece = choice.take(output)
        if output.tokens:
            now = time.monotonic() - self.arrived
            if not self.first:
                self.first = now
                server.metrics.first_token.labels(self.model.name).observe(now)
            elif choice.index in self.last:
                gap = (now - self.last[choice.index]) / len(output.tokens)
                for _ in output.tokens:  # which came together
                    server.metrics.between_tokens.labels(self.model.name).observe(gap)
            self.last[choice.index] = now
        if choice.finish is not None and output.finish is None:
            server.worker.abort(output.request, output.index)
        return choice, piece

    def _usage(self) -> Usage:
        """The figures of this moment. The engine's are of its last step, and only needed until the
        first token."""
        made = stream.usage(self.choices)
        made.first, made.seconds = self.first, time.monotonic() - self.arrived
        if self.first:
            seconds = max(self.last.values()) - self.first
            if seconds > 0:
                made.rate = (made.generated - len(self.last)) / seconds
            return made
        # The engine lists each running choice in order; the first one has the prefix match.
        stats = self.model.server.worker.models[self.model.name].stats
        running = {id: counts for id, *counts in reversed(stats.running_requests)}
        matched = [running[request.id] for request in self.requests if request.id in running]
        if matched:
            made.cached, made.read = map(sum, zip(*matched, strict=True))
        return made

    def _row(self, outcome: str = "") -> Row:
        """The figures for the page; `outcome` is "" until the end. Holds no text."""
        return {
            "id": self.writer.id,
            "model": self.model.name,
            "outcome": outcome,
            **asdict(self._usage()),
        }

    def _finish(self, failed: bool) -> None:
        """Abort what still runs; record what has finished; count, list and log the answer.
        `failed`: it could not be written."""
        server, name = self.model.server, self.model.name
        for id in {choice.request.id for choice in self.choices if choice.finish is None}:
            server.worker.abort(id)
        for choice in self.choices:
            if server.recorder and choice.finish in ("stop", "length"):
                server.recorder.add(name, choice.request.prompt, choice.ids)
        # By the alphabet, so that failures come first.
        outcomes = sorted({choice.finish or "gone" for choice in self.choices})
        if failed:
            outcomes = ["error"]
        usage, outcome = self._usage(), ",".join(outcomes)
        del server.live[self.writer.id]
        server.finished.appendleft(self._row(outcome))
        server.metrics.duration.labels(name, outcomes[0]).observe(usage.seconds)
        log.info("%s: %s, %s", self.writer.id, _summary(usage), outcome)


def _summary(usage: Usage) -> str:
    """The figures of a finished answer, for the log."""
    text = f"{usage.prompt} in, {usage.cached} cached, {usage.generated} out"
    when = f"{usage.first or usage.seconds:.2f} s"
    text += f", {'first' if usage.first else 'none'} after {when}"
    text += f", {usage.rate:.1f} tokens/s, {usage.rounds} rounds"
    if usage.drafted:
        text += f", {usage.generated / usage.rounds:.1f} tok/round"
        text += f", {usage.kept / usage.drafted:.0%} of drafts kept"
    return text

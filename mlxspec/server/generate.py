"""One answer from submission to its last byte, streamed or whole, for any API.

Rule: however it ends (last token, stop string, disconnected client, error), what still runs of it
is aborted.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxspec.engine.worker import Mailbox
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.observer import Observer
from mlxspec.server.state import TextModel, while_connected
from mlxspec.server.stream import Choice, Choices, Piece, ResponseWriter
from mlxspec.text.structured.grammar import Make
from mlxspec.types import Output, Request

PROGRESS_S = 1.0  # from one sign of how much of the prompt was read to the next
STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the text thread makes of a request. `choices` are grouped by request, `body.n` of
    each."""

    requests: list[Request]
    choices: Choices
    grammar: Future[Make] | None = None  # of the answers, being compiled
    # Called before the last byte is sent: the client's next request may follow at once.
    on_done: Callable[[], None] = lambda: None


async def respond(
    model: TextModel,
    body: Any,
    writer: ResponseWriter,
    prepare: Callable[..., Prepared],
    *args: Any,
) -> "Generation":
    """The response to a `body`, which has the fields of openai.schema.Common. Raises what `prepare`
    raises, which gets model, body, the response's id and `args`."""
    arrived = time.monotonic()
    prepared = await model.server.on_text_thread(prepare, model, body, writer.id, *args)
    observer = Observer(model, writer.id, prepared.choices, arrived)
    return Generation(model, body, writer, prepared, observer)


@dataclass(frozen=True, slots=True)
class Generation:
    """The response to one HTTP request, as an ASGI application that generates while it sends."""

    model: TextModel
    body: Any
    writer: ResponseWriter
    prepared: Prepared
    observer: Observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises only before the first byte."""
        http, id = HttpRequest(scope, receive), self.writer.id
        if self.prepared.grammar:
            await while_connected(http, asyncio.wrap_future(self.prepared.grammar))
        outputs = self._submit()
        headers = {"x-request-id": id, "request-id": id}
        with self.observer.watch():
            try:
                if self.body.stream:
                    events, media = self._events(outputs), self.writer.media
                    response = StreamingResponse(events, 200, headers | STREAM, media)
                    await response(scope, receive, send)
                else:
                    body = await while_connected(http, self._body(outputs))
                    await JSONResponse(body, headers=headers)(scope, receive, send)
            finally:
                choices = self.prepared.choices
                for request in {each.request.id for each in choices if each.finish is None}:
                    self.model.server.worker.abort(request)

    def _submit(self) -> Mailbox:
        """Queue all requests or none. Raises ApiError, Busy and Dead."""
        config, answers = self.model.server.config, len(self.prepared.choices)
        most = config.max_sequences + config.max_queue
        if answers > most:
            raise invalid("n", f"{answers} answers are more than the queue's {most}; ask for fewer")
        return self.model.server.worker.submit(*self.prepared.requests)

    def _runs(self) -> bool:
        return any(choice.finish is None for choice in self.prepared.choices)

    async def _body(self, outputs: Mailbox) -> Json:
        while self._runs():
            self._read(await anext(outputs))
        self.prepared.on_done()
        return self.writer.body(self.prepared.choices, self.observer.usage())

    async def _events(self, outputs: Mailbox) -> AsyncIterator[bytes]:
        """The events of a streamed answer. A silent stream gets an event without content every
        `keepalive_s`, and while the prompt is read it tells how far."""
        writer, choices, usage = self.writer, self.prepared.choices, self.observer.usage
        yield writer.opening(usage())
        pause = self.model.server.config.keepalive_s
        told = 0  # tokens of the prompt
        written = time.monotonic()
        try:
            while self._runs():
                data = b""
                try:
                    async with asyncio.timeout(min(pause, PROGRESS_S)):
                        output = await anext(outputs)
                    data = writer.chunk(*self._read(output))
                except TimeoutError:
                    now = usage()
                    if now.read > told:
                        told = now.read
                        yield writer.progress(now, self.body.progress)
                if not data and time.monotonic() - written >= pause:
                    data = writer.keep_alive()
                if data:
                    written = time.monotonic()
                    yield data
            self.prepared.on_done()
            yield writer.closing(choices, usage())
        except ApiError as error:
            yield writer.failed(error)

    def _read(self, output: Output) -> tuple[Choice, Piece]:
        """Add an output to its choice, unless that has finished."""
        choices = self.prepared.choices
        first = next(each.index for each in choices if each.request.id == output.request)
        choice = choices[first + output.index]
        if choice.finish is not None:
            return choice, Piece()
        piece = choice.take(output)
        self.observer.saw(choice, output)
        if choice.finish is not None and output.finish is None:
            self.model.server.worker.abort(output.request, output.index)
        return choice, piece

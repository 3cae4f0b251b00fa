"""One answer from submission to its last byte, streamed or whole, for any API.

Rule: however it ends (last token, stop string, disconnected client, error), choices that still run
are aborted, and it is counted and logged once.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxspec import log
from mlxspec.engine.worker import Mailbox
from mlxspec.server import stream
from mlxspec.server.body import IGNORED
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.state import Figures, TextModel, while_connected
from mlxspec.server.stream import Choice, Choices, Piece, ResponseWriter, Usage
from mlxspec.text.structured.grammar import CompiledGrammar
from mlxspec.types import Output, Request

PROGRESS_S = 1.0  # between reports of how much of the prompt was read
STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class Prepared:
    """What the text thread makes of a request. `choices` are grouped by request, `body.n` for
    each."""

    requests: list[Request]
    choices: Choices
    grammar: Future[CompiledGrammar] | None = None  # of the answers, being compiled
    # Called before the last byte is sent: the client's next request may follow at once.
    on_done: Callable[[], None] = lambda: None


async def respond(
    model: TextModel,
    body: Any,
    writer: ResponseWriter,
    prepare: Callable[..., Prepared],
    *args: Any,
) -> "Generation":
    """The response to a `body` with the fields of openai.schema.Common. `prepare` gets the model,
    the body, the response's id and `args`; raises what it raises."""
    arrived = time.monotonic()
    prepared = await model.server.on_text_thread(prepare, model, body, writer.id, *args)
    observer = Observer(model, writer.id, prepared.choices, arrived)
    return Generation(model, body.stream, body.progress, writer, prepared, observer)


@dataclass
class Observer:
    """Watches the choices of one response: its clock, the metrics, the page's row, the log line and
    the record. Keeps no text. Times are seconds since the request `arrived`."""

    model: TextModel
    id: str
    choices: Choices
    arrived: float
    first: float = 0.0  # time of the first token
    last: dict[int, float] = field(default_factory=dict)  # time of the last token, by choice

    @contextmanager
    def watch(self) -> Iterator[None]:
        """List the answer while it runs, then count and log it. Suppresses ClientDisconnect."""
        server, name = self.model.server, self.model.name
        server.live[self.id] = self.row
        failed = False
        try:
            yield
        except ClientDisconnect:
            pass
        except Exception:
            failed = True
            raise
        finally:
            del server.live[self.id]
            for choice in self.choices:
                seen = choice.request.images  # which the recorder does not keep
                if server.recorder and not seen and choice.finish in ("stop", "length"):
                    server.recorder.add(self.model.base, choice.request.prompt, choice.ids)
            # In alphabetical order, so that failures come first.
            outcomes = sorted({choice.finish or "gone" for choice in self.choices})
            if failed:  # the response could not be written
                outcomes = ["error"]
            usage, outcome = self.usage(), ",".join(outcomes)
            server.finished.appendleft(self.row(outcome))
            server.metrics.duration.labels(name, outcomes[0]).observe(usage.seconds)
            profile = "" if name == self.model.base else f"{name}, "
            log.info("%s: %s%s, %s", self.id, profile, _summary(usage), outcome)

    def record_time(self, choice: Choice, output: Output) -> None:
        """Record the time of an output's tokens, which came together."""
        metrics, name = self.model.server.metrics, self.model.name
        if not output.tokens:
            return
        now = time.monotonic() - self.arrived
        if not self.first:
            self.first = now
            metrics.first_token.labels(name).observe(now)
        elif choice.index in self.last:
            gap = (now - self.last[choice.index]) / len(output.tokens)
            for _ in output.tokens:
                metrics.between_tokens.labels(name).observe(gap)
        self.last[choice.index] = now

    def usage(self) -> Usage:
        """The figures now. The engine's are of its last step, and only needed until the first
        token."""
        usage = stream.usage(self.choices)
        usage.first, usage.seconds = self.first, time.monotonic() - self.arrived
        if self.first:
            if (seconds := max(self.last.values()) - self.first) > 0:
                usage.rate = (usage.generated - len(self.last)) / seconds
            return usage
        requests = {choice.request.id for choice in self.choices}
        # The engine lists each running choice in order; the first one has the prefix match.
        running = reversed(self.model.served.stats.running_requests)
        prompts = {id: counts for id, *counts in running if id in requests}
        if prompts:
            usage.cached, usage.read = map(sum, zip(*prompts.values(), strict=True))
        return usage

    def row(self, outcome: str = "") -> Figures:
        """The figures for the page; `outcome` is "" until the end."""
        head = {"id": self.id, "model": self.model.name, "outcome": outcome}
        return head | asdict(self.usage())


@dataclass(frozen=True)
class Generation:
    """The response to one HTTP request, as an ASGI application that generates while it sends. It
    does not keep the request's body: that may be large, and the answer may take long."""

    model: TextModel
    streamed: bool
    progress: bool  # a stream has events that report how much of the prompt was read
    writer: ResponseWriter
    prepared: Prepared
    observer: Observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises only before the first byte."""
        http, id = HttpRequest(scope, receive), self.writer.id
        if self.prepared.grammar:
            future = asyncio.wrap_future(self.prepared.grammar)
            left_out = (await while_connected(http, future)).left_out
            scope[IGNORED] += left_out
        server, answers = self.model.server, len(self.prepared.choices)
        size = server.config.max_sequences + server.config.max_queue
        if answers > size:
            raise invalid("n", f"{answers} answers are more than the queue's {size}; ask for fewer")
        outputs = server.worker.submit(*self.prepared.requests)
        headers = {"x-request-id": id, "request-id": id}
        with self.observer.watch():
            try:
                if self.streamed:
                    events, media = self._events(outputs), self.writer.media
                    response = StreamingResponse(events, 200, headers | STREAM, media)
                    await response(scope, receive, send)
                else:
                    body = await while_connected(http, self._body(outputs))
                    await JSONResponse(body, headers=headers)(scope, receive, send)
            finally:
                choices = self.prepared.choices
                for request in {choice.request.id for choice in choices if choice.finish is None}:
                    server.worker.abort(request)

    def _running(self) -> bool:
        return any(choice.finish is None for choice in self.prepared.choices)

    async def _body(self, outputs: Mailbox) -> Json:
        try:
            while self._running():
                self._add_output(await anext(outputs))
        except ApiError as error:
            if error.status == 500:
                choices, usage = self.prepared.choices, self.observer.usage()
                error.generated = self.writer.generated(choices, usage)
            raise
        self.prepared.on_done()
        return self.writer.body(self.prepared.choices, self.observer.usage())

    async def _events(self, outputs: Mailbox) -> AsyncIterator[bytes]:
        """The events of a streamed answer. A silent stream gets an event without content every
        `keepalive_s`, and reports how much of the prompt was read."""
        writer, choices, usage = self.writer, self.prepared.choices, self.observer.usage
        yield writer.opening(usage())
        pause = self.model.server.config.keepalive_s
        reported = 0  # tokens of the prompt
        written = time.monotonic()
        try:
            while self._running():
                data = b""
                try:
                    async with asyncio.timeout(min(pause, PROGRESS_S)):
                        output = await anext(outputs)
                    data = writer.chunk(*self._add_output(output))
                except TimeoutError:
                    now = usage()
                    if writer.comment and now.read > reported:
                        reported = now.read
                        yield writer.progress(now, self.progress)
                if not data and time.monotonic() - written >= pause:
                    data = writer.comment + writer.keepalive()
                if data:
                    written = time.monotonic()
                    yield data
            self.prepared.on_done()
            yield writer.closing(choices, usage())
        except ApiError as error:
            yield writer.failed(error)

    def _add_output(self, output: Output) -> tuple[Choice, Piece]:
        """Add an output to its choice, unless the choice has finished."""
        choices = self.prepared.choices
        first = next(choice.index for choice in choices if choice.request.id == output.request)
        choice = choices[first + output.index]
        if choice.finish is not None:
            return choice, Piece()
        piece = choice.take(output)
        self.observer.record_time(choice, output)
        if choice.finish is not None and output.finish is None:
            self.model.server.worker.abort(output.request, output.index)
        return choice, piece


def _summary(usage: Usage) -> str:
    """The figures of a finished answer, for the log."""
    text = f"{usage.prompt} in, {usage.cached} cached, {usage.generated} out"
    when = f"{usage.first or usage.seconds:.2f} s"
    text += f", {'first' if usage.first else 'none'} after {when}"
    text += f", {usage.rate:.1f} tokens/s, {usage.rounds} rounds"
    if usage.drafted:
        text += f", {usage.generated / usage.rounds:.1f} tok/round"
        text += f", {usage.kept / usage.drafted:.0%} of drafts kept"
    if usage.loops:
        text += f", {usage.loops} ended by the loop guard"
    return text

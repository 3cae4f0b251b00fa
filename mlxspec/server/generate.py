"""One answer from submission to its last byte, streamed or whole, for any API.

Rule: however it ends (last token, stop string, disconnected client, error), what still runs of it
is aborted, and it is counted and logged once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxspec.server import stream
from mlxspec.server.errors import ApiError, Gone, busy, dead
from mlxspec.server.state import Model, Row, ServerState, State, while_connected
from mlxspec.server.stream import Choice, Piece, ResponseWriter
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
    """The work of one HTTP request. `choices` are grouped by request, `n` of each. Times are
    time.monotonic()."""

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

    def usage(self) -> stream.Usage:
        return stream.usage(self.requests, self.choices)


def answer(model: Model, generation: Generation) -> ASGIApp:
    """The response, which generates while it is sent. Raises ApiError only before its first
    byte."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        state = model.server
        outputs = _submit(state, generation.requests)
        state.journal.live[generation.writer.id] = lambda: _row(model, generation)
        try:
            if generation.streamed:
                async with aclosing(_events(model, generation, outputs)) as events:
                    headers = SSE | generation.headers
                    await StreamingResponse(events, headers=headers)(scope, receive, send)
            else:
                whole = await while_connected(receive, _whole(model, generation, outputs))
                await whole(scope, receive, send)
        except Gone:
            pass
        except BaseException:
            generation.outcome = "error"
            raise
        finally:
            _finish(model, generation)

    return respond


def _submit(state: ServerState, requests: Sequence[Request]) -> Outputs:
    """Queue all requests or none. Raises ApiError."""
    outputs: list[AsyncIterator[Output]] = []
    try:
        for request in requests:
            outputs.append(state.engine.submit(request))
    except Dead as error:
        raise dead(state.engine) from error
    except Busy as error:
        for request in requests[: len(outputs)]:
            state.engine.abort(request.id)
        raise busy(error) from error
    return outputs


async def _whole(model: Model, generation: Generation, outputs: Outputs) -> JSONResponse:
    async with aclosing(merged(outputs, None)) as found:
        async for each in found:
            if each is not None:
                _read(model, generation, *each)
    generation.on_done()
    pieces = [choice.pieces for choice in generation.choices]
    body = generation.writer.body(generation.choices, pieces, generation.usage())
    return JSONResponse(body, headers=generation.headers)


async def _events(
    model: Model, generation: Generation, outputs: Outputs
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer."""
    writer = generation.writer
    yield writer.opening(generation.usage())
    pause = min(model.server.config.keepalive_s, EVENT_S)
    written = time.monotonic()
    try:
        async with aclosing(merged(outputs, pause)) as found:
            async for each in found:
                data = b""
                if each is not None and (read := _read(model, generation, *each)):
                    data = writer.chunk(*read)
                if not data and (each is None or time.monotonic() - written > pause):
                    data = stream.COMMENT + writer.still_here()
                if data:
                    written = time.monotonic()
                    yield data
        generation.on_done()
        yield writer.closing(generation.choices, generation.usage())
    except ApiError as error:
        generation.outcome = "error"
        yield writer.failed(error)


def _read(
    model: Model, generation: Generation, k: int, output: Output
) -> tuple[Choice, Piece] | None:
    """Add an output of request `k` to its choice; None if that choice has finished before."""
    state, request = model.server, generation.requests[k]
    choice = generation.choices[k * request.n + output.index]
    if choice.finish is not None:
        return None
    now, piece = time.monotonic(), choice.take(output)
    if output.tokens:
        before = generation.last.get(choice.index)
        generation.last[choice.index] = now
        if not generation.first:
            generation.first = now
            seconds = now - generation.arrived
            state.metrics.first_token.labels(model.name).observe(seconds)
        elif before is not None:
            state.metrics.between(model.name, now - before, len(output.tokens))
    if choice.finish is not None and output.finish is None:
        state.engine.abort(request.id, output.index)
    return choice, piece


async def merged(
    outputs: Outputs, pause: float | None
) -> AsyncGenerator[tuple[int, Output] | None, None]:
    """(index of the request, output) as they come, and None after each `pause` seconds of silence,
    until all have ended."""
    while len(outputs) == 1:  # the usual case, without a task per output
        try:
            async with asyncio.timeout(pause):
                output = await anext(outputs[0])  # loses no output when it is cancelled
        except TimeoutError:
            yield None
        except StopAsyncIteration:
            return
        else:
            yield 0, output
    waiting = {asyncio.ensure_future(anext(each)): k for k, each in enumerate(outputs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield None
            for task in done:
                k = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(outputs[k]))] = k
                yield k, output
    finally:
        for task in waiting:
            task.cancel()


def _row(model: Model, generation: Generation, outcome: str = "") -> Row:
    usage, first = generation.usage(), generation.first
    # The engine lists each running choice in order; the first one has the prefix match.
    running = dict(reversed(model.server.engine.models()[model.name].stats.seated))
    matched = [running[request.id] for request in generation.requests if request.id in running]
    state: State = "waiting"
    if first:
        state = "writing"
    elif matched:
        state = "reading"
        usage = replace(usage, cached=sum(matched))
    seconds = max(generation.last.values(), default=0.0) - first
    return Row(
        id=generation.writer.id,
        model=model.name,
        **asdict(usage),
        rounds=sum(choice.rounds for choice in generation.choices),
        first=first - generation.arrived if first else 0.0,
        seconds=time.monotonic() - generation.arrived,
        rate=(usage.generated - len(generation.last)) / seconds if seconds > 0 else 0.0,
        outcome=outcome,
        state=state,
    )


def _finish(model: Model, generation: Generation) -> None:
    """Abort what still runs; count, list and log the answer."""
    state, choices = model.server, generation.choices
    for k, request in enumerate(generation.requests):
        own = choices[k * request.n :][: request.n]
        if any(choice.finish is None for choice in own):
            generation.outcome = generation.outcome or "gone"
            state.engine.abort(request.id)
    finishes = dict.fromkeys(choice.finish for choice in choices if choice.finish)
    row = _row(model, generation, generation.outcome or ",".join(finishes))
    state.journal.end(row)
    outcome = row.outcome.partition(",")[0]
    state.metrics.duration.labels(model.name, outcome).observe(row.seconds)
    first = f"first after {row.first:.2f} s" if row.first else f"none after {row.seconds:.2f} s"
    counts = f"{row.prompt} in, {row.cached} cached, {row.generated} out"
    text = f"{row.id}: {counts}, {first}, {row.rate:.1f} tokens/s, {row.rounds} rounds"
    if drafts := stream.speculation(choices):
        text += f", {drafts}"
    log.info("%s, %s", text, row.outcome)

"""One answer from submission to its last byte, streamed or whole, for any API.

Rule: however it ends (the last token, a stop string, a client that left, an error), what still runs
of it is aborted, and it is counted and logged once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxspec.server import stream
from mlxspec.server.errors import busy, dead
from mlxspec.server.journal import Row
from mlxspec.server.state import Gone, Model, ServerState, while_connected
from mlxspec.server.stream import Choice, Failed, Piece, ResponseWriter
from mlxspec.types import Busy, Dead, Output, Request

log = logging.getLogger("mlxspec")

PROTOCOL_S = (
    15.0  # a silent stream gets a real chunk at least this often: some clients ignore comments
)
SSE = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Outputs = Sequence[AsyncIterator[Output]]


@dataclass(slots=True)
class Job:
    """One HTTP request's work. `choices` are grouped by request, `n` of each. Times are
    time.monotonic()."""

    requests: list[Request]
    choices: list[Choice]
    dialect: ResponseWriter
    streamed: bool
    headers: dict[str, str]
    arrived: float
    first: float = 0.0  # token
    last: dict[int, float] = field(default_factory=dict)  # token, by choice
    outcome: str = ""  # how it ended, where that was not with the choices
    done: Callable[[Sequence[Sequence[Piece]]], None] | None = (
        None  # told the pieces of all choices at the end
    )
    pieces: list[list[Piece]] = field(default_factory=list)  # by choice

    def __post_init__(self) -> None:
        self.pieces = [[] for _ in self.choices]


def answer(model: Model, job: Job) -> ASGIApp:
    """The response that does the work while it is sent. Raises ApiError before its first byte
    only."""

    front = model.front

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        outputs = _submit(front, job)
        front.journal.live[job.dialect.id] = lambda: _row(model, job)
        try:
            deliver = (
                _stream(model, job, outputs, send) if job.streamed else _whole(model, job, outputs)
            )
            response = await while_connected(receive, deliver)
            if response is not None:
                await response(scope, receive, send)
        except Gone:
            job.outcome = "gone"
        except BaseException:
            job.outcome = "error"
            raise
        finally:
            for k, request in enumerate(job.requests):
                if any(c.finish is None for c in job.choices[k * request.n :][: request.n]):
                    front.engine.abort(request.id)
            _book(model, job)

    return respond


def _submit(front: ServerState, job: Job) -> Outputs:
    outputs: list[AsyncIterator[Output]] = []
    try:
        for request in job.requests:
            outputs.append(front.engine.submit(request))
    except Dead as error:
        raise dead(front.engine) from error
    except Busy as error:
        for request in job.requests[: len(outputs)]:
            front.engine.abort(request.id)
        raise busy(error) from error
    return outputs


async def _whole(model: Model, job: Job, outputs: Outputs) -> JSONResponse:
    try:
        async with aclosing(_merged(outputs, None)) as merged:
            async for found in merged:
                if found is not None:
                    _read(model, job, *found)
    except Failed as error:
        raise error.error from error
    _done(job)
    usage = stream.usage(job.requests, job.choices)
    return JSONResponse(job.dialect.body(job.choices, job.pieces, usage), headers=job.headers)


async def _stream(model: Model, job: Job, outputs: Outputs, send: Send) -> None:
    async def write(data: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    headers = [(name.encode(), value.encode()) for name, value in (SSE | job.headers).items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await write(job.dialect.opening(stream.usage(job.requests, job.choices)))
    pause = min(model.front.config.keepalive_s, PROTOCOL_S)
    wrote = spoke = time.monotonic()  # a byte, a chunk
    try:
        async with aclosing(_merged(outputs, pause)) as merged:
            async for found in merged:
                read = _read(model, job, *found) if found is not None else None
                data = job.dialect.chunk(*read) if read else b""
                now = time.monotonic()
                if data:
                    wrote = spoke = now
                elif found is None or now - wrote > pause:
                    data, wrote = stream.COMMENT, now
                    if now - spoke + pause > PROTOCOL_S:
                        data, spoke = data + job.dialect.still_here(), now
                if data:
                    await write(data)
        _done(job)
        usage = stream.usage(job.requests, job.choices)
        await write(job.dialect.closing(job.choices, usage), more=False)
    except Failed as error:
        job.outcome = "error"
        await write(job.dialect.failed(error.error), more=False)


def _done(job: Job) -> None:
    """Before the last byte: the client's next request may be on its way at once."""
    if job.done:
        job.done(job.pieces)


def _read(model: Model, job: Job, k: int, output: Output) -> tuple[Choice, Piece] | None:
    """What an output of request `k` adds to its choice; None where that choice has ended
    already."""
    front, request = model.front, job.requests[k]
    choice = job.choices[k * request.n + output.index]
    if choice.finish is not None:
        return None
    now, piece = time.monotonic(), choice.take(output)
    job.pieces[k * request.n + output.index].append(piece)
    if output.tokens:
        if not job.first:
            job.first = now
            front.metrics.first_token.labels(model.name).observe(now - job.arrived)
        elif (before := job.last.get(choice.index)) is not None:
            front.metrics.between(model.name, now - before, len(output.tokens))
        job.last[choice.index] = now
    if choice.finish is not None and output.finish is None:
        front.engine.abort(request.id, output.index)
    return choice, piece


async def _merged(
    outputs: Outputs, pause: float | None
) -> AsyncGenerator[tuple[int, Output] | None, None]:
    """(number of the stream, output) as they come, None after each `pause` of silence; until all
    have ended or their choices have."""
    while len(outputs) == 1:  # as a rule; without a task and what it takes for every token
        try:
            async with asyncio.timeout(pause):
                output = await anext(outputs[0])  # may be cancelled, see Engine.submit
        except TimeoutError:
            yield None
        except StopAsyncIteration:
            return
        else:
            yield 0, output
    waiting = {asyncio.ensure_future(anext(some)): k for k, some in enumerate(outputs)}
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


def _row(model: Model, job: Job, outcome: str = "") -> Row:
    now = time.monotonic()
    counts = stream.usage(job.requests, job.choices)
    seats = dict(
        reversed(model.front.engine.models()[model.name].stats.seated)
    )  # the first of n choices
    seated = [seats[request.id] for request in job.requests if request.id in seats]
    seconds = max(job.last.values(), default=0.0) - job.first
    return Row(
        id=job.dialect.id,
        model=model.name,
        prompt=counts.prompt,
        cached=counts.cached if job.first else sum(seated),
        generated=counts.generated,
        rounds=sum(choice.rounds for choice in job.choices),
        drafted=counts.drafted,
        kept=counts.kept,
        first=job.first and job.first - job.arrived,
        seconds=now - job.arrived,
        rate=(counts.generated - len(job.last)) / seconds if seconds > 0 else 0.0,
        outcome=outcome,
        state="waiting" if not seated else "writing" if job.first else "reading",
    )


def _book(model: Model, job: Job) -> None:
    """The counters, the row and the one line of a finished answer."""
    finishes = ",".join(dict.fromkeys(c.finish or "cut" for c in job.choices))
    row = _row(model, job, job.outcome or finishes)
    model.front.journal.end(row)
    ended = model.front.metrics.duration.labels(model.name, row.outcome.partition(",")[0])
    ended.observe(row.seconds)
    drafts = stream.speculation(job.choices)
    log.info(
        "%s: %d in, %d cached, %d out, %s after %.2f s, %.1f tokens/s, %d rounds, %s%s",
        row.id,
        row.prompt,
        row.cached,
        row.generated,
        "first" if job.first else "none",
        row.first or row.seconds,
        row.rate,
        row.rounds,
        drafts and f"{drafts}, ",
        row.outcome,
    )

"""The engine thread, and its connection to asyncio.

Rule: one thread owns MLX. Orders go in through an inbox that `submit` bounds, outputs come back
with one loop callback per step; nothing that holds an array crosses. If the thread dies, every
request that waits gets an error, and a critical line is logged.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

import mlx.core as mx

from mlxspec import log
from mlxspec.engine.memory import CRITICAL, HOLD_S
from mlxspec.engine.models import LoadCommand, ModelManager, Order
from mlxspec.types import (
    Busy,
    Dead,
    Finish,
    Interrupted,
    ModelInfo,
    Output,
    Outputs,
    Request,
    Served,
    UnsupportedModel,
    line_of,
)

RETRY_S = 5  # after which a client may try again when the queue is full
DRAIN_POLL_S = 0.02
STOP_S = 30.0  # for the step in progress to end
MAX_UNREAD = 1 << 14  # outputs that a client may leave unread, per choice; 0.5 to 3 KB each
QUIET_S = 0.5  # without an order, until an idle engine measures: requests come in groups
IDLE_POLL_S = 5.0  # between looks at the memory and the age of idle models
STOPPING = "the server is stopping"


class OutputStream:
    """The outputs of one order, all choices interleaved; ends after the last choice's finish.

    It has at most one output per step and choice, and `n` * MAX_UNREAD of them unread. Several
    orders may share a `queue`, which then has the outputs of all.
    """

    def __init__(self, order: Order, queue: "asyncio.Queue[Output]") -> None:
        self.id, self.limit = order.id, order.n * MAX_UNREAD
        self.unfinished = set(range(order.n))  # choices whose last output was not delivered
        self._queue = queue

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> Output:
        if not self.unfinished and self._queue.empty():
            raise StopAsyncIteration
        return await self._queue.get()

    def put(self, output: Output) -> None:
        """Deliver an output, unless its choice has finished."""
        if output.index in self.unfinished:
            self._queue.put_nowait(output)
            if output.finish:
                self.unfinished.discard(output.index)

    def finish(self, finish: Finish, **reason: Any) -> None:
        """End all choices that have not finished."""
        for index in sorted(self.unfinished):
            self.put(Output(self.id, index, (), finish=finish, **reason))


class Worker:
    """Runs a ModelManager on a thread of its own.

    `submit`, `load`, `unload` and `drain` are for one event loop, the rest for any thread. Up to
    `max_sequences` + `max_queue` choices run or wait, of all models together.
    """

    def __init__(self, manager: ModelManager, max_sequences: int = 16, max_queue: int = 64) -> None:
        self._manager = manager
        self._limit = max_sequences + max_queue
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._inbox: SimpleQueue[Callable[[], Outputs]] = SimpleQueue()
        self._stopping = self.draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, OutputStream] = {}  # on the loop's thread
        self._started: Future[None] = Future()
        self._error: BaseException | None = None
        self.models: Mapping[str, Served] = {}  # by name, the default first
        self._busy = False
        self._progress = time.monotonic()

    # ---- any thread

    def launch(self, meanwhile: Callable[[], object] = lambda: None) -> ModelInfo:
        """Start the thread, call `meanwhile`, and wait for the default model.

        Raises what either raised.
        """
        self._thread.start()
        atexit.register(self.stop)  # the interpreter must not end while a thread uses MLX
        meanwhile()
        self._started.result()
        return self.info

    @property
    def info(self) -> ModelInfo:
        """The default model's."""
        return next(iter(self.models.values())).info

    def loading(self) -> str:
        """The model being loaded, while all others wait; or ""."""
        return self._manager.loading

    def alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    def stalled(self) -> float:
        """Seconds since the engine last finished a step while it had work; 0.0 when idle."""
        return time.monotonic() - self._progress if self._busy else 0.0

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice, before the next step; unknown ids do nothing."""
        self._inbox.put(partial(self._manager.abort, request_id, index))

    def stop(self, seconds: float = STOP_S) -> bool:
        """End the thread after its current step, waiting for at most `seconds`; whether it has
        ended. May be called twice."""
        self._stop_soon()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _stop_soon(self) -> None:
        """Let the thread end; its last act is to answer all requests."""
        self._stopping = True
        self.abort("")  # wakes the thread

    # ---- event loop

    def submit(
        self, request: Request, queue: "asyncio.Queue[Output] | None" = None
    ) -> OutputStream:
        """Queue a request; its outputs go to `queue`, if given.

        Raises Busy when the queue is full or memory very short, Dead when draining or dead.
        """
        waiting = request.n + sum(len(stream.unfinished) for stream in self._streams.values())
        if waiting > self._limit:
            raise Busy(RETRY_S)
        if self._manager.monitor.poll() >= CRITICAL:
            raise Busy(HOLD_S, "the machine is short of memory")
        return self._queue(request, queue)

    def _queue(self, order: Order, queue: "asyncio.Queue[Output] | None" = None) -> OutputStream:
        if self._closed:
            raise Dead("the engine takes no more requests")
        self._loop = asyncio.get_running_loop()
        stream = self._streams[order.id] = OutputStream(order, queue or asyncio.Queue())
        self._inbox.put(partial(self._manager.submit, order))
        return stream

    @property
    def _closed(self) -> bool:
        return self._stopping or self.draining or not self.alive()

    async def load(self, name: str, pin: bool | None = None) -> None:
        """Load a model, after the loads that wait already; pin or unpin it unless `pin` is None.

        Raises UnsupportedModel and Dead.
        """
        await self._command(name, True, pin)

    async def unload(self, name: str) -> None:
        """Unload a model once its requests have ended; if this is cancelled before, it stays
        loaded."""
        await self._command(name, False)

    async def _command(self, name: str, load: bool, pin: bool | None = None) -> None:
        command = LoadCommand(uuid4().hex, name, load, pin)
        stream = self._queue(command)
        try:
            output = await anext(stream)
        finally:
            self.abort(command.id)  # if it was cancelled
        if output.finish != "stop":
            error = output.error or STOPPING
            raise Dead(error) if self._closed else UnsupportedModel(error)

    async def drain(self, timeout: float) -> None:
        """Admit nothing more; wait until all requests have ended, at most `timeout` seconds, then
        end their streams. The process is expected to stop the engine next."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                while self._streams and self.alive():
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("aborting %d requests that did not finish", len(self._streams))
            self._finish_all("abort")

    def _finish_all(self, finish: Finish, **reason: Any) -> None:
        for stream in self._streams.values():
            stream.finish(finish, **reason)
        self._streams.clear()

    def _deliver(self, outputs: Outputs) -> None:
        for output in outputs:
            stream = self._streams.get(output.request)
            if not stream:
                continue
            stream.put(output)
            if stream.unfinished and stream._queue.qsize() > stream.limit:
                self.abort(output.request)
                stream.finish("error", fault="client")
            if not stream.unfinished:
                del self._streams[output.request]

    def _deliver_or_die(self, outputs: Outputs) -> None:
        try:
            self._deliver(outputs)
        except Exception as error:  # a client would wait for the lost outputs for ever
            self.die(error)
            self._stop_soon()

    def die(self, error: BaseException) -> None:
        """Fail all requests, or the launch; for any thread. The first error counts. After one that
        is no Exception the engine's thread may wait for ever."""
        if self._error is not None:
            return
        self._error = error
        reason = line_of(error)
        try:
            self._started.set_exception(error)
        except InvalidStateError:  # it had started
            trace = error if isinstance(error, Exception) else None
            log.critical("the engine thread died: %s", reason, exc_info=trace)
        self._call_loop(lambda: self._finish_all("error", error=reason))

    # ---- engine thread

    def _main(self) -> None:
        manager = self._manager
        try:
            manager.launch()
            self._publish([])
            self._started.set_result(None)
            with manager.group.together():
                while self._turn(manager):
                    pass
        except BaseException as failure:
            self.die(failure)
        finally:
            self._call_loop(lambda: self._finish_all("error", error=STOPPING))
            if self._error is None or isinstance(self._error, Exception):
                manager.close()
                mx.clear_streams()

    def _turn(self, manager: ModelManager) -> bool:
        """Wait for work and do one step; False when stopping."""
        timeout = 0.0
        if not manager.busy:
            manager.poll()
            self._busy = False
            timeout = QUIET_S if manager.has_idle_work else IDLE_POLL_S
        orders: list[Callable[[], Outputs]] = []
        with suppress(Empty):
            while True:
                orders.append(self._inbox.get(timeout=timeout))
                timeout = 0.0
        if self._stopping:
            return False
        self._progress = time.monotonic()
        self._busy = True
        if orders:  # answered before a load, which takes long
            self._publish([output for order in orders for output in order()])
        if not (orders or manager.busy):
            manager.work_idle(self._check_idle)
        outputs = manager.step()
        manager.unload_idle()
        self._publish(outputs)
        return True

    def _check_idle(self) -> None:
        """Raises Interrupted where an order waits, or the thread is to end."""
        self._progress = time.monotonic()
        if not self._inbox.empty():
            raise Interrupted

    def _publish(self, outputs: Outputs) -> None:
        """Deliver outputs on the loop's thread, and renew what any thread may read."""
        self.models = self._manager.snapshot()
        if outputs:
            self._call_loop(lambda: self._deliver_or_die(outputs))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        if self._loop:  # None: no order was sent yet
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(callback)

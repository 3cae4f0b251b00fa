"""The engine's thread, and the door between it and asyncio.

Rule: one thread owns MLX. Requests go in through a bounded inbox, outputs come back with one loop
callback per step; nothing that holds an array crosses. If the thread dies, everything waiting is
told, loudly.
"""

import asyncio
import atexit
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import mlx.core as mx

from mlxspec.engine.models import Call, ModelManager, ModelSlot, Order, Start, total
from mlxspec.engine.pressure import CRITICAL, HOLD_S, MemoryMonitor
from mlxspec.types import (
    Busy,
    Dead,
    Finish,
    ModelInfo,
    Output,
    Request,
    Served,
    Stats,
    UnsupportedModel,
    line_of,
)

log = logging.getLogger("mlxspec")

REST = 0.01  # seconds between two looks at what the disk has done
STOP = 30.0  # seconds that a step may take to end
UNREAD = 1 << 23  # bytes of outputs that a client may leave unread, for each choice
BYTES, EACH = 512, 128  # about what an output takes, and an alternative of its token
IDLE_S = 5.0  # between two looks at the memory of an idle machine


class Stream:
    """The outputs of one request, all choices interleaved; ends after the last choice's finish. It
    holds at most one output per step and choice, and `most` of them that nobody has taken."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._left = request.n
        self.most = request.n * UNREAD // (BYTES + EACH * (request.sampling.logprobs or 0))
        self._queue: asyncio.Queue[Output] = asyncio.Queue()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Output:
        if self._left == 0:
            raise StopAsyncIteration
        output = await self._queue.get()
        self._left -= output.finish is not None
        return output


class Worker:
    """`models` are several, or what loads the only one and returns its engine; that runs on the
    worker's thread. `submit`, `load`, `unload` and `drain` are for one event loop, the rest for any
    thread. Beyond `max_sequences` choices that run, `max_queue` may wait, whichever models they are
    for."""

    def __init__(
        self,
        models: ModelManager | Start,
        *,
        max_sequences: int = 16,
        max_queue: int = 64,
        guard: MemoryMonitor | None = None,
    ) -> None:
        self._fleet = (
            models if isinstance(models, ModelManager) else ModelManager([ModelSlot(models)])
        )
        self._fleet.guard = self._guard = guard
        self._slots, self._max = max_sequences, max_sequences + max_queue
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._wake = threading.Condition()
        self._inbox: deque[Order] = deque()
        self._stopping = self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[
            str, tuple[Stream, set[int]]
        ] = {}  # loop thread; choices not finished yet
        self._calls: dict[str, asyncio.Future[str]] = {}  # loop thread
        self._numbers = itertools.count()
        self._idle: asyncio.Event = asyncio.Event()
        self._seconds = 1.0  # moving average of a request's duration
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._models: Mapping[str, Served] = {}
        self._busy, self._progress = False, time.monotonic()

    # ---- any thread
    # -----------------------------------------------------------------------------------

    def launch(self, meanwhile: Callable[[], object] = lambda: None) -> ModelInfo:
        """Start the thread, do something else, and wait for the default model. Raises what either
        raised."""
        self._thread.start()
        atexit.register(self.stop)  # the interpreter must not end under a thread that uses MLX
        try:
            meanwhile()
        except BaseException:
            self.stop()
            raise
        self._ready.wait()
        if self._error is not None:
            self._thread.join(STOP)
            raise self._error
        return self.info

    @property
    def info(self) -> ModelInfo:
        """The default model's."""
        for served in self._models.values():
            return served.info
        raise Dead("the model is not loaded")

    def models(self) -> Mapping[str, Served]:
        """All that can be asked for, by name, the default first."""
        return self._models

    def loading(self) -> str:
        """The model that is being loaded now, while all others wait; empty: none."""
        return self._fleet.loading

    def alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    def stalled(self) -> float:
        """Seconds since the engine last finished a turn while it had work; 0.0 when idle."""
        return time.monotonic() - self._progress if self._busy else 0.0

    def draining(self) -> bool:
        return self._draining

    def stats(self) -> Stats:
        """Of all models together."""
        return total([served.stats for served in self._models.values()] or [Stats()])

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one choice); unknown ids do nothing. Honoured before the next step is
        planned."""
        self._order((request_id, index))

    def stop(self) -> None:
        """End the thread after its current step, waiting STOP seconds at most; safe to call
        twice."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP)

    def _order(self, order: Order) -> None:
        with self._wake:
            self._inbox.append(order)
            if not self._busy:
                self._busy, self._progress = True, time.monotonic()
            self._wake.notify()

    # ---- event loop
    # -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises Busy when the queue is full or memory very short, Dead when
        draining or without an engine."""
        self._admit(request.model)
        if request.id in self._streams:
            raise ValueError(f"a request with the id {request.id} is running")
        waiting = sum(len(left) for _, left in self._streams.values())
        if waiting + request.n > self._max:
            turns = (waiting + request.n) / max(1, self._slots)
            raise Busy(min(60, max(1, math.ceil(self._seconds * turns))))
        if self._guard and self._guard.poll() >= CRITICAL:
            raise Busy(HOLD_S, "the machine is short of memory")
        self._loop = asyncio.get_running_loop()
        stream = Stream(request)
        self._streams[request.id] = (stream, set(range(request.n)))
        self._idle.clear()
        self._order(request)
        return stream

    async def load(self, name: str, pin: bool | None = None) -> None:
        """Load a model, after all that waits already, and pin it, or no longer. Raises
        UnsupportedModel and Dead."""
        await self._call(name, True, pin)

    async def unload(self, name: str) -> None:
        """Unload a model when it has answered what it took before. Cancelled before that, it
        stays."""
        await self._call(name, False)

    async def _call(self, name: str, load: bool, pin: bool | None = None) -> None:
        self._admit(name)
        self._loop = asyncio.get_running_loop()
        call = Call(f"call {next(self._numbers)}", name, load, pin)
        self._calls[call.id] = future = self._loop.create_future()
        self._order(call)
        try:
            if wrong := await future:
                raise Dead(wrong) if self._draining else UnsupportedModel(wrong)
        finally:
            del self._calls[call.id]
            self._idle.set()
            self.abort(call.id)  # nobody waits for it any more

    def _admit(self, model: str) -> None:
        if not self.alive() or self._stopping or self._draining:
            raise Dead("the engine takes no more requests")
        if model and model not in self._models:
            raise ValueError(f"there is no model {model!r}")

    async def drain(self, timeout: float) -> None:
        """Admit nothing more; wait until all requests have ended, and abort those left after
        `timeout` s."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                while (self._streams or self._calls) and self.alive():
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning(
                "%d requests did not finish in %.0f s; aborted", len(self._streams), timeout
            )
            for name in list(self._streams):
                self.abort(name)
            self._deliver([], [(name, "the server is stopping") for name in self._calls])
            if self.loading():  # that may take longer than anybody waits
                self._deliver(self._ends("abort"), [])

    def _deliver(self, outputs: list[Output], answered: list[tuple[str, str]]) -> None:
        for name, wrong in answered:
            if (future := self._calls.get(name)) and not future.done():
                future.set_result(wrong)
        for output in outputs:
            if (entry := self._streams.get(output.request)) is None:
                continue
            stream, left = entry
            if output.index in left:
                stream._queue.put_nowait(output)
                if output.finish is not None:
                    left.discard(output.index)
            if left and stream._queue.qsize() > stream.most:
                self.abort(output.request)
                for index in left:
                    ended = Output(output.request, index, (), finish="error", fault="client")
                    stream._queue.put_nowait(ended)
                left.clear()
            if not left:
                del self._streams[output.request]
                took = time.monotonic() - (stream.request.created or time.monotonic())
                self._seconds += 0.1 * (took - self._seconds)
        if not self._streams:
            self._idle.set()

    def _hand_over(self, outputs: list[Output], answered: list[tuple[str, str]]) -> None:
        try:
            self._deliver(outputs, answered)
        except Exception as error:  # who waits for what is lost here would wait for ever
            log.critical(
                "the engine thread dies: its outputs cannot be handed over", exc_info=error
            )
            self._error = error
            with self._wake:  # its thread tells them, as its last
                self._stopping = True
                self._wake.notify()

    def _fail(self, reason: str) -> None:
        """Tell everything that waits that nothing will come."""
        for output in self._ends("error", reason):
            self._streams[output.request][0]._queue.put_nowait(output)
        self._streams.clear()
        for future in [each for each in self._calls.values() if not each.done()]:
            future.set_result(f"the engine has ended: {reason}")
        self._idle.set()

    def _ends(self, finish: Finish, error: str = "") -> list[Output]:
        """What would end all that runs."""
        left = [
            (name, index) for name, (_, left) in self._streams.items() for index in sorted(left)
        ]
        return [Output(name, index, (), finish=finish, error=error) for name, index in left]

    # ---- engine thread
    # --------------------------------------------------------------------------------

    def _main(self) -> None:
        fleet = self._fleet
        try:
            fleet.launch()
            self._publish(fleet, [])
            self._ready.set()
            while self._turn(fleet):
                pass
        except BaseException as error:
            self._error = error
            if self._ready.is_set():
                log.critical("the engine thread died", exc_info=error)
        finally:
            why = line_of(self._error) if self._error else "the server is stopping"
            if self._loop is not None:
                self._tell(lambda: self._fail(why))
            self._ready.set()
            fleet.close()
            mx.clear_streams()

    def _turn(self, fleet: ModelManager) -> bool:
        if not fleet.busy:
            fleet.check()
            fleet.look()
        with self._wake:
            while not (self._inbox or fleet.busy or self._stopping or fleet.rest() == 0):
                self._busy = False
                if not self._wake.wait(min(IDLE_S, fleet.rest() or IDLE_S)):
                    fleet.look()
                    self._publish(fleet, [])
            if self._stopping:
                return False
            orders = list(self._inbox)
            self._inbox.clear()
        outputs = [o for order in orders for o in fleet.take(order)]
        if fleet.busy:
            outputs += fleet.step()
        fleet.expire()
        self._publish(fleet, outputs)
        if fleet.rests:
            with self._wake:
                if not (self._inbox or self._stopping):
                    self._wake.wait(REST)
        return True

    def _publish(self, fleet: ModelManager, outputs: list[Output]) -> None:
        self._progress = time.monotonic()
        self._models = fleet.snapshot(self._progress)
        answered, fleet.answered = fleet.answered, []
        if (outputs or answered) and self._loop is not None:
            self._tell(lambda: self._hand_over(outputs, answered))

    def _tell(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop has closed: nobody listens any more
            log.debug("outputs after the event loop closed")

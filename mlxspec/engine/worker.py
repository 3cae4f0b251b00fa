"""The engine thread, and its connection to asyncio.

Rule: one thread owns MLX. Requests go in through an inbox that `submit` bounds, outputs come back
with one loop callback per step; nothing that holds an array crosses. If the thread dies, every
request and command that waits gets an error, and a critical line is logged.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx

from mlxspec import log
from mlxspec.engine.manager import ModelManager
from mlxspec.engine.memory import CRITICAL, HOLD_S
from mlxspec.engine.orders import Ended, LoadCommand, Results
from mlxspec.types import (
    BACKGROUND,
    Busy,
    Dead,
    Finish,
    Interrupted,
    ModelInfo,
    Output,
    Request,
    Served,
    UnsupportedModel,
    line_of,
)

RETRY_S = 5  # after which a client may try again when the queue is full
DRAIN_POLL_S = 0.02
STOP_S = 30.0  # for the step in progress to end
MAX_UNREAD = 1 << 14  # outputs that a client may leave unread, per choice; 0.5 to 3 KB each
QUIET_S = 0.5  # without orders before an idle engine measures: requests come in groups
IDLE_POLL_S = 5.0  # between checks of memory and of the age of idle models
STOPPING = "the server is stopping"


class Mailbox:
    """The outputs of one or more requests, all choices interleaved; ends after the last choice's
    finish. It has at most one output per step and choice, and MAX_UNREAD per choice unread."""

    def __init__(self, choices: int) -> None:
        self.running = choices
        self.limit = choices * MAX_UNREAD
        self.unread = asyncio.Queue[Output]()

    def __aiter__(self) -> "Mailbox":
        return self

    async def __anext__(self) -> Output:
        if not self.running and self.unread.empty():
            raise StopAsyncIteration
        return await self.unread.get()

    def put(self, output: Output) -> None:
        self.unread.put_nowait(output)
        self.running -= output.finish is not None


class EngineThread:
    """Runs a ModelManager on a thread of its own, the engine thread.

    `submit`, `load`, `unload` and `drain` are for one event loop, the rest for any thread. Up to
    `max_sequences` + `max_queue` choices run or wait, of all models together; what is background
    leaves half of `max_sequences` to others.
    """

    def __init__(self, manager: ModelManager, max_sequences: int = 16, max_queue: int = 64) -> None:
        self._manager = manager
        self._limit = max_sequences + max_queue
        self._reserved = max_sequences // 2
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._inbox: SimpleQueue[Callable[[], Results]] = SimpleQueue()
        self._stopping = self.draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of running choices, by request and index; on the loop's thread.
        self._mailboxes: dict[tuple[str, int], Mailbox] = {}
        self._commands: dict[LoadCommand, asyncio.Future[None]] = {}  # likewise
        self._started = threading.Event()  # or failed to
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
        self._started.wait()
        if self._error:
            raise self._error
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
        self._stopping = True
        self.abort("")  # wakes the thread, whose last act is to answer all requests
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- event loop

    def submit(self, *requests: Request) -> Mailbox:
        """Queue requests, all or none; their outputs come in one mailbox.

        Raises Busy when the queue is full or memory very short, Dead when draining or dead.
        """
        choices = [(request.id, index) for request in requests for index in range(request.n)]
        waits = min(request.priority for request in requests) >= BACKGROUND
        reserved = self._reserved if waits and self._mailboxes else 0
        if len(choices) + len(self._mailboxes) > self._limit - reserved:
            raise Busy(RETRY_S)
        if self._manager.monitor.poll() >= CRITICAL:
            raise Busy(HOLD_S, "the machine is short of memory")
        for request in requests:
            self._send(partial(self._manager.submit, request))
        mailbox = Mailbox(len(choices))
        self._mailboxes |= dict.fromkeys(choices, mailbox)
        return mailbox

    def add(self, name: str, model: Any) -> Awaitable[None]:
        """Serve another model, which is loaded on its first request; `model` is for the manager's
        `make_slot`. The future raises as that of `load`."""
        return self._command(LoadCommand(name, False), self._manager.add, model)

    def remove(self, name: str) -> Awaitable[None]:
        """Serve a model no longer. The future raises UnsupportedModel if it has to stay."""
        return self._command(LoadCommand(name, False), self._manager.remove)

    def load(self, name: str, pin: bool | None = None) -> Awaitable[None]:
        """Load a model, after the loads that wait already; pin or unpin it unless `pin` is None.
        The future raises UnsupportedModel and Dead.

        Raises Dead.
        """
        return self._command(LoadCommand(name, True, pin), self._manager.submit)

    def unload(self, name: str) -> Awaitable[None]:
        """Unload a model once its requests have ended; if the future is cancelled before, it stays
        loaded."""
        return self._command(LoadCommand(name, False), self._manager.submit)

    def _command(
        self,
        command: LoadCommand,
        order: Callable[..., Results],
        *args: Any,
    ) -> Awaitable[None]:
        self._send(partial(order, command, *args))
        future = self._commands[command] = asyncio.get_running_loop().create_future()

        def done(_: object) -> None:
            del self._commands[command]
            self._inbox.put(partial(self._manager.withdraw, command))  # it may be cancelled

        future.add_done_callback(done)
        return future

    def _send(self, order: Callable[[], Results]) -> None:
        """Let the engine's thread call `order` before its next step. Raises Dead."""
        if self._stopping or self.draining or not self.alive():
            raise Dead("the engine takes no more requests")
        self._loop = asyncio.get_running_loop()
        self._inbox.put(order)

    async def drain(self, timeout: float) -> None:
        """Admit nothing more; wait until all requests have ended, at most `timeout` seconds, then
        end their streams. The process is expected to stop the engine next."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                while (self._mailboxes or self._commands) and self.alive():
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("aborting %d requests that did not finish", len(self._mailboxes))
            self._end_all("abort", STOPPING)

    def _end_all(self, finish: Finish, error: str) -> None:
        """End all choices and commands that have not ended."""
        self._end(list(self._mailboxes), finish, error=error)
        for command in self._commands:
            self._settle(command, Dead(error))

    def _settle(self, command: LoadCommand, error: Exception | None) -> None:
        future = self._commands.get(command)
        if not future or future.done():
            return
        if error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _end(self, choices: Sequence[tuple[str, int]], finish: Finish, **reason: Any) -> None:
        for request, index in choices:
            self.abort(request, index)
            mailbox = self._mailboxes.pop((request, index))
            mailbox.put(Output(request, index, (), finish=finish, **reason))

    def _deliver(self, outputs: Results) -> None:
        for output in outputs:
            if isinstance(output, Ended):
                error = UnsupportedModel(output.error) if output.error else None
                self._settle(output.command, error)
                continue
            choice = output.request, output.index
            mailbox = self._mailboxes.get(choice)
            if not mailbox:  # it was ended here
                continue
            mailbox.put(output)
            if output.finish:
                del self._mailboxes[choice]
            if mailbox.unread.qsize() > mailbox.limit:
                choices = [choice for choice, box in self._mailboxes.items() if box is mailbox]
                self._end(choices, "error", fault="client")

    def _deliver_or_die(self, outputs: Results) -> None:
        try:
            self._deliver(outputs)
        except Exception as error:  # a client would wait for the lost outputs for ever
            self.die(error)
            self.stop(0.0)

    def die(self, error: BaseException) -> None:
        """Fail all requests, or the launch; for any thread. The first error counts. After one that
        is not an Exception the engine's thread may wait for ever."""
        if self._error is not None:
            return
        self._error = error
        reason = line_of(error)
        if self._started.is_set():
            trace = error if isinstance(error, Exception) else None
            log.critical("the engine thread died: %s", reason, exc_info=trace)
        self._started.set()
        self._call_loop(lambda: self._end_all("error", reason))

    # ---- engine thread

    def _main(self) -> None:
        manager = self._manager
        try:
            manager.launch()
            self._publish([])
            self._started.set()
            with manager.group.together():
                while self._turn(manager):
                    pass
        except BaseException as failure:
            self.die(failure)
        finally:
            self._call_loop(lambda: self._end_all("error", STOPPING))
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
        orders: list[Callable[[], Results]] = []
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
        """Raises Interrupted if an order waits or the thread is to end."""
        self._progress = time.monotonic()
        if not self._inbox.empty():
            raise Interrupted

    def _publish(self, outputs: Results) -> None:
        """Deliver outputs on the loop's thread, and renew what any thread may read."""
        self.models = self._manager.snapshot()
        if outputs:
            self._call_loop(lambda: self._deliver_or_die(outputs))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        if self._loop:  # None: no order was sent yet
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(callback)

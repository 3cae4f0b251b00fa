"""Several models on the engine thread: which are loaded, whose step is next, who waits for a load.

Rule: orders for models that are not loaded are served in the order in which they came. A model
that has to leave finishes what it took and takes nothing new, so nothing starves.
"""

import ctypes
import gc
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx

from mlxspec.engine.engine import Engine, SpecDecodeMetrics, of_process
from mlxspec.engine.pressure import MemoryMonitor
from mlxspec.types import (
    NOW,
    Finish,
    ModelInfo,
    OutOfMemory,
    Output,
    Request,
    Served,
    Stats,
    UserError,
    line_of,
    too_long,
)

log = logging.getLogger("mlxspec")

CLOSE_S = 5.0  # for the disk, before the process ends
UNLOAD_S = 1.0  # for the disk, while other models wait
RETRY_S = 10.0  # for which requests do not repeat a failed load
LOADING_BYTES = 1 << 62  # expected of a load, whose size is known when it is done
UNKNOWN = ModelInfo("", 0, 0, "", 0, 0, 0, 0, 0)

Start = Callable[[], tuple[Engine, ModelInfo]]
# (name, bytes of all loaded models, bytes of those that will be unloaded) -> why the model does
# not fit into memory, or ""
MemoryCheck = Callable[[str, int, int], str]


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Load a model, and pin or unpin it unless `pin` is None; or unload it."""

    id: str
    model: str
    load: bool
    pin: bool | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or one choice of it."""

    id: str
    index: int | None = None


Order = Request | LoadCommand | Abort


@dataclass(slots=True, eq=False)
class ModelSlot:
    """One model, loaded or not."""

    start: Start
    info: ModelInfo = UNKNOWN  # estimated from the files until the first load
    pinned: bool = False
    engine: Engine | None = None
    last_stats: Stats = field(default_factory=Stats)  # before the last unload
    counters: tuple[dict[str, int], SpecDecodeMetrics] | None = None  # the next load continues them
    used: float = 0.0  # time of its last work
    loads: int = 0
    need: int = 0  # bytes that the last load lacked
    error: str = ""  # of the last load
    failed: float = -math.inf  # time of the last load that failed

    @property
    def busy(self) -> bool:
        """Whether a request waits for its steps."""
        return self.engine is not None and self.engine.busy

    @property
    def nbytes(self) -> int:
        return self.info.weight_bytes + self.info.kv_bytes if self.engine is not None else 0

    def stats(self) -> Stats:
        return self.last_stats if self.engine is None else self.engine.stats()


@dataclass(slots=True, eq=False)
class ModelManager:
    """Runs all models on one thread, the first being the default; the worker sees one engine.

    A model without work for `ttl` seconds is unloaded unless it is pinned; 0 means never. With
    `lazy` nothing is loaded at launch, so every slot needs its `info`.
    """

    slots: Sequence[ModelSlot]
    memory_check: MemoryCheck = lambda name, held, freed: ""
    ttl: float = 0.0
    clock: Callable[[], float] = time.monotonic
    monitor: MemoryMonitor | None = None
    lazy: bool = False
    models: dict[str, ModelSlot] = field(default_factory=dict)
    loading: str = ""  # the model being loaded, which blocks the thread; readable from any thread
    answered: list[tuple[str, str]] = field(default_factory=list)  # command ids, each with an error
    _waiting: deque[Request | LoadCommand] = field(default_factory=deque)  # the first is next
    _leaving: list[ModelSlot] = field(default_factory=list)  # to be unloaded for the first
    _announced: bool = False  # a snapshot has shown that model as loading
    _disk_bytes: int = 0
    _turns: deque[ModelSlot] = field(default_factory=deque)

    def launch(self) -> None:
        """Load the default model, unless `lazy`. Raises what loading raises."""
        if not self.lazy:
            self._start(self.slots[0])
        self.models = {slot.info.name: slot for slot in self.slots}
        self._turns = deque(self.slots)

    def _engines(self) -> list[Engine]:
        return [slot.engine for slot in self.slots if slot.engine is not None]

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(engine.active for engine in self._engines())

    @property
    def waits_for_disk(self) -> bool:
        """Whether a step would do nothing until the disk has answered."""
        active = [engine for engine in self._engines() if engine.active]
        return bool(active) and not self._waiting and all(engine.rests for engine in active)

    def close(self) -> None:
        """Drop all models; the thread ends."""
        for slot in self.slots:
            if slot.engine is not None:
                slot.engine.close(CLOSE_S / len(self.slots))
                slot.engine = None

    def poll(self) -> None:
        """While idle: check the engines' invariants, and evict caches if memory is short."""
        for engine in self._engines():
            engine.check()
            engine.poll_memory()

    def snapshot(self, progress: float) -> dict[str, Served]:
        """All models by name, the default first."""
        for engine in self._engines():
            if engine.offloader is not None:  # all share one directory
                self._disk_bytes = engine.offloader.disk.stats().bytes
                break
        served = {}
        coming = self._slot(self._waiting[0]) if self._waiting else None
        for name, slot in self.models.items():
            stats = replace(slot.stats(), progress=progress, disk_bytes=self._disk_bytes)
            status: Literal["loaded", "loading", "unloaded"] = "loaded"
            if slot.engine is None:
                stats = replace(stats, **of_process(self.monitor))
                status = "loading" if slot is coming else "unloaded"
            pinned, error = slot.pinned, slot.error
            served[name] = Served(slot.info, status, stats, pinned, slot.loads, error, slot.used)
        return served

    # ---- orders

    def submit(self, order: Order) -> list[Output]:
        """Start an order, or queue it until its model is loaded."""
        if isinstance(order, Abort):
            return self._abort(order)
        first = not self._waiting
        outputs = self._dispatch(order)
        if first:
            outputs += self._plan()
        return outputs

    def _dispatch(self, order: Request | LoadCommand) -> list[Output]:
        slot = self._slot(order)
        ready = slot.engine is not None and slot not in self._leaving
        if isinstance(order, Request):
            if ready:
                return self._add(slot, order)
            if self.clock() - slot.failed < RETRY_S:
                return _finish(order, "error", error=slot.error, fault="model")
        elif ready if order.load else slot.engine is None:
            self._answer(order)
            return []
        self._waiting.append(order)
        return []

    def _slot(self, order: Request | LoadCommand) -> ModelSlot:
        return self.models[order.model] if order.model else self.slots[0]

    def _add(self, slot: ModelSlot, request: Request) -> list[Output]:
        """Hand a request to its engine; the limits known before the load may have been wrong."""
        assert slot.engine is not None
        slot.used = self.clock()
        room = slot.info.context - len(request.prompt)
        if request.grammar and request.masks not in (0, slot.info.vocab):
            why = f"the vocabulary of {slot.info.name} was unknown; send the request again"
            return _finish(request, "error", error=why, fault="model")
        if room <= 0:
            why = too_long(len(request.prompt), slot.info.context)
            return _finish(request, "error", error=why, fault="prompt")
        try:
            slot.engine.add(replace(request, max_tokens=min(request.max_tokens, room)))
        except UserError as error:
            return _finish(request, "error", error=str(error))
        return []

    def _answer(self, command: LoadCommand, error: str = "") -> None:
        slot = self._slot(command)
        if command.pin is not None and not error:
            slot.pinned = command.pin
        slot.used = self.clock()
        self.answered.append((command.id, error))

    def _abort(self, abort: Abort) -> list[Output]:
        found = next((order for order in self._waiting if order.id == abort.id), None)
        if found is None:
            return [o for engine in self._engines() for o in engine.abort(abort.id, abort.index)]
        first = found is self._waiting[0]
        self._waiting.remove(found)
        outputs = _finish(found, "abort") if isinstance(found, Request) else []
        return outputs + self._resume() if first else outputs

    # ---- loads and unloads

    def _resume(self) -> list[Output]:
        """Dispatch all waiting orders again, as the first was served or given up."""
        waiting, self._waiting, self._leaving = self._waiting, deque(), []
        outputs = [output for order in waiting for output in self._dispatch(order)]
        return outputs + self._plan()

    def _plan(self) -> list[Output]:
        """Choose the models that leave for the first waiting order."""
        self._leaving, self._announced = [], False
        if not self._waiting:
            return []
        order = self._waiting[0]
        slot = self._slot(order)
        if not _needs_load(order):
            self._leaving = [slot]
            return []
        candidates = self._by_last_use()
        while reason := self._lacks_memory(slot):
            if not candidates:
                return self._fail(slot, reason)
            self._leaving.append(candidates.pop(0))
        return []

    def _lacks_memory(self, slot: ModelSlot) -> str:
        held, freed = (sum(s.nbytes for s in slots) for slots in (self.slots, self._leaving))
        return self.memory_check(slot.info.name, held, freed)

    def _by_last_use(self) -> list[ModelSlot]:
        """Models that may be unloaded: idle before busy, least recently used first."""
        loaded = [slot for slot in self.slots if slot.engine is not None and not slot.pinned]
        return sorted(loaded, key=lambda slot: (slot.busy, slot.used))

    def step(self) -> list[Output]:
        """Do a step of the next active model; or, once announced, what the first waiting order
        needs."""
        if self._waiting and self._announced and not any(slot.busy for slot in self._leaving):
            return self._serve_first()
        self._announced = True
        for _ in self.slots:
            slot = self._turns[0]
            self._turns.rotate(-1)
            if slot.engine is not None and slot.engine.active:
                if slot.busy:
                    slot.used = self.clock()
                return slot.engine.step()
        return []

    def _serve_first(self) -> list[Output]:
        leaving, self._leaving = self._leaving, []
        for slot in leaving:
            self._unload(slot)
        if not _needs_load(self._waiting[0]):
            return self._resume()
        if leaving:
            return []  # a snapshot shows them as unloaded
        slot = self._slot(self._waiting[0])
        reason = self._load(slot)
        if not reason:
            return self._resume()
        _release_memory()  # only now, because the traceback held arrays
        if slot.need and self._lacks_memory(slot):
            return self._plan()  # now that the need is known, others may leave
        return self._fail(slot, reason)

    def _load(self, slot: ModelSlot) -> str:
        """Load a model; why it failed, or ""."""
        self.loading = slot.info.name
        log.info("%s: loading", self.loading)
        try:
            self._start(slot)
        except UserError as error:
            if isinstance(error, OutOfMemory):
                slot.need = error.need
            return str(error)
        except Exception as error:  # the model's own code, or MLX without memory
            log.exception("%s failed to load", self.loading)
            return line_of(error)
        finally:
            self.loading = ""
        return ""

    def _start(self, slot: ModelSlot) -> None:
        self._expect(LOADING_BYTES)
        try:
            slot.engine, info = slot.start()
        finally:
            self._expect(-LOADING_BYTES)
        slot.engine.monitor = self.monitor
        if slot.counters is not None:
            slot.engine.counters, slot.engine.drafts = slot.counters
        slot.info = replace(info, created=slot.info.created or info.created)
        slot.used, slot.error, slot.failed = self.clock(), "", -math.inf
        slot.loads += 1
        self._expect(slot.nbytes)

    def _expect(self, size: int) -> None:
        if self.monitor is not None:
            self.monitor.reserve(size)

    def _fail(self, slot: ModelSlot, reason: str) -> list[Output]:
        """Answer the command that waits first; requests are refused for RETRY_S."""
        slot.error, slot.failed = f"{slot.info.name} cannot be loaded: {reason}", self.clock()
        log.error("%s", slot.error)
        first = self._waiting[0]
        if isinstance(first, LoadCommand):
            self._waiting.popleft()
            self._answer(first, slot.error)
        return self._resume()

    def _unload(self, slot: ModelSlot) -> None:
        assert slot.engine is not None
        zeros: dict[str, Any] = dict.fromkeys(NOW, 0)
        slot.last_stats = replace(slot.stats(), seated=(), **zeros)
        slot.counters = (slot.engine.counters, slot.engine.drafts)
        self._expect(-slot.nbytes)
        others_wait = any(other.busy for other in self.slots)
        slot.engine.close(0.0 if others_wait else UNLOAD_S)
        slot.engine = None
        _release_memory()
        log.info("%s: unloaded", slot.info.name)

    def seconds_to_unload(self) -> float:
        """Seconds until an idle model has reached its `ttl`; infinite if none will."""
        idle = [slot.used for slot in self._by_last_use() if not slot.busy]
        if not self.ttl or not idle:
            return math.inf
        return max(0.0, self.ttl + idle[0] - self.clock())

    def unload_idle(self) -> None:
        """Unload all models that have reached their `ttl`."""
        while self.seconds_to_unload() == 0:
            self._unload(self._by_last_use()[0])


def _needs_load(order: Request | LoadCommand) -> bool:
    return isinstance(order, Request) or order.load


def _finish(request: Request, finish: Finish, **reason: Any) -> list[Output]:
    """The final output of each choice."""
    return [Output(request.id, i, (), finish=finish, **reason) for i in range(request.n)]


def _release_memory() -> None:
    """Give back what nobody refers to: models are full of cycles, MLX keeps buffers, glibc keeps
    pages."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)

"""Several models on the engine thread: which are loaded, whose step is next, who waits for a load.

Rule: orders for models that are not loaded are served in the order in which they came. A model
that has to leave finishes what it took and takes nothing new, so nothing starves.
"""

import gc
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx

from mlxspec.engine.engine import Engine, SpecDecodeMetrics
from mlxspec.engine.pressure import MemoryMonitor
from mlxspec.model import meter
from mlxspec.types import (
    Finish,
    ModelInfo,
    OutOfMemory,
    Output,
    Request,
    Served,
    Stats,
    UserError,
    line_of,
)

log = logging.getLogger("mlxspec")

CLOSE_S = 2.0  # for a model's disk cache, before the process ends
UNLOAD_S = 0.5  # likewise, while other models wait
RETRY_S = 10.0  # for which requests do not repeat a failed load
LOADING_BYTES = 1 << 62  # expected of a load, whose size is known when it is done
UNKNOWN = ModelInfo("", 0, 0, "", 0, 0, 0, 0, 0)

Start = Callable[[], tuple[Engine, ModelInfo]]


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Load a model, and pin or unpin it unless `pin` is None; or unload it. Answered by one output,
    with finish "stop" or "error"."""

    id: str
    model: str
    load: bool
    pin: bool | None = None
    n: int = 1


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or one choice of it; or a command that waits."""

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
    leaving: bool = False  # unloaded when it is idle, for the order that waits first
    last_stats: Stats = field(default_factory=Stats)  # before the last unload
    counters: Counter[str] = field(default_factory=Counter)  # of all loads, like `spec_metrics`
    spec_metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    used: float = 0.0  # time of its last work
    loads: int = 0
    need: int = 0  # bytes that the last load lacked
    error: str = ""  # of the last load
    failed: float = -math.inf  # time of the last load that failed

    @property
    def busy(self) -> bool:
        """Whether a request waits for its steps."""
        return bool(self.engine and self.engine.busy)

    @property
    def nbytes(self) -> int:
        return self.info.weight_bytes + self.info.kv_bytes if self.engine else 0


@dataclass(slots=True, eq=False)
class ModelManager:
    """Runs all models on one thread, the first being the default; the worker sees one engine.

    A model without work for `ttl` seconds is unloaded unless it is pinned; 0 means never. With
    `lazy` nothing is loaded at launch, so every slot needs its `info`.
    """

    slots: Sequence[ModelSlot]
    # (name, bytes of all loaded models, bytes of those that will be unloaded) -> why the model does
    # not fit into memory, or ""
    memory_check: Callable[[str, int, int], str] = lambda name, held, freed: ""
    ttl: float = 0.0
    clock: Callable[[], float] = time.monotonic
    monitor: MemoryMonitor | None = None
    lazy: bool = False
    loading: str = ""  # the model being loaded, which blocks the thread; readable from any thread
    _waiting: deque[Request | LoadCommand] = field(default_factory=deque)  # the first is next
    _disk_bytes: int = 0
    _turns: deque[ModelSlot] = field(default_factory=deque)

    def launch(self) -> None:
        """Load the default model, unless `lazy`. Raises what loading raises."""
        if not self.lazy:
            self._start(self.slots[0])
        self._turns = deque(self.slots)

    def _engines(self) -> list[Engine]:
        return [slot.engine for slot in self.slots if slot.engine]

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(engine.active for engine in self._engines())

    @property
    def waits_for_disk(self) -> bool:
        """Whether a step of a busy manager would do nothing until the disk has answered."""
        engines = self._engines()
        return not self._waiting and all(
            engine.waits_for_disk for engine in engines if engine.active
        )

    def close(self) -> None:
        """Drop all models; the thread ends."""
        for slot in self.slots:
            if slot.engine:
                slot.engine.close(CLOSE_S)
                slot.engine = None

    def poll(self) -> None:
        """While idle: check the engines' invariants, and evict caches if memory is short."""
        for engine in self._engines():
            engine.check()
            engine.poll_memory()

    def snapshot(self) -> dict[str, Served]:
        """All models by name, the default first."""
        for engine in self._engines():
            if engine.offloader:  # all share one directory
                self._disk_bytes = engine.offloader.disk.stats().bytes
        active, cached = meter.held()
        process: dict[str, Any] = dict(
            disk_bytes=self._disk_bytes,
            mlx_active_bytes=active,
            mlx_cache_bytes=cached,
            live_arrays=meter.arrays(),
        )
        if self.monitor:
            process["memory_pressure"] = self.monitor.level
            process["footprint_bytes"] = self.monitor.footprint
        coming = self._slot(self._waiting[0]) if self._waiting else None
        served = {}
        for slot in self.slots:
            status: Literal["loaded", "loading", "unloaded"] = "unloaded"
            stats = slot.last_stats
            if slot.engine:
                status, stats = "loaded", slot.engine.stats()
            elif slot is coming:
                status = "loading"
            stats = replace(stats, **process)
            served[slot.info.name] = Served(
                slot.info, status, stats, slot.pinned, slot.loads, slot.error, slot.used
            )
        return served

    # ---- orders

    def submit(self, order: Order) -> list[Output]:
        """Start an order, or queue it until its model is loaded."""
        if isinstance(order, Abort):
            return self._abort(order)
        outputs = self._dispatch(order)
        if len(self._waiting) == 1:
            outputs += self._plan()
        return outputs

    def _dispatch(self, order: Request | LoadCommand) -> list[Output]:
        slot = self._slot(order)
        ready = slot.engine and not slot.leaving
        if isinstance(order, LoadCommand):
            if ready if order.load else not slot.engine:
                if order.pin is not None:
                    slot.pinned = order.pin
                slot.used = self.clock()
                return _finish(order, "stop")
        elif ready:
            return self._add(slot, order)
        elif self.clock() - slot.failed < RETRY_S:
            return _finish(order, "error", error=slot.error, fault="model")
        self._waiting.append(order)
        return []

    def _slot(self, order: Request | LoadCommand) -> ModelSlot:
        by_name = {slot.info.name: slot for slot in self.slots}
        return by_name[order.model] if order.model else self.slots[0]

    def _add(self, slot: ModelSlot, request: Request) -> list[Output]:
        """Hand a request to its engine; the limits known before the load may have been wrong."""
        assert slot.engine
        slot.used = self.clock()
        if request.grammar and request.grammar_vocab not in (0, slot.info.vocab):
            why = f"the vocabulary of {slot.info.name} was unknown; send the request again"
            return _finish(request, "error", error=why, fault="model")
        try:
            slot.engine.add(request)
        except UserError as error:
            return _finish(request, "error", error=str(error), fault="prompt")
        return []

    def _abort(self, abort: Abort) -> list[Output]:
        outputs = []
        for engine in self._engines():
            outputs += engine.abort(abort.id, abort.index)
        for order in list(self._waiting):
            if order.id == abort.id:
                first = order is self._waiting[0]
                self._waiting.remove(order)
                outputs += _finish(order, "abort")
                if first:
                    outputs += self._resume()
        return outputs

    # ---- loads and unloads

    def _resume(self) -> list[Output]:
        """Dispatch all waiting orders again, as the first was served or given up."""
        waiting, self._waiting = self._waiting, deque()
        for slot in self.slots:
            slot.leaving = False
        outputs = []
        for order in waiting:
            outputs += self._dispatch(order)
        return outputs + self._plan()

    def _plan(self) -> list[Output]:
        """Choose the models that leave for the first waiting order."""
        if not self._waiting:
            return []
        order = self._waiting[0]
        slot = self._slot(order)
        if isinstance(order, LoadCommand) and not order.load:
            slot.leaving = True
            return []
        candidates = self._by_last_use()
        while reason := self._lacks_memory(slot):
            if not candidates:
                return self._fail(slot, reason)
            candidates.pop(0).leaving = True
        return []

    def _lacks_memory(self, slot: ModelSlot) -> str:
        held = sum(each.nbytes for each in self.slots)
        freed = sum(each.nbytes for each in self.slots if each.leaving)
        return self.memory_check(slot.info.name, held, freed)

    def _by_last_use(self) -> list[ModelSlot]:
        """Models that may be unloaded: idle before busy, least recently used first."""
        loaded = [slot for slot in self.slots if slot.engine and not slot.pinned]
        return sorted(loaded, key=lambda slot: (slot.busy, slot.used))

    def step(self) -> list[Output]:
        """Do what the first waiting order needs once nothing that leaves is busy, else a step of
        the next active model."""
        leaving = [slot for slot in self.slots if slot.leaving]
        if self._waiting and not any(slot.busy for slot in leaving):
            if not leaving:
                return self._load(self._slot(self._waiting[0]))
            for slot in leaving:
                self._unload(slot)
            return self._resume()  # a load comes next: a snapshot shows them as unloaded before
        for _ in self.slots:
            slot = self._turns[0]
            self._turns.rotate(-1)
            if slot.engine and slot.engine.active:
                if slot.busy:
                    slot.used = self.clock()
                return slot.engine.step()
        return []

    def _load(self, slot: ModelSlot) -> list[Output]:
        """Load a model for the orders that wait for it."""
        self.loading = slot.info.name
        log.info("%s: loading", self.loading)
        reason = ""
        try:
            self._start(slot)
        except OutOfMemory as error:
            reason, slot.need = str(error), error.need
        except UserError as error:
            reason = str(error)
        except Exception as error:  # the model's own code, or MLX without memory
            log.exception("%s failed to load", self.loading)
            reason = line_of(error)
        self.loading = ""
        if not reason:
            return self._resume()
        _release_memory()  # only now, because the traceback held arrays
        if slot.need and self._lacks_memory(slot):
            return self._plan()  # now that the need is known, others may leave
        return self._fail(slot, reason)

    def _start(self, slot: ModelSlot) -> None:
        self._expect(LOADING_BYTES)
        try:
            slot.engine, info = slot.start()
        finally:
            self._expect(-LOADING_BYTES)
        slot.engine.monitor = self.monitor
        slot.engine.counters, slot.engine.spec_metrics = slot.counters, slot.spec_metrics
        slot.info = replace(info, created=slot.info.created or info.created)
        slot.used, slot.error, slot.failed = self.clock(), "", -math.inf
        slot.loads += 1
        self._expect(slot.nbytes)

    def _expect(self, size: int) -> None:
        if self.monitor:
            self.monitor.reserve(size)

    def _fail(self, slot: ModelSlot, reason: str) -> list[Output]:
        """Answer all that waits for this load; requests are refused for RETRY_S."""
        slot.error, slot.failed = f"{slot.info.name} cannot be loaded: {reason}", self.clock()
        log.error("%s", slot.error)
        outputs = []
        for order in [each for each in self._waiting if self._slot(each) is slot]:
            if isinstance(order, Request) or order.load:
                self._waiting.remove(order)
                outputs += _finish(order, "error", error=slot.error, fault="model")
        return outputs + self._resume()

    def _unload(self, slot: ModelSlot) -> None:
        assert slot.engine
        stats = slot.engine.stats()
        slot.last_stats = replace(stats, blocks_cached=0, blocks_free=0, states=0, step_seconds=0)
        self._expect(-slot.nbytes)
        slot.engine.close(UNLOAD_S)
        slot.engine = None
        _release_memory()
        log.info("%s: unloaded", slot.info.name)

    def unload_idle(self) -> None:
        """Unload all models that have reached their `ttl`."""
        if not self.ttl or self._waiting:
            return
        for slot in self._by_last_use():
            if not slot.busy and self.clock() - slot.used >= self.ttl:
                self._unload(slot)


def _finish(order: Request | LoadCommand, finish: Finish, **reason: Any) -> list[Output]:
    """The final output of each choice."""
    return [Output(order.id, i, (), finish=finish, **reason) for i in range(order.n)]


def _release_memory() -> None:
    """Give back what nobody refers to: models are full of cycles, and MLX keeps buffers."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()

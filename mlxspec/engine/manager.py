"""Several models on the engine thread: which are loaded, which one steps next, loads and evictions.

Rule: orders for models that are not loaded are served in the order in which they came. A model that
is to be unloaded finishes its requests and takes no new ones, so no order starves.
"""

import gc
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlxspec import log
from mlxspec.engine import memory
from mlxspec.engine.engine import Engine, SpecDecodeMetrics
from mlxspec.engine.orders import Ended, LoadCommand, Order, Results, end_of
from mlxspec.model import meter
from mlxspec.model.parallel import ALONE, ProcessGroup
from mlxspec.types import (
    Check,
    ModelInfo,
    OutOfMemory,
    Request,
    Served,
    Stats,
    UserError,
    line_of,
)

CLOSE_S = 2.0  # for a model's disk cache to finish writing, before the process ends
UNLOAD_S = 0.5  # likewise, while other models wait
LARGE = 0.6  # of the machine's memory: macOS was seen to page out larger weights
RELEASE_S = 4.0  # of idleness, after which buffers are freed that the next step would use again
MAX_SKIPPED_STEPS = 8  # steps of models with more important requests before one of another's
RELOAD_S = 10.0  # after a failed load; until then requests are answered with its error

Load = Callable[[], tuple[Engine, ModelInfo]]


@dataclass(slots=True, eq=False)
class ModelSlot:
    """One model, loaded or not. `load` loads it."""

    load: Load
    info: ModelInfo  # estimated from the files until the first load
    pinned: bool = False  # never evicted, nor unloaded when idle
    engine: Engine | None = None
    last_stats: Stats = field(default_factory=Stats)  # before the last unload
    counters: Counter[str] = field(default_factory=Counter)  # of all loads, like `spec_metrics`
    spec_metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    used: float = 0.0  # time of its last work
    loads: int = 0
    need: int = 0  # bytes that must be free, by the last load that ran out of memory
    error: str = ""  # why the last load failed
    failed: float = 0.0  # time of that error
    passed: int = 0  # steps of others since its own

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.engine and self.engine.busy)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and full pools, if loaded."""
        return self.info.weight_bytes + self.info.kv_bytes if self.engine else 0


@dataclass(slots=True, eq=False)
class ModelManager:
    """Runs all models on one thread; the first is the default. Orders go in by `submit`, outputs
    come from `submit` and `step`.

    An order for a model that is loaded is passed on at once. Others wait; for the first that waits,
    `step` unloads the models in `_leaving` once they are idle, then loads its model. A model
    without work for `ttl` seconds is unloaded unless it is pinned; 0 means never. With
    `load_on_request` no model is loaded at launch.
    """

    slots: list[ModelSlot]
    # (model, bytes of the loaded ones that stay) -> why it does not fit into memory, or ""
    memory_check: Callable[[ModelSlot, int], str] = lambda slot, staying: ""
    ttl: float = 0.0
    clock: Callable[[], float] = time.monotonic
    monitor: memory.MemoryMonitor = field(default_factory=memory.MemoryMonitor)
    load_on_request: bool = False
    group: ProcessGroup = ALONE
    wired: bool = False  # wire the weights of the first model that is loaded
    # (what the server resolved of a model) -> its slot; raises UserError
    make_slot: Callable[[Any], ModelSlot] | None = None
    loading: str = ""  # the model being loaded, which blocks the thread; readable from any thread
    _waiting: deque[Order] = field(default_factory=deque)  # the first is next
    _leaving: list[ModelSlot] = field(default_factory=list)  # to unload for the first that waits
    _turns: deque[ModelSlot] = field(default_factory=deque)  # the first may step next

    def launch(self) -> None:
        """Load the default model, unless `load_on_request`. Raises what loading raises."""
        if not self.load_on_request:
            self._load_now(self.slots[0])
        self._turns = deque(self.slots)

    def _engines(self) -> list[Engine]:
        return [slot.engine for slot in self.slots if slot.engine]

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(engine.active for engine in self._engines())

    @property
    def has_idle_work(self) -> bool:
        """Whether an engine has work for idle moments."""
        return any(engine.idle_work for engine in self._engines())

    def work_idle(self, check: Check) -> None:
        """Continue the idle work of all engines until `check` raises Interrupted. Work that fails
        is dropped until the next start."""
        for engine in self._engines():
            try:
                with self.group.together():
                    engine.work_idle(check)
            except Exception:
                log.exception("measuring failed; the next start tries it again")
                engine.idle_work = None

    def close(self) -> None:
        """Drop all models; the thread ends."""
        for slot in self.slots:
            if slot.engine:
                slot.engine.close(CLOSE_S)
                slot.engine = None
        self.group.end()

    def poll(self) -> None:
        """While idle: check the engines' invariants, evict caches if memory is short, and after
        RELEASE_S free the buffers that steps left behind."""
        self.group.poll()
        if meter.held()[1] and self.clock() - max(slot.used for slot in self.slots) > RELEASE_S:
            meter.trim()
        for engine in self._engines():
            engine.check()
            engine.housekeep()

    def snapshot(self) -> dict[str, Served]:
        """All models by name, the default first."""
        active, cached = meter.held()
        next_slot = self._slot(self._waiting[0]) if self._waiting else None
        served = {}
        for slot in self.slots:
            if slot.engine and slot.engine.exact:
                slot.info = replace(slot.info, exact=slot.engine.exact)
            stats = replace(
                slot.engine.stats() if slot.engine else slot.last_stats,
                mlx_active_bytes=active,
                mlx_cache_bytes=cached,
                live_arrays=meter.arrays(),
                memory_pressure=self.monitor.level,
                footprint_bytes=self.monitor.footprint,
                ranks=self.group.size,
            )
            served[slot.info.name] = Served(
                slot.info,
                "loaded" if slot.engine else "loading" if slot is next_slot else "unloaded",
                stats,
                pinned=slot.pinned,
                loads=slot.loads,
                error=slot.error,
            )
        return served

    # ---- which models there are

    def add(self, command: LoadCommand, model: Any) -> Results:
        """Serve another model, not loaded yet; `model` is for `make_slot`. It may be there
        already."""
        if not self._find(command.model):
            try:
                slot = self.make_slot(model) if self.make_slot else None
            except UserError as error:
                return [Ended(command, str(error))]
            if not slot:
                return [Ended(command, "this server takes no more models; restart it with them")]
            self.slots.append(slot)
            self._turns.append(slot)
        return [Ended(command)]

    def remove(self, command: LoadCommand) -> Results:
        """Serve a model no longer, unless it is the first, loaded, or about to be."""
        slot = self._find(command.model)
        if not slot:
            return [Ended(command)]
        if slot is self.slots[0]:
            return [Ended(command, f"{command.model} is the server's first model, and stays")]
        if slot.engine or any(self._slot(order) is slot for order in self._waiting):
            return [Ended(command, f"{command.model} is loaded; unload it first")]
        self.slots.remove(slot)
        self._turns.remove(slot)
        return [Ended(command)]

    # ---- orders

    def submit(self, order: Order) -> Results:
        """Start an order, or queue it until its model is loaded."""
        if not self._find(order.model):
            gone = f"{order.model} is no longer served; choose another model"
            return end_of(order, "error", error=gone, fault="model")
        outputs = self._dispatch(order)
        return outputs if self._leaving else outputs + self._choose_evictions()

    def _dispatch(self, order: Order) -> Results:
        slot = self._slot(order)
        ready = None if slot in self._leaving else slot.engine
        if isinstance(order, LoadCommand):
            if ready if order.load else not slot.engine:
                if order.pin is not None:
                    slot.pinned = order.pin
                slot.used = self.clock()
                return [Ended(order)]
        elif ready:
            slot.used = self.clock()
            try:
                ready.add(order)
            except UserError as error:  # loading may have changed the limits it was checked with
                return end_of(order, "error", error=str(error), fault="prompt")
            return []
        elif slot.error and self.clock() - slot.failed < RELOAD_S:
            return end_of(order, "error", error=slot.error, fault="model")
        self._waiting.append(order)
        return []

    def _slot(self, order: Order) -> ModelSlot:
        slot = self._find(order.model)
        assert slot
        return slot

    def _find(self, model: str) -> ModelSlot | None:
        return next((slot for slot in self.slots if model in ("", slot.info.name)), None)

    def abort(self, id: str, index: int | None = None) -> Results:
        """End a request, or one choice of it; all of one that waits for its model."""
        outputs: Results = []
        for engine in self._engines():
            outputs += engine.abort(id, index)
        for order in self._waiting:
            if isinstance(order, Request) and order.id == id:
                return outputs + end_of(order, "abort") + self.withdraw(order)
        return outputs

    def withdraw(self, order: Order) -> Results:
        """Forget an order, if it waits."""
        if order not in self._waiting:
            return []
        first = order is self._waiting[0]
        self._waiting.remove(order)
        # Those behind another one go on waiting, or the first would never have its turn.
        return self._dispatch_waiting() if first else []

    def _dispatch_waiting(self) -> Results:
        """Dispatch all waiting orders again, as the first was answered or can be."""
        waiting, self._waiting = self._waiting, deque()
        self._leaving = []
        outputs: Results = []
        for order in waiting:
            outputs += self._dispatch(order)
        return outputs + self._choose_evictions()

    # ---- loads and unloads

    def _choose_evictions(self) -> Results:
        """Choose the models to unload for the first waiting order: no more than its model needs,
        idle before busy, least recently used first. If all are not enough, fail the order."""
        if not self._waiting:
            return []
        order = self._waiting[0]
        slot = self._slot(order)
        if isinstance(order, LoadCommand) and not order.load:
            self._leaving = [slot]
            return []
        loaded = [slot for slot in self.slots if slot.engine and not slot.pinned]
        candidates = sorted(loaded, key=lambda slot: (slot.busy, slot.used))
        while reason := self._lacks_memory(slot):
            if not candidates:
                return self._fail(slot, reason)
            self._leaving.append(candidates.pop(0))
        return []

    def _lacks_memory(self, slot: ModelSlot) -> str:
        """Why a model would not fit after the chosen evictions, or ""."""
        staying = sum(each.nbytes for each in self.slots if each not in self._leaving)
        return self.memory_check(slot, staying)

    def step(self) -> Results:
        """Unload or load for the first waiting order, if no model in `_leaving` is busy; else do a
        step of the next active model."""
        if self._waiting and not any(slot.busy for slot in self._leaving):
            if not self._leaving:
                return self._load(self._slot(self._waiting[0]))
            for slot in self._leaving:
                self._unload(slot)
            return self._dispatch_waiting()  # the load is the next step: see `snapshot`
        active = [(slot, slot.engine) for slot in self._turns if slot.engine and slot.engine.active]
        best = min((engine.priority for _, engine in active), default=0)
        for slot, engine in active:
            if engine.priority > best and slot.passed < MAX_SKIPPED_STEPS:
                continue
            for other, _ in active:
                other.passed += 1
            slot.passed = 0
            slot.used = self.clock()
            self._turns.remove(slot)
            self._turns.append(slot)
            if not engine.busy:  # it only saves blocks, which a slow disk may hold up
                self.group.poll()
            alone = not any(other.busy for _, other in active if other is not engine)
            return [*engine.step(alone)]
        return []

    def _load(self, slot: ModelSlot) -> Results:
        """Load a model and dispatch the orders that wait for it, or answer that it failed."""
        self.loading, reason = slot.info.name, ""
        try:
            self._load_now(slot)
        except OutOfMemory as error:
            reason, slot.need = str(error), error.need
        except UserError as error:
            reason = str(error)
        except Exception as error:  # the model's own code, or MLX without memory
            log.exception("%s failed to load", self.loading)
            reason = line_of(error)
        self.loading = ""
        if not reason:
            return self._dispatch_waiting()
        release_memory()  # only now, because the traceback held arrays
        if slot.need and self._lacks_memory(slot):
            return self._choose_evictions()  # now that the need is known
        return self._fail(slot, reason)

    def _load_now(self, slot: ModelSlot) -> None:
        slot.engine, info = slot.load()
        slot.engine.monitor = self.monitor
        slot.engine.counters = slot.counters
        slot.engine.spec_metrics = slot.spec_metrics
        slot.info = replace(info, created=slot.info.created)
        slot.used = self.clock()
        slot.error = ""
        slot.loads += 1
        if self.wired:
            if sum(each.loads for each in self.slots) == 1:
                meter.wire(slot.nbytes)
        elif memory.DARWIN and info.weight_bytes > LARGE * memory.total():
            log.warning(
                "%s takes over 60 %% of memory and is not wired: macOS may page weights out, which"
                " makes it crawl; docs/memory.md says what --wired on costs",
                info.name,
            )

    def _fail(self, slot: ModelSlot, reason: str) -> Results:
        """Answer all orders that wait for this load."""
        slot.error = f"{slot.info.name} cannot be loaded: {reason}"
        slot.failed = self.clock()
        log.error("%s", slot.error)
        outputs: Results = []
        for order in [order for order in self._waiting if self._slot(order) is slot]:
            self._waiting.remove(order)
            outputs += end_of(order, "error", error=slot.error, fault="model")
        return outputs + self._dispatch_waiting()

    def _unload(self, slot: ModelSlot) -> None:
        assert slot.engine
        slot.last_stats = replace(
            slot.engine.stats(),
            blocks_cached=0,
            blocks_free=0,
            states=0,
            step_seconds=0,
            disk_bytes=0,
        )
        slot.engine.close(UNLOAD_S)
        slot.engine = None
        release_memory()
        log.info("%s: unloaded", slot.info.name)

    def unload_idle(self) -> None:
        """Unload the models that were idle for `ttl` seconds."""
        if not self.ttl or self._waiting:
            return
        for slot in self.slots:
            idle = slot.engine and not slot.busy and self.clock() - slot.used >= self.ttl
            if idle and not slot.pinned:
                self._unload(slot)


def release_memory() -> None:
    """Free memory that nothing references: models are full of cycles, and MLX keeps buffers."""
    gc.unfreeze()  # the start froze objects that may be part of them
    gc.collect()
    mx.synchronize()
    meter.trim()

"""Several models on the engine's thread: which are in memory, whose step is next, what waits for a
load.

Rule: what waits is served in the order in which it came. A model that has to leave lets finish what
it took before and takes nothing new, so a swap serves all that waited for it, and nobody waits for
ever.
"""

import ctypes
import gc
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import zip_longest
from typing import Any, Literal

import mlx.core as mx

from mlxspec.engine.engine import Engine, of_process
from mlxspec.engine.pressure import MemoryMonitor
from mlxspec.types import (
    NOW,
    PROCESS,
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
LOADING = 1 << 62  # bytes: what a load takes is known when it is done
UNLOAD_S = 1.0  # for the disk, while other models wait
RETRY_S = 10.0  # after a load that failed, in which requests do not make it try again
KEYS = {"drafts": 2, "depths": 1}  # of a table in Stats, how many columns name the row
UNKNOWN = ModelInfo("", 0, 0, "", 0, 0, 0, 0, 0)

Start = Callable[[], tuple[Engine, ModelInfo]]
# Why `name` does not fit beside `held` bytes of loaded models, once `freed` of them are gone;
# empty: it does.
Lack = Callable[[str, int, int], str]


@dataclass(frozen=True, slots=True)
class Call:
    """That a model be loaded, and maybe pinned (or no longer), or be unloaded."""

    id: str
    model: str
    load: bool
    pin: bool | None = None


Order = Request | Call | tuple[str, int | None]  # the last: an abort


@dataclass(slots=True, eq=False)
class ModelSlot:
    """One model. `info` is what its files promise until it was loaded, `past` what was counted
    before it was loaded the last time, `used` when it last had work."""

    start: Start
    info: ModelInfo = UNKNOWN
    pinned: bool = False
    engine: Engine | None = None
    past: Stats = field(default_factory=Stats)
    used: float = 0.0
    loads: int = 0
    need: int = 0  # bytes, once a load has found out
    error: str = ""
    failed: float = -math.inf

    @property
    def busy(self) -> bool:
        return self.engine is not None and self.engine.busy

    @property
    def active(self) -> bool:
        """Also if only the disk is behind, which nobody waits for."""
        return self.engine is not None and self.engine.active

    @property
    def held(self) -> int:
        """Bytes."""
        return self.info.weight_bytes + self.info.kv_bytes if self.engine is not None else 0

    def stats(self) -> Stats:
        now = self.engine.stats() if self.engine is not None else Stats()
        return now if self.loads < 2 and self.engine else total([self.past, now])


@dataclass(slots=True, eq=False)
class ModelManager:
    """To the worker, one engine for all `members`; the first is the default. `ttl` is the time in
    seconds without work after which a model that is not pinned is unloaded, 0: never; `asleep`: not
    even the first is loaded before it is asked for, so each must have its `info`."""

    members: Sequence[ModelSlot]
    lack: Lack = lambda name, held, freed: ""
    ttl: float = 0.0
    clock: Callable[[], float] = time.monotonic
    guard: MemoryMonitor | None = None
    asleep: bool = False
    models: dict[str, ModelSlot] = field(default_factory=dict)
    loading: str = ""  # the model that keeps the thread now; any thread may look
    answered: list[tuple[str, str]] = field(
        default_factory=list
    )  # calls that ended: id, what was wrong
    _held: deque[Order] = field(
        default_factory=deque
    )  # all for models that are not there, or are leaving
    _goal: Request | Call | None = None  # the oldest of them, while it is being seen to
    _leaving: list[ModelSlot] = field(default_factory=list)  # for the goal
    _disk: int = 0  # bytes of the prompt cache, when one was looked at last
    _told: bool = False  # of the goal: what is loading has been published
    _turns: deque[ModelSlot] = field(default_factory=deque)

    def launch(self) -> None:
        """Load the first, unless `asleep`. Raises what loading raises."""
        if not self.asleep:
            self._start(self.members[0])
        self.models = {member.info.name: member for member in self.members}
        self._turns = deque(self.members)

    @property
    def busy(self) -> bool:
        return bool(self._held) or any(member.active for member in self.members)

    @property
    def rests(self) -> bool:
        """Nothing can be done until the disk has."""
        active = [engine for engine in self._engines() if engine.active]
        return bool(active) and self._goal is None and all(engine.rests for engine in active)

    def _engines(self) -> list[Engine]:
        return [member.engine for member in self.members if member.engine is not None]

    def close(self) -> None:
        """Let go of all models; the thread ends."""
        end = time.monotonic() + CLOSE_S
        for engine in self._engines():
            engine.close(max(0.0, end - time.monotonic()))
        for member in self.members:
            member.engine = None

    def look(self) -> None:
        """See how short memory is; for an idle moment."""
        for engine in self._engines():
            engine.poll_memory()

    def check(self) -> None:
        for engine in self._engines():
            engine.check()

    def snapshot(self, progress: float) -> dict[str, Served]:
        """All models by name, the default first."""
        coming = (
            self._goal
            and (not isinstance(self._goal, Call) or self._goal.load)
            and self._of(self._goal)
        )
        found = {}
        sizes = (
            engine.tier.disk.stats().bytes for engine in self._engines() if engine.tier is not None
        )
        self._disk = next(sizes, self._disk)
        for name, m in self.models.items():
            status: Literal["loaded", "loading", "unloaded"] = (
                "loading" if m is coming else "unloaded"
            )
            stats = replace(m.stats(), progress=progress, disk_bytes=self._disk)
            if m.engine is None:
                stats = replace(stats, **of_process(self.guard))
            status = "loaded" if m.engine else status
            found[name] = Served(m.info, status, stats, m.pinned, m.loads, m.error, m.used)
        return found

    def rest(self) -> float | None:
        """Seconds until a model has had no work for too long; None: that will not be."""
        if not self.ttl:
            return None
        idle = [m for m in self._leavers() if not m.busy]
        return max(0.0, self.ttl + idle[0].used - self.clock()) if idle else None

    def expire(self) -> None:
        """Unload what has had no work for too long."""
        while self.rest() == 0:
            self._unload(self._leavers()[0])

    # ---- orders
    # ---------------------------------------------------------------------------------------

    def take(self, order: Order) -> list[Output]:
        """Begin with an order, or keep it until its model is there."""
        outputs = self._begin(order)
        return outputs + self._aim() if self._goal is None else outputs

    def _begin(self, order: Order) -> list[Output]:
        if isinstance(order, tuple):
            return self._abort(*order)
        member = self._of(order)
        here = member.engine is not None and member not in self._leaving
        if isinstance(order, Request):
            if here:
                return self._add(member, order)
            if self.clock() - member.failed < RETRY_S:
                return _refused(order, member.error)
        elif here if order.load else member.engine is None:
            return self._done(member, order)
        self._held.append(order)
        return []

    def _of(self, order: Request | Call) -> ModelSlot:
        return self.models[order.model] if order.model else self.members[0]

    def _add(self, member: ModelSlot, request: Request) -> list[Output]:
        assert member.engine is not None
        member.used = self.clock()
        if request.grammar and request.masks not in (0, member.info.vocab):
            why = f"the vocabulary of {member.info.name} was not known before it was loaded"
            return _refused(request, f"{why}; send the request again")
        context = member.info.context  # that it promised may have been more
        if len(request.prompt) >= context:
            return _refused(request, too_long(len(request.prompt), context), "prompt")
        most = min(request.max_tokens, context - len(request.prompt))
        try:
            member.engine.add(
                request if most == request.max_tokens else replace(request, max_tokens=most)
            )
        except UserError as error:
            return _refused(request, str(error), "engine")
        return []

    def _done(self, member: ModelSlot, call: Call, why: str = "") -> list[Output]:
        if call.load and call.pin is not None and not why:
            member.pinned = call.pin
        member.used = self.clock()
        self.answered.append((call.id, why))
        return []

    def _abort(self, id: str, index: int | None) -> list[Output]:
        mine = next((o for o in self._held if not isinstance(o, tuple) and o.id == id), None)
        if mine is None:
            return [o for engine in self._engines() for o in engine.abort(id, index)]
        if index is not None:  # it is the engine that knows choices, so this waits as well
            self._held += [(id, index)] if (id, index) not in self._held else []
            return []
        self._held = deque(o for o in self._held if (o[0] if isinstance(o, tuple) else o.id) != id)
        gone = [
            Output(id, i, (), finish="abort")
            for i in range(mine.n if isinstance(mine, Request) else 0)
        ]
        return gone + (self._again() if mine is self._goal else [])

    def _again(self) -> list[Output]:
        """Begin anew with what waits, in its order: the goal was reached or given up."""
        self._goal, self._leaving = None, []
        waiting, self._held = self._held, deque()
        return [output for order in waiting for output in self._begin(order)] + self._aim()

    # ---- loads and unloads
    # ----------------------------------------------------------------------------

    def _aim(self) -> list[Output]:
        """See to the oldest order that waits, if there is one: decide who leaves for it."""
        if not self._held:
            return []
        goal = self._held[0]
        assert not isinstance(goal, tuple)  # an abort stands behind its request
        self._goal, self._told, member = goal, False, self._of(goal)
        if isinstance(goal, Call) and not goal.load:
            self._leaving = [member]
            return []
        self._leaving, held = [], sum(m.held for m in self.members)
        free = self._leavers()
        while why := self.lack(member.info.name, held, sum(m.held for m in self._leaving)):
            if not free:
                return self._fail(member, why)
            self._leaving.append(free.pop(0))
        return []

    def _leavers(self) -> list[ModelSlot]:
        """Who may have to make room, the first first."""
        return sorted(
            (m for m in self.members if m.engine and not m.pinned), key=lambda m: (m.busy, m.used)
        )

    def step(self) -> list[Output]:
        """A step of the next busy model, or what the goal needs, one turn after it was told as
        loading."""
        if self._goal and self._told and not any(member.busy for member in self._leaving):
            return self._reach(self._goal)
        self._told = True
        for _ in self.members:
            member = self._turns[0]
            self._turns.rotate(-1)
            if member.engine is not None and member.active:
                busy, outputs = member.busy, member.engine.step()
                member.used = self.clock() if busy else member.used
                return outputs
        return []

    def _reach(self, goal: Request | Call) -> list[Output]:
        leaving, self._leaving = self._leaving, []
        for member in leaving:
            self._unload(member)
        if isinstance(goal, Call) and not goal.load:
            self._held.popleft()
            self._done(self._of(goal), goal)
            return self._again()
        if leaving:
            return self._aim()  # what is free now is measured, not reckoned
        return self._load(self._of(goal))

    def _load(self, member: ModelSlot) -> list[Output]:
        self.loading, why = member.info.name, ""
        log.info("%s: loading", self.loading)
        try:
            self._start(member)
        except OutOfMemory as error:
            member.need, why = error.need, str(error)
        except UserError as error:
            why = str(error)
        except Exception as error:  # whatever the model's own code raises, or MLX where memory ends
            log.exception("%s failed to load", self.loading)
            why = line_of(error)
        finally:
            self.loading = ""
        if why:  # only now is the traceback gone, and what it held
            _free()
            if member.need and self.lack(member.info.name, sum(m.held for m in self.members), 0):
                return self._aim()  # knowing more: who leaves, or that it is no use
            return self._fail(member, why)
        return self._again()

    def _start(self, member: ModelSlot) -> None:
        self._expect(LOADING)
        try:
            member.engine, info = member.start()
        finally:
            self._expect(-LOADING)
        member.engine.guard = self.guard
        created = member.info.created or info.created
        member.info, member.used = replace(info, created=created), self.clock()
        member.loads, member.error, member.failed = member.loads + 1, "", -math.inf
        self._expect(member.held)

    def _expect(self, size: int) -> None:
        if self.guard is not None:
            self.guard.reserve(size)

    def _fail(self, member: ModelSlot, why: str) -> list[Output]:
        why = f"{member.info.name} cannot be loaded: {why}"
        log.error("%s", why)
        member.error, member.failed = why, self.clock()
        outputs, waiting, self._held = list[Output](), self._held, deque()
        for order in waiting:
            if isinstance(order, tuple) or self._of(order) is not member:
                self._held.append(order)
            elif isinstance(order, Request):
                outputs += _refused(order, why)
            else:
                self._done(member, order, why if order.load else "")
        return outputs + self._again()

    def _unload(self, member: ModelSlot) -> None:
        nothing: dict[str, Any] = dict.fromkeys(NOW, 0) | {"seated": ()}
        member.past = replace(member.stats(), **nothing)
        self._expect(-member.held)
        if member.engine is not None:
            member.engine.close(0.0 if any(m.busy for m in self.members) else UNLOAD_S)
        member.engine = None
        _free()
        log.info("%s: unloaded", member.info.name)


def _refused(
    request: Request, why: str, fault: Literal["engine", "model", "prompt"] = "model"
) -> list[Output]:
    return [
        Output(request.id, i, (), finish="error", error=why, fault=fault) for i in range(request.n)
    ]


def _free() -> None:
    """Give back what nobody refers to: models are full of cycles, MLX keeps buffers, glibc keeps
    pages."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def total(parts: Iterable[Stats]) -> Stats:
    """The sum of several models' numbers; of clocks and times, the largest."""
    return reduce(_sum, parts)


def _sum(one: Stats, other: Stats) -> Stats:
    made: dict[str, Any] = {}
    for name in (row.name for row in fields(Stats)):
        a, b = getattr(one, name), getattr(other, name)
        if name in KEYS:
            rows: dict[tuple[str | int, ...], tuple[int, ...]] = {}
            for row in (*a, *b):
                key, counts = row[: KEYS[name]], row[KEYS[name] :]
                rows[key] = tuple(map(sum, zip_longest(rows.get(key, ()), counts, fillvalue=0)))
            made[name] = tuple((*key, *counts) for key, counts in rows.items())
        else:
            made[name] = max(a, b) if name in PROCESS | {"progress", "step_seconds"} else a + b
    return Stats(**made)

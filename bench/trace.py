"""A step on a timeline: what the engine's thread does, what the device does, and when it has
nothing to do.

Rule: only what was seen is told. A thread beside it waits for every submission, so "ready" comes
late: by SWITCH_S, a call of MLX and what a busy machine adds. A gap is a lower bound by that much;
the submission that ends it takes CPU time, in which MLX walks over the graph before the first
operation runs. See `gaps`.
"""

import asyncio
import functools
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal
from unittest import mock

import mlx.core as mx

from mlxspec import kernels
from mlxspec.engine.engine import Engine
from mlxspec.engine.models import Start
from mlxspec.engine.worker import Worker
from mlxspec.model import attention
from mlxspec.model.batch import Step
from mlxspec.model.pages import Pages
from mlxspec.speculate import NoSpeculation, Speculator
from mlxspec.types import Entry, ModelInfo, Request

SWITCH_S = 5e-5  # a thread that has seen something waits so long at most for the interpreter
FEW = 8  # steps below which no figure is worth saying
LEFT_OUT = 2  # steps at both ends, where sequences come and go

Span = tuple[str, int, float, float]  # track, step, seconds
Gap = tuple[int, float, float]  # the step that ended it, seconds
Bound = Literal["least", "likely", "most"]


@dataclass(slots=True)
class Submission:
    """One mx.async_eval: its step, when it was called and came back, when its results were there,
    and what it took of the CPU. Seconds."""

    step: int
    began: float
    ended: float = 0.0
    ready: float = 0.0
    walk: float = 0.0


@dataclass(slots=True)
class Turn:
    """One turn of the engine's thread. `seconds` by what was done: whole, waits (submitting and
    reading), graph (mlx-lm's own Python), seam (our page writes and attention inside it); CPU time
    of the thread."""

    step: int
    rows: int
    drafted: int
    fresh: bool  # whether a prompt was read in it
    seconds: dict[str, float]

    @property
    def ours(self) -> float:
        return self.seconds["whole"] - self.seconds["waits"] - self.seconds["graph"]


def gaps(submissions: Sequence[Submission], bound: Bound = "least") -> list[Gap]:
    """When nothing was submitted: from the moment that all before was ready to the next submission
    (least), to the end of what this takes of the CPU if nothing else holds it up (likely), or if
    all of that comes after that moment (most); where a submission waits, the device has work."""
    found, done = [], submissions[0].ready if submissions else 0.0
    for s in submissions[1:]:
        walks = max(s.began, done) if bound == "most" else s.began
        if (end := s.began if bound == "least" else min(s.ended, walks + s.walk)) > done:
            found.append((s.step, done, end))
        done = max(done, s.ready)
    return found


@dataclass(slots=True)
class Figures:
    """Of the steps that only decoded, more than half of the streams in each. `idle`, `likely`,
    `most`: the share of their time in which nothing was submitted, see `gaps`; the rest in
    milliseconds: a step, then CPU time of the thread in one."""

    steps: int
    drafted: int
    idle: float
    likely: float
    most: float
    step: float
    ours: float
    ours_p99: float
    seam: float
    graph: float


@dataclass
class Side:
    """What was recorded of one run: its title, its streams, and what came of it."""

    title: str
    streams: int
    drafter: Speculator
    spans: list[Span] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def decoding(self) -> list[Turn]:
        full = [t for t in self.turns if 2 * t.rows > self.streams and not t.fresh]
        return full[LEFT_OUT:-LEFT_OUT]

    def idle(self, bound: Bound = "least") -> float:
        """Seconds of the gaps before steps that only decoded."""
        steps = {t.step for t in self.decoding()}
        return sum(
            end - began for step, began, end in gaps(self.submissions, bound) if step in steps
        )

    def figures(self) -> Figures | None:
        """None where there were too few steps."""
        turns = self.decoding()
        if len(turns) < FEW:
            return None
        steps = {t.step for t in turns}
        # A step's time goes from the end of the one before it to its own.
        ready: dict[int, float] = {}
        for s in self.submissions:
            ready[s.step] = max(s.ready, ready.get(s.step, 0.0))
        took = [ready[n] - ready[n - 1] for n in sorted(steps) if n in ready and n - 1 in ready]
        ours = sorted(t.ours - t.seconds["seam"] for t in turns)

        def ms(values: Sequence[float]) -> float:
            return 1000 * statistics.median(values)

        return Figures(
            len(turns),
            sum(t.drafted for t in turns),
            self.idle() / sum(took),
            self.idle("likely") / sum(took),
            self.idle("most") / sum(took),
            ms(took),
            ms(ours),
            1000 * ours[min(len(ours) - 1, int(0.99 * len(ours)))],
            ms([t.seconds["seam"] for t in turns]),
            ms([t.seconds["graph"] for t in turns]),
        )


class Timed:
    """A callable, or an object with verbs, that is timed; all else of it is as it was."""

    def __init__(self, inner: Any, verbs: dict[str, Callable[..., Any]]) -> None:
        self._inner, self._verbs = inner, verbs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._verbs["__call__"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._verbs.get(name) or getattr(self._inner, name)


class Recorder:
    """Stands round one engine and its worker while they run. All verbs but `watch` on the engine's
    thread."""

    def __init__(self) -> None:
        self.side: Side | None = None
        self.upcoming: Side | None = None  # begins with the next request
        self.engine: Engine | None = None
        self._queue: SimpleQueue[tuple[Submission, mx.array] | None] = SimpleQueue()
        self._cpu: dict[str, float] = defaultdict(float)  # of this turn
        self._plan: Sequence[Entry] = ()
        self._read = (0.0, 0.0)
        self._booked = 0

    # ---- what is wrapped
    # --------------------------------------------------------------------------------

    def adopt(self, engine: Engine) -> None:
        """Wrap what is this engine's alone."""
        self.engine, engine.trace = engine, self._event
        engine.scheduler.plan = self._span("plan", engine.scheduler.plan)  # type: ignore[method-assign]
        engine.runner.forward = self._run(engine.runner.forward)  # type: ignore
        drafters = getattr(engine.proposer, "drafters", ())
        for runner in (engine.runner, *(d.runner for d in drafters if hasattr(d, "runner"))):
            runner.model = Timed(runner.model, {"__call__": self._clock("model", runner.model)})

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Wrap what is everybody's, and watch what is submitted."""
        watcher = threading.Thread(target=self.watch, name="watch", daemon=True)
        every, submit = sys.getswitchinterval(), mx.async_eval
        patches: list[tuple[Any, str, Any]] = [
            (mx, "async_eval", self._submit(submit)),
            (Engine, "add", self._add(Engine.add)),
            (Engine, "_count", self._span("commit", Engine._count)),
            (Step, "read", self._reading(Step.read)),
            (Worker, "_publish", self._span("publish", Worker._publish)),
            (Worker, "_turn", self._turn(Worker._turn)),
            (Pages, "update_and_fetch", self._clock("seam", Pages.update_and_fetch)),
            (attention, "paged_attention", self._clock("seam", kernels.paged_attention)),
        ]
        with ExitStack() as stack:
            for owner, name, made in patches:
                stack.enter_context(mock.patch.object(owner, name, made))
            sys.setswitchinterval(SWITCH_S)
            watcher.start()
            try:
                yield
            finally:
                self._queue.put(None)
                watcher.join(60)
                sys.setswitchinterval(every)

    def watch(self) -> None:
        """On a thread of its own: see when each submission is ready, in their order."""
        while (found := self._queue.get()) is not None:
            submission, probe = found
            mx.eval(probe)
            submission.ready = time.perf_counter()
            del found, probe

    # ---- how
    # ------------------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """Of the step that is being made."""
        assert self.engine is not None
        return self.engine.counters["steps"] + 1

    def _note(self, track: str, step: int, began: float, ended: float) -> None:
        if self.side:
            self.side.spans.append((track, step, began, ended))

    def _span(self, track: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            made = verb(*args, **kwargs)
            step = self._booked if track in ("commit", "publish") else self._number
            if step and (track != "publish" or args[-1]):
                self._note(track, step, began, time.perf_counter())
            return made

        return functools.wraps(verb)(timed)

    def _clock(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return verb(*args, **kwargs)
            finally:
                self._cpu[name] += time.thread_time() - began

        return timed

    def _add(self, add: Callable[..., None]) -> Callable[..., None]:
        def first(engine: Engine, request: Request) -> None:
            if self.upcoming:
                self.side, self.upcoming = self.upcoming, None
                engine.reset()
                engine.proposer = self._drafter(self.side.drafter)
                self._booked, self._plan = 0, ()
            add(engine, request)

        return first

    def _drafter(self, drafter: Speculator) -> Speculator:
        if isinstance(drafter, NoSpeculation):
            return drafter  # the engine knows it by its class
        timed: Any = Timed(drafter, {"draft": self._span("draft", drafter.draft)})
        return timed  # type: ignore[no-any-return]

    def _submit(self, submit: Callable[..., None]) -> Callable[..., None]:
        """A submission with an array of our own in it, which becomes ready with the rest: two
        threads must not wait for the same array, and who holds a pool keeps the next step from
        writing in place."""

        def watched(*arrays: Any) -> None:
            first = arrays[0][0] if isinstance(arrays[0], list) and arrays[0] else arrays[0]
            if self.side is None or not isinstance(first, mx.array):
                return submit(*arrays)
            cpu = time.thread_time()  # what watching takes is not ours to count
            probe = first.flatten()[:1] + 0
            made, walk = Submission(self._number, time.perf_counter()), time.thread_time()
            submit(*arrays, probe)
            made.ended, made.walk = time.perf_counter(), time.thread_time() - walk
            self._note("submit", made.step, made.began, made.ended)
            self.side.submissions.append(made)
            self._queue.put((made, probe))
            self._cpu["waits"] += time.thread_time() - cpu
            return None

        return watched

    def _run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def built(plan: Sequence[Entry], before: Step | None) -> Any:
            self._plan, began = plan, time.perf_counter()
            step = run(plan, before)
            if self.side:
                self._note("build", self._number, began, self.side.submissions[-1].began)
            return step

        return built

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def timed(step: Step) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            made = read(step)
            self._read = began, time.perf_counter()
            self._cpu["waits"] += time.thread_time() - cpu
            return made

        return timed

    def _event(self, event: str, step: int) -> None:
        if event == "read":
            self._booked = step
            self._note("read", step, *self._read)

    def _turn(self, turn: Callable[..., bool]) -> Callable[..., bool]:
        def timed(*args: Any) -> bool:
            self._cpu, self._plan, began = defaultdict(float), (), time.thread_time()
            goes_on = turn(*args)
            c, plan = self._cpu, self._plan
            if self.side and plan:
                seam = c["seam"]
                spent = {
                    "whole": time.thread_time() - began,
                    "waits": c["waits"],
                    "graph": c["model"] - seam,
                    "seam": seam,
                }
                drafted = sum(len(e.draft) for e in plan)
                fresh = any(e.count > 1 for e in plan)
                self.side.turns.append(Turn(self._number - 1, len(plan), drafted, fresh, spent))
            return goes_on

        return timed


def record(
    start: Start, chosen: Callable[[Engine, ModelInfo], Sequence[tuple[str, list[Request]]]]
) -> list[Side]:
    """Serve `chosen` groups of requests one after the other, each without a draft and, where the
    engine has a drafter, with it, as a server does: a worker's thread, and a loop that takes what
    it publishes."""
    recorder, held, found = Recorder(), [], []

    def begin() -> tuple[Engine, ModelInfo]:
        made = start()
        recorder.adopt(made[0])
        held.append((made[0], made[0].proposer))
        return made

    with recorder.wrapped():
        worker = Worker(begin, max_sequences=256)
        info = worker.launch()
        try:
            engine, own = held[0]
            for title, requests in chosen(engine, info):
                for drafter in (NoSpeculation(), own)[: 1 + (not isinstance(own, NoSpeculation))]:
                    name = (
                        f"{title}, {'plain' if isinstance(drafter, NoSpeculation) else 'drafting'}"
                    )
                    side = recorder.upcoming = Side(name, len(requests), drafter)
                    asyncio.run(_serve(worker, requests))
                    found.append(side)
        finally:
            worker.stop()
    return found


async def _serve(worker: Worker, requests: Sequence[Request]) -> None:
    async def take(request: Request) -> None:
        async for output in worker.submit(request):
            if output.finish in ("abort", "error"):
                raise RuntimeError(f"{output.request} ended by {output.finish}: {output.error}")

    await asyncio.gather(*map(take, requests))

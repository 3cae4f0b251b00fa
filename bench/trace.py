"""Records each step on a timeline: what the engine's thread does, what the device runs, and when
nothing is submitted. `python -m bench.trace MODEL --trace FILE` prints what our Python takes a step.

A watcher thread waits for every submission, so `ready` comes late by SWITCH_S and a call of MLX: a
gap is a lower bound. Our Python is CPU time of the engine's thread without waiting, submitting and
mlx-lm's own Python.
"""

import argparse
import asyncio
import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from rich.console import Console  # noqa: E402

from bench import timeline  # noqa: E402
from bench.timeline import Side, Submission, Turn  # noqa: E402
from mlxspec.commands.bench import WORKLOADS, prompt_of, tasks_of  # noqa: E402
from mlxspec.config import Config  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.engine.manager import Load, ModelManager, ModelSlot  # noqa: E402
from mlxspec.engine.worker import EngineThread  # noqa: E402
from mlxspec.kernels.attention import paged_attention  # noqa: E402
from mlxspec.load.resolve import resolve_model  # noqa: E402
from mlxspec.model import attention  # noqa: E402
from mlxspec.model.batch import Forward, Step  # noqa: E402
from mlxspec.model.pages import Pages  # noqa: E402
from mlxspec.sequences import Entry  # noqa: E402
from mlxspec.speculate import NoSpeculation, Speculator  # noqa: E402
from mlxspec.types import ModelInfo, Request, Sampling  # noqa: E402

SWITCH_S = 5e-5  # a thread that has seen something waits so long at most for the interpreter


class Timed:
    """A callable, or an object with verbs, that is timed; all else of it is as it was."""

    def __init__(self, inner: Any, verbs: dict[str, Callable[..., Any]]) -> None:
        self._inner, self._verbs = inner, verbs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._verbs["__call__"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._verbs.get(name) or getattr(self._inner, name)


class Recorder:
    """Wraps one engine and its thread while they run. `watch` runs on a thread of its own."""

    def __init__(self) -> None:
        self.side: Side | None = None
        self.upcoming: Side | None = None  # begins with the next request
        self.engine: Engine | None = None
        self._queue: SimpleQueue[tuple[Submission, mx.array] | None] = SimpleQueue()
        self._cpu: dict[str, float] = defaultdict(float)  # of this turn
        self._plan: Sequence[Entry] = ()
        self._read = (0.0, 0.0)
        self._build_began = 0.0
        self._last_read = 0

    def adopt(self, engine: Engine) -> None:
        """Wrap the parts of this engine."""
        self.engine, engine.trace = engine, self._event
        engine.scheduler.plan = self._span("plan", engine.scheduler.plan)  # type: ignore[method-assign]
        engine.runner.forward = self._forward(engine.runner.forward)  # type: ignore[method-assign]
        engine.runner.submit = self._built(engine.runner.submit)  # type: ignore[method-assign]
        drafters = getattr(engine.proposer, "drafters", ())
        runners = {
            id(r): r for r in (engine.runner, *(getattr(d, "runner", None) for d in drafters))
        }
        for runner in filter(None, runners.values()):  # a head's is the engine's
            runner.model = Timed(runner.model, {"__call__": self._clock("model", runner.model)})
        for head in filter(None, (getattr(d, "head", None) for d in drafters)):
            inner = head.module
            verbs = {
                name: self._clock("model", getattr(inner, name))
                for name in ("__call__", "store")  # the latter: K and V of context rows
                if hasattr(inner, name)
            }
            head.module = Timed(inner, verbs)
            head.embed = self._clock("model", head.embed)
            head.lm_head = self._clock("model", head.lm_head)

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Patch functions and classes, and start the watcher."""
        watcher = threading.Thread(target=self.watch, name="watch", daemon=True)
        every, submit = sys.getswitchinterval(), mx.async_eval
        patches: list[tuple[Any, str, Any]] = [
            (mx, "async_eval", self._submit(submit)),
            (Engine, "add", self._add(Engine.add)),
            (Engine, "_read_and_commit", self._commit(Engine._read_and_commit)),
            (Forward, "read", self._reading(Forward.read)),
            (EngineThread, "_publish", self._span("publish", EngineThread._publish)),
            (EngineThread, "_turn", self._turn(EngineThread._turn)),
            (Pages, "update_and_fetch", self._clock("seam", Pages.update_and_fetch)),
            (attention, "paged_attention", self._clock("seam", paged_attention)),
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
            step = self._last_read if track == "publish" else self._number
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
                self._last_read, self._plan = 0, ()
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

    def _forward(self, forward: Callable[..., Step]) -> Callable[..., Step]:
        def timed(plan: Sequence[Entry], previous: Step | None) -> Step:
            if self._plan is not plan:
                self._plan, self._build_began = plan, time.perf_counter()
            return forward(plan, previous)

        return timed

    def _built(self, submit: Callable[..., Step]) -> Callable[..., Step]:
        """From the call of `forward` to the submission of the samples."""

        def timed(*args: Any) -> Step:
            step = submit(*args)
            if self.side:
                ended = self.side.submissions[-1].began
                self._note("build", self._number, self._build_began, ended)
            return step

        return timed

    def _commit(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        """All of `finish` after the read."""

        def timed(engine: Engine, step: Step) -> Any:
            outputs = finish(engine, step)
            self._note("commit", step.number, self._read[1], time.perf_counter())
            return outputs

        return timed

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
            self._last_read = step
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
                drafted = sum(e.draft.size for e in plan)
                fresh = any(e.count > 1 for e in plan)
                self.side.turns.append(Turn(self._number - 1, len(plan), drafted, fresh, spent))
            return goes_on

        return timed


def record(
    load: Load, chosen: Callable[[Engine, ModelInfo], Sequence[tuple[str, list[Request]]]]
) -> list[Side]:
    """Serve `chosen` groups of requests one after the other, each without a draft and, where the
    engine has a drafter, with it, as a server does: an engine thread, and a loop that takes what
    it publishes."""
    recorder, held, found = Recorder(), [], []

    def begin() -> tuple[Engine, ModelInfo]:
        made = load()
        recorder.adopt(made[0])
        held.append((made[0], made[0].proposer))
        return made

    with recorder.wrapped():
        worker = EngineThread(
            ModelManager([ModelSlot(begin, ModelInfo("", 0, 0, "", 0, 0, 0, 0))]),
            max_sequences=256,
        )
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


async def _serve(worker: EngineThread, requests: Sequence[Request]) -> None:
    async def take(request: Request) -> None:
        async for output in worker.submit(request):
            if output.finish in ("abort", "error"):
                raise RuntimeError(f"{output.request} ended by {output.finish}: {output.error}")

    await asyncio.gather(*map(take, requests))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trace", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="as for serve; default: built in")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="the timeline")
    parser.add_argument("--draft", default="", metavar="HEAD_OR_MODEL", help="as for serve")
    parser.add_argument("--draft-depth", type=int, default=0, help="as for serve")
    parser.add_argument("--workload", choices=WORKLOADS, default="chat")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    most = max(args.streams)
    config = Config(
        model=args.model,
        draft=args.draft,
        draft_depth=args.draft_depth,
        max_sequences=most,
        cache_gb=0.0,
    )
    model = resolve_model(config)
    stop, sampling = frozenset(model.tokenizer.eos_token_ids), Sampling(args.temperature)
    requests = [
        Request(task.name, prompt_of(task, model.tokenizer), args.max_tokens, sampling, stop)
        for task in tasks_of(args.workload)
    ]
    groups = [(f"{args.workload}, streams: {n}", requests[:n]) for n in args.streams]
    sides = record(model.load, lambda engine, info: groups)
    timeline.write(args.trace, sides)
    console = Console(width=max(Console().width, 150))
    console.print(timeline.table(sides))
    console.print(f"the timeline is in {args.trace}: open it in ui.perfetto.dev", soft_wrap=True)


if __name__ == "__main__":
    main()

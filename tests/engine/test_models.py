"""Several models behind one worker: swaps, their order, failures, memory. Tiny models, or paper
ones."""

import asyncio
import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.config import Config
from mlxspec.engine import manager as module
from mlxspec.engine.manager import RELOAD_S, LoadCommand, ModelManager, ModelSlot
from mlxspec.engine.worker import EngineThread
from mlxspec.load.loader import load_engine
from mlxspec.types import (
    BACKGROUND,
    Dead,
    ModelInfo,
    OutOfMemory,
    Output,
    Request,
    Stats,
    UserError,
)
from tests.support import tiny
from tests.support.examples import examples
from tests.support.parameter_rows import only

KINDS = {"a": "qwen3", "b": "llama", "c": "qwen3_moe"}
INFO = ModelInfo("", 512, tiny.VOCAB, "rows", 8, 0, 1, 1)
PLAIN = {name: tiny.Plain(tiny.model(kind)) for name, kind in KINDS.items()}


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def room(most: int) -> Callable[[ModelSlot, int], str]:
    """Space for so many models of one byte each."""
    return lambda slot, staying: "" if staying < most else "there is no space"


def load(name: str) -> tuple[Any, ModelInfo]:
    return tiny.engine(tiny.model(KINDS[name]), vocab=tiny.VOCAB), replace(INFO, name=name)


def make(names: str = "ab", most: int = 1, starts: Any = None, **kw: Any) -> EngineThread:
    """An engine thread with models of these names; `starts` replaces how some are loaded."""

    def start_of(name: str) -> Callable[[], Any]:
        return (starts or {}).get(name) or (lambda: load(name))

    members = [ModelSlot(start_of(name), replace(INFO, name=name)) for name in names]
    return EngineThread(ModelManager(members, room(most), **kw), max_sequences=16, max_queue=64)


@pytest.fixture
def launched() -> Any:
    made: list[EngineThread] = []

    def launch(*args: Any, **kw: Any) -> EngineThread:
        made.append(make(*args, **kw))
        made[-1].launch()
        return made[-1]

    yield launch
    for worker in made:
        worker.stop()


async def collect(stream: Any) -> list[Output]:
    async with asyncio.timeout(60):
        return [o async for o in stream]


def ask(worker: EngineThread, model: str, name: str, n: int = 8, **kw: Any) -> Any:
    seed = sum(map(ord, name))
    return worker.submit(replace(tiny.request(name, [seed % 300, 1, 2], n, **kw), model=model))


def right(outputs: list[Output], model: str, name: str, n: int = 8) -> bool:
    return tiny.tokens(outputs, name) == PLAIN[model]([sum(map(ord, name)) % 300, 1, 2], n)


def states(worker: EngineThread) -> dict[str, str]:
    return {name: served.status for name, served in worker.models.items()}


def test_alternating_requests_swap_twice(launched: Any) -> None:
    worker = launched()
    names = [("ab"[i % 2], f"r{i}") for i in range(12)]

    async def main() -> list[list[Output]]:
        return await asyncio.gather(*(collect(ask(worker, model, name)) for model, name in names))

    for (model, name), outputs in zip(names, asyncio.run(main()), strict=True):
        assert right(outputs, model, name), (model, name)
    served = worker.models
    assert (served["a"].loads, served["b"].loads) == (2, 1)
    assert states(worker) == {"a": "loaded", "b": "unloaded"}


def test_models_that_fit_share_the_thread(launched: Any) -> None:
    worker = launched("abc", most=3)

    async def main() -> list[list[Output]]:
        jobs = [(model, f"{model}{i}") for i in range(3) for model in "abc"]
        return [jobs, await asyncio.gather(*(collect(ask(worker, *job, 20)) for job in jobs))]

    jobs, found = asyncio.run(main())
    assert all(right(o, *job, 20) for job, o in zip(jobs, found, strict=True))
    assert set(states(worker).values()) == {"loaded"}
    each = [served.stats for served in worker.models.values()]
    assert [s.generated_tokens for s in each] == [60] * 3 and tiny.stats(
        worker
    ).generated_tokens == 180


def test_load_on_request_loads_at_the_first_request(launched: Any) -> None:
    async def main() -> None:
        worker = launched(load_on_request=True)
        assert states(worker) == {"a": "unloaded", "b": "unloaded"} and worker.info.name == "a"
        assert right(await collect(ask(worker, "", "one")), "a", "one")
        assert states(worker) == {"a": "loaded", "b": "unloaded"}

    asyncio.run(main())


def test_later_requests_wait_behind_a_load(launched: Any) -> None:
    worker = launched()

    async def main() -> list[str]:
        ended: list[str] = []

        async def one(model: str, name: str, n: int) -> None:
            outputs = await collect(streams.pop(0))
            assert right(outputs, model, name, n)
            ended.append(name)

        streams = [ask(worker, "a", "long", 60)]
        first = asyncio.ensure_future(one("a", "long", 60))
        while not tiny.stats(worker).running:
            await asyncio.sleep(0)
        streams += [ask(worker, "b", "swap", 4), ask(worker, "a", "late", 2)]
        await asyncio.gather(first, one("b", "swap", 4), one("a", "late", 2))
        return ended

    assert asyncio.run(main()) == ["long", "swap", "late"]
    assert {name: served.loads for name, served in worker.models.items()} == {"a": 2, "b": 1}
    total_of_a = worker.models["a"].stats
    assert total_of_a.generated_tokens == 62 and total_of_a.running == 0  # counted across the swap


def test_a_failed_load_is_reported(launched: Any) -> None:
    tries: list[int] = []

    def broken() -> Any:
        tries.append(1)
        if len(tries) == 2:
            raise RuntimeError("[metal::malloc] no more\nof it")
        raise UserError("its files are broken")

    clock = Clock()
    worker = launched("ab", 2, {"b": broken}, clock=clock)

    async def main() -> None:
        good = ask(worker, "a", "good", 40)
        bad = await collect(ask(worker, "b", "bad", choices=2))
        assert [(o.finish, o.fault) for o in bad] == [("error", "model")] * 2
        assert bad[0].error == "b cannot be loaded: its files are broken"
        again = await collect(ask(worker, "b", "again"))
        assert again[0].error == bad[0].error and len(tries) == 1  # not tried again so soon
        with pytest.raises(
            UserError, match=r"b cannot be loaded: RuntimeError: \[metal::malloc\] no more of it$"
        ):
            await worker.load("b")  # a new request for it is accepted
        clock.now += RELOAD_S
        assert "broken" in (await collect(ask(worker, "b", "later")))[0].error and len(tries) == 3
        assert right(await collect(good), "a", "good", 40)

    asyncio.run(main())
    assert worker.alive() and "broken" in worker.models["b"].error


def test_a_model_that_cannot_fit_evicts_nobody(launched: Any) -> None:
    worker = launched("ab", 0)

    async def main() -> list[Output]:
        return await collect(ask(worker, "b", "r"))

    assert asyncio.run(main())[0].error == "b cannot be loaded: there is no space"
    assert states(worker) == {"a": "loaded", "b": "unloaded"}


def test_an_out_of_memory_load_that_cannot_be_helped_evicts_nobody(launched: Any) -> None:
    """The first guess was too low: what the load found out decides whether it is worth while to
    unload."""

    def short() -> Any:
        raise OutOfMemory("it needs 9", need=9)

    worker = launched("abc", 3, {"c": short})
    guess = worker._manager.memory_check
    worker._manager.memory_check = lambda slot, staying: (
        "there is no space" if slot.need > 3 - staying else guess(slot, staying)
    )

    async def main() -> list[Output]:
        await worker.load("b")
        return await collect(ask(worker, "c", "r"))

    assert asyncio.run(main())[0].error == "c cannot be loaded: there is no space"
    assert states(worker) == {"a": "loaded", "b": "loaded", "c": "unloaded"}


def test_an_unloaded_model_reports_process_stats(launched: Any) -> None:
    worker = launched("a", 1)

    async def main() -> None:
        await worker.unload("a")

    asyncio.run(main())
    assert states(worker) == {"a": "unloaded"}
    assert worker.models["a"].stats.live_arrays > 0 and worker.models["a"].stats.blocks_free == 0


def test_lru_eviction_spares_pinned_models(launched: Any) -> None:
    worker = launched("abc", 2)

    async def main() -> None:
        await worker.load("b")
        await collect(ask(worker, "a", "r1"))
        await collect(ask(worker, "c", "r2"))
        assert states(worker) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        await worker.load("a", pin=True)
        await collect(ask(worker, "b", "r3"))
        assert states(worker) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        await worker.load("b", pin=True)
        assert "no space" in (await collect(ask(worker, "c", "r4")))[0].error
        await worker.load("b", pin=False)
        await worker.load("c")
        assert states(worker) == {"a": "loaded", "b": "unloaded", "c": "loaded"}

    asyncio.run(main())


def test_an_unload_waits_for_answers_and_can_be_cancelled(launched: Any) -> None:
    worker = launched("ab", 2)

    async def main() -> None:
        first = ask(worker, "a", "first", 300)
        await anext(first)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await worker.unload("a")
        second = ask(worker, "a", "second", 4)  # it takes requests again
        assert right(await collect(second), "a", "second", 4)
        worker.abort("first")
        await worker.unload("a")
        assert states(worker)["a"] == "unloaded"
        await worker.unload("a")  # is no mistake
        assert right(
            await collect(ask(worker, "", "third")), "a", "third"
        )  # the default, loaded again

    asyncio.run(main())


def test_idle_unload_spares_pinned_models(launched: Any) -> None:
    clock = Clock()
    worker = launched("abc", 3, ttl=60, clock=clock)

    async def until(**wanted: str) -> None:
        async with asyncio.timeout(20):
            while states(worker) != wanted:
                worker.abort("nobody")  # the fake clock wakes nobody
                await asyncio.sleep(0)

    async def main() -> None:
        await worker.load("b", pin=True)
        await worker.load("c")
        clock.now = 59
        await collect(ask(worker, "a", "r"))
        assert set(states(worker).values()) == {"loaded"}
        clock.now = 60
        await until(a="loaded", b="loaded", c="unloaded")
        clock.now = 119
        await until(a="unloaded", b="loaded", c="unloaded")

    asyncio.run(main())


def test_an_abort_cancels_the_load(launched: Any) -> None:
    worker = launched("ab", 1)

    async def main() -> None:
        long = ask(worker, "a", "long", 200)
        await anext(long)
        waits = ask(worker, "b", "waits", choices=2)
        worker.abort("waits")
        assert [o.finish for o in await collect(waits)] == ["abort", "abort"]
        one = ask(worker, "b", "one", 4)
        worker.abort("long")
        assert right(await collect(one), "b", "one", 4)
        assert (await collect(long))[-1].finish == "abort"

    asyncio.run(main())


def test_limits_found_by_loading_apply(launched: Any) -> None:
    """The window is smaller than the files promised."""

    def small() -> Any:
        engine = tiny.engine(tiny.model(KINDS["b"]), vocab=tiny.VOCAB, context=16)
        return engine, replace(INFO, name="b", context=16)

    worker = make("ab", 2, {"b": small})
    worker.launch()

    async def main() -> None:
        long = replace(tiny.request("long", range(16), 4), model="b")
        clamped = replace(tiny.request("clamped", [1, 2], 400), model="b")
        found = await asyncio.gather(*(collect(worker.submit(r)) for r in (long, clamped)))
        assert found[0][0].fault == "prompt" and "16 tokens > 16 maximum" in found[0][0].error
        assert len(tiny.tokens(found[1], "clamped")) == 14

    asyncio.run(main())
    worker.stop()


def test_a_stop_during_a_load(launched: Any) -> None:
    gate, begun = threading.Event(), threading.Event()

    def slow() -> Any:
        begun.set()
        assert gate.wait(20)
        return load("b")

    worker = launched("ab", 1, {"b": slow})

    async def main() -> None:
        waits, loads = ask(worker, "b", "r"), asyncio.ensure_future(worker.load("a"))
        await asyncio.to_thread(begun.wait, 20)
        assert worker.loading() == "b" and states(worker) == {"a": "unloaded", "b": "loading"}
        worker._stopping = True
        gate.set()
        assert "stopping" in (await collect(waits))[0].error
        with pytest.raises(Dead, match="stopping"):
            await loads
        with pytest.raises(Dead):
            await worker.load("a")

    asyncio.run(main())


def test_a_drain_does_not_wait_for_a_load(launched: Any) -> None:
    gate, begun = threading.Event(), threading.Event()

    def slow() -> Any:
        begun.set()
        assert gate.wait(20)
        return load("b")

    worker = launched("ab", 2, {"b": slow})

    async def main() -> None:
        waits, loads = ask(worker, "b", "r", choices=2), asyncio.ensure_future(worker.load("b"))
        await asyncio.to_thread(begun.wait, 20)
        await worker.drain(0.01)
        assert [o.finish for o in await collect(waits)] == ["abort"] * 2
        with pytest.raises(Dead, match="stopping"):
            await loads
        gate.set()

    asyncio.run(main())


@dataclass
class Paper:
    """An engine that answers each request in as many steps as it has tokens to give."""

    log: list[Any]
    name: str
    queue: list[list[Any]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    drafts: Any = None

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    @property
    def priority(self) -> int:
        return min((request.priority for request, _ in self.queue), default=0)

    @property
    def active(self) -> bool:
        return self.busy

    def add(self, request: Request) -> None:
        self.queue.append([request, request.max_tokens])

    def abort(self, id: str, index: int | None = None) -> list[Output]:
        gone = [r for r, _ in self.queue if r.id == id]
        self.queue = [job for job in self.queue if job[0].id != id]
        return [Output(r.id, 0, (), finish="abort") for r in gone]

    def step(self, alone: bool = True) -> list[Output]:
        self.log.append(self.name)
        for job in self.queue:
            job[1] -= 1
        done = [r for r, left in self.queue if left == 0]
        self.queue = [job for job in self.queue if job[1]]
        return [Output(r.id, 0, (1,), finish="length") for r in done]

    def check(self) -> None: ...
    def housekeep(self) -> None: ...
    def close(self, seconds: float) -> None:
        assert not self.queue

    def stats(self) -> Stats:
        return Stats(running=len(self.queue))


def paper(most: int, names: str = "abc") -> tuple[ModelManager, list[str]]:
    steps: list[str] = []

    def start_of(name: str) -> Callable[[], Any]:
        return lambda: (Paper(steps, name), replace(INFO, name=name))

    made = ModelManager(
        [ModelSlot(start_of(n), replace(INFO, name=n)) for n in names], room(most), clock=Clock()
    )
    made.launch()
    return made, steps


def test_busy_models_step_in_turn() -> None:
    made, steps = paper(3)
    for model in "abc":
        made.submit(replace(tiny.request(model, [1], 8), model=model))
    while made.busy:
        made.step()
    assert sorted(steps[-12:]) == sorted("abc" * 4) and all(
        len(set(steps[-9 + i : -6 + i])) == 3 for i in range(6)
    )


def test_a_model_with_background_work_alone_does_every_ninth_step() -> None:
    made, steps = paper(3)
    for model, n, priority in (("a", 27, 0), ("b", 6, BACKGROUND), ("c", 9, 0)):
        request = replace(tiny.request(model, [1], n), priority=priority)
        made.submit(replace(request, model=model))
    while made.busy:
        made.step()
    assert steps.count("b") == 6
    *gaps, after = [len(gap) for gap in "".join(steps).split("b")]
    assert gaps[1:4] == [8] * 3 and sum(gaps) == 27 + 9 and not after


ORDERS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abc"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.just(""), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.just(""), st.integers(0, 30)),
        st.tuples(st.sampled_from(["load", "unload"]), st.sampled_from("abc"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=examples(200))
@given(ORDERS, st.integers(1, 3))
def test_every_order_is_answered_once_within_memory(orders: Any, most: int) -> None:
    free, module.release_memory = module.release_memory, lambda: None
    try:
        made, _ = paper(most)
        ended: dict[str, str] = {}
        order: list[str] = []
        asked, calls, commands = dict[str, str](), 0, dict[LoadCommand, str]()

        def note(outputs: list[Output]) -> None:
            for o in outputs:
                if isinstance(o, module.Ended):
                    ended[commands.pop(o.command)] = o.error or "stop"
                    continue
                assert o.request not in ended
                ended[o.request] = str(o.finish)

        def turn() -> None:
            if made.busy:
                note(made.step())
            assert sum(m.engine is not None for m in made.slots) <= most
            order.extend(m.info.name for m in made.slots if m.loads > order.count(m.info.name))

        for kind, model, n in orders:
            if kind == "ask":
                asked[f"r{len(asked)}"] = model
                request = tiny.request(f"r{len(asked) - 1}", [1], n)
                note(made.submit(replace(request, model=model, priority=BACKGROUND * (n % 2))))
            elif kind == "abort":
                note(made.abort(f"r{n}"))
            elif kind == "step":
                for _ in range(n):
                    turn()
            else:
                calls += 1
                command = LoadCommand(model, kind == "load")
                commands[command] = f"c{calls}"
                note(made.submit(command))
        for _ in range(40 * len(orders) + 10):
            turn()
        assert not made.busy and set(ended) == {*asked, *(f"c{i + 1}" for i in range(calls))}
        assert {ended[name] for name in asked} <= {"length", "abort"}
        assert {ended[name] for name in set(ended) - set(asked)} <= {"stop"}
        assert len(order) <= 1 + len(asked) + calls  # each swap serves somebody
    finally:
        module.release_memory = free


def test_a_steady_stream_for_one_model_starves_nobody() -> None:
    """Two new requests for `a` after every step: one for `b` is served when those before it are."""
    made, steps = paper(1, "ab")
    made.submit(tiny.request("a0", [1], 5))
    made.submit(replace(tiny.request("b", [1], 2), model="b"))
    turns, ended, n = 0, list[str](), 0
    while "b" not in ended:
        for _ in range(2):
            n += 1
            made.submit(replace(tiny.request(f"a{n}", [1], 5), model="a"))
        made.abort(f"a{n}")  # of a client that left: the others go on waiting
        ended += [o.request for o in made.step()]
        turns += 1
        assert turns < 15
    assert ended == ["a0", "b"] and steps == ["a"] * 5 + ["b"] * 2
    while made.busy:
        made.step()
    assert made.slots[0].loads == 2


def test_nothing_refers_to_a_model_that_was_unloaded() -> None:
    made = ModelManager([ModelSlot(lambda: load("a"), replace(INFO, name="a"))])
    made.launch()
    gc.collect()
    mx.clear_cache()
    before = None
    for i in range(5):
        made.submit(tiny.request(f"r{i}", [1, 2, 3], 20))
        while made.busy:
            made.step()
        engine = made.slots[0].engine
        assert engine is not None
        refs = [
            weakref.ref(engine.runner),
            weakref.ref(engine.runner.model),
            weakref.ref(engine.scheduler.pool),
        ]
        del engine
        made.submit(LoadCommand("a", False))
        while made.busy:
            made.step()
        assert [ref() for ref in refs] == [None] * 3
        now = mx.get_active_memory()
        before = now if before is None else before
        assert abs(now - before) < 1 << 20


def rss() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps pages
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_an_unload_frees_memory(smollm2: Path, tmp_path: Path) -> None:
    """Five times; speculation is on, so there is a drafter too."""
    config = Config(kv_blocks=64, context=1024, cache_dir=str(tmp_path), cache_gb=0)
    start = partial(load_engine, smollm2, "a", config)
    made = ModelManager([ModelSlot(start, replace(INFO, name="a"))])
    seen: list[tuple[int, int]] = []
    gc.collect()  # models of other tests
    before = (mx.get_active_memory(), rss())
    made.launch()
    size = made.slots[0].info.weight_bytes
    for i in range(5):
        made.submit(tiny.request(f"r{i}", [1, 2, 3, 4] * 20, 24))
        while made.busy:
            made.step()
        assert mx.get_active_memory() - before[0] >= size
        made.submit(LoadCommand("a", False))
        while made.busy:
            made.step()
        seen.append((mx.get_active_memory(), rss()))
    print(
        "active and RSS in MiB before:",
        [x >> 20 for x in before],
        "after:",
        [[x >> 20 for x in s] for s in seen],
    )
    assert all(abs(active - before[0]) < 1 << 20 for active, _ in seen)
    assert all(held - before[1] < size // 10 for _, held in seen)
    assert seen[-1][1] - seen[0][1] < size // 50


@pytest.mark.parametrize(
    ("wired", "working_set", "limits"),
    only([(False, 1 << 40, []), (True, 1 << 40, [5000]), (True, 3000, [3000])], 1),
)
def test_memory_is_wired_once_and_never_again(
    wired: bool, working_set: int, limits: list[int], launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is loaded later: a limit that changes while the GPU works panics macOS."""
    set_to: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", set_to.append)
    info = {"max_recommended_working_set_size": working_set}
    monkeypatch.setattr(mx, "device_info", lambda: info)

    def start(name: str) -> tuple[Any, ModelInfo]:
        engine, info = load(name)
        assert not engine.counters["steps"]
        return engine, replace(info, weight_bytes=4000, kv_bytes=1000)

    worker = launched("ab", wired=wired, starts={name: partial(start, name) for name in "ab"})
    assert set_to == limits

    async def main() -> None:
        for model in "abab":
            await collect(ask(worker, model, model))

    asyncio.run(main())
    assert set_to == limits


@pytest.mark.parametrize(
    ("darwin", "wired", "weights", "told"),
    [
        (True, False, 61, True),
        (True, False, 59, False),
        (True, True, 61, False),
        (False, False, 61, False),
    ],
)
def test_a_large_model_that_is_not_wired_is_told(
    darwin: bool,
    wired: bool,
    weights: int,
    told: bool,
    launched: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("mlxspec.engine.memory.DARWIN", darwin)
    monkeypatch.setattr("mlxspec.engine.memory.total", lambda: 100)
    monkeypatch.setattr("mlxspec.engine.memory.available", lambda: 50)
    monkeypatch.setattr("mlxspec.engine.memory.system_level", lambda: 0)
    monkeypatch.setattr("mlxspec.engine.memory.footprint", lambda: 1)

    def start() -> tuple[Any, ModelInfo]:
        engine, info = load("a")
        return engine, replace(info, weight_bytes=weights)

    with caplog.at_level("WARNING", "mlxspec"):
        launched("a", wired=wired, starts={"a": start})
    assert ("--wired" in caplog.text) == told


def test_buffers_that_steps_left_are_freed_when_idle() -> None:
    clock = Clock()
    manager = ModelManager([ModelSlot(lambda: load("a"), replace(INFO, name="a"))], clock=clock)
    manager.launch()
    manager.submit(Request("r", (1, 2, 3), 4))
    while manager.busy:
        manager.step()
    assert mx.get_cache_memory()
    manager.poll()
    assert mx.get_cache_memory()  # the next request may come at once
    clock.now = 10.0
    manager.poll()
    assert not mx.get_cache_memory()
    manager.close()

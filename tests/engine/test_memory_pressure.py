"""Levels rise at once and fall late; an engine under them admits less, and loses nothing."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.engine.memory import CRITICAL, HOLD_S, NORMAL, WARN, MemoryMonitor
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from mlxspec.types import Busy, ModelInfo
from tests.support import tiny
from tests.support.machines import GIB, MAC, FixedMonitor, Libc, on_linux, on_mac
from tests.support.scripted import Answer, Server
from tests.tiny_tokenizer import save_tokenizer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("number", "level"), [(1, NORMAL), (2, WARN), (4, CRITICAL), (3, NORMAL)])
def test_macos_level(number: int, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_mac(monkeypatch, Libc({"kern.memorystatus_vm_pressure_level": (number, 4)}))
    assert memory.system_level() == level


def test_an_unknown_level_is_normal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_linux(monkeypatch, tmp_path)
    assert memory.system_level() == NORMAL
    on_mac(monkeypatch, Libc({}))
    assert memory.system_level() == NORMAL and MemoryMonitor(clock=Clock()).poll() == NORMAL, (
        "a guess never alarms"
    )


@pytest.mark.parametrize(
    ("free", "level"), [(16 / 32, NORMAL), (15.9 / 32, WARN), (7.9 / 32, WARN)]
)
def test_free_memory_sets_the_level(
    free: float, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS only the kernel says that it is very short."""
    numbers = MAC | {name: (0, 4) for name in memory.FREE_PAGES}
    numbers["vm.page_free_count"] = (int(free * GIB) // 16384, 4)
    on_mac(monkeypatch, Libc(numbers, {9: 8 * GIB}))
    monitor = MemoryMonitor(Clock())
    assert (monitor.poll(), monitor.footprint) == (level, 8 * GIB)


def test_the_level_falls_late_and_is_logged(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock, reads = Clock(), []
    monitor = MemoryMonitor(clock)
    now = NORMAL
    monkeypatch.setattr(memory, "system_level", lambda: reads.append(clock.now) or now)
    monkeypatch.setattr(memory, "available", memory.total)

    def at(seconds: float, level: int) -> int:
        nonlocal now
        clock.now, now = seconds, level
        return monitor.poll()

    with caplog.at_level(logging.WARNING, "mlxspec"):
        assert at(0, NORMAL) == NORMAL
        assert at(0.9, CRITICAL) == NORMAL and reads == [0], "once a second"
        assert at(1, CRITICAL) == CRITICAL
        assert at(5, NORMAL) == at(6, WARN) == at(10, NORMAL) == CRITICAL
        assert at(1 + HOLD_S, WARN) == WARN
        assert at(12, WARN) == at(20, NORMAL) == at(21, NORMAL) == WARN
        assert at(22, NORMAL) == NORMAL
        for second in range(30, 60, 2):  # now and then
            assert at(second, WARN) == at(second + 1, NORMAL) == WARN
    said = [record.getMessage().partition(" (")[0] for record in caplog.records]
    assert said == [f"memory is {memory.LEVELS[level]}" for level in (2, 1, 0, 1)]


def test_this_machine_is_read() -> None:
    monitor = MemoryMonitor()
    assert monitor.poll() in (NORMAL, WARN, CRITICAL) and monitor.footprint > 1 << 20


def test_while_memory_is_very_short_one_request_runs_at_a_time() -> None:
    e = tiny.engine(tiny.model("qwen3"), monitor=FixedMonitor())
    plain, most = tiny.Plain(tiny.model("qwen3")), 0
    for i in range(2):
        e.add(tiny.request(f"r{i}", [i, 1, 2], 12))
    outputs = e.step() + e.step()
    assert len(e.scheduler.running) == 2
    for i in range(2, 6):
        e.add(tiny.request(f"r{i}", [i, 1, 2], 12, choices=1 + (i == 5)))
    while e.busy:
        running = len(e.scheduler.running)
        e.monitor.level = CRITICAL
        e.housekeep()
        outputs += e.step()
        e.check()
        assert len(e.scheduler.running) <= max(1, running), "nothing starts beside what runs"
        most = max(most, len(e.scheduler.running))
    assert most == 2 and e.scheduler.preemptions == 0, "what runs goes on"
    for i in range(6):
        assert tiny.tokens(outputs, f"r{i}") == plain([i, 1, 2], 12)
    assert tiny.tokens(outputs, "r5", 1) == plain([5, 1, 2], 12)


@pytest.mark.parametrize(("kind", "layout"), [("qwen3", "rows"), ("mamba2", "rect")])
def test_snapshots_are_evicted_when_memory_is_very_short_and_blocks_stay(
    kind: str, layout: Any
) -> None:
    """Pools would keep their memory."""
    e = tiny.engine(tiny.model(kind), layout=layout, monitor=FixedMonitor())
    prompt, kv = list(range(40)), e.scheduler.kv

    def ask() -> tuple[int, list[int]]:
        e.add(tiny.request("r", prompt, 8))
        outputs = tiny.run(e)
        return outputs[-1].cached, tiny.tokens(outputs, "r")

    (cold, first), (warm, second) = ask(), ask()
    assert cold == 0 and warm > 30
    cached = len(kv.pool.idle)
    e.monitor.level = CRITICAL
    e.housekeep()
    assert len(kv.pool.idle) == cached > 0 and not (kv.states and kv.states.snapshots)
    again, third = ask()
    assert (again > 30) == (kv.states is None)
    assert first == second == third == tiny.Plain(tiny.model(kind))(prompt, 8)


def test_while_memory_is_short_all_are_served_and_the_cache_gives_way_block_by_block() -> None:
    """Which macOS says of a small machine's everyday."""
    e = tiny.engine(tiny.model("qwen3"), monitor=FixedMonitor())
    plain, pool = tiny.Plain(tiny.model("qwen3")), e.scheduler.pool
    prompts = [[i + 3 * j for j in range(40)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        e.add(tiny.request(f"a{i}", prompt, 8))
    tiny.run(e)
    highest, cached = pool.highest, len(pool.idle)
    e.monitor.level = WARN
    e.housekeep()
    assert len(pool.idle) == cached, "nothing is evicted before it is needed"
    e.add(tiny.request("again", prompts[3], 8))
    outputs = tiny.run(e)
    assert outputs[-1].cached > 30 and tiny.tokens(outputs, "again") == plain(prompts[3], 8)
    others = [[5 * i + 2 * j + 1 for j in range(20)] for i in range(3)]
    for i, prompt in enumerate(others):
        e.add(tiny.request(f"b{i}", prompt, 8))
    outputs = e.step() + e.step()
    assert len(e.scheduler.running) == 3
    outputs += tiny.run(e)
    for i, prompt in enumerate(others):
        assert tiny.tokens(outputs, f"b{i}") == plain(prompt, 8)
    assert pool.highest == highest, "no more memory was taken"
    assert len(pool.idle) > cached // 2


@pytest.fixture
def monitor() -> MemoryMonitor:
    return FixedMonitor()


@pytest.fixture
def worker(monitor: MemoryMonitor) -> Iterator[EngineThread]:
    info = ModelInfo("tiny", 512, tiny.VOCAB, "rows", 8, 1000, 234, 0)
    manager = tiny.manager(lambda: (tiny.engine(tiny.model("qwen3"), vocab=tiny.VOCAB), info))
    manager.monitor = monitor
    w = EngineThread(manager, max_sequences=8)
    w.launch()
    yield w
    w.stop()


def test_a_worker_refuses_while_memory_is_critical(
    worker: EngineThread, monitor: MemoryMonitor
) -> None:
    plain = tiny.Plain(tiny.model("qwen3"))

    async def main() -> None:
        async def collect(stream: Any) -> list[int]:
            return [t async for o in stream for t in o.tokens]

        streams = [worker.submit(tiny.request(f"r{i}", [i, 1, 2], 40)) for i in range(8)]
        first = await anext(streams[0])
        monitor.level = WARN
        streams += [worker.submit(tiny.request(f"r{i}", [i, 1, 2], 40)) for i in range(8, 12)]
        await anext(streams[1])
        monitor.level = CRITICAL
        with pytest.raises(Busy, match="short of memory; try again in 10 s") as refused:
            worker.submit(tiny.request("no", [1], 3))
        assert refused.value.retry_after == HOLD_S
        rest = [collect(s) for s in streams[2:]]
        async with asyncio.timeout(60):
            found = await asyncio.gather(collect(streams[0]), collect(streams[1]), *rest)
            assert list(first.tokens) + found[0] == plain([0, 1, 2], 40)
            for i in range(2, 12):
                assert found[i] == plain([i, 1, 2], 40), i
            monitor.level = NORMAL
            assert await collect(worker.submit(tiny.request("yes", [1], 3))) == plain([1], 3)

    asyncio.run(main())
    assert tiny.stats(worker).blocks_used == 0


def test_an_idle_worker_frees_snapshots(monitor: MemoryMonitor, monkeypatch: Any) -> None:
    info = ModelInfo("tiny", 512, tiny.VOCAB, "rect", 8, 1000, 234, 0)
    manager = tiny.manager(lambda: (tiny.engine(tiny.model("mamba2"), layout="rect"), info))
    manager.monitor = monitor
    worker = EngineThread(manager, max_sequences=8)
    worker.launch()

    async def main() -> None:
        prompt = list(range(40))
        assert [o async for o in worker.submit(tiny.request("r", prompt, 3))]
        while worker._busy or not tiny.stats(worker).states:
            await asyncio.sleep(0)
        monkeypatch.setattr("mlxspec.engine.worker.IDLE_POLL_S", 0.01)
        worker.abort("nobody")  # so that the wait starts again
        monitor.level = CRITICAL
        async with asyncio.timeout(30):
            while tiny.stats(worker).states:
                await asyncio.sleep(0.01)
        assert tiny.stats(worker).memory_pressure == CRITICAL and worker.stalled() == 0

    asyncio.run(main())
    worker.stop()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_client_sees_429(
    path: str, worker: EngineThread, monitor: MemoryMonitor, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    server = Server(worker, create_app(worker, load_tokenizer(tmp_path), tmp_path, Config()))
    body = {"model": "default", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}

    async def main() -> tuple[Answer, Answer, str]:
        monitor.level = CRITICAL
        refused = await server.post(path, body)
        monitor.level = NORMAL
        served = await server.post(path, body)
        return refused, served, (await server.get("/metrics")).body.decode()

    refused, served, page = asyncio.run(main())
    assert (refused.status, refused.headers["retry-after"]) == (429, "10")
    error = refused.json["error"]
    assert error["type"] == "rate_limit_error"
    assert error["message"] == "the machine is short of memory; try again in 10 s"
    assert served.status == 200
    assert (
        'mlxspec_refused_total{status="429"} 1.0' in page and "mlxspec_memory_pressure 0.0" in page
    )

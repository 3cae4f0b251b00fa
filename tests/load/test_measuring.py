"""What a first start measures in idle moments: no request waits for it, notices it or is changed by
it, and it is complete in the end."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxspec.engine.engine import Engine
from mlxspec.engine.manager import ModelManager, ModelSlot
from mlxspec.engine.worker import EngineThread
from mlxspec.load.loader import load_engine
from mlxspec.speculate import calibrate
from mlxspec.speculate.calibrate import MEASURED
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.types import Interrupted, Request
from tests.load.test_loader_heads import BLOCK
from tests.support import tiny
from tests.support.checkpoints import both, settings

ROOM = 64 + MEASURED // BLOCK  # blocks: to measure, and to try the head


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, Any]]:
    """A start with a model whose head tries hidden states, without waiting for measurements."""
    monkeypatch.setattr("mlxspec.model.hub.default_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(calibrate, "SECONDS", 0.0)
    target, head = both(tmp_path, "qwen3_5")

    def started(**change: Any) -> tuple[Engine, Any]:
        options = settings(kv_blocks=ROOM, cache_gb=1.0, **change)
        return load_engine(target, "tiny", options, head, measure_idle=True)

    return started


def interrupted_at(number: int) -> Callable[[], None]:
    """Raises Interrupted at its `number`th call, as if a request waited."""
    calls = iter(range(1, 10**9))

    def check() -> None:
        if next(calls) == number:
            raise Interrupted

    return check


def known(folder: Path) -> dict[str, Any]:
    (file,) = (folder / "cache/costs").iterdir()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_first_start_serves_at_once_and_drafts_when_it_has_measured(
    start: Callable[..., tuple[Engine, Any]], tmp_path: Path
) -> None:
    e, _ = start()
    assert e.idle_work
    plain = tiny.Plain(tiny.model("qwen3_5"))
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    for n in range(1, 10_000):
        e.add(tiny.request(f"r{n}", prompt, 6))
        assert tiny.tokens(tiny.run(e), f"r{n}") == plain(prompt, 6)
        counters, metrics = dict(e.counters), dict(e.spec_metrics.drafted)
        e.work_idle(interrupted_at(1 + n % 3))
        assert (e.counters, e.spec_metrics.drafted) == (counters, metrics)
        assert not e.busy and e.scheduler.pool.used == 0
        e.check()
        if not e.proposer.costs:  # type: ignore[attr-defined]
            assert not metrics
        if not e.idle_work or n > 12:  # its trial of the head takes longer than that
            break
    e.work_idle()
    assert e.idle_work is None and e.proposer.costs  # type: ignore[attr-defined]
    kept = known(tmp_path)
    assert kept["costs"] and kept["drafts"] and kept["taps"]
    e.close(5)


@pytest.mark.slow
def test_a_second_start_has_nothing_to_measure(start: Callable[..., tuple[Engine, Any]]) -> None:
    first, _ = start()
    assert first.offloader is None  # what blocks hold depends on what the head reads
    first.work_idle()
    assert first.offloader
    first.close(5)
    second, _ = start()
    assert second.idle_work is None and second.proposer.costs and second.offloader  # type: ignore[attr-defined]
    second.close(5)


@pytest.mark.slow
def test_answers_tried_for_a_head_leave_no_trace(start: Callable[..., tuple[Engine, Any]]) -> None:
    e, _ = start()
    prompt = list(range(1, 3 * BLOCK))
    e.add(tiny.request("a", prompt, 4))
    tiny.run(e)
    before = e.stats()
    e.work_idle()
    after = e.stats()
    for name in ("steps", "rounds", "generated_tokens", "prompt_tokens", "cached_tokens"):
        assert getattr(before, name) == getattr(after, name), name
    assert not after.running_requests
    e.close(5)


@pytest.mark.slow
def test_a_request_that_arrives_ends_the_measurement(
    start: Callable[..., tuple[Engine, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the step that is being measured and no other, through the engine's thread."""
    steps: list[int] = []  # tokens that were generated before each
    real = calibrate.time_step
    e, info = start()

    async def session() -> None:
        arrived, answered = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*args: Any, **how: Any) -> float:
            steps.append(e.counters["generated_tokens"])
            loop.call_soon_threadsafe(arrived.set)
            while not (worker._inbox.qsize() or answered.is_set()):
                pass  # the request arrives during this step
            return real(*args, **how)

        monkeypatch.setattr(calibrate, "time_step", slow)
        worker = EngineThread(ModelManager([ModelSlot(lambda: (e, info), info)]))
        worker.launch()
        await arrived.wait()
        outputs = [output async for output in worker.submit(Request("r", (1, 2, 3), 4))]
        assert outputs[-1].finish == "length"
        answered.set()
        while e.idle_work:
            await asyncio.sleep(0.01)
        worker.stop()

    asyncio.run(session())
    assert steps[0] == 0 and set(steps[1:]) == {4} and len(steps) > 5


@pytest.mark.parametrize("what", ["steps", "head"])
def test_a_measurement_that_fails_is_given_up(
    start: Callable[..., tuple[Engine, Any]],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    e, info = start()
    if what == "steps":
        monkeypatch.setattr(calibrate, "time_step", lambda *_, **__: 1 / 0)
    else:
        monkeypatch.setattr(HeadDrafter, "measure", lambda *_: 1 / 0)

    async def session() -> None:
        worker = EngineThread(ModelManager([ModelSlot(lambda: (e, info), info)]))
        worker.launch()
        while e.idle_work:
            await asyncio.sleep(0.01)
        outputs = [output async for output in worker.submit(Request("r", (1, 2, 3), 4))]
        assert outputs[-1].finish == "length"
        worker.stop()

    asyncio.run(session())
    assert "measuring failed" in caplog.text

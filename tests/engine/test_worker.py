"""The thread and its door: streams, cancel, overload, errors, death, shutdown. No sleeps."""

import asyncio
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from mlxspec.engine.engine import Engine
from mlxspec.engine.worker import EngineThread
from mlxspec.types import BACKGROUND, Busy, Dead, ModelInfo, Output, Request, UserError
from tests.support import tiny

INFO = ModelInfo("tiny", 512, tiny.VOCAB, "rows", 8, 0, 0, 0)


def make(**kw) -> EngineThread:
    def start():
        return tiny.engine(tiny.model("qwen3"), vocab=tiny.VOCAB, **kw), INFO

    return EngineThread(tiny.manager(start), max_sequences=8, max_queue=4)


@pytest.fixture
def worker():
    w = make()
    w.launch()
    yield w
    w.stop()


async def collect(stream) -> list[Output]:
    async with asyncio.timeout(30):
        return [o async for o in stream]


def test_streams_carry_the_tokens(worker: EngineThread) -> None:
    plain = tiny.Plain(tiny.model("qwen3"))

    async def main():
        streams = [worker.submit(tiny.request(f"r{i}", [i, 1, 2], 10)) for i in range(5)]
        return await asyncio.gather(*map(collect, streams))

    for i, outputs in enumerate(asyncio.run(main())):
        assert tiny.tokens(outputs, f"r{i}") == plain([i, 1, 2], 10)
        assert [o.finish for o in outputs][-1] == "length"


def test_finished_requests_are_dropped(worker: EngineThread) -> None:
    async def main():
        before = worker._progress
        await collect(worker.submit(tiny.request("r", [1], 3)))
        return before

    before = asyncio.run(main())
    assert not worker._mailboxes
    assert worker._progress > before


def test_an_idle_engine_is_checked() -> None:
    worker = make()
    worker.launch()
    checked = []

    async def main():
        stream = worker.submit(tiny.request("r", [1], 3))
        while (await anext(stream)).finish is None:
            pass
        while worker._busy:
            await asyncio.sleep(0)

    check = Engine.check
    Engine.check = lambda self: checked.append(1) or check(self)
    try:
        asyncio.run(main())
    finally:
        Engine.check = check
        worker.stop()
    assert checked


@pytest.mark.slow
@pytest.mark.parametrize("how, status", [("raise SystemExit(3)", 3), ("", 0)])
def test_a_program_ends_cleanly_without_stop(how: str, status: int) -> None:
    """A thread that holds MLX while the interpreter ends would abort the process."""
    program = (
        "from mlxspec import blas; blas.load()\n"
        "import asyncio\n"
        "from tests.support import tiny\n"
        "from tests.engine.test_worker import make\n"
        "worker = make(); worker.launch()\n"
        "async def busy(): await anext(worker.submit(tiny.request('r', [1, 2], 500)))\n"
        f"asyncio.run(busy())\n{how}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr


def test_choices_end_one_by_one(worker: EngineThread) -> None:
    async def main():
        return await collect(
            worker.submit(tiny.request("r", [1, 2], 6, temperature=1.0, choices=3))
        )

    outputs = asyncio.run(main())
    assert sorted(o.index for o in outputs if o.finish) == [0, 1, 2]
    assert all(len(tiny.tokens(outputs, "r", i)) == 6 for i in range(3))


def test_abort_ends_the_stream_and_frees_the_blocks(worker: EngineThread) -> None:
    async def main():
        stream = worker.submit(tiny.request("r", [1, 2, 3], 400))
        first = await anext(stream)
        worker.abort("r")
        rest = await collect(stream)
        while worker.stalled() or tiny.stats(worker).running:
            await asyncio.sleep(0)
        return first, rest

    first, rest = asyncio.run(main())
    assert first.finish is None and rest[-1].finish == "abort"
    assert len(rest) < 300
    assert tiny.stats(worker).blocks_used == 0


def test_abort_of_one_choice_leaves_the_others(worker: EngineThread) -> None:
    async def main():
        stream = worker.submit(tiny.request("r", [1, 2, 3], 50, temperature=1.0, choices=2))
        await anext(stream)
        worker.abort("r", 0)
        return await collect(stream)

    ends = {o.index: o.finish for o in asyncio.run(main()) if o.finish}
    assert ends == {0: "abort", 1: "length"}


def test_a_full_queue_is_refused_with_a_time(worker: EngineThread) -> None:
    async def main():
        streams = [worker.submit(tiny.request(f"r{i}", [1], 30)) for i in range(12)]
        with pytest.raises(Busy) as refused:
            worker.submit(tiny.request("more", [1], 30))
        done = await asyncio.gather(*map(collect, streams))
        again = await collect(worker.submit(tiny.request("more", [1], 3)))
        return refused.value.retry_after, done, again

    wait, done, again = asyncio.run(main())
    assert 1 <= wait <= 60
    assert all(d[-1].finish == "length" for d in done) and again[-1].finish == "length"


def test_the_background_leaves_places_for_others(worker: EngineThread) -> None:
    """A queue full of it refuses nobody who waits for an answer; an empty one takes any of it."""

    def background(name: str, choices: int = 1) -> Request:
        return replace(tiny.request(name, [1], 30, choices=choices), priority=BACKGROUND)

    async def main():
        streams = [worker.submit(background("large", 9))]
        with pytest.raises(Busy):
            worker.submit(background("more"))
        for i in range(3):
            streams.append(worker.submit(tiny.request(f"r{i}", [1], 30)))
        with pytest.raises(Busy):
            worker.submit(tiny.request("more", [1], 30))
        return await asyncio.gather(*map(collect, streams))

    assert all(o[-1].finish == "length" for o in asyncio.run(main()))


def test_requests_are_queued_together_or_not_at_all(worker: EngineThread) -> None:
    """What is left of the queue holds one of two requests: neither runs."""

    async def main():
        mailbox = worker.submit(*(tiny.request(f"r{i}", [1], 30) for i in range(11)))
        with pytest.raises(Busy):
            worker.submit(tiny.request("one", [1], 3), tiny.request("more", [1], 3))
        assert ("one", 0) not in worker._mailboxes
        return await collect(mailbox)

    outputs = asyncio.run(main())
    assert {o.request for o in outputs if o.finish == "length"} == {f"r{i}" for i in range(11)}


def test_an_invalid_request_ends_alone(worker: EngineThread) -> None:
    async def main():
        good = worker.submit(tiny.request("good", [1, 2], 20))
        bad = worker.submit(tiny.request("bad", range(512), 20, choices=2))
        return await asyncio.gather(collect(good), collect(bad))

    good, bad = asyncio.run(main())
    assert good[-1].finish == "length"
    assert [o.finish for o in bad] == ["error", "error"] and "too long" in bad[0].error
    assert worker.alive()


def test_a_dead_engine_fails_all_requests() -> None:
    worker = make()
    worker.launch()

    async def main():
        stream = worker.submit(tiny.request("r", [1, 2], 400))
        await anext(stream)
        worker.abort(object())  # type: ignore[arg-type]  harmless: an unknown id
        worker._inbox.put(42)  # what no caller can send
        outputs = await collect(stream)
        with pytest.raises(Dead):
            worker.submit(tiny.request("s", [1], 3))
        await worker.drain(30)  # has nothing to wait for
        return outputs

    outputs = asyncio.run(main())
    assert outputs[-1].finish == "error" and "Error" in outputs[-1].error
    assert not worker.alive()


def test_a_stop_fails_all_requests(worker: EngineThread) -> None:
    async def main():
        stream = worker.submit(tiny.request("r", [1, 2], 400))
        await anext(stream)
        worker.stop()
        outputs = await collect(stream)
        with pytest.raises(Dead):
            worker.submit(tiny.request("s", [1], 3))
        return outputs

    assert "stopping" in asyncio.run(main())[-1].error


def test_an_unknown_abort_is_not_a_stall(worker: EngineThread) -> None:
    worker._progress -= 100
    worker.abort("nobody")
    assert worker.stalled() < 50


def test_loading_errors_reach_the_caller() -> None:
    def start():
        raise UserError("no such model")

    with pytest.raises(UserError, match="no such model"):
        EngineThread(tiny.manager(start)).launch()


def test_health_is_progress(worker: EngineThread) -> None:
    assert worker.alive() and worker.stalled() == 0.0

    async def main():
        stream = worker.submit(tiny.request("r", [1], 5))
        during = worker.stalled()
        await collect(stream)
        return during

    assert 0 <= asyncio.run(main()) < 5
    worker._busy, worker._progress = True, time.monotonic() - 100
    assert worker.stalled() > 99


def test_drain_waits_then_aborts(worker: EngineThread) -> None:
    async def main():
        short = worker.submit(tiny.request("short", [1], 5))
        assert not worker.draining
        await worker.drain(30)
        assert worker.draining
        with pytest.raises(Dead):
            worker.submit(tiny.request("late", [1], 5))
        return await collect(short)

    assert asyncio.run(main())[-1].finish == "length"
    second = make()
    second.launch()

    async def cut():
        long = second.submit(tiny.request("long", [1], 500))
        await second.drain(0.0)
        return await collect(long)

    assert asyncio.run(cut())[-1].finish == "abort"
    second.stop()
    second.stop()
    assert not second.alive()


def test_unread_outputs_are_bounded(worker: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices that run are ended."""
    monkeypatch.setattr("mlxspec.engine.worker.MAX_UNREAD", 30)

    async def main():
        stream = worker.submit(tiny.request("r", [1], 300, choices=2))
        other = worker.submit(tiny.request("other", [2], 20))
        async with asyncio.timeout(30):
            while ("r", 0) in worker._mailboxes or worker._busy:
                await asyncio.sleep(0.001)
        held = stream.unread.qsize()
        assert len(await collect(other)) == 20
        return held, await collect(stream)

    held, outputs = asyncio.run(main())
    assert 60 < held <= 64 and len(outputs) == held
    assert [(o.finish, o.fault) for o in outputs if o.finish] == [("error", "client")] * 2
    assert not worker._mailboxes and not tiny.stats(worker).running

"""The text thread: off the event loop, in order, bounded. And how disconnects are noticed."""

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from mlxspec.config import Config
from mlxspec.server.errors import HttpRequest
from mlxspec.server.state import ServerState, while_connected
from mlxspec.types import Busy, Dead
from tests.support.scripted import server

pytestmark = pytest.mark.anyio


@pytest.fixture
def state(tokenizer: Any, model_dir: Any) -> ServerState:
    made: ServerState = server(
        tokenizer, model_dir, Config(max_sequences=1, max_queue=2)
    ).app.state.server
    return made


async def test_text_work_runs_off_the_loop_and_in_order(state: ServerState) -> None:
    gate, order = threading.Event(), []

    def work(name: str, wait: bool = False) -> str:
        if wait:
            assert gate.wait(10)
        order.append((name, threading.current_thread() is threading.main_thread()))
        return name

    first = asyncio.ensure_future(state.on_text_thread(work, "a", True))
    second = asyncio.ensure_future(state.on_text_thread(work, "b"))
    await asyncio.sleep(0)  # the loop is free although the thread is not
    assert not order
    gate.set()
    assert await asyncio.gather(first, second) == ["a", "b"]
    assert order == [("a", False), ("b", False)]


async def test_waiting_text_work_is_bounded(state: ServerState) -> None:
    gate = threading.Event()
    waiting = [asyncio.ensure_future(state.on_text_thread(gate.wait, 10)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await state.on_text_thread(len, "")
    gate.set()
    await asyncio.gather(*waiting)
    assert await state.on_text_thread(len, "ab") == 2


async def test_cancelled_text_work_makes_room(state: ServerState) -> None:
    gate = threading.Event()
    waiting = [asyncio.ensure_future(state.on_text_thread(gate.wait, 10)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[2].cancel()
    await asyncio.wait(waiting[2:])
    gate.set()
    assert await state.on_text_thread(len, "ab") == 2
    await asyncio.gather(*waiting[:2])


async def test_cancelled_text_work_is_freed(state: ServerState) -> None:
    """A body may have megabytes, and the thread may be at another for long."""

    class Body: ...

    gate, bodies = threading.Event(), weakref.WeakSet[Body]()
    held = asyncio.ensure_future(state.on_text_thread(gate.wait, 10))
    for _ in range(20):
        body = Body()
        bodies.add(body)
        gone = asyncio.ensure_future(state.on_text_thread(id, body))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait((gone,))
        del body, gone
    await asyncio.sleep(0.05)
    assert state.text_jobs == 1 and not bodies
    gate.set()
    assert await held


async def test_text_work_fails_when_the_engine_stops(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: what is rendered then is refused."""
    gate = threading.Event()
    waiting = [asyncio.ensure_future(state.on_text_thread(gate.wait, 10)) for _ in range(2)]
    await asyncio.sleep(0.1)
    monkeypatch.setattr(type(state.worker), "draining", property(lambda self: True))
    for job in waiting:
        with pytest.raises(Dead):
            await asyncio.wait_for(job, 2)
    assert state.text_jobs == 0
    gate.set()


def connection() -> tuple[HttpRequest, asyncio.Event]:
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    return HttpRequest({"type": "http"}, receive), gone


async def test_while_connected_returns_what_the_work_returns() -> None:
    http, _ = connection()

    async def work() -> int:
        return 5

    assert await while_connected(http, work()) == 5


async def test_while_connected_passes_errors_on() -> None:
    http, _ = connection()

    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(http, work())


async def test_while_connected_takes_an_error_that_nobody_waits_for() -> None:
    """The work fails as it is cancelled, because its client has left."""

    class Leaving:
        async def is_disconnected(self) -> bool:
            await asyncio.sleep(0.01)
            return True

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("x")

    lost: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context))
    http: Any = Leaving()
    with pytest.raises(ClientDisconnect):
        await while_connected(http, work())
    gc.collect()
    assert not lost


@pytest.mark.parametrize("how", ["the client", "the server"])
async def test_while_connected_cancels_the_work_and_waits_for_its_end(how: str) -> None:
    http, gone = connection()
    began, log = asyncio.Event(), []

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            log.append("ended")

    task = asyncio.ensure_future(while_connected(http, work()))
    await began.wait()
    if how == "the client":
        gone.set()
        with pytest.raises(ClientDisconnect):
            await task
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log == ["ended"]


async def test_failures_of_later_work_are_logged(
    state: ServerState, caplog: pytest.LogCaptureFixture
) -> None:
    state.later(lambda: 1 // 0)
    assert await state.on_text_thread(len, "ab") == 2
    assert "ZeroDivisionError" in caplog.text

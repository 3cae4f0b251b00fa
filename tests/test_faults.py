"""An engine that breaks at each of its steps: whoever waits is told, the process ends, and the next serves.

Rule: every fault is injected into the real engine, behind the real application; every wait has a limit.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from mlxspec.config import Config
from mlxspec.engine import constrain
from mlxspec.engine.engine import Engine
from mlxspec.engine.fleet import Fleet
from mlxspec.engine.scheduler import Scheduler
from mlxspec.engine.tier import Tier
from mlxspec.engine.worker import Worker
from mlxspec.model import runner
from mlxspec.model.runner import Runner, Step
from mlxspec.server import run
from mlxspec.speculate.chain import Chain
from tests import tiny
from tests.model.test_load import save
from tests.server.scripted import MESSAGES, Answer, Connection
from tests.tiny_tokenizer import save_tokenizer

SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 20}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
LONG = 400  # tokens, far more than are made before the fault
CHAT, PLAIN, MESSAGE, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": LONG, "ignore_eos": True},
    PLAIN: {"prompt": "hello", "max_tokens": LONG, "ignore_eos": True},
    MESSAGE: {"messages": MESSAGES, "max_tokens": LONG},
    RESPONSE: {"input": "hello", "max_output_tokens": LONG},
}
# What ends the engine, wherever it is raised: where, and the method or function.
POINTS: list[tuple[Any, str]] = [
    (Fleet, "take"),
    (Fleet, "step"),
    (Fleet, "expire"),
    (Fleet, "snapshot"),  # what `_publish` asks for
    (Engine, "look"),
    (constrain, "waits"),
    (Scheduler, "plan"),
    (constrain, "mask"),
    (Runner, "copy"),
    (Runner, "run"),
    (runner, "sample"),
    (Scheduler, "submitted"),
    (Step, "read"),
    (Runner, "rewind"),
    (Scheduler, "commit"),
    (constrain, "take"),
    (Tier, "turn"),
    (Worker, "_publish"),
    (Worker, "_deliver"),  # on the event loop's thread
]
DRAFTING = ["begin", "waits", "plan", "draft", "observe", "end"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tokenizer(tmp_path_factory.mktemp("model"))
    save(path, "llama")
    return path


class Fault:
    """Raises in the place of what it stands for, once it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
        self.armed, self.error, self.whole = False, error, getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kw: self(*args, **kw))

    def __call__(self, *args: Any, **kw: Any) -> Any:
        if self.armed:
            raise self.error
        return self.whole(*args, **kw)


@contextmanager
def served(path: Path, cache: Path, **change: Any) -> Iterator[tuple[ASGIApp, Worker]]:
    settings: dict[str, Any] = dict(port=0, kv_blocks=256, max_sequences=4, cache_dir=str(cache))
    app, worker = run._load(Config(model=str(path), **settings | change))
    assert isinstance(worker, Worker)
    try:
        yield app, worker
    finally:
        worker.stop()


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not seen():
            await asyncio.sleep(0.002)


def assert_(found: bool) -> None:
    assert found


def told(url: str, answer: Answer) -> str:
    """What a streamed answer ends with, or a whole one is, in its API's shape."""
    if answer.status != 200:
        error = answer.json["error"]
        assert answer.json.get("type") == ("error" if url == MESSAGE else None)
        kinds = ("api_error", "overloaded_error") if url == MESSAGE else ("server_error",)
        assert error["type"] in kinds
        return str(error["message"])
    last = answer.body.decode().strip().rpartition("\n\n")[2]
    data = json.loads(last.rpartition("data: ")[2])
    if url == RESPONSE:
        assert data["type"] == "response.failed" and data["response"]["status"] == "failed"
        return str(data["response"]["error"]["message"])
    assert last.startswith("event: error\n") if url == MESSAGE else last.startswith("data: ")
    return str(data["error"]["message"])


async def asked(app: ASGIApp, worker: Worker, fault: Fault) -> dict[tuple[str, int], Answer]:
    """Every API's answers, streamed and whole, some of them queued, that the fault overtook."""
    (engine,) = worker._fleet._engines()
    gate = threading.Event()
    engine.trace = lambda *_: assert_(gate.wait(20))
    talks = {(CHAT, 2): Connection(app, CHAT, BODIES[CHAT] | {"response_format": FORMAT, "stream": True})}
    await until(lambda: worker._streams)  # a grammar is among those that run
    for n, stream in enumerate((True, False)):
        for url, body in BODIES.items():
            talks[url, n] = Connection(app, url, body | {"stream": stream})
    await until(lambda: len(worker._streams) == len(talks))
    gate.set()
    await until(lambda: worker.stats().running == 4 and worker.stats().waiting == len(talks) - 4)
    fault.armed = True
    talks[CHAT, 3] = Connection(app, CHAT, BODIES[CHAT])  # so that there is an order to take
    return {key: await talk.answer() for key, talk in talks.items()}


@pytest.mark.parametrize(("owner", "name"), POINTS, ids=lambda each: getattr(each, "__name__", each))
def test_whoever_waits_is_told(
    path: Path,
    tmp_path: Path,
    owner: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bare_settings: None,
) -> None:
    fault = Fault(monkeypatch, owner, name, ZeroDivisionError("injected"))

    async def main() -> None:
        answers = await asked(app, worker, fault)
        health = await Connection(app, "/health", method="GET").answer()
        assert health.status == 503 and health.json["reason"] == "the engine has stopped"
        for (url, n), answer in answers.items():
            assert answer.status == 200 if n in (0, 2) else answer.status in (500, 503), answer.body
            said = told(url, answer)
            assert "injected" in said or "engine has stopped" in said, (url, n, said)
        late = await Connection(app, MESSAGE, BODIES[MESSAGE]).answer()
        assert late.status == 503 and late.json["error"]["type"] == "overloaded_error"
        await worker.drain(5)

    with served(path, tmp_path) as (app, worker):
        asyncio.run(main())
        worker._thread.join(20)
        assert not worker._thread.is_alive() and not worker.alive() and not worker._streams
    assert "the engine thread die" in caplog.text

"""An engine that breaks at each of its steps: every waiting client gets an error, the process ends, and the next
serves.

Rule: every fault is injected into the real engine, behind the real application; every wait has a
limit.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from mlxspec.cache.offload import KVOffloader
from mlxspec.config import Config
from mlxspec.engine.engine import Engine
from mlxspec.engine.manager import ModelManager
from mlxspec.engine.scheduler import Scheduler
from mlxspec.engine.worker import EngineThread
from mlxspec.model import runner
from mlxspec.model.batch import Forward
from mlxspec.model.runner import Runner
from mlxspec.server import chat_request as asking
from mlxspec.server import process
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from tests.support import tiny
from tests.support.api_errors import CHAT, EMBED, FIM, MESSAGE, OLLAMA, PLAIN, RESPONSE, told
from tests.support.checkpoints import save
from tests.support.parameter_rows import diagonal, only
from tests.support.process_caller import Caller, serve, stop_me
from tests.support.scripted import MESSAGES, Answer, Connection
from tests.tiny_tokenizer import PSM, save_tokenizer

SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 20}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
LONG = 400  # tokens, far more than are made before the fault
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": LONG, "ignore_eos": True},
    PLAIN: {"prompt": "hello", "max_tokens": LONG, "ignore_eos": True},
    MESSAGE: {"messages": MESSAGES, "max_tokens": LONG, "ignore_eos": True},
    RESPONSE: {"input": "hello", "max_output_tokens": LONG, "ignore_eos": True},
}
MORE: dict[str, dict[str, Any]] = {
    OLLAMA: {"messages": MESSAGES, "max_tokens": LONG, "ignore_eos": True},
    FIM: {"prompt": "hello", "suffix": "world", "max_tokens": LONG, "ignore_eos": True},
    EMBED: {"input": "hello"},
}
# What ends the engine, wherever it is raised: where, and the method or function.
POINTS: list[tuple[Any, str]] = [
    (ModelManager, "submit"),
    (ModelManager, "step"),
    (ModelManager, "unload_idle"),
    (ModelManager, "snapshot"),  # what `_publish` asks for
    (Engine, "housekeep"),
    (Proposer, "depths"),
    (Scheduler, "plan"),
    (Engine, "_mask"),
    (Runner, "copy_blocks"),
    (Runner, "forward"),
    (Runner, "submit"),
    (runner, "sample"),
    (Scheduler, "submitted"),
    (Forward, "read"),
    (Runner, "sample"),
    (Scheduler, "commit"),
    (Engine, "_advance"),
    (KVOffloader, "poll"),
    (EngineThread, "_publish"),
    (EngineThread, "_deliver"),  # on the event loop's thread
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tokenizer(tmp_path_factory.mktemp("model"), extra=PSM)
    save(path, "llama")
    return path


class Fault:
    """Raises in the place of what it stands for, once it is armed."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException
    ) -> None:
        self.armed, self.error, self.whole = False, error, getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kw: self(*args, **kw))

    def __call__(self, *args: Any, **kw: Any) -> Any:
        if self.armed:
            raise self.error
        return self.whole(*args, **kw)


@contextmanager
def served(path: Path, cache: Path, **change: Any) -> Iterator[tuple[ASGIApp, EngineThread]]:
    settings: dict[str, Any] = dict(port=0, kv_blocks=256, max_sequences=4, cache_dir=str(cache))
    app = process._load(Config(model=str(path), **settings | change))
    worker = app.state.server.worker
    assert isinstance(worker, EngineThread)
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


async def asked(app: ASGIApp, worker: EngineThread, fault: Fault) -> dict[tuple[str, int], Answer]:
    """Every API's answers, streamed and whole, some of them queued, that the fault overtook."""
    (engine,) = worker._manager._engines()
    gate = threading.Event()
    engine.trace = lambda *_: assert_(gate.wait(20))
    talks = {
        (CHAT, 2): Connection(app, CHAT, BODIES[CHAT] | {"response_format": FORMAT, "stream": True})
    }
    await until(lambda: worker._mailboxes)  # a grammar is among those that run
    for bodies in (BODIES, MORE):  # an embedding is not among the first four: it would be answered
        for n, stream in enumerate((True, False)):
            for url, body in bodies.items():
                talks[url, n] = Connection(app, url, body | {"stream": stream})
        await until(lambda: len(worker._mailboxes) == len(talks))
    gate.set()
    await until(
        lambda: tiny.stats(worker).running == 4 and tiny.stats(worker).waiting == len(talks) - 4
    )
    fault.armed = True
    talks[CHAT, 3] = Connection(app, CHAT, BODIES[CHAT])  # so that there is an order to take
    return {key: await talk.answer() for key, talk in talks.items()}


@pytest.mark.parametrize(
    ("owner", "name"),
    only(POINTS, *range(0, len(POINTS), 2)),
    ids=lambda each: getattr(each, "__name__", each),
)
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
            streamed = n in (0, 2) and url != EMBED
            assert answer.status == 200 if streamed else answer.status in (500, 503), answer.body
            said = told(url, answer)
            assert "injected" in said or "engine has stopped" in said, (url, n, said)
        late = await Connection(app, MESSAGE, BODIES[MESSAGE]).answer()
        assert late.status == 503 and late.json["error"]["type"] == "overloaded_error"
        await worker.drain(5)

    with served(path, tmp_path) as (app, worker):
        asyncio.run(main())
        worker._thread.join(20)
        assert not worker._thread.is_alive() and not worker.alive() and not worker._mailboxes
    assert "the engine thread die" in caplog.text


# ---- what ends the engine, and what only a drafter or a request
# --------------------------------------------


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[malloc] Unable to allocate 8 bytes.")],
    ids=["python", "mlx"],
)
def test_no_memory_for_a_step_ends_it(
    path: Path,
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    bare_settings: None,
) -> None:
    """What a step has half done is not known, so nothing goes on from there: the next process
    does."""
    fault = Fault(monkeypatch, Runner, "forward", error)

    async def main() -> None:
        answers = await asked(app, worker, fault)
        said = told(CHAT, answers[CHAT, 1])
        assert f"the engine failed: {type(error).__name__}: {error}" == said
        assert await ended(worker)

    with served(path, tmp_path) as (app, worker):
        asyncio.run(main())


async def ended(worker: EngineThread) -> bool:
    await until(lambda: not worker._thread.is_alive())
    return not worker.alive() and not worker._mailboxes


@pytest.mark.parametrize("verb", only(["begin", "options", "draft", "observe", "end"], 2))
def test_a_drafter_that_raises_is_left_out(
    path: Path,
    tmp_path: Path,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bare_settings: None,
) -> None:
    """The answer goes on with the same tokens, and the log says why it is slower."""
    fault = Fault(monkeypatch, NgramDrafter, verb, ZeroDivisionError("injected"))
    body = {
        "prompt": "the end and the end and the end",
        "max_tokens": 60,
        "ignore_eos": True,
        "temperature": 0,
    }

    async def ask() -> Any:
        answer = await Connection(app, PLAIN, body).answer()
        assert answer.status == 200
        return answer.json["choices"][0]["text"]

    async def main() -> None:
        (engine,) = worker._manager._engines()
        before = await ask()
        await until(lambda: not engine.idle_work)  # then it drafts
        engine.trace = lambda *_: setattr(fault, "armed", engine.counters["steps"] > steps + 3)
        steps = engine.counters["steps"]
        after = await ask()
        fault.armed = True
        assert [after, await ask()] == [before] * 2 and worker.alive()
        assert engine.proposer.drafters == [] and "drafting by copy failed" in caplog.text

    with served(path, tmp_path) as (app, worker):
        asyncio.run(main())


# ---- a signal, wherever it meets the engine
# ----------------------------------------------------------------


@pytest.mark.parametrize(
    "when, patient",
    diagonal(["idle", "text", "prefill", "decode", "swap"], [False, True])
    + [pytest.param("load", patient, marks=pytest.mark.slow) for patient in (True, False)],
)
def test_a_signal_ends_it_in_time(
    path: Path,
    tmp_path: Path,
    when: str,
    patient: bool,
    monkeypatch: pytest.MonkeyPatch,
    bare_settings: None,
) -> None:
    """`patient`: with time enough, every answer ends well; else it is told that the server stops.
    So is, at once, whose prompt is not even read."""
    went, slow = list[str](), ModelManager._load_now
    begun, left_alone = threading.Event(), threading.Event()
    monkeypatch.setattr(Runner, "forward", slowed(Runner.forward, went))

    def load(self: ModelManager, member: Any) -> None:
        if member.loads or self.loading:
            begun.set()
            time.sleep(0.5)
        slow(self, member)

    monkeypatch.setattr(ModelManager, "_load_now", load)
    if when == "text":
        monkeypatch.setattr(asking, "render", lambda *_, **__: (begun.set(), left_alone.wait(20)))
    tokens = 20 if patient else LONG
    bodies = {url: body | {"stream": True} for url, body in BODIES.items()}
    for body in bodies.values():
        body |= {"max_output_tokens" if "input" in body else "max_tokens": tokens}
    if when == "idle":
        bodies = {}
    elif when == "prefill":
        bodies = {PLAIN: {"prompt": "word " * 150, "max_tokens": 2, "ignore_eos": True}}
    elif when in ("load", "swap", "text"):
        bodies = {CHAT: bodies[CHAT] | {"model": "local" if when == "text" else "two"}}
    answers = list[httpx.Response]()

    def call(url: str) -> None:
        def post(at: str) -> None:
            answers.append(httpx.post(url + at, json=bodies[at], timeout=30))

        went.clear()
        threads = [threading.Thread(target=post, args=(at,), daemon=True) for at in bodies]
        for thread in threads:
            thread.start()
        if when in ("load", "swap", "text"):
            assert begun.wait(20)
        elif bodies:
            while len(went) < 6 or tiny.stats(worker).running < len(bodies):
                assert not begun.wait(0.005)
        since.append(time.monotonic())
        stop_me()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    since, drain = list[float](), 20.0 if patient else 0.2
    both: dict[str, Any] = dict(others=(f"two={path}",)) if when in ("load", "swap") else {}
    with served(path, tmp_path, speculate=False, prefill_budget=8, drain_s=drain, **both) as (
        app,
        worker,
    ):
        if when == "swap":
            worker._manager.memory_check = lambda slot, staying: "no room" if staying else ""
        caller = Caller(call)
        assert serve(app, caller) == 0
        took = time.monotonic() - since[0]
        caller.check()
    left_alone.set()
    assert took < drain + process.GRACE_S + 5
    if when == "text":
        assert took < 10, took
    for answer in answers:
        good = answer.status_code == 200 and "stopping" not in answer.text
        assert good if patient and when != "text" else "the server is stopping" in answer.text, (
            answer.status_code,
            answer.text,
        )
    assert len(answers) == len(bodies)


def slowed(whole: Callable[..., Any], went: list[str]) -> Callable[..., Any]:
    def run_slowly(*args: Any) -> Any:
        went.append("step")
        time.sleep(0.02)
        return whole(*args)

    return run_slowly


# ---- as a process: it ends, and the same command serves again
# ----------------------------------------------

BREAKS = """
import sys
from pathlib import Path
from mlxspec import blas
blas.load()
from mlxspec.cli import main
from mlxspec.engine.worker import EngineThread
from mlxspec.model.batch import Forward
from mlxspec.model.runner import Runner

owner, name = sys.argv.pop(1).split("."), Path(sys.argv.pop(1))
of = {"Runner": Runner, "Forward": Forward, "EngineThread": EngineThread}[owner[0]]
whole = getattr(of, owner[1])

def breaks(*args):
    if name.exists():
        raise RuntimeError("[malloc] injected")
    return whole(*args)

setattr(of, owner[1], breaks)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    ["Runner.forward", "Forward.read", "EngineThread._deliver"],
)
def test_the_next_process_serves(path: Path, tmp_path: Path, point: str) -> None:
    trigger, body = (
        tmp_path / "now",
        BODIES[PLAIN] | {"max_tokens": 40, "temperature": 0, "prompt": "word " * 120},
    )
    words = [sys.executable, "-c", BREAKS, point, str(trigger), "serve", str(path), "--port", "0"]
    words += ["--kv-blocks", "64", "--cache-dir", str(tmp_path), "--cache-gb", "1"]
    bare = {k: v for k, v in os.environ.items() if not k.startswith("MLXSPEC_")} | {
        "HOME": str(tmp_path)
    }
    truth, cached = "", 0
    for life in range(2):
        child = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=bare
        )
        assert child.stdout is not None and child.stderr is not None
        with child, child.stdout, child.stderr:
            try:
                url = child.stdout.readline().split()[4].removesuffix("/v1")
                found = httpx.post(url + PLAIN, json=body, timeout=30).json()
                said = found["choices"][0]["text"]
                cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert said == (truth or said)
                truth = said
                if life == 1:
                    child.send_signal(signal.SIGTERM)
                    assert child.wait(30) == 0
                    break
                until_there(tmp_path / "prompts")
                with httpx.stream(
                    "POST", url + MESSAGE, json=BODIES[MESSAGE] | {"stream": True}
                ) as talk:
                    lines = talk.iter_lines()
                    assert next(lines) == "event: message_start"
                    trigger.touch()
                    assert "[malloc] injected" in list(lines)[-2]
                began = time.monotonic()
                assert (
                    child.wait(30) == 1
                    and time.monotonic() - began < process.GRACE_S + process.STOP_S
                )
                errors = child.stderr.read()
                assert "the engine thread die" in errors and "the engine has stopped" in errors
                trigger.unlink()
            finally:
                child.kill()
    assert cached > 0


@pytest.mark.slow
def test_standard_output_that_cannot_be_written(path: Path, tmp_path: Path) -> None:
    """A full disk under the service's log, or `mlxspec serve | head`: it serves, and ends with
    0."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "mlxspec",
        "serve",
        str(path),
        "--port",
        str(port),
        "--kv-blocks",
        "32",
    ]
    bare = {k: v for k, v in os.environ.items() if not k.startswith("MLXSPEC_")} | {
        "HOME": str(tmp_path)
    }
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(words, stdout=full, stderr=full, env=bare) as p,
    ):
        try:
            for _ in range(600):
                if p.poll() is not None or up(port):
                    break
                time.sleep(0.05)
            url = f"http://127.0.0.1:{port}"
            assert httpx.post(url + PLAIN, json=BODIES[PLAIN], timeout=30).status_code == 200
            p.send_signal(signal.SIGTERM)
            assert p.wait(30) == 0
        finally:
            p.kill()


def until_there(folder: Path) -> None:
    for _ in range(200):
        if list(folder.rglob("*.safetensors")):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing was saved in {folder}")


def up(port: int) -> bool:
    """Whether a server has loaded its model; before, it answers 503."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False

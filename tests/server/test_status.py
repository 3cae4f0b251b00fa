"""status, load, stop and models: against a server on a real socket, a foreign one, and none."""

import json
import os
import plistlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlxspec import cli
from mlxspec.config import Config
from mlxspec.files import write_atomic
from mlxspec.service import launchd, status
from mlxspec.service.client import ClientError
from mlxspec.types import Served, Stats
from tests.service import fake
from tests.support.live import live
from tests.support.scripted import INFO, Server, server

SMALL = Served(replace(INFO, name="small"), "unloaded")
At = Callable[..., AbstractContextManager[tuple[str, Server]]]
Change = Callable[[Any], object]

pytestmark = pytest.mark.usefixtures("bare_settings")


@pytest.fixture
def at(tokenizer: Any, model_dir: Path) -> At:
    @contextmanager
    def serve(config: Config | None = None, **kw: Any) -> Iterator[tuple[str, Server]]:
        paths = {"small": model_dir}
        made = server(tokenizer, model_dir, config, paths, **kw)
        with live(made.app) as url:
            yield url, made

    return serve


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def error_of(*words: str) -> str:
    """The message that `main` prints before it exits with 2."""
    done = run(*words)
    assert isinstance(done.exception, ClientError), done.output
    return str(done.exception)


def test_no_server() -> None:
    url = free_url()
    done = run("status", "--url", url)
    assert done.exit_code == 1 and f"no server at {url}" in done.output
    assert json.loads(run("status", "--url", url, "--json").output)["up"] is False
    for words in (("load", "small"), ("stop", "small")):
        assert "start one with: mlxspec serve" in error_of(*words, "--url", url)
    assert "is not a URL" in error_of("load", "small", "--url", "localhost")


def test_a_running_server(at: At, model_dir: Path) -> None:
    with at(others=(SMALL,)) as (url, made):
        made.app.state.server.paths = {"tiny": model_dir, "small": model_dir}
        done = run("status", "--url", url)
        assert done.exit_code == 0 and "1 running, 2 waiting" in done.output
        assert f"process {os.getpid()}" in done.output
        assert "tiny (loaded); small (unloaded)" in done.output
        assert run("status", "--url", f"{url}/v1/").output == done.output
        assert run("load", "small", "--url", url).output.startswith("small is loaded, after ")
        assert run("stop", "small", "--url", url).output.startswith("small is unloaded, after ")
        assert made.engine.ordered == [("small", None), ("small", "unload")]
        assert "no model 'nope' here; send " in error_of("load", "nope", "--url", url)


def test_a_pinned_model_needs_force(at: At) -> None:
    with at(others=(replace(SMALL, status="loaded", pinned=True),)) as (url, _):
        assert "pinned" in error_of("stop", "small", "--url", url)
        assert run("stop", "small", "--force", "--url", url).exit_code == 0


def test_the_api_key(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    with at(Config(api_key="sesame")) as (url, _):
        assert run("status", "--url", url, "--api-key", "sesame").exit_code == 0
        done = run("status", "--url", url)
        assert done.exit_code == 1 and "give --api-key" in done.output
        assert "give --api-key" in error_of("load", "small", "--url", url)
        monkeypatch.setenv("MLXSPEC_API_KEY", "sesame")
        assert run("status", "--url", url).exit_code == 1  # the settings' key is for their server
        monkeypatch.setenv("MLXSPEC_PORT", url.rpartition(":")[2])
        assert run("status", "--url", url).exit_code == run("status").exit_code == 0


ANSWERS = [(b"200 OK", b"<html>"), (b"200 OK", b"[]"), *[(b"404 Not Found", b"<html>\x1b[31m")] * 2]
ANSWERS += [(b"418 Teapot", b'{"error": {"message": "a\\u001b[31mteapot"}}')]


def test_a_foreign_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            for code, body in ANSWERS:
                client, _ = other.accept()
                client.recv(1 << 16)
                head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (code, len(body))
                client.sendall(head + body)
                client.close()

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        for _ in range(3):
            now = status.get_status(url)
            assert now.state == "unwell" and "give another --url" in now.why
        assert "is not mlxspec" in error_of("load", "x", "--url", url)
        assert error_of("load", "x", "--url", url) == "the server answered 418: a?[31mteapot"


ROW = {
    "id": "chatcmpl-1",
    "model": "tiny",
    "prompt": 100,
    "cached": 64,
    "generated": 30,
    "rounds": 10,
    "drafted": 20,
    "kept": 15,
    "first": 0.2,
    "seconds": 2.0,
    "rate": 15.0,
    "outcome": "",
}
STATES: dict[str, tuple[Stats | None, Change]] = {
    "busy": (None, lambda made: made.app.state.server.live.update(a=lambda: ROW)),
    "idle": (Stats(), lambda made: None),
    "short of memory": (Stats(memory_pressure=1), lambda made: None),
    "asleep": (Stats(), lambda made: setattr(made.engine, "sleeps", True)),
    "loading": (None, lambda made: setattr(made.engine, "loads", "small")),
    "unwell": (None, lambda made: setattr(made.engine, "silent", 61.0)),
}


@pytest.mark.parametrize("state", STATES)
def test_the_states(state: str, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    stats, change = STATES[state]
    with at(others=(SMALL,)) as (url, made):
        change(made)
        engine = type(made.engine)
        if stats:
            monkeypatch.setattr(engine, "stats", lambda self: stats)
        if state == "asleep":
            served = {"tiny": Served(INFO, "unloaded", stats)}
            monkeypatch.setattr(engine, "models", property(lambda self: served))
        found = status.get_status(url)
        assert found.state == state
        assert (run("status", "--url", url).exit_code == 0) == (state != "unwell")


def test_speed_and_acceptance(at: At) -> None:
    with at() as (url, made):
        state = made.app.state.server
        state.finished.append(ROW | {"id": "old", "outcome": "stop", "rate": 9.0})
        now = status.get_status(url)
        assert (now.speed, now.tokens_per_round, now.accepted) == (9.0, 3.0, 0.75)
        for name, rate in (("a", 15.0), ("b", 20.0)):
            state.live[name] = lambda name=name, rate=rate: ROW | {"id": name, "rate": rate}
        assert status.get_status(url).speed == 35.0
        assert json.loads(run("status", "--url", url, "--json").output)["speed"] == 35.0


def test_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("service", "status").exit_code == 4
    tool = fake.install(tmp_path / "fake", monkeypatch)
    url = free_url()
    agent = launchd.definition({"port": url.rpartition(":")[2]}, {})
    write_atomic(launchd.agent_file(), plistlib.dumps(agent))
    (tool.root / "loaded").touch()
    with monkeypatch.context() as patch:
        patch.setattr(status, "request", None)  # asking would wake it
        now = status.get_status(url)
        assert (now.state, now.service) == ("asleep", "waiting")
        done = run("status")  # finds the service without a URL
        assert done.exit_code == 0 and url in done.output and "waiting" in done.output
        assert run("service", "status").exit_code == 0
    launchd.stop()
    done = run("service", "status")
    assert done.exit_code == 3 and "mlxspec service start" in done.output
    assert status.get_status(free_url()).service == "elsewhere"

"""status, ps, load, stop and models: against a server on a real socket, and where there is none."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlxspec import cli
from mlxspec.chat import ChatError
from mlxspec.config import Config
from mlxspec.server.journal import Row
from mlxspec.service import ledger, status, stop, systemd
from mlxspec.service.job import Job
from mlxspec.service.menubar import menu_of
from mlxspec.types import Served, Stats, Unfit
from tests.server.live import live
from tests.server.scripted import INFO, Server, server
from tests.service import fake

SMALL = Served(replace(INFO, name="small"), "unloaded")
At = Callable[..., AbstractContextManager[tuple[str, Server]]]
Change = Callable[[Any], object]


@pytest.fixture(autouse=True)
def bare(bare_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither launchd nor systemd."""
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.setattr("mlxspec.service.shutil.which", lambda name: None)


@pytest.fixture
def at(tokenizer: Any, model_dir: Path) -> At:
    @contextmanager
    def serve(config: Config | None = None, **kw: Any) -> Iterator[tuple[str, Server]]:
        made = server(tokenizer, model_dir, config, **kw)
        with live(made.app) as url:
            yield url, made

    return serve


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def absent() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def mended(*words: str) -> str:
    """The message that `main` would print before it exits with 2."""
    done = run(*words)
    assert isinstance(done.exception, (ChatError, Unfit)), done.output
    return str(done.exception)


def test_nobody_there() -> None:
    url = absent()
    done = run("status", "--url", url)
    assert done.exit_code == 1 and f"no server at {url}; start one with: mlxspec serve" in done.output
    assert json.loads(run("status", "--url", url, "--json").output)["up"] is False
    for words in (("ps",), ("load", "small"), ("stop", "small")):
        assert "start one with: mlxspec serve" in mended(*words, "--url", url)
    assert run("stop", "--url", url).output == f"no server runs at {url}\n"
    assert "is not a URL" in mended("load", "small", "--url", "localhost")


def test_a_server_by_hand(at: At, model_dir: Path) -> None:
    with at(others=(SMALL,)) as (url, made):
        made.app.state.front.paths = {"tiny": model_dir, "small": model_dir}
        done = run("status", "--url", url)
        assert done.exit_code == 0 and "1 running, 2 waiting" in done.output
        assert "tiny; small, not loaded" in done.output
        lines = run("ps", "--url", url).output.splitlines()
        assert [line.split()[0] for line in lines] == ["NAME", "tiny"] and lines[1].endswith("busy")
        assert run("load", "small", "--url", url).output.startswith("small is loaded, after ")
        assert [line.split()[0] for line in run("ps", "--url", url).output.splitlines()][2:] == ["small"]
        assert run("stop", "small", "--url", url).output.startswith("small is unloaded, after ")
        assert made.engine.ordered == [("small", None), ("small", "unload")]
        assert "'nope' is not served here" in mended("load", "nope", "--url", url)
        assert "served, unloaded" in run("models", "--url", url).output


def test_a_pinned_model_leaves_by_force(at: At) -> None:
    with at(others=(replace(SMALL, status="loaded", pinned=True),)) as (url, _):
        assert "pinned" in mended("stop", "small", "--url", url)
        assert run("stop", "small", "--force", "--url", url).exit_code == 0


def test_the_key(at: At) -> None:
    with at(Config(api_key="sesame")) as (url, _):
        assert run("status", "--url", url, "--api-key", "sesame").exit_code == 0
        done = run("status", "--url", url)
        assert done.exit_code == 1 and "401" in done.output and "give --api-key" in done.output
        assert "give --api-key" in mended("load", "small", "--url", url)


def test_somebody_elses_server(at: At) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        import threading

        def answer() -> None:
            for body in (b"<html>", b"[]"):
                client, _ = other.accept()
                client.recv(1 << 16)
                head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
                client.sendall(head + body)
                client.close()

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        for _ in range(2):
            now = status.look(url)
            assert now.state == "unwell" and "give another --url" in now.why


ROW = Row("chatcmpl-1", "tiny", 100, 64, 30, 10, 20, 15, 0.2, 2.0, 15.0)
STATES: dict[str, tuple[dict[str, Any], Change]] = {
    "busy": ({}, lambda made: None),
    "idle": ({"now": Stats()}, lambda made: None),
    "short": ({"now": Stats(memory_pressure=1)}, lambda made: None),
    "asleep": ({"now": Stats()}, lambda made: setattr(made.engine, "sleeps", True)),
    "loading": ({}, lambda made: setattr(made.engine, "loads", "small")),
    "unwell": ({}, lambda made: setattr(made.engine, "silent", 61.0)),
}


@pytest.mark.parametrize("state", STATES)
def test_the_states(state: str, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    kw, change = STATES[state]
    with at(others=(SMALL,)) as (url, made):
        change(made)
        engine = type(made.engine)
        if now := kw.get("now"):
            monkeypatch.setattr(engine, "stats", lambda self: now)
        if state == "asleep":
            served = {"tiny": Served(INFO, "unloaded", kw["now"])}
            monkeypatch.setattr(engine, "models", lambda self: served)
        found = status.look(url)
        assert found.state == state and found.service == "none"
        assert (run("status", "--url", url).exit_code == 0) == (state != "unwell")
        assert menu_of(found).items[0].title == status.headline(found)


def test_speed_and_speculation_come_from_the_answers(at: At) -> None:
    with at() as (url, made):
        journal = made.app.state.front.journal
        journal.end(replace(ROW, id="old", outcome="stop", rate=9.0))
        now = status.look(url)
        assert (now.speed, now.round, now.kept) == (9.0, 3.0, 0.75)
        for name, rate in (("a", 15.0), ("b", 20.0)):
            journal.live[name] = lambda name=name, rate=rate: replace(ROW, id=name, rate=rate)
        assert status.look(url).speed == 35.0
        out = run("ps", "--url", url).output.splitlines()
        assert out[-2].split()[:6] == ["b", "tiny", "100", "64", "30", "20.0"]
        assert json.loads(run("ps", "--url", url, "--json").output)["requests"][0]["id"] == "b"


@pytest.mark.parametrize(
    ("change", "ttl", "said"),
    [
        ({"running": 1, "idle": 1.0}, 60, "busy"),
        ({"state": "loading"}, 60, "busy"),
        ({"idle": 90.0, "pinned": True}, 60, "idle 2 min, pinned"),
        ({"idle": 30.0}, 0, "idle 30 s, stays"),
        ({"idle": 600.0}, 1800, "idle 10 min, unloads in 20 min"),
        ({"idle": None}, 7200, "idle, unloads in 2 h"),
    ],
)
def test_until(change: dict[str, Any], ttl: float, said: str) -> None:
    assert status.until(replace(status.Model("m", "loaded", 1), **change), ttl) == said


# ---- the service ----------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, fake.Fake]:
    """A service by a fake systemctl, which listens at a URL where nobody does."""
    url = absent()
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path))
    tool = fake.install("systemctl", tmp_path / "fake", monkeypatch)
    monkeypatch.setattr("mlxspec.service.shutil.which", lambda name: name if name == "systemctl" else None)
    job = Job(("/bin/true",), {}, "127.0.0.1", int(url.rpartition(":")[2]), 50)
    for path, data in systemd.files(job).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tool.root / "loaded").touch()
    return url, tool


def test_a_service_that_waits_is_not_woken(
    installed: tuple[str, fake.Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = installed
    monkeypatch.setattr(status, "call", None)  # nobody may knock
    now = status.look(url)
    assert (now.state, now.service) == ("asleep", "waiting")
    done = run("status")  # which finds it without a URL
    assert done.exit_code == 0 and url in done.output and "waiting" in done.output
    assert run("ps").output == "no model is loaded; the next request loads one\n"


def test_a_service_that_stays_down_or_is_stopped(
    installed: tuple[str, fake.Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, tool = installed
    ledger.file().parent.mkdir(parents=True, exist_ok=True)
    ledger.write(ledger.file(), ledger.Ledger(held="it crashed 6 times; `mlxspec service start` starts it"))
    with monkeypatch.context() as patch:
        patch.setattr(status, "call", None)  # a knock would start it again
        done = run("status")
    assert done.exit_code == 1 and done.output.count("it crashed 6 times") == 1
    assert run("stop").output.startswith("stopped, until")
    assert tool.calls() == ["--user stop mlxspec.socket mlxspec.service"]
    done = run("status")
    assert done.exit_code == 1 and "`mlxspec service start` starts it" in done.output
    for path in systemd.paths():
        path.unlink()
    assert status.look(url).state == "not installed"
    assert "not installed" in mended("logs")


# ---- stop, by hand --------------------------------------------------------------------------------------


def stood(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "look", lambda url, key: status.Status(url, "idle", pid=pid, version="1"))


def test_stop_ends_a_server_that_was_started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)", "mlxspec", "serve"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        stood(child.pid, monkeypatch)
        with pytest.raises(Unfit, match="stop it there"):
            stop.stop_server("http://192.168.1.5:8080", "")
        assert child.poll() is None
        assert (
            stop.stop_server("http://127.0.0.1:8080", "") == "the server at http://127.0.0.1:8080 has ended"
        )
        assert child.wait(5) == -15


def test_stop_signals_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        stood(child.pid, monkeypatch)
        with pytest.raises(Unfit, match="stop it there"):
            stop.stop_server("http://127.0.0.1:8080", "")
        assert child.poll() is None
        child.kill()

"""status, ps, load, stop and models: against a server on a real socket, and where there is none."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlxspec import cli
from mlxspec.commands.chat import ChatError
from mlxspec.config import Config
from mlxspec.server.state import Row
from mlxspec.service import ledger, status, stop, systemd
from mlxspec.service.job import Job
from mlxspec.service.menubar import menu_of
from mlxspec.types import Served, Stats, UserError
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
    assert isinstance(done.exception, (ChatError, UserError)), done.output
    return str(done.exception)


def test_nobody_there() -> None:
    url = absent()
    done = run("status", "--url", url)
    assert (
        done.exit_code == 1 and f"no server at {url}; start one with: mlxspec serve" in done.output
    )
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
        assert run("status", "--url", f"{url}/v1/").output == done.output
        lines = run("ps", "--url", url).output.splitlines()
        assert [line.split()[0] for line in lines] == ["NAME", "tiny"] and lines[1].endswith("busy")
        assert run("load", "small", "--url", url).output.startswith("small is loaded, after ")
        assert [line.split()[0] for line in run("ps", "--url", url).output.splitlines()][2:] == [
            "small"
        ]
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


ANSWERS = [(b"200 OK", b"<html>"), (b"200 OK", b"[]"), *[(b"404 Not Found", b"<html>\x1b[31m")] * 4]
ANSWERS += [(b"418 Teapot", b'{"error": {"message": "a\\u001b[31mteapot"}}')]


def test_somebody_elses_server(at: At) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        import threading

        def answer() -> None:
            for code, body in ANSWERS:
                client, _ = other.accept()
                client.recv(1 << 16)
                head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (code, len(body))
                client.sendall(head + body)
                client.close()

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        for _ in range(2):
            now = status.look(url)
            assert now.state == "unwell" and "give another --url" in now.why
        done = run("status", "--url", url)
        assert done.output.count("something else answers") == 1
        for words in (("ps",), ("stop",), ("load", "x")):
            wanted = f"something else answers at {url} (404); give another --url, or end it"
            assert mended(*words, "--url", url) == wanted
        assert mended("ps", "--url", url) == "the server answered 418: a?[31mteapot"


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
        rests = status.load_of(replace(found, running=0, waiting=0))
        assert rests == ("loading" if state == "loading" else "idle")
        assert menu_of(found).items[0].title == status.headline(found)


def test_speed_and_speculation_come_from_the_answers(at: At) -> None:
    with at() as (url, made):
        journal = made.app.state.front.journal
        journal.end(replace(ROW, id="old", outcome="stop", rate=9.0))
        now = status.look(url)
        assert (now.speed, now.round, now.kept) == (9.0, 3.0, 0.75)
        for name, rate in (("a", 15.0), ("b", 20.0)):
            journal.live[name] = lambda name=name, rate=rate: replace(ROW, id=name, rate=rate)
        out = run("ps", "--url", url).output.splitlines()
        assert out[-2].split() == ["b", "tiny", "100", "64", "30", "20.0", "2.0", "waiting"]
        assert json.loads(run("ps", "--url", url, "--json").output)["requests"][0]["id"] == "b"


def test_speed_is_what_was_generated_between_two_looks(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more requests wait than have a row of what has ended."""
    with at() as (url, made):
        generated = iter(range(0, 10_000, 100))
        stats = lambda self: Stats(running=1, generated_tokens=next(generated))  # noqa: E731
        monkeypatch.setattr(type(made.engine), "stats", stats)
        for n in range(40):
            made.app.state.front.journal.live[f"{n}"] = lambda n=n: replace(
                ROW, id=f"{n}", rate=0.0, first=0.0
            )
        assert status.look(url).speed == 0.0
        clock = time.monotonic()
        now = status.look(url, over=0.2)
        assert 100 / (time.monotonic() - clock) <= now.speed <= 100 / 0.2


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


# ---- the service
# ----------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, fake.Fake]:
    """A service by a fake systemctl, which listens at a URL where nobody does."""
    url = absent()
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path))
    tool = fake.install("systemctl", tmp_path / "fake", monkeypatch)
    monkeypatch.setattr(
        "mlxspec.service.shutil.which", lambda name: name if name == "systemctl" else None
    )
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
    ledger.write(
        ledger.file(), ledger.Ledger(held="it crashed 6 times; `mlxspec service start` starts it")
    )
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


# ---- stop, by hand
# --------------------------------------------------------------------------------------


def stood(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stop, "look", lambda url, key: status.Status(url, "idle", pid=pid, version="1")
    )


LISTENER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(60)
"""


@contextmanager
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Iterator[Any]:
    """A process with a port, and the server's answer that names it."""
    (tmp_path / "mlxspec").mkdir(exist_ok=True)
    (
        tmp_path / "mlxspec/__init__.py"
    ).touch()  # or a package that is installed would come before it
    (tmp_path / "mlxspec/__main__.py").write_text(LISTENER)
    (tmp_path / "mlxspec/mlxspec").write_text(LISTENER)
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, cwd=tmp_path) as child:
        assert child.stdout
        port = int(child.stdout.readline())
        stood(child.pid, monkeypatch)
        yield child, port
        child.kill()


@pytest.mark.parametrize(
    "words", [("-m", "mlxspec", "serve"), ("-u", "mlxspec/mlxspec", "serve", "a")]
)
def test_stop_ends_a_server_that_was_started_by_hand(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(tmp_path, monkeypatch, *words) as (child, port):
        for url in (
            f"http://192.168.1.5:{port}",
            absent(),
        ):  # elsewhere; a port that it does not have
            with pytest.raises(UserError, match="stop it there"):
                stop.stop_server(url, "")
        assert child.poll() is None
        url = f"http://127.0.0.1:{port}"
        assert run("stop", "--url", url).output.splitlines()[-1] == f"the server at {url} has ended"
        assert child.wait(5) == -15


@pytest.mark.parametrize(
    "words", [("-c", LISTENER, "mlxspec", "serve"), ("-m", "mlxspec", "bench", " serve")]
)
def test_stop_signals_nobody_else(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(tmp_path, monkeypatch, *words) as (child, port):
        with pytest.raises(UserError, match="stop it there"):
            stop.stop_server(f"http://127.0.0.1:{port}", "")
        assert child.poll() is None


def test_stop_ends_what_has_the_port_of_a_stopped_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, said in ((0, "the service's"), (7, "stop it there")):
        now = status.Status("http://127.0.0.1:1", "idle", "stopped", pid=pid)
        monkeypatch.setattr(stop, "look", lambda url, key, now=now: now)
        monkeypatch.setattr(stop, "here", lambda: None)
        monkeypatch.setattr(stop.verbs, "stop", lambda *_: "the service's")
        monkeypatch.setattr(stop, "_argv", lambda pid: [])
        try:
            found = stop.stop_server(now.url, "")
        except UserError as error:
            found = str(error)
        assert said in found


def test_stop_waits_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stood(7, monkeypatch)
    for name, found in (
        ("_argv", ["mlxspec", "serve"]),
        ("_listens", True),
        ("os", SimpleNamespace(kill=print)),
    ):
        monkeypatch.setattr(stop, name, found if name == "os" else lambda *_, found=found: found)
    monkeypatch.setattr(stop, "_serves", lambda argv: True)
    monkeypatch.setattr(stop, "PATIENCE_S", 0.01)
    with pytest.raises(UserError, match="at once: kill 7"):
        stop.stop_server("http://127.0.0.1:8080", "")


def test_stop_on_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ps and lsof; a path may have blanks."""
    monkeypatch.setattr(stop, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^ps: No such file"):
        stop._argv(1)
    command = "/Users/a/Application Support/bin/Python -m mlxspec serve x"
    for uid, state, found in (
        (os.getuid(), "S", True),
        (os.getuid(), "Z", False),
        (os.getuid() + 1, "S", False),
    ):
        (tmp_path / "ps").write_text(f"#!/bin/sh\necho '  {uid} {state}+   {command}'")
        (tmp_path / "ps").chmod(0o755)
        assert stop._serves(stop._argv(1)) == found
    (tmp_path / "lsof").write_text("#!/bin/sh\n[ $2 = -iTCP:81 ] && echo 1 && echo 17")
    (tmp_path / "lsof").chmod(0o755)
    assert stop._listens(17, 81) and not stop._listens(7, 81) and not stop._listens(17, 82)


# ---- the menu
# -------------------------------------------------------------------------------------------


def test_the_menu_means_the_server_that_it_shows(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    with at(Config(api_key="sesame")) as (url, _):
        out = run("menubar", "--xbar", "--url", url, "--api-key", "sesame").output
        assert f'param3="stop" param4="--url" param5="{url}"' in out.replace(
            'param4="tiny" param5', "param4"
        )
        assert "Serving tiny" in out
        monkeypatch.setenv(
            "MLXSPEC_PORT", url.rpartition(":")[2]
        )  # which xbar does not hand to an action
        monkeypatch.setenv("MLXSPEC_API_KEY", "sesame")
        out = run("menubar", "--xbar").output
        assert "Serving tiny" in out and f'"--copy" param5="--url" param6="{url}"' in out
        assert run("status", "--url", url).exit_code == 0  # whose address is the settings'
        monkeypatch.setenv("MLXSPEC_API_KEY", "wrong")
        out = run("menubar", "--xbar").output
        assert "api_key in the settings' file" in out and f"Open the page | href={url}/" in out


def test_broken_settings_are_a_menu(monkeypatch: pytest.MonkeyPatch) -> None:
    """xbar shows nothing of a plugin that fails."""
    monkeypatch.setenv("MLXSPEC_PORT", "eighty")
    done = run("menubar", "--xbar")
    lines = done.output.splitlines()
    assert done.exit_code == 0 and lines[:2] == ["⚠", "---"]
    assert (
        "eighty" in done.output
        and "doctor" in lines[-1]
        and all(len(line) <= 80 for line in lines[2:-2])
    )
    monkeypatch.setenv("MLXSPEC_PORT", "1")
    assert run("status", "--url", absent()).exit_code == 1

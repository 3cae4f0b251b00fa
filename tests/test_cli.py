"""The command line: what it prints, and that a user's mistake ends in one line and status 2."""

import os
import plistlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlxspec import __version__, cli
from mlxspec.config import TABLE, Config, flag
from mlxspec.files import lock
from mlxspec.service.menubar import Menu
from mlxspec.types import UserError


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, bare_settings: None) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxspec", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"mlxspec {__version__}\n", "")


def test_help_has_every_flag() -> None:
    done = run("serve", "--help")
    assert done.returncode == 0
    for name in TABLE:
        assert flag(name) in done.stdout


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (
            ("serve", "--port", "x"),
            {},
            "error: --port: port = 'x' is not allowed; give 0 to 65535\n",
        ),
        (
            ("serve",),
            {"MLXSPEC_PORT": "x"},
            "error: MLXSPEC_PORT: port = 'x' is not allowed; ",
        ),
        (
            ("serve",),
            {"MLXSPEC_CONFIG": "/gone.toml"},
            "error: /gone.toml: [Errno 2] No such file or directory",
        ),
        (("serve", "--prot", "1"), {}, "No such option: --prot"),
        (("chat", "--url", "localhost"), {}, "error: --url = 'localhost' is not a URL; "),
        (("chat", "--temperature", "-1"), {}, "--temperature"),
        (("sing",), {}, "No such command 'sing'"),
    ],
)
def test_mistakes_end_in_a_line_and_status_2(
    words: tuple[str, ...],
    env: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert command(monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err
    assert said.out == ""


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mlxspec", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_serve_hands_over_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Config] = []
    monkeypatch.setattr(
        "mlxspec.server.process.serve_model", lambda config: sys.exit(given.append(config))
    )
    monkeypatch.setenv("MLXSPEC_MAX_QUEUE", "5")
    assert command(monkeypatch, "serve", "some/model", "--port", "0", "--log-level", "debug") == 0
    assert given == [Config(model="some/model", port=0, max_queue=5, log_level="debug")]


def test_serve_takes_several_models(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Config] = []
    monkeypatch.setattr(
        "mlxspec.server.process.serve_model", lambda config: sys.exit(given.append(config))
    )
    assert command(monkeypatch, "serve", "a", "b", "--pin", "b", "c=d") == 0
    assert given == [Config(model="a", others=("b", "c=d"), pin=("b",))]


def test_a_model_that_does_not_fit_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: Config) -> int:
        raise UserError("model = 'a[b]' is too large; give a smaller one")

    monkeypatch.setattr("mlxspec.server.process.serve_model", refuse)
    assert command(monkeypatch, "serve") == 2
    assert capsys.readouterr().err == "error: model = 'a[b]' is too large; give a smaller one\n"


@pytest.mark.parametrize(
    ("words", "env", "url", "key"),
    [
        ((), {}, "http://127.0.0.1:8080", ""),
        ((), {"MLXSPEC_HOST": "0.0.0.0", "MLXSPEC_PORT": "9"}, "http://127.0.0.1:9", ""),
        ((), {"MLXSPEC_HOST": "::", "MLXSPEC_API_KEY": "k"}, "http://[::1]:8080", "k"),
        (("--api-key", "mine"), {"MLXSPEC_API_KEY": "k"}, "http://127.0.0.1:8080", "mine"),
        (("--url", "http://other:1"), {"MLXSPEC_API_KEY": "k"}, "http://other:1", ""),
    ],
)
def test_chat_finds_its_server(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], env: dict[str, str], url: str, key: str
) -> None:
    given: list[tuple[object, ...]] = []

    def ask(*args: object) -> None:
        given.append(args)
        raise UserError("this is far enough")

    monkeypatch.setattr("mlxspec.commands.chat.request", ask)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert command(monkeypatch, "chat", *words) == 2
    assert given == [(url, key, "GET", "/v1/models")]


def test_a_service_needs_macos(tmp_path: Path) -> None:
    done = run("service", "install", PATH=str(tmp_path))
    assert done.returncode == 2 and "needs macOS" in done.stderr


def test_a_service_is_installed_by_the_command(tmp_path: Path) -> None:
    """The whole chain but launchctl and what it starts: settings, definition, exit status."""
    tool = tmp_path / "launchctl"
    tool.write_text('#!/bin/sh\ncase "$1 $2" in print\\ gui/*/*) exit 113;; esac\n')
    tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    port = str(unused_port())
    words = ("some/model", "--port", port)
    with lock(tmp_path / "Library/Application Support/mlxspec/service.lock"):  # it runs
        done = run("service", "install", *words, MLXSPEC_PIN="a", **env)
    assert done.returncode == 0 and f"http://127.0.0.1:{port}/v1" in done.stdout, done.stderr
    file = tmp_path / "Library/LaunchAgents/dev.mlxspec.plist"
    agent = plistlib.loads(file.read_bytes())
    assert agent["ProgramArguments"][3:] == ["serve", *words, "--pin", "a"]
    done = run("service", "status", **env)
    assert done.returncode == 3 and "mlxspec service start" in done.stdout
    done = run("service", "logs", **env)
    assert (done.returncode, done.stdout) == (0, "")  # nothing was said yet
    assert run("service", "uninstall", **env).returncode == 0
    assert not any(p.is_file() for p in (tmp_path / "Library").rglob("*"))
    assert run("service", "status", **env).returncode == 4


@pytest.mark.parametrize(
    ("url", "port"), [("", "8080"), ("http://127.0.0.1:9", "9"), ("", "eighty")]
)
def test_the_menu_bar_shows_the_server(
    url: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    menus: list[Menu] = []
    monkeypatch.setattr("mlxspec.service.menubar.show", lambda poll: menus.append(poll()))
    if not url:
        monkeypatch.setenv("MLXSPEC_PORT", port)
    words = ["menubar", "--url", url] if url else ["menubar"]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert any(port in item.title for item in menus[0].items)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])

"""The command line: what it prints, and that a user's mistake ends in one line and status 2."""

import os
import plistlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mlxspec import __version__, cli
from mlxspec.commands.options import names_served
from mlxspec.config import TABLE, Config, flag, load_config
from mlxspec.files import lock
from mlxspec.service.menubar import Menu
from mlxspec.types import UserError
from tests.commands.test_chat import echo, serving


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


@pytest.mark.parametrize("name", TABLE)
def test_help_says_kind_default_and_range_of_every_setting(name: str) -> None:
    """On a terminal that is so wide that a setting is a line."""
    row = TABLE[name]
    (line,) = re.findall(rf"^│ +{flag(name)} +(.*?) +│$", help_of("serve", columns=1000), re.M)
    kind = line.split()[0]
    assert re.fullmatch(r"<.+>", kind) and kind not in ("<str>", "<float>", "<list[str]>")
    if row.metadata["choices"]:
        assert all(str(choice) in line for choice in row.metadata["choices"])
    elif row.metadata["high"]:
        assert f" Values: {row.metadata['low']} to {row.metadata['high']}." in line
    if row.default not in (None, "", ()):
        said = re.search(r" Default: (.+)\.$", line)
        assert said and load_config({name: said[1]}, {}) == Config()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("port", "<int>"),
        ("idle_ttl", "<seconds>"),
        ("memory_gb", "<GiB>"),
        ("max_body_mb", "<MiB>"),
        ("decode_gap_ms", "<ms>"),
        ("context", "<tokens>"),
        ("wired", "<on|off>"),
        ("kv_bits", "<0|4|8>"),
        ("pin", "<name,...>"),
        ("cache_dir", "<dir>"),
    ],
)
def test_help_says_units_and_choices(name: str, kind: str) -> None:
    assert re.search(rf"{flag(name)} +{re.escape(kind)} ", help_of("serve"))


@cache
def help_of(*words: str, columns: int = 120, flag: str = "-h") -> str:
    """What a command says of itself on a terminal of so many columns."""
    shown = CliRunner().invoke(cli.app, [*words, flag], env={"COLUMNS": str(columns)})
    assert shown.exit_code == 0 and max(map(len, shown.stdout.splitlines())) <= columns
    return shown.stdout


def paths(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from paths(each, *words, name)


@pytest.mark.parametrize("words", list(paths(get_command(cli.app))), ids=" ".join)
@pytest.mark.parametrize(("flag", "columns"), [("-h", 80), ("--help", 120)])
def test_every_command_says_what_its_values_are(
    words: tuple[str, ...], flag: str, columns: int
) -> None:
    shown = help_of(*words, columns=columns, flag=flag)
    assert "…" not in shown, "cut off"
    command: Any = get_command(cli.app)
    for word in words:
        command = command.commands[word]
    for param in command.params:
        if "completion" not in param.name:  # typer's own
            written = max(param.opts, key=len) if hasattr(param, "is_flag") else param.metavar
            (line,) = re.findall(rf"^│[ *]+{written} .*│$", shown, re.M)
            kind = re.findall(r" (<\S+>) ", line)
            assert kind == [] if getattr(param, "is_flag", False) else kind not in ([], ["<str>"])


def test_an_agent_gets_its_own_h() -> None:
    given = get_command(cli.app).commands["launch"].make_context("launch", ["claude", "-h"])
    assert (given.params["agent"], given.params["args"]) == ("claude", ["-h"])


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("serve --wired ", {"on", "off"}),
        ("serve --kv-bits ", {"0", "4", "8"}),
        ("service install --log-level d", {"debug"}),
        ("serve some/model --layout re", {"rect"}),
        ("bench --workload c", {"code", "chat"}),
        ("launch c", {"claude", "codex", "copilot"}),
        ("pull smol", {"smollm2-135m-instruct"}),
        ("serve smol", {"smollm2-135m-instruct"}),
        ("load x", set()),  # no server runs
    ],
)
def test_the_shell_completes_what_is_known(
    line: str, known: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_MLXSPEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"mlxspec {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" "))))
    assert command(monkeypatch) == 0
    assert set(capsys.readouterr().out.split()) == known


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (
            ("serve", "--port", "x"),
            {},
            "error: --port: port = 'x' is not allowed; give 0 to 65535\n",
        ),
        (
            ("serve", "--wired", "yes"),
            {},
            "error: --wired: wired = 'yes' is not allowed; give one of on, off\n",
        ),
        (
            ("serve", "--kv-bits", "5"),
            {},
            "error: --kv-bits: kv_bits = '5' is not allowed; give one of 0, 4, 8\n",
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


def test_text_from_elsewhere_is_printable_in_the_log() -> None:
    """In a process of its own, whose log that changes: our messages and another library's, errors
    and tracebacks."""
    code = r"""
import logging, sys
from mlxspec import log
from mlxspec.commands.options import log_to_stderr
log_to_stderr("info")
other = logging.getLogger("other")
other.addHandler(logging.StreamHandler())
evil = "\x1b]0;evil\x07\x1b[2J\n00:00:00 INFO    forged\u202e\x9b"
log.info("one %s", evil)
other.warning("two %s", evil)
try:
    raise ValueError(evil)
except ValueError:
    log.exception(evil)
logging.getLogger("uvicorn.error").error("three\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    lines = done.stderr.decode().split("\n")
    assert all(line.isprintable() for line in lines)
    assert not [line for line in lines if line.startswith("00:00:00")]
    text = "\n".join(lines)
    assert "one ?]0;evil??[2J 00:00:00 INFO    forged" in text and "ValueError" in text
    assert text.count("two ") == 2 and text.rstrip().endswith("three")


@pytest.mark.parametrize("words", [["chat"], ["launch", "aider"], ["serve"], ["rm"]])
def test_words_that_are_not_utf_8(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlxspec", *words, b"tw\xf6"], capture_output=True, timeout=60
    )
    said = done.stderr.decode()
    assert done.returncode == 2 and len(said.splitlines()) == 1
    assert said.startswith("error: ") and "tw?" in said and "UTF-8" in said


@pytest.mark.slow
def test_an_error_is_printable(tmp_path: Path) -> None:
    name = tmp_path / "\x1b[2J"
    done = subprocess.run(
        [sys.executable, "-m", "mlxspec", "serve", str(name), "--port", "0"],
        capture_output=True,
        timeout=60,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 2 and b"\x1b" not in done.stderr and b"error: " in done.stderr


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


def test_a_service_can_be_seen_before_it_is_installed(tmp_path: Path) -> None:
    done = run("service", "print", "some/model", "--port", "81", HOME=str(tmp_path))
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []
    agent = plistlib.loads(done.stdout.encode())
    assert agent["ProgramArguments"][3:] == ["serve", "some/model", "--port", "81"]
    assert agent["Sockets"]["http"]["SockServiceName"] == "81"


def test_a_shell_completes_the_models_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(echo) as server:
        monkeypatch.setenv("MLXSPEC_PORT", server.url.rpartition(":")[2])
        assert names_served() == ["tiny"]


def test_the_help_has_groups() -> None:
    titles = re.findall(r"^╭─ (.+?) ─", help_of(columns=80), re.M)
    assert titles == ["Options", "The server", "Chat and agents", "Models", "This machine"]
    titles = re.findall(r"^╭─ (.+?) ─", help_of("serve"), re.M)
    assert {"Address and access", "Drafts and kernels"} < {*titles}


def test_logs_of_a_service_that_never_ran() -> None:
    done = run("service", "logs")
    assert done.returncode != 0
    assert "no service has run" in done.stderr and "mlxspec service status" in done.stderr


@pytest.mark.slow
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

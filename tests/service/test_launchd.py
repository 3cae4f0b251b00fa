"""The launch agent against launchd.plist(5), and its life with a fake launchctl."""

import ctypes
import errno
import os
import plistlib
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import ConfigError
from mlxspec.service import crashes, launchd
from mlxspec.types import UserError
from tests.metalsim.toolchain import find
from tests.service import fake
from tests.service.fake import DOCUMENTED, faults

pytestmark = pytest.mark.usefixtures("bare_settings")


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def words(flags: dict[str, Any], **env: str) -> list[str]:
    """The arguments of `serve` in the definition."""
    command = launchd.definition(flags, env)["ProgramArguments"]
    assert command[:4] == [sys.executable, "-m", "mlxspec", "serve"]
    return list(command[4:])


def write_settings(text: str) -> None:
    file = Path("~/.config/mlxspec/config.toml").expanduser()
    file.parent.mkdir(parents=True)
    file.write_text(text)


def test_the_definition() -> None:
    agent = launchd.definition({"port": "81", "host": "::1"}, {"HF_HOME": "/x", "OTHER": "y"})
    assert faults(agent, DOCUMENTED) == []
    assert agent["Label"] == launchd.agent_file().stem
    assert agent["KeepAlive"] == {"SuccessfulExit": False, "Crashed": True}
    assert agent["EnvironmentVariables"] == {"PATH": launchd.PATH, "HF_HOME": "/x"}
    assert agent["StandardErrorPath"] == str(launchd.log_file())
    assert agent["ExitTimeOut"] == 50 and agent["Umask"] == 0o077
    listen = agent["Sockets"]["http"]
    assert (listen["SockNodeName"], listen["SockServiceName"]) == ("::1", "81")
    assert listen["SockFamily"] == "IPv6"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Socket", {}),
        ("KeepAlive", {"Crash": True}),
        ("ExitTimeOut", "50"),
        ("ThrottleInterval", True),
        ("ProcessType", "interactive"),
        ("Sockets", {"http": {"SockFamily": "inet"}}),
    ],
)
def test_the_table_refuses(key: str, value: Any) -> None:
    assert len(faults(launchd.definition({}, {}) | {key: value}, DOCUMENTED)) == 1


def test_flags_and_variables_are_kept() -> None:
    assert words({}) == []
    found = words({"model": "org/name", "port": "81"}, MLXSPEC_PIN="a,b")
    assert found == ["org/name", "--port", "81", "--pin", "a,b"]


def test_settings_in_the_file_stay_there() -> None:
    write_settings('model = "org/name"\nothers = ["b"]\nport = 9000\napi_key = "sesame"\n')
    assert words({}) == []
    assert launchd.definition({}, {})["Sockets"]["http"]["SockServiceName"] == "9000"
    assert words({"port": "8080"}) == ["--port", "8080"]  # the default, against the file
    assert words({"model": "x", "others": ["c"]}) == ["x", "c"]
    assert words({"others": ["c"]}) == ["org/name", "c"]


@pytest.mark.parametrize(
    ("flags", "env", "name"),
    [
        ({"api_key": "sesame"}, {}, "api_key"),
        ({}, {"MLXSPEC_API_KEY": "sesame"}, "api_key"),
        ({}, {"HF_ENDPOINT": "https://me:sesame@hub.example"}, "HF_ENDPOINT"),
        ({"port": "0"}, {}, "port"),
    ],
)
def test_refused_settings(flags: dict[str, str], env: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}") as caught:
        launchd.definition(flags, env)
    assert "sesame" not in str(caught.value)


def test_no_secret_is_stored() -> None:
    write_settings('api_key = "sesame"')
    env = {"MLXSPEC_API_KEY": "sesame", "HF_TOKEN": "sesame", "HF_HOME": "/x"}
    assert "sesame" not in repr(launchd.definition({}, env))


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "small", "draft"):
        (tmp_path / name).mkdir()
    (tmp_path / "my.toml").write_text("port = 82")
    flags = {"model": "model", "others": ["s=small", "org/name"], "draft": "draft"}
    found = words({**flags, "cache_dir": "new"}, MLXSPEC_CONFIG="my.toml")
    at = str(tmp_path)
    models = [f"{at}/model", f"s={at}/small", "org/name"]
    assert found == [*models, "--draft", f"{at}/draft", "--cache-dir", f"{at}/new"]
    variables = launchd.definition({}, {"MLXSPEC_CONFIG": "my.toml"})["EnvironmentVariables"]
    assert variables["MLXSPEC_CONFIG"] == f"{at}/my.toml"


# ---- its life


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake.Launchctl:
    """What it loads runs, unless there is a file `stuck`."""
    monkeypatch.setattr(launchd, "POLL_S", 0.001)
    tool = fake.install(tmp_path / "fake", monkeypatch)
    stuck = tool.root / "stuck"
    monkeypatch.setattr(crashes, "is_running", lambda: tool.loaded and not stuck.exists())
    return tool


def agent(**flags: str) -> dict[str, Any]:
    return launchd.definition({"port": free_port(), **flags}, {})


def test_a_whole_life(tool: fake.Launchctl) -> None:
    mine = agent()
    url = f"http://127.0.0.1:{mine['Sockets']['http']['SockServiceName']}"
    assert launchd.installed_url() == ""
    assert url in launchd.install(mine)
    assert tool.loaded and tool.calls() == ["bootout", "enable", "bootstrap"]
    assert plistlib.loads(launchd.agent_file().read_bytes()) == mine
    assert launchd.installed_url() == url

    launchd.install(mine | {"ExitTimeOut": 51})
    assert tool.loaded and tool.calls() == ["bootout", "enable", "bootstrap"]

    crashes.write(crashes.files()[0], [1.0])
    launchd.stop()
    assert not tool.loaded and tool.calls() == ["bootout"]
    launchd.stop()
    assert not tool.loaded and tool.calls() == ["bootout"]
    launchd.start()
    assert tool.loaded and tool.calls() == ["bootout", "enable", "bootstrap"]
    assert not crashes.files()[0].exists()
    launchd.restart()
    assert tool.loaded and tool.calls() == ["bootout", "enable", "bootstrap"]

    launchd.log_file().write_text("a log")
    (tool.root / "loaded.menubar").touch()
    launchd.uninstall()
    assert not tool.loaded and not (tool.root / "loaded.menubar").exists()
    assert not [path for path in (Path.home() / "Library").rglob("*") if path.is_file()]
    assert "not installed" in launchd.uninstall()


def test_a_running_service_is_not_started_again(
    tool: fake.Launchctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchd.install(agent())
    tool.calls()
    monkeypatch.setattr(crashes, "is_running", lambda: True)
    assert "already" in launchd.start() and tool.calls() == []


@pytest.mark.parametrize("verb", ["bootstrap", "bootout"])
def test_failures_of_launchctl_are_errors(tool: fake.Launchctl, verb: str) -> None:
    launchd.install(agent())
    tool.fail(verb)
    with pytest.raises(UserError, match=rf"{verb}.* status 9: made up"):
        launchd.restart()


@pytest.mark.parametrize("act", [launchd.start, launchd.stop, launchd.restart])
def test_a_missing_service_is_an_error(tool: fake.Launchctl, act: Callable[[], str]) -> None:
    with pytest.raises(UserError, match="mlxspec service install"):
        act()
    assert tool.calls() == []


def test_a_port_in_use_is_named(tool: fake.Launchctl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(ConfigError, match=f"port = {port}"):
            launchd.install(agent(port=port))
    assert not tool.loaded and not launchd.agent_file().exists()


def test_a_change_that_fails_leaves_the_service_as_it_was(tool: fake.Launchctl) -> None:
    before = agent()
    launchd.install(before)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError):
        launchd.install(agent(port=str(other.getsockname()[1])))
    assert tool.loaded and plistlib.loads(launchd.agent_file().read_bytes()) == before


def test_a_file_in_the_way_is_named(tool: fake.Launchctl, tmp_path: Path) -> None:
    (tmp_path / "Library").write_text("")
    with pytest.raises(OSError, match="Library"):
        launchd.install(agent())


@pytest.mark.parametrize("again", [False, True])
def test_a_service_that_does_not_start_is_undone(
    again: bool, tool: fake.Launchctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchd, "START_S", 0.05)
    before = agent()
    if again:
        launchd.install(before)
    (tool.root / "stuck").touch()
    with pytest.raises(UserError, match=r"did not start.* mlxspec service logs"):
        launchd.install(agent())
    assert tool.loaded == launchd.agent_file().exists() == again
    if again:
        assert plistlib.loads(launchd.agent_file().read_bytes()) == before


def test_a_bootstrap_waits_until_the_label_is_gone(tool: fake.Launchctl) -> None:
    """A bootout returns while the process still ends."""
    launchd.install(agent())
    (tool.root / "linger").write_text("\n" * 5)
    launchd.restart()
    assert tool.loaded and not (tool.root / "linger").read_text()


def test_waiting_for_launchd_ends(tool: fake.Launchctl, monkeypatch: pytest.MonkeyPatch) -> None:
    launchd.install(agent())
    monkeypatch.setattr(launchd, "WAIT_S", 0.05)
    (tool.root / "linger").write_text("\n" * 1000)
    with pytest.raises(UserError, match="has not ended"):
        launchd.stop()


def test_a_disabled_label_is_enabled(tool: fake.Launchctl) -> None:
    (tool.root / "disabled").touch()
    launchd.install(agent())
    assert tool.loaded


def test_without_launchctl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs macOS"):
        launchd.uninstall()


# ---- the socket

SOURCE = f"""
static int given[4]; static unsigned long number; static int taken;
void give(int fd) {{ given[number++] = fd; }}
static int same(const char *a, const char *b) {{ while (*a && *a == *b) a++, b++; return *a == *b; }}
int launch_activate_socket(const char *name, int **fds, unsigned long *count) {{
    if (!number) return {errno.ESRCH};
    if (!same(name, "http")) return {errno.ENOENT};
    if (taken++) return {errno.EALREADY};
    *fds = given; *count = number;
    return 0;
}}
"""


@pytest.fixture
def library(tmp_path: Path) -> Any:
    """A library with launch_activate_socket(3)."""
    (tmp_path / "launch.c").write_text(SOURCE)
    made = tmp_path / "launch.so"
    command = [*find().compile, "-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-o", made]
    subprocess.run([*map(str, command), str(tmp_path / "launch.c")], check=True, timeout=100)
    return ctypes.CDLL(str(made))


def test_launchd_hands_over_a_socket(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchd.sys, "platform", "darwin")
    monkeypatch.setattr(launchd.ctypes, "CDLL", lambda name: library)
    assert launchd.activated_socket() is None  # ESRCH: started by hand
    with socket.create_server(("127.0.0.1", 0)) as listener:
        library.give(os.dup(listener.fileno()))
        with monkeypatch.context() as patch:
            patch.setattr(launchd, "SOCKET", "other")
            assert launchd.activated_socket() is None  # ENOENT
        with socket.create_connection(listener.getsockname()) as client:
            taken = launchd.activated_socket()
            assert taken and not taken.get_inheritable()
            with taken, taken.accept()[0] as mine:
                mine.sendall(b"hello")
                assert client.recv(5) == b"hello"
    with pytest.raises(UserError, match="does not hand over"):
        launchd.activated_socket()


def test_other_systems_have_no_launchd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchd.sys, "platform", "linux")
    assert launchd.activated_socket() is None

"""The launch agent against what launchd.plist(5) documents, and launchctl's races."""

import os
import plistlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import ConfigError
from mlxspec.service import Hands, launchd, verbs
from mlxspec.service.job import Job
from mlxspec.types import UserError
from tests.service import fake
from tests.service.test_service import free_port

# launchd.plist(5), the keys that a user's agent may need, with the types that the page gives them;
# a dict
# holds the keys inside. `Crashed` is in the page since OS X 10.9. Read at
# https://leancrew.com/all-this/man/man5/launchd.plist.html (macOS 13) and in Apple's own source of
# the page,
# https://github.com/apple-oss-distributions/launchd/blob/main/man/launchd.plist.5 (OS X 10.9).
DOCUMENTED: dict[str, Any] = {
    "Label": str,
    "Program": str,
    "ProgramArguments": [str],
    "EnvironmentVariables": {str: str},
    "WorkingDirectory": str,
    "Umask": (int, str),
    "RunAtLoad": bool,
    "KeepAlive": {"SuccessfulExit": bool, "Crashed": bool, "PathState": {str: bool}},
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "StandardInPath": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "ProcessType": ("Background", "Standard", "Adaptive", "Interactive"),
    "LimitLoadToSessionType": (str, [str]),
    "Nice": int,
    "LowPriorityIO": bool,
    "AbandonProcessGroup": bool,
    "Sockets": {
        str: {
            "SockType": ("stream", "dgram", "seqpacket"),
            "SockPassive": bool,
            "SockNodeName": str,
            "SockServiceName": (str, int),
            "SockFamily": ("IPv4", "IPv6", "IPv4v6", "Unix"),
            "SockProtocol": ("TCP", "UDP"),
            "SockPathName": str,
        }
    },
}


def faults(value: Any, rule: Any, at: str = "") -> list[str]:
    """What of a property list the table does not know, or knows otherwise."""
    if isinstance(rule, dict):
        if not isinstance(value, dict):
            return [f"{at}: not a dictionary"]
        found = []
        for key, inner in value.items():
            known = rule.get(key, rule.get(str))
            found += (
                faults(inner, known, f"{at}/{key}") if known else [f"{at}/{key}: not documented"]
            )
        return found
    if isinstance(rule, list):
        wrong = not isinstance(value, list) or any(type(one) is not rule[0] for one in value)
        return [f"{at}: not an array"] * wrong
    if isinstance(rule, tuple) and isinstance(rule[0], str):
        return [] if value in rule else [f"{at}: {value!r} is not a choice"]
    ways = rule if isinstance(rule, tuple) else (rule,)
    return (
        []
        if any(
            type(value) is way or (isinstance(way, list) and not faults(value, way)) for way in ways
        )
        else [f"{at}: {type(value).__name__}"]
    )


@pytest.fixture
def job() -> Job:
    command = ("/opt/a venv/bin/python", "-m", "mlxspec", "serve", "a&b <c>", "--name", "é")
    return Job(command, {"PATH": "/usr/bin:/bin", "HF_HOME": "/Volumes/x"}, "127.0.0.1", 8080, 50)


def made(job: Job) -> dict[str, Any]:
    (data,) = launchd.files(job).values()
    return dict(plistlib.loads(data))


@pytest.mark.parametrize("folder", ["", "/a/checkout"])
def test_every_key_is_documented(job: Job, folder: str) -> None:
    found = made(replace(job, folder=folder))
    assert faults(found, DOCUMENTED) == []
    assert found.get("WorkingDirectory", "") == folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Socket", {}),
        ("KeepAlive", {"Crash": True}),
        ("ExitTimeOut", "50"),
        ("ThrottleInterval", 10.0),
        ("ThrottleInterval", True),
        ("ProcessType", "interactive"),
        ("ProgramArguments", "python"),
        ("Sockets", {"http": {"SockPort": 80}}),
        ("Sockets", {"http": {"SockFamily": "inet"}}),
    ],
)
def test_the_table_refuses(job: Job, key: str, value: Any) -> None:
    assert len(faults(made(job) | {key: value}, DOCUMENTED)) == 1


def test_what_it_says(job: Job) -> None:
    found = made(job)
    assert found["Label"] == "dev.mlxspec" == launchd.paths()[0].stem
    assert (
        found["ProgramArguments"] == list(job.command)
        and found["EnvironmentVariables"] == job.variables
    )
    assert found["KeepAlive"] == {"SuccessfulExit": False, "Crashed": True}
    assert found["ProcessType"] == "Interactive" and found["ExitTimeOut"] == 50
    assert found["Umask"] == 0o077
    assert found["StandardErrorPath"] == found["StandardOutPath"] == str(launchd.log_file())
    assert found["Sockets"] == {
        "http": {
            "SockType": "stream",
            "SockProtocol": "TCP",
            "SockFamily": "IPv4",
            "SockNodeName": "127.0.0.1",
            "SockServiceName": "8080",
        }
    }


def test_a_host_becomes_one_address(job: Job) -> None:
    """launchd listens on each address that a name has, and the server takes one socket."""
    assert made(replace(job, host="::1"))["Sockets"]["http"]["SockFamily"] == "IPv6"
    assert made(replace(job, host="localhost"))["Sockets"]["http"]["SockNodeName"] in (
        "127.0.0.1",
        "::1",
    )
    with pytest.raises(
        ConfigError, match=r"host = 'no\.such\.invalid': .*; give an address of this machine"
    ):
        made(replace(job, host="no.such.invalid"))


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_settings: None) -> fake.Fake:
    monkeypatch.setattr(launchd, "LOOK_S", 0.001)
    monkeypatch.setattr("mlxspec.service.AGAIN_S", 0.2)
    monkeypatch.setattr("mlxspec.service.LOOK_S", 0.001)
    return fake.install("launchctl", tmp_path / "fake", monkeypatch)


@pytest.fixture
def small() -> Job:
    return Job(
        ("/bin/true", "-m", "mlxspec", "serve"), {"PATH": "/bin"}, "127.0.0.1", free_port(), 50
    )


def test_a_bootstrap_waits_until_the_label_is_gone(tool: fake.Fake, small: Job) -> None:
    """A bootout returns while the process still ends, and a bootstrap fails with 5 until it has."""
    verbs.install(launchd, small, Hands())
    tool.linger(5)
    verbs.restart(launchd, Hands())
    assert tool.loaded and not (tool.root / "linger").read_text()


@pytest.mark.parametrize("status", [5, 37])
def test_a_bootstrap_is_tried_again(tool: fake.Fake, small: Job, status: int) -> None:
    (tool.root / "busy").write_text(f"{status}\n" * 2)
    verbs.install(launchd, small, Hands())
    assert tool.loaded and [call.split()[0] for call in tool.calls()] == ["bootstrap"] * 3


def test_a_bootstrap_that_fails_for_ever_is_said(tool: fake.Fake, small: Job) -> None:
    (tool.root / "busy").write_text("5\n" * 10_000)
    with pytest.raises(UserError, match=r"ended with status 5: .*; try again in a minute"):
        verbs.install(launchd, small, Hands())
    assert not tool.loaded and not launchd.paths()[0].exists()


def test_what_is_disabled_is_enabled(tool: fake.Fake, small: Job) -> None:
    (tool.root / "disabled").touch()
    verbs.install(launchd, small, Hands())
    assert [call.split()[0] for call in tool.calls()] == ["enable", "bootstrap"]


def test_the_menu_bar_goes_too(tool: fake.Fake, small: Job) -> None:
    verbs.install(launchd, small, Hands())
    other = launchd.agent("dev.mlxspec.menubar")
    other.write_bytes(b"")
    (tool.root / "loaded.menubar").touch()
    verbs.uninstall(launchd, Hands())
    assert not tool.loaded and not other.exists()


def test_what_never_goes_is_said(
    tool: fake.Fake, small: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs.install(launchd, small, Hands())
    tool.linger(10_000)
    monkeypatch.setattr(launchd, "SLACK_S", -50 + 0.05)
    with pytest.raises(
        UserError, match=r"launchd has not let go of dev\.mlxspec \(launchctl print: 0\)"
    ):
        verbs.stop(launchd, Hands())


def test_it_is_ended_by_bootout_alone(tool: fake.Fake, small: Job) -> None:
    """`stop` would race with KeepAlive, and `kickstart -k` would not let answers end."""
    verbs.install(launchd, small, Hands())
    verbs.stop(launchd, Hands())
    verbs.start(launchd, Hands())
    verbs.restart(launchd, Hands())
    verbs.uninstall(launchd, Hands())
    verbs_used = [call.split()[0] for call in tool.calls()]
    assert set(verbs_used) == {"bootstrap", "bootout", "kickstart"}
    assert verbs_used.count("bootout") == 3
    assert os.listdir(Path.home()) == ["fake"]


def test_the_log() -> None:
    assert launchd.logs(5, False) == ["tail", "-n", "5", str(launchd.log_file())]
    assert "-F" in launchd.logs(5, True)  # by name: the log is rotated

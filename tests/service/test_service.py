"""The verbs, by launchd and by systemd, through fakes that can fail at each step."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxspec import cli
from mlxspec.config import ConfigError
from mlxspec.service import Hands, System, here, launchd, ledger, systemd, verbs
from mlxspec.service.job import Job
from mlxspec.types import UserError
from tests.service import fake


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def job() -> Job:
    return Job(
        ("/bin/true", "-m", "mlxspec", "serve"), {"PATH": "/bin"}, "127.0.0.1", free_port(), 50
    )


class Setup:
    def __init__(self, system: System, tool: fake.Fake, home: Path) -> None:
        self.system, self.tool, self.home = system, tool, home
        self.said: list[str] = []
        self.hands = Hands(say=self.said.append)

    def state(self) -> tuple[dict[str, bytes], bool]:
        """All but the ledger, which a failed change may make anew."""
        return {
            n: d for n, d in fake.tree(self.home).items() if "service.json" not in n
        }, self.tool.loaded


@pytest.fixture(params=["launchctl", "systemctl"])
def at(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bare_settings: None,
) -> Setup:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(launchd, "LOOK_S", 0.001)
    tool = fake.install(request.param, tmp_path / "fake", monkeypatch)
    # this machine's own systemctl must not be found beside the fake launchctl, nor the other way
    # round
    system: System = launchd if request.param == "launchctl" else systemd
    monkeypatch.setattr("mlxspec.service.here", lambda: system)
    monkeypatch.setattr("mlxspec.service.status.here", lambda: system)
    monkeypatch.setattr("mlxspec.service.AGAIN_S", 0.05)
    monkeypatch.setattr("mlxspec.service.LOOK_S", 0.001)
    return Setup(system, tool, home)


DOMAIN = f"gui/{os.getuid()}"
ADDS = {
    launchd: [f"bootstrap {DOMAIN} "],
    systemd: [
        "--user daemon-reload",
        "--user enable mlxspec.socket",
        "--user start mlxspec.socket",
    ],
}
ENDS = {
    launchd: [f"bootout {DOMAIN}/dev.mlxspec"],
    systemd: ["--user stop mlxspec.socket mlxspec.service"],
}
WAKES = {launchd: f"kickstart {DOMAIN}/dev.mlxspec", systemd: "--user start mlxspec.service"}


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["service", *words])
    return done.exit_code, done.output


def status() -> tuple[int, str]:
    return command("status")


def alike(calls: list[str], wanted: list[str]) -> bool:
    return len(calls) == len(wanted) and all(
        a.startswith(b) for a, b in zip(calls, wanted, strict=True)
    )


def test_a_whole_life(at: Setup, job: Job) -> None:
    bare = at.state()
    adds, ends = ADDS[at.system], ENDS[at.system]
    assert status()[0] == 4
    assert f"http://127.0.0.1:{job.port}/v1" in verbs.install(at.system, job, at.hands)
    assert at.tool.loaded and alike(at.tool.calls(), adds)
    assert {path: path.read_bytes() for path in at.system.paths()} == at.system.files(job)
    assert at.system.address() == ("127.0.0.1", job.port)
    code, said = status()
    assert code == 0 and f"http://127.0.0.1:{job.port}\n" in said and "waiting" in said
    installed = at.state()

    assert "installed already" in verbs.install(at.system, job, at.hands) and at.tool.calls() == []

    other = replace(job, command=(*job.command, "--pin", "a"))
    verbs.install(at.system, other, at.hands)
    assert at.tool.loaded and alike(at.tool.calls(), ends + adds)
    verbs.install(at.system, job, at.hands)
    at.tool.calls()

    assert command("stop")[0] == 0
    assert not at.tool.loaded and alike(at.tool.calls(), ends)
    assert status()[0] == 3
    assert "already" in verbs.stop(at.system, at.hands) and at.tool.calls() == []
    assert command("start")[0] == 0
    assert at.tool.loaded and alike(at.tool.calls(), [*adds, WAKES[at.system]])
    assert command("restart")[0] == 0
    assert at.tool.loaded and alike(at.tool.calls(), [*ends, *adds, WAKES[at.system]])
    assert at.state() == installed

    for path in at.system.leftovers():
        if path.suffix:
            path.write_text("a log")
    ledger.file().with_name("service.json.123").write_text("of a process that was killed")
    ledger.occupy()
    assert verbs.uninstall(at.system, at.hands) == "nothing of the service is left"
    assert at.state() == bare
    assert verbs.uninstall(at.system, at.hands) == "the service is not installed"
    assert not ledger.file().parent.exists()


@pytest.mark.parametrize("step", range(3))
def test_a_first_install_that_fails_leaves_nothing(at: Setup, job: Job, step: int) -> None:
    steps = ADDS[at.system]
    if step >= len(steps):
        pytest.skip("launchctl is asked once")
    verb = steps[step].split()[at.tool.verb - 1]
    before = at.state()
    at.tool.fail(verb)
    with pytest.raises(
        UserError, match=rf"{verb}.* ended with status 9: {verb} failed: made up(; try.*)?$"
    ):
        verbs.install(at.system, job, at.hands)
    assert at.state() == before and not ledger.file().exists()


@pytest.mark.parametrize("step", range(4))
def test_a_change_that_fails_leaves_the_old_one(at: Setup, job: Job, step: int) -> None:
    verbs.install(at.system, job, at.hands)
    before = at.state()
    steps = ENDS[at.system] + ADDS[at.system]
    if step >= len(steps):
        pytest.skip("launchctl is asked twice")
    verb = steps[step].split()[at.tool.verb - 1]
    at.tool.fail(verb)
    with pytest.raises(UserError, match=r"made up(; try.*)?$"):
        verbs.install(at.system, replace(job, port=free_port()), at.hands)
    assert at.state() == before


def test_what_cannot_be_taken_back_is_said(at: Setup, job: Job) -> None:
    verbs.install(at.system, job, at.hands)
    files = at.state()[0]
    at.tool.fail(ADDS[at.system][-1].split()[at.tool.verb - 1], times=2)
    with pytest.raises(
        UserError, match=r"made up.*; and to take it back failed too: .* made up(; try.*)?$"
    ):
        verbs.install(at.system, replace(job, port=free_port()), at.hands)
    assert at.state() == (files, False)


@pytest.mark.parametrize("verb", ["uninstall", "stop", "restart"])
def test_what_does_not_end_stays(at: Setup, job: Job, verb: str) -> None:
    verbs.install(at.system, job, at.hands)
    before = at.state()
    at.tool.fail(ENDS[at.system][0].split()[at.tool.verb - 1])
    with pytest.raises(UserError, match=r"made up(; try.*)?$"):
        getattr(verbs, verb)(at.system, at.hands)
    assert at.state() == before


@pytest.mark.parametrize("verb", ["start", "restart"])
@pytest.mark.parametrize("step", range(4))
def test_a_restart_that_fails_leaves_the_old_one(at: Setup, job: Job, verb: str, step: int) -> None:
    verbs.install(at.system, job, at.hands)
    if verb == "start":
        verbs.stop(at.system, at.hands)
    past = ledger.Ledger(held="it crashed", crashes=[1.0])
    ledger.write(ledger.file(), past)
    before, steps = at.state(), [*ADDS[at.system], WAKES[at.system]]
    if step >= len(steps):
        pytest.skip("fewer steps than systemctl's")
    at.tool.fail(steps[step].split()[at.tool.verb - 1])
    with pytest.raises(UserError, match="made up"):
        getattr(verbs, verb)(at.system, at.hands)
    assert at.state() == before and ledger.read(ledger.file()) == past


def test_without_a_session_it_is_said_once(at: Setup, job: Job) -> None:
    """Also by a dry run; and what was installed can be removed."""
    verbs.install(at.system, job, at.hands)
    (at.tool.root / "alone").touch()
    for hands in (at.hands, Hands(dry=True)):
        do: list[Callable[[], str]] = [
            lambda: verbs.start(at.system, hands),  # noqa: B023
            lambda: verbs.restart(at.system, hands),  # noqa: B023
            lambda: verbs.install(at.system, replace(job, exit_s=51), hands),  # noqa: B023
        ]
        at.tool.calls()
        for verb in do:
            with pytest.raises(
                UserError, match=r"log in (there|on this machine), or .*`mlxspec serve`"
            ) as caught:
                verb()
            assert str(caught.value).count("Failed to connect") <= 1 and at.tool.calls() == []
    verbs.uninstall(at.system, at.hands)
    assert at.state()[0] == {}


def test_what_is_in_the_way_is_named(at: Setup, job: Job) -> None:
    file = at.system.paths()[0].parent.parent
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    with pytest.raises(UserError, match=f"{file}.*; make it one that you may write"):
        verbs.install(at.system, job, at.hands)
    assert at.tool.calls() == [] and not at.tool.loaded


@pytest.mark.parametrize("words", [("logs",), ("logs", "-f"), ("service", "logs", "-f")])
def test_the_log_is_shown(
    at: Setup, job: Job, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(
        os, "execvp", lambda file, command: ran.append(command)
    )  # which never returns
    assert "not installed" in str(CliRunner().invoke(cli.app, words).exception) and not ran
    verbs.install(at.system, job, at.hands)
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert ran == [at.system.logs(100, "-f" in words)]


def test_a_log_that_cannot_be_shown(at: Setup, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    verbs.install(at.system, job, at.hands)
    monkeypatch.setenv("PATH", str(at.home))
    done = CliRunner().invoke(cli.app, ["service", "logs"])
    assert isinstance(done.exception, UserError) and str(done.exception).startswith(
        at.system.logs(1, False)[0]
    )


def test_a_taken_port_is_named(at: Setup, job: Job) -> None:
    before = at.state()
    with socket.create_server(("127.0.0.1", job.port)):
        with pytest.raises(ConfigError, match=f"port = {job.port}: Address already in use"):
            verbs.install(at.system, job, at.hands)
    assert at.state() == before and at.tool.calls() == []


def test_a_program_that_does_not_run_is_not_installed(at: Setup, job: Job) -> None:
    before = at.state()
    with pytest.raises(UserError, match="cannot run mlxspec outside this shell"):
        verbs.install(at.system, replace(job, command=("/bin/false", "-m", "mlxspec")), at.hands)
    assert at.state() == before


def test_a_dry_run_does_nothing(at: Setup, job: Job) -> None:
    before, hands = at.state(), Hands(dry=True, say=at.said.append)
    assert verbs.install(at.system, job, hands) == "nothing was changed"
    assert at.state() == before and at.tool.calls() == []
    for call in ADDS[at.system]:
        assert any(call in line for line in at.said), call
    assert sum(line.startswith("would write: ") for line in at.said) == len(at.system.paths())
    verbs.install(at.system, job, at.hands)
    before = at.state()
    at.tool.calls()
    do: list[Callable[[System, Hands], Any]] = [
        verbs.stop,
        verbs.start,
        verbs.restart,
        verbs.uninstall,
    ]
    for verb in do:
        verb(at.system, hands)
    verbs.install(at.system, replace(job, exit_s=51), hands)
    assert at.state() == before and at.tool.calls() == []
    assert sum("would remove" in line for line in at.said) >= len(at.system.paths())


def test_start_is_for_what_stays_down(at: Setup, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs is left alone; one that is held starts anew, forgiven."""
    verbs.install(at.system, job, at.hands)
    at.tool.calls()
    monkeypatch.setattr(ledger, "running", lambda: True)
    assert verbs.start(at.system, at.hands) == "the service runs already" and at.tool.calls() == []
    held = ledger.Ledger(held="a panic", panic="a panic", crashes=[1.0])
    monkeypatch.setattr(ledger, "panics", lambda: ["a.panic"])
    ledger.write(ledger.file(), held)
    code, said = status()
    assert code == 3 and "Unwell: a panic" in said
    verbs.start(at.system, at.hands)
    now = ledger.read(ledger.file())
    assert (now.held, now.panic, now.crashes) == ("", "", []) and now.reports == ["a.panic"]
    assert alike(at.tool.calls(), ENDS[at.system] + ADDS[at.system] + [WAKES[at.system]])


def test_nothing_is_done_to_what_is_not_installed(at: Setup) -> None:
    do: list[Callable[[System, Hands], Any]] = [verbs.start, verbs.stop, verbs.restart]
    for verb in do:
        with pytest.raises(UserError, match="not installed; `mlxspec service install`"):
            verb(at.system, at.hands)
    assert at.tool.calls() == []


def test_neither_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match="neither launchd nor systemd is here; let what starts programs"
    ):
        here()
    for name, module in (("systemctl", systemd), ("launchctl", launchd)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert here() is module

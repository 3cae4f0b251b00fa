"""The units, by systemd's own check where that is here, and their quoting."""

import configparser
import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mlxspec.service import systemd
from mlxspec.service.job import Job


@pytest.fixture
def job() -> Job:
    words = ("/bin/true", "-m", "mlxspec", "serve", 'a "b" 50%', "$HOME", "back\\slash")
    return Job(words, {"PATH": "/bin", "X": "50%"}, "127.0.0.1", 8080, 50, "/tmp")


def units(job: Job) -> dict[str, configparser.RawConfigParser]:
    found = {}
    for path, data in systemd.files(job).items():
        found[path.name] = parser = configparser.RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read_string(data.decode())
    return found


def test_what_they_say(job: Job) -> None:
    found = units(job)
    socket, service = found["mlxspec.socket"], found["mlxspec.service"]
    assert socket["Socket"]["ListenStream"] == "127.0.0.1:8080"
    assert socket["Install"]["WantedBy"] == "sockets.target"
    assert service["Unit"]["Requires"] == "mlxspec.socket"
    assert (
        service["Service"]["Restart"] == "on-failure"
        and service["Service"]["TimeoutStopSec"] == "50"
    )
    assert service["Service"]["ExecStart"] == (
        '"/bin/true" "-m" "mlxspec" "serve" "a \\"b\\" 50%%" "$$HOME" "back\\\\slash"'
    )
    assert service["Service"]["Environment"] == '"X=50%%"'  # the last of two
    assert service["Service"]["WorkingDirectory"] == "/tmp"


def test_an_address_of_version_6_stands_in_brackets(job: Job, bare_settings: None) -> None:
    job = dataclasses.replace(job, host="::1")
    assert units(job)["mlxspec.socket"]["Socket"]["ListenStream"] == "[::1]:8080"
    for path, data in systemd.files(job).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert systemd.address() == ("::1", 8080)


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("ExecStart=", "ExecStrat="), ('"/bin/true"', "true%")]
)
def test_systemd_finds_nothing_wrong_but_what_is(
    job: Job, tmp_path: Path, old: str, new: str
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    for path, data in systemd.files(job).items():
        (tmp_path / path.name).write_text(data.decode().replace(old, new))
    command = ["systemd-analyze", "verify", "--user", *map(str, tmp_path.glob("mlxspec.*"))]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode == 0 and not done.stderr) == (not old), done.stderr


def test_the_log() -> None:
    assert systemd.logs(5, True) == [
        "journalctl",
        "--user",
        "-u",
        "mlxspec.service",
        "-n",
        "5",
        "-f",
    ]

"""Servers start as their line of the table says, or say why not; so do their environments."""

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import venvs
from bench.measure import installed
from bench.rows import Rows
from bench.servers import DEFAULT, SERVERS, Ended, Server, environment, last, start


def test_commands_leave_nothing_to_fill_in() -> None:
    for server in SERVERS.values():
        for setting in (server.setting, server.plain, server.drafted or ()):
            command = server.command("python", Path("/m"), setting, Path("/d"))
            assert command[0] == "python" and "/m" in command and "{port}" in command
            assert not [c for c in command[3:] if "{model}" in c or "{draft}" in c]
        assert server.name in DEFAULT or server.name in ("mlxspec-plain", "vllm-mlx-paged")
        assert server.package.count("==") == (server.venv != "mlxspec")


def test_nobody_writes_into_the_users_home(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    assert env["HOME"] == str(tmp_path / "home") and env["MLXSPEC_CACHE_DIR"].startswith(
        env["HOME"]
    )
    assert int(env["OPENBLAS_NUM_THREADS"]) >= 1 and env["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("code", "wait", "said"),
    [
        ("print('no such model'); raise SystemExit(3)", 30, "status 3: no such model"),
        ("import time; time.sleep(60)", 0.3, "did not answer within 0 s: its log is empty"),
    ],
)
def test_what_does_not_start_says_why(tmp_path: Path, code: str, wait: float, said: str) -> None:
    with pytest.raises(Ended, match=said):
        start("it", [sys.executable, "-c", code], dict(os.environ), tmp_path / "log", wait)


def test_what_cannot_be_installed_is_a_row_with_the_reason(tmp_path: Path) -> None:
    """pip is one that cannot find anything; the environment is there, so none is made."""
    fake = tmp_path / "gone" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        "#!/bin/sh\necho 'ERROR: No matching distribution found for gone==1' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    rows = Rows()
    gone = Server("gone", "gone", "gone==1", "gone:main", ())
    assert installed([gone], tmp_path, rows, Console(quiet=True)) == {}
    [row] = rows.failures()
    assert (row.server, row.workload) == ("gone", "install")
    assert row.note == "was not installed: ERROR: No matching distribution found for gone==1"


def test_the_size_is_of_the_packages_alone(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, size in (
        ("torch/a.so", 3_000_000),
        ("one.py", 500_000),
        ("pip/x", 10**6),
        ("pip-25.dist-info/x", 9),
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(b"0" * size)
    python = tmp_path / "bin" / "python"
    assert venvs.megabytes(python) == 3.5
    assert venvs.has(python, "torch") and not venvs.has(python, "mlx")


def test_the_last_line_that_says_something(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\ntw\xffo  \n\n")
    assert last(tmp_path / "log") == "tw\ufffdo"
    (tmp_path / "log").write_bytes(b"")
    assert last(tmp_path / "log") == "its log is empty"

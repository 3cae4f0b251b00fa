"""The compile cache: shared by processes, bounded, and the compiler that must be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import metalsim
from tests.metalsim import build, toolchain
from tests.metalsim.trial import run

ROOT = Path(__file__).resolve().parents[2]
RACE = """
from tests.metalsim.trial import run
for k in range(2):
    assert run(f"o[i] = x[i] + {k}.5f;", n=4, group=4).tolist() == [k + 0.5 + j for j in range(4)]
"""


@pytest.mark.slow
def test_processes_share_an_empty_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "METALSIM_CACHE": str(tmp_path / "cache")}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE], cwd=ROOT, env=environment, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.communicate(timeout=100)[1] == b"" and racer.returncode == 0
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert len(names) == 4 and [name.split("-")[0] for name in names if "-" in name] == [
        "mlx",
        "run",
    ]


def test_the_entries_used_longest_ago_go(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old", "older", "oldest"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.so").write_text("")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / ".new-under-way").mkdir()
    build.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new-under-way", "new", "old"]


@pytest.mark.slow
def test_what_every_kernel_needs_is_in_use_while_kernels_are_made(tmp_path: Path) -> None:
    """In a process that makes more than the cache holds."""
    text = """
import os
from tests.metalsim import build
from tests.metalsim.trial import run
build.ENTRIES = 3
for k in range(4):
    assert run(f"o[i] = x[i] + {k}.5f;", n=4, group=4).tolist() == [k + 0.5 + j for j in range(4)]
    for path in build.cache_dir().iterdir():
        age = 1000 * path.name.startswith(("mlx-", "run-"))
        os.utime(path, (os.stat(path).st_mtime - age, os.stat(path).st_mtime - age))
"""
    environment = {**os.environ, "METALSIM_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_a_failed_entry_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALSIM_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        build.entry("x", fail)
    assert list(tmp_path.iterdir()) == []
    assert build.entry("x", lambda folder: (folder / "whole").touch()) == tmp_path / "x"
    assert build.entry("x", fail) == tmp_path / "x"


def test_loaded_kernels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LOADED", 2)
    for k in range(3):
        run(f"o[i] = {k};", n=1, group=1)
    assert len(build._loaded) <= 2


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ziglang", None)
    toolchain.find.cache_clear()
    try:
        with pytest.raises(metalsim.CompilerMissing, match=r"pip install 'ziglang>=0\.17'"):
            run("o[i] = 0;")
    finally:
        toolchain.find.cache_clear()

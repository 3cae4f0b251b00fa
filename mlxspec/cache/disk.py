"""The prefix cache on disk: runs of KV blocks and recurrent states, each a safetensors file.

Rule: every file is checked against its digest when it is read; a damaged one is a miss, and costs a
recomputation, never a wrong answer. Callers never wait: one thread writes, another reads. Each
write holds the directory's lock, as models and processes share the directory and its limit.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mlxspec import log
from mlxspec.files import lock, write_atomic

Keys = tuple[bytes, ...]  # of a run's blocks

FORMAT = "4"
MAX_QUEUED = 128 << 20  # bytes that wait to be written
MAX_HEADER = 1 << 20  # bytes of a file's header
TOUCH_BYTES = 1 << 14  # that a touch counts for in the queue

WEIGHTS = {".safetensors", ".npz", ".gguf", ".py"}  # files that mlx-lm uses, besides config.json
SAMPLES, SAMPLE_BYTES = 16, 1 << 14  # of a weight file, spread evenly


def fingerprint(model_dir: Path, about: Mapping[str, str], mtime: bool = True) -> str:
    """32 hex digits for a model and `about`: layout, bits, versions and all else that its KV
    depends on. Hashes the name, size, `mtime` and samples of each file. Raises OSError."""
    digest = blake2b(digest_size=16)
    facts = json.dumps([FORMAT, sorted(about.items())])
    digest.update(facts.encode())
    for path in sorted(model_dir.rglob("*")):  # a head may be in a subdirectory
        if path.suffix not in WEIGHTS and path.name != "config.json":
            continue
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            changed = status.st_mtime_ns if mtime else 0
            about_file = f"{path.relative_to(model_dir)} {status.st_size} {changed}"
            digest.update(about_file.encode())
            last = max(0, status.st_size - SAMPLE_BYTES)
            for i in range(SAMPLES):
                file.seek(i * last // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


# ---- one file


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The KV of some blocks of a chain with their 16-byte keys, or one recurrent state.

    Equal keys mean equal arrays. `arrays` are C-contiguous and must no longer change."""

    keys: Keys
    arrays: dict[str, np.ndarray]


class Label(BaseModel):
    """A file's metadata. `keys` are those of its run, in hex; `digest` covers the arrays and all
    other fields."""

    fingerprint: str
    model: str
    keys: str = Field(pattern=r"^[0-9a-f]{32}( [0-9a-f]{32})*$")
    digest: str = ""

    def run_keys(self) -> Keys:
        return tuple(map(bytes.fromhex, self.keys.split()))


class _Header(BaseModel):
    label: Label = Field(alias="__metadata__")


def read_label(file: BinaryIO) -> Label:
    """The label at the start of a file, not verified. Raises ValueError where there is none."""
    size = int.from_bytes(file.read(8), "little")
    header = file.read(min(size, MAX_HEADER))
    return _Header.model_validate_json(header).label


def encode(run: Run, fingerprint: str, model: str) -> bytes:
    keys = " ".join(key.hex() for key in run.keys)
    label = Label(fingerprint=fingerprint, model=model, keys=keys)
    label.digest = _digest(label, run.arrays)
    return save(run.arrays, label.model_dump())


def decode(data: bytes, fingerprint: str) -> Run | None:
    """The run in a file; None if it is damaged or another model's."""
    try:
        label = read_label(BytesIO(data))
        arrays = load(data)
    except (ValueError, KeyError, SafetensorError):
        return None
    if label.fingerprint != fingerprint or label.digest != _digest(label, arrays):
        return None
    return Run(label.run_keys(), arrays)


def _digest(label: Label, arrays: Mapping[str, np.ndarray]) -> str:
    about_run = f"{label.fingerprint} {label.keys} {label.model}"
    digest = sha256(about_run.encode())
    for name, array in sorted(arrays.items()):
        about_array = f"{name} {array.dtype} {array.shape}"
        digest.update(about_array.encode())
        digest.update(array.data)
    return digest.hexdigest()


def stored_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file of the cache under `root`; one whose name continues after .safetensors is
    only partly written. Raises OSError."""
    folders = root.iterdir() if root.exists() else ()
    for folder in folders:
        for path in folder.glob("*.safetensors*"):
            with suppress(FileNotFoundError):  # evicted meanwhile
                yield path, path.lstat()


# ---- the directory


@dataclass
class DiskCache:
    """One model's runs: `<root>/<fingerprint>/<last key in hex>.safetensors`. `model` is its name.

    `limit` bytes are for all models under `root`; the least recently used file, by mtime, is
    evicted first. Methods are for the engine thread; only `flush` and `close` wait."""

    root: Path
    fingerprint: str
    limit: int
    model: str = ""

    def __post_init__(self) -> None:
        self._submitted = 0  # bytes, counted by the caller's thread
        self._done = 0  # of these, counted by the writer's
        self._paths: dict[bytes, Path] = {}  # key -> the file that holds it, or soon will
        self._keys: dict[Path, Keys] = {}
        self._warned = False
        # Named as in `Stats`: the bytes of all models, and counts of this process.
        self.stats = Counter[str]()
        self._writer = ThreadPoolExecutor(1, "disk writer")
        self._reader = ThreadPoolExecutor(1, "disk reader")
        try:
            self._scan()
        except OSError as error:
            self._warn(error)
        self._submit(0, self._make_room, 0)

    @property
    def queued(self) -> int:
        """Bytes waiting to be written."""
        return self._submitted - self._done

    def __contains__(self, key: bytes) -> bool:
        return key in self._paths

    def files(self, keys: Iterable[bytes]) -> list[Path]:
        """The files that hold these keys, each once, in the order of the keys."""
        paths = [self._paths[key] for key in keys if key in self._paths]
        return list(dict.fromkeys(paths))

    def save(self, run: Run) -> bool:
        """Queue a run to be written; False if too much is queued."""
        size = sum(array.nbytes for array in run.arrays.values())
        queued = self._submit(size, self._write, run)
        if queued:
            self._add(self._path(run.keys), run.keys)
        return queued

    def read(self, path: Path) -> "Future[Run | None]":
        """Read a file; the result is None if that is a miss."""
        return self._reader.submit(self._read, path)

    def touch(self, keys: Iterable[bytes]) -> list[Path]:
        """Mark the files that hold these keys as used, the first one last: the head of a chain
        is then evicted after its tail. Returns the files."""
        files = self.files(keys)
        self._submit(TOUCH_BYTES, self._touch, *reversed(files))
        return files

    def discard(self, path: Path) -> None:
        """Delete a damaged file."""
        self.stats["disk_runs_damaged"] += 1
        self._forget(path)
        with suppress(OSError):
            path.unlink()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Delete the files that hold these keys, also those still to be written."""
        files = self.files(keys)
        for path in files:
            self._forget(path)
        self._submit(0, self._remove, *files)

    def flush(self, timeout: float) -> bool:
        """Wait until all that is queued is written; False after `timeout` seconds."""
        try:
            last = self._writer.submit(int)
        except RuntimeError:  # the interpreter is exiting, and has waited for the writer
            return True
        return bool(wait([last], timeout).done)

    def close(self, timeout: float) -> bool:
        """Flush, then drop what is still queued. No method may be called afterwards."""
        done = self.flush(timeout)
        for executor in (self._writer, self._reader):
            executor.shutdown(wait=False, cancel_futures=True)
        return done

    # ---- the index

    def _path(self, keys: Keys) -> Path:
        return self.root / self.fingerprint / f"{keys[-1].hex()}.safetensors"

    def _scan(self) -> None:
        folder = self.root / self.fingerprint
        for path in folder.glob("*.safetensors"):
            if not path.is_file():  # opening a pipe would block, a link may be broken
                continue
            try:
                with path.open("rb") as file:
                    label = read_label(file)
                self._add(path, label.run_keys())
            except ValueError:
                self.discard(path)
            except OSError as error:  # of this file alone
                self._warn(error)

    def _add(self, path: Path, keys: Keys) -> None:
        self._keys[path] = keys
        for key in keys:
            self._paths[key] = path

    def _forget(self, path: Path) -> None:
        for key in self._keys.pop(path, ()):
            if self._paths.get(key) == path:
                del self._paths[key]

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("prefix cache in %s: %s", self.root, error)
        self._warned = True

    # ---- the writer's thread

    def _submit(self, size: int, task: Callable[..., None], *args: Any) -> bool:
        """Queue a task that changes the directory; False where `size` more bytes are too many."""
        if self.queued + size > MAX_QUEUED:
            return False
        self._submitted += size
        self._writer.submit(self._locked, size, task, *args)
        return True

    def _locked(self, size: int, task: Callable[..., None], *args: Any) -> None:
        try:
            with lock(self.root / "lock"):
                task(*args)
        except OSError as error:
            self._warn(error)
        finally:
            self._done += size

    def _write(self, run: Run) -> None:
        path = self._path(run.keys)
        data = encode(run, self.fingerprint, self.model)
        self._forget(path)  # until it is written
        path.unlink(missing_ok=True)  # a shorter run with the same end
        if len(data) <= self.limit:
            self._make_room(len(data))
            write_atomic(path, data)
            self._touch(path)
            self._add(path, run.keys)
            self.stats["disk_written_bytes"] += len(data)
            self.stats["disk_bytes"] += len(data)

    def _remove(self, *paths: Path) -> None:
        for path in paths:
            self._forget(path)
            path.unlink(missing_ok=True)
        self._make_room(0)

    def _touch(self, *paths: Path) -> None:
        for path in paths:
            now = time.time_ns()  # exact, unlike the times that the kernel sets
            with suppress(FileNotFoundError):
                os.utime(path, ns=(now, now))

    def _make_room(self, size: int) -> None:
        """Evict until `size` more bytes fit; delete what a killed process left half written."""
        files = sorted(stored_files(self.root), key=lambda file: file[1].st_mtime_ns)
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total + size > self.limit or path.suffix != ".safetensors":
                path.unlink(missing_ok=True)
                self._forget(path)
                total -= status.st_size
        self.stats["disk_bytes"] = total

    # ---- the reader's thread

    def _read(self, path: Path) -> Run | None:
        try:
            data = path.read_bytes()
        except OSError as error:
            self._forget(path)
            if not isinstance(error, FileNotFoundError):  # evicted or cleared meanwhile
                self._warn(error)
            return None
        run = decode(data, self.fingerprint)
        if run is None or path != self._path(run.keys):
            self.discard(path)
            return None
        self.stats["disk_runs_found"] += 1
        self.stats["disk_read_bytes"] += len(data)
        return run

"""One run of the prompt cache as a file: safetensors that any reader opens, with a SHA-256 over all
of it.

Rule: nothing is believed before the digest of every byte is right. A file that is wrong in any way
is a miss: never an exception, never more memory than its size. The label alone, for a quick look,
is not verified.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "1"
FOLDER = re.compile(r"[0-9a-f]{8,64}")  # a fingerprint
NAME = re.compile(r"[0-9a-f]{32}\.safetensors|\.[0-9a-f]{32}\.tmp")
CHUNK = 1 << 23  # bytes of one system call
KEY = 16  # bytes of a key
LABEL = 1 << 16  # bytes in which a file's metadata must end, so that one read finds it
LEAD = b'{"__metadata__":'
START = 8 + len(LEAD) + len(b'{"sha256":"')
DIGEST = slice(START, START + 64)
UNSEALED = b"0" * 64  # stands where the digest comes, while that is computed

NAMES = {
    "?": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "u2": "U16",
    "i2": "I16",
    "u4": "U32",
    "i4": "I32",
    "u8": "U64",
}
NAMES |= {"i8": "I64", "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64"}
DTYPES = {name: np.dtype(code) for code, name in NAMES.items()}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}

WEIGHTS = {".safetensors", ".npz", ".gguf", ".py"}  # what mlx-lm computes with, beside config.json
SAMPLES, SAMPLE = 16, 1 << 14  # pieces of a weight file, spread evenly, and bytes of a piece


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """KV of consecutive blocks, with their hash-chain keys of 16 bytes, or a state snapshot with
    its one key.

    A key stands for content: equal keys, equal arrays; so a snapshot's key is salted other than a
    block's. `arrays` are opaque, of any dtype in NAMES (uint16 may stand for bfloat16), and must
    not change any more.
    """

    keys: tuple[bytes, ...]
    arrays: dict[str, np.ndarray]
    meta: dict[str, str]


def fingerprint(model_dir: Path, about: Mapping[str, str]) -> str:
    """32 hex digits for a model and all else that its KV depends on: `about` names layout, bits,
    block size, versions of what computes it. Of weights the name, size, mtime and samples count.
    Raises OSError."""
    digest = blake2b(digest_size=16)

    def feed(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    feed(json.dumps([FORMAT, sorted(about.items())]).encode())
    feed((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.iterdir()):
        if path.suffix in WEIGHTS:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                feed(json.dumps([path.name, found.st_size, found.st_mtime_ns]).encode())
                for i in range(SAMPLES):
                    file.seek(i * max(0, found.st_size - SAMPLE) // (SAMPLES - 1))
                    feed(file.read(SAMPLE))
    return digest.hexdigest()


def encode(run: Run, fingerprint: str, model: str) -> bytes:
    """The file's head, up to the first array, still unsealed; its length plus the arrays' is the
    file's. Raises ValueError for what a file cannot hold."""
    if not run.keys or any(len(key) != KEY for key in run.keys):
        raise ValueError(f"run.keys = {run.keys!r:.80}: give one or more of {KEY} bytes each")
    meta = {
        "sha256": UNSEALED.decode(),
        "format": FORMAT,
        "fingerprint": fingerprint,
        "keys": " ".join(key.hex() for key in run.keys),
        "model": model,
        "meta": json.dumps(run.meta),
    }
    header: dict[str, Any] = {"__metadata__": meta}
    header |= dict.fromkeys(run.arrays)  # in the caller's order, whatever the order of their bytes
    if header["__metadata__"] is None:
        raise ValueError(
            "run.arrays has '__metadata__', which safetensors reserves; give another name"
        )
    at = 0
    for name, array in _packed(run):
        if array.dtype not in NAME_OF:
            raise ValueError(
                f"run.arrays[{name!r}] is {array.dtype}; give one of {', '.join(DTYPES)}"
            )
        offsets = [at, at := at + array.nbytes]
        header[name] = {
            "dtype": NAME_OF[array.dtype],
            "shape": array.shape,
            "data_offsets": offsets,
        }
    if len(json.dumps(meta)) > LABEL - len(LEAD) - 8:
        raise ValueError(
            f"run of {len(run.keys)} keys: they and meta pass {LABEL} bytes; give fewer at once"
        )
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(run: Run, head: bytes) -> Iterator[memoryview]:
    """The bytes of the file, in order, from `encode`'s head: now with the digest."""
    digest = sha256(head)
    for _, array in _packed(run):
        digest.update(_raw(array))
    yield memoryview(head[: DIGEST.start] + digest.hexdigest().encode() + head[DIGEST.stop :])
    for _, array in _packed(run):
        yield _raw(array)


def _packed(run: Run) -> list[tuple[str, np.ndarray]]:
    """Arrays in the file's order: wide ones first, so that each is aligned without gaps."""
    return sorted(run.arrays.items(), key=lambda item: -item[1].dtype.itemsize)


def _raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def put(path: Path, parts: Iterable[memoryview], mtime: int) -> None:
    """Write a file whole or not at all, readable by its owner alone, with that mtime in unix ns."""
    temporary = path.with_name(f".{path.stem}.tmp")
    try:
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            for part in parts:
                while part:
                    part = part[os.write(fd, part[:CHUNK]) :]
            os.fsync(fd)
            os.utime(fd, ns=(mtime, mtime))
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path, fingerprint: str, size: int) -> Run | None:
    """The run in a file of `size` bytes, its arrays read-only views of one buffer; None if anything
    about it is wrong. Raises OSError if it cannot be read."""
    fd = _open(path)
    with open(fd, "rb", buffering=0) as file:
        found = os.fstat(fd)
        if found.st_size != size or not stat.S_ISREG(found.st_mode) or size < DIGEST.stop:
            return None
        data, at = np.empty(size, np.uint8), 0
        while at < size and (count := file.readinto(data[at:].data)):
            at += count
    digest = sha256(data[: DIGEST.start].data)
    digest.update(UNSEALED)
    digest.update(data[DIGEST.stop :].data)
    if at < size or digest.hexdigest().encode() != data[DIGEST].tobytes():
        return None
    data.flags.writeable = False
    try:
        return _decode(data, fingerprint)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # sealed, but not by this version of us


def _decode(data: np.ndarray, fingerprint: str) -> Run | None:
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:end].tobytes())
    meta = header.pop("__metadata__")
    if meta["format"] != FORMAT or meta["fingerprint"] != fingerprint:
        return None
    arrays = {}
    for name, of in header.items():
        first, last = of["data_offsets"]
        arrays[name] = data[end + first : end + last].view(DTYPES[of["dtype"]]).reshape(of["shape"])
    return Run(keys_of(meta), arrays, json.loads(meta["meta"]))


def label(path: Path) -> dict[str, str] | None:
    """A file's metadata from one bounded read, not verified: fingerprint, keys, model, meta; None
    if there is none or its keys are no keys. Raises OSError."""
    fd = _open(path)
    try:
        text = os.read(fd, LABEL)[8:].decode("latin-1")
    finally:
        os.close(fd)
    try:
        meta, _ = json.JSONDecoder().raw_decode(text, len(LEAD))
        keys_of(meta)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (
        meta
        if text.startswith(LEAD.decode()) and all(type(x) is str for x in meta.values())
        else None
    )


def keys_of(meta: Mapping[str, str]) -> tuple[bytes, ...]:
    """The keys in a file's metadata. Raises ValueError where that is not what it holds."""
    keys = tuple(bytes.fromhex(word) for word in meta["keys"].split(" "))
    if any(len(key) != KEY for key in keys):
        raise ValueError("not keys")
    return keys


def listing(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every run and temporary file under `root`, as "folder/name". Raises OSError, but not for what
    goes while it looks, nor for a root that is not there."""
    with suppress(FileNotFoundError), os.scandir(root) as folders:
        for folder in folders:
            if FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError), os.scandir(folder) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):
                            if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                                yield (
                                    f"{folder.name}/{entry.name}",
                                    entry.stat(follow_symlinks=False),
                                )


def open_lock(root: Path) -> int:
    """The file that whoever writes or deletes under `root` locks first; its text is the last
    writer's."""
    return os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _open(path: Path) -> int:
    """Nothing that stands in a file's place can lead elsewhere or keep the thread waiting."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

"""Verdicts on disk: a file for each kernel and shape of one machine and one version of everything.

Rule: a file speaks only for the facts that stand in it; torn, strange or about something else is a miss. One
that says "trying" while nobody tries tells of a proof that ended its process: that kernel is parked.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.config import data_dir
from mlxspec.kernels.proven import Verdict

log = logging.getLogger("mlxspec")

CRASHED = "it ended the process while it was being tried; `mlxspec tune` tries it again"
BUSY = "another process is trying kernels now"


@cache
def code() -> str:
    """Of the kernels, their wrappers and the proof."""
    files = [*sorted(data_dir("metal").glob("*.metal")), *sorted(Path(__file__).parent.glob("*.py"))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def machine() -> dict[str, str]:
    """What a verdict depends on, besides its kernel and shape."""
    about = mx.device_info()
    chip = [str(about[key]) for key in ("device_name", "architecture", "memory_size") if key in about]
    system = platform.mac_ver()[0] or platform.release()
    return {"chip": ", ".join(chip), "system": system, "mlx": version("mlx"), "code": code()}


@dataclass(slots=True)
class Shelf:
    """The verdicts of this machine in `folder`; None: nothing is kept. A process that tries kernels holds its
    lock, which goes with the process, however that ends."""

    folder: Path | None
    facts: dict[str, str] = field(default_factory=machine)

    def load(self, name: str, alone: bool) -> Verdict | None:
        """What is known of the case `name`. `alone`: nobody else is trying kernels now."""
        found = _read(self._file(name)) if self.folder else None
        if found is None or found["facts"] != self._about(name):
            return None
        if "verdict" in found:
            return _verdict(found["verdict"])
        return Verdict(why=CRASHED, parked=True) if alone else Verdict(why=BUSY)

    def all(self, alone: bool) -> dict[str, Verdict]:
        """All that is known of this machine, by name."""
        files = self.folder.glob("*.json") if self.folder else ()
        names = [str(found["facts"].get("case")) for file in sorted(files) if (found := _read(file))]
        held = {name: self.load(name, alone) for name in sorted(names)}
        return {name: verdict for name, verdict in held.items() if verdict}

    def mark(self, name: str) -> None:
        """Say that the case is being tried. Raises OSError."""
        self._write(name, {"trying": os.getpid()})

    def unmark(self, name: str) -> None:
        """Nothing came of it."""
        if self.folder:
            with suppress(OSError):
                self._file(name).unlink(missing_ok=True)

    def save(self, name: str, verdict: Verdict) -> None:
        try:
            self._write(name, {"verdict": asdict(verdict)})
        except OSError as error:
            log.warning("%s: %s; what was found out about %s is forgotten", self.folder, error.strerror, name)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other process tries kernels; until the end none will. Makes no folder."""
        try:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600) if self.folder else -1
        except OSError:  # not there yet, or not ours: `mark` will say it
            lock = -1
        try:
            if lock >= 0:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            if lock >= 0:
                os.close(lock)

    def _about(self, name: str) -> dict[str, str]:
        return {"case": name, **self.facts}

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        about = json.dumps(self._about(name), sort_keys=True)
        return self.folder / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.json"

    def _write(self, name: str, what: dict[str, Any]) -> None:
        if self.folder is None:
            return
        file = self._file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps({"facts": self._about(name), **what}), "utf-8")
        made.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    """A whole file of ours, else None."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads(file.read_text("utf-8"))
        if dict(found["facts"]) and ("trying" in found or _verdict(found["verdict"])):
            return dict(found)
    return None


def _verdict(found: dict[str, Any]) -> Verdict:
    """Raises TypeError, ValueError, KeyError and AttributeError where that is none."""
    gains = {int(rows): float(gain) for rows, gain in found["gains"].items()}
    whole = {**found, "gains": gains}
    made = Verdict(**whole)
    if not (isinstance(made.way, str) and isinstance(made.why, str) and isinstance(made.parked, bool)):
        raise TypeError("not a verdict")
    made.least, made.most, made.error = int(made.least), int(made.most), float(made.error)
    return made

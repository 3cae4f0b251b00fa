"""Verdicts on disk: a file for each kernel and shape of one machine and one version of everything.

Rule: a file speaks only for the facts that stand in it; torn, strange or about something else is a
miss. One that says "trying" while nobody tries tells of a proof that ended its process: that kernel
is parked. So it is on the disk before anything is tried.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.config import data_dir
from mlxspec.files import write_atomic
from mlxspec.kernels.proven import Verdict

log = logging.getLogger("mlxspec")

CRASHED = "it ended the process while it was being tried; `mlxspec tune` tries it again"
BUSY = "another process is trying kernels now; the next start reads what it finds"
AGAIN = 3  # later starts that try again what passing trouble hindered


@cache
def code() -> str:
    """Of the kernels, their wrappers and the proof."""
    files = [
        *sorted(data_dir("metal").glob("*.metal")),
        *sorted(Path(__file__).parent.glob("*.py")),
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def machine() -> dict[str, str]:
    """What a verdict depends on, besides its kernel and shape."""
    about = mx.device_info()
    chip = [
        str(about[key]) for key in ("device_name", "architecture", "memory_size") if key in about
    ]
    system = platform.mac_ver()[0] or platform.release()
    return {"chip": ", ".join(chip), "system": system, "mlx": version("mlx"), "code": code()}


@dataclass(slots=True)
class Shelf:
    """The verdicts of this machine in `folder`; None: nothing is kept. A process that tries kernels
    holds its lock, which goes with the process, however that ends."""

    folder: Path | None
    facts: dict[str, str] = field(default_factory=machine)

    def load(self, name: str, alone: bool) -> Verdict | None:
        """What is known of the case `name`; None: it is to be tried. `alone`: nobody else tries any
        now."""
        found = self._held(name)
        if found is None or ("verdict" in found and 0 < found["tries"] <= AGAIN):
            return None
        return _told(found, alone) if alone or "verdict" in found else None

    def all(self, alone: bool) -> dict[str, Verdict]:
        """All that is known of this machine, by name, also of what will be tried again."""
        files = self.folder.glob("*.json") if self.folder else ()
        names = [
            str(found["facts"].get("case")) for file in sorted(files) if (found := _read(file))
        ]
        return {name: _told(found, alone) for name in sorted(names) if (found := self._held(name))}

    def mark(self, name: str) -> None:
        """Say that the case is being tried, for the how manieth time in a row. Raises OSError."""
        found = self._held(name)
        self._write(name, {"trying": os.getpid(), "tries": (found["tries"] if found else 0) + 1})

    def unmark(self, name: str) -> None:
        """Nothing came of it."""
        if self.folder:
            with suppress(OSError):
                self._file(name).unlink(missing_ok=True)

    def save(self, name: str, verdict: Verdict, passing: bool = False, stalls: int = 0) -> None:
        """Keep what was found out. `passing`: something that may be gone at the next start was in
        the way, which is believed after AGAIN more tries. `stalls`: how often a step stalled."""
        found = self._held(name) if passing else None
        tries = max(1, found["tries"]) if found else int(passing)
        try:
            self._write(name, {"verdict": asdict(verdict), "tries": tries, "stalls": stalls})
        except OSError as error:
            log.warning(
                "%s: %s; what was found out about %s is forgotten",
                self.folder,
                error.strerror,
                name,
            )
            self.unmark(name)  # nothing ended the process

    def stalled(self, name: str, used: Verdict, parked: Verdict) -> bool:
        """A step stalled while `used` was in use. Whether one had done so in an earlier process:
        only then is `parked` kept, else that it happened."""
        found = self._held(name)
        if self.folder is None or (
            found and "trying" in found
        ):  # another process will have more to say
            return False
        second = found is not None and found["stalls"] > 0
        self.save(name, parked if second else used, stalls=1 + second)
        return second

    @contextmanager
    def alone(self, wait: Callable[[], bool] | None = None) -> Iterator[bool]:
        """Whether no other process tries kernels; until the end none will. While one does, `wait`
        is asked whether to look again. Without it, this is for a short look: nothing is made, and
        others may look."""
        how, flags = (
            (fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT) if wait else (fcntl.LOCK_SH, os.O_RDONLY)
        )
        try:
            lock = os.open(self.folder / "lock", flags, 0o600) if self.folder else -1
        except OSError:  # not there yet, or not ours: `mark` will say it
            lock = -1
        try:
            yield lock < 0 or _locked(lock, how, wait or (lambda: False))
        finally:
            if lock >= 0:
                os.close(lock)

    def _about(self, name: str) -> dict[str, str]:
        return {"case": name, **self.facts}

    def _held(self, name: str) -> dict[str, Any] | None:
        found = _read(self._file(name)) if self.folder else None
        return found if found and found["facts"] == self._about(name) else None

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        about = json.dumps(self._about(name), sort_keys=True)
        return self.folder / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.json"

    def _write(self, name: str, what: dict[str, Any]) -> None:
        if self.folder is None:
            return
        write_atomic(
            self._file(name),
            json.dumps({"facts": self._about(name), **what}).encode(),
            durable=True,
        )


@contextmanager
def orderly() -> Iterator[None]:
    """SIGTERM, and the SIGHUP of a terminal that is closed, end what runs in here by SystemExit
    where they would kill the process, so that it leaves no mark, as with Ctrl-C. Not in a thread:
    whoever has the signals calls TRIAL.give_up."""
    main = threading.current_thread() is threading.main_thread()
    both = (signal.SIGTERM, signal.SIGHUP) if main else ()
    ends = [number for number in both if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: object) -> None:
        for each in ends:
            signal.signal(
                each, signal.SIG_IGN
            )  # a terminal sends it twice; the mark's removal comes first
        raise SystemExit(128 + number)

    try:
        for number in ends:
            signal.signal(number, end)
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def _locked(lock: int, how: int, wait: Callable[[], bool]) -> bool:
    """Whether the lock was had before `wait` said no."""
    while True:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not wait():
                return False
        except OSError:  # a file system without locks
            return True


def _told(found: dict[str, Any], alone: bool) -> Verdict:
    if "verdict" in found:
        return _verdict(found["verdict"])
    return Verdict(why=CRASHED, parked=True) if alone else Verdict(why=BUSY)


def _read(file: Path) -> dict[str, Any] | None:
    """A whole file of ours, else None."""
    with suppress(
        OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError
    ):
        found = json.loads(file.read_text("utf-8"))
        if dict(found["facts"]) and ("trying" in found or _verdict(found["verdict"])):
            return {**found, **{count: int(found.get(count, 0)) for count in ("tries", "stalls")}}
    return None


def _verdict(found: dict[str, Any]) -> Verdict:
    """Raises TypeError, ValueError, KeyError and AttributeError where that is none."""
    gains = {int(rows): float(gain) for rows, gain in found["gains"].items()}
    whole = {**found, "gains": gains}
    made = Verdict(**whole)
    if not (
        isinstance(made.way, str) and isinstance(made.why, str) and isinstance(made.parked, bool)
    ):
        raise TypeError("not a verdict")
    made.least, made.most, made.error = int(made.least), int(made.most), float(made.error)
    return made

"""What the service remembers between its lives, and what follows: serve, serve in safe mode, or
stay down.

Rule: a life that did not say that it ends was a crash. The file is small, replaced whole, and a
damaged one counts as none.
"""

import contextlib
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mlxspec.files import write_atomic

log = logging.getLogger("mlxspec")

WINDOW_S = 600.0
SAFE, DOWN = 3, 6  # crashes in the window, from which on it serves in safe mode, or not at all
PATIENCE = 50  # looks at the lock
MOST = 1000  # reports of panics that are looked at, the newest
PANICS = ("/Library/Logs/DiagnosticReports", "~/Library/Logs/DiagnosticReports")
START = "`mlxspec service start` starts it"


@dataclass(slots=True)
class Ledger:
    """Times are unix time. `open`: it serves, and has not said that it ends; `reports`: the panics
    that were known when nothing was wrong; `panic`: why it stays down until the user starts it."""

    open: bool = False
    reports: list[str] = field(
        default_factory=list
    )  # by name: a date may be of a clock that was wrong
    crashes: list[float] = field(default_factory=list)  # when they were noticed
    safe: bool = False
    held: str = ""
    panic: str = ""


def file() -> Path:
    """Where it is; no setting moves it, for the command and the service must agree."""
    mac = sys.platform == "darwin"
    state = "~/Library/Application Support/mlxspec" if mac else "~/.local/state/mlxspec"
    return Path(state).expanduser() / "service.json"


def traces() -> list[Path]:
    """All that is written here, and the folder."""
    return [*file().parent.glob("service.*"), file().parent]


def occupy() -> None:
    """For the rest of this process, `running`. A lock ends with its process however that ends; a
    number of a process would be another's some day."""
    try:
        file().parent.mkdir(0o700, parents=True, exist_ok=True)
        lock = os.open(file().with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(PATIENCE):  # who asks has it for a moment
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.02)
    except OSError as error:
        log.warning(
            "%s: %s; `mlxspec service status` cannot tell that it runs", file(), error.strerror
        )


def running() -> bool:
    """Whether the service's process is there."""
    try:
        with file().with_suffix(".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def read(path: Path) -> Ledger:
    try:
        found = {**json.loads(path.read_text("utf-8"))}
        known = {name: found[name] for name in Ledger.__slots__ if name in found}
        right = all(type(value) is type(getattr(Ledger(), name)) for name, value in known.items())
        kinds = {"crashes": float, "reports": str}
        if right and all(
            type(one) is kind for name, kind in kinds.items() for one in known.get(name, ())
        ):
            return Ledger(**known)
    except FileNotFoundError:
        return Ledger()
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    log.warning("%s is damaged; starting a new one", path)
    return Ledger()


def write(path: Path, ledger: Ledger) -> None:
    """A disk that is full is no reason not to serve."""
    try:
        write_atomic(path, json.dumps(asdict(ledger)).encode())
    except OSError as error:
        log.warning("%s: %s; crashes are not counted", path, error.strerror)


def begin(past: Ledger, now: float, panics: list[str]) -> Ledger:
    """The ledger of a life that begins; `held` says why it must not serve. `panics` are the
    kernel's reports: one that is new holds it, if it served when the machine went down."""
    crashes = [at for at in past.crashes if now - WINDOW_S < at <= now]
    if past.open:
        crashes = [*crashes, now][-DOWN:]
    panic = past.panic
    if past.open and (fresh := [name for name in panics if name not in past.reports]):
        panic = f"the machine panicked while it ran ({fresh[0]}); {START}"
    held = panic
    if not held and len(crashes) >= DOWN:
        held = f"it crashed {len(crashes)} times in {WINDOW_S / 60:.0f} minutes, also in safe mode; {START}"
    return Ledger(
        open=not held,
        reports=past.reports if past.open or panic else panics,
        crashes=crashes,
        safe=not held and len(crashes) >= SAFE,
        held=held,
        panic=panic,
    )


def forgive(path: Path) -> None:
    """The user has been told, and starts it."""
    write(path, Ledger(reports=panics()))


def panics() -> list[str]:
    """The kernel's reports on this machine, the newest first; empty where they may not be read."""
    found = sorted((one for folder in PANICS for one in _reports(folder)), reverse=True)
    return [name for _, name in found[:MOST]]


def closed() -> list[str]:
    """The folders of reports that are there and may not be read."""
    return [
        each
        for each in PANICS
        if (at := Path(each).expanduser()).exists() and not os.access(at, os.R_OK)
    ]


def _reports(folder: str) -> Iterator[tuple[float, str]]:
    try:
        for entry in os.scandir(Path(folder).expanduser()):
            if entry.name.endswith(".panic") or entry.name.startswith(("panic-full-", "Kernel")):
                yield entry.stat().st_mtime, entry.name
    except OSError as error:
        log.debug("%s: %s", folder, error.strerror)

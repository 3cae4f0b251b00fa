"""The service's process: it counts its crashes, and serves in safe mode after three.

Rule: a process that did not record its end has crashed. A server that cannot start answers 503
with the reason, so that no client hangs and launchd does not restart it in a loop.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mlxspec import log
from mlxspec.config import load_config
from mlxspec.files import lock, write_atomic
from mlxspec.server.unavailable import UnavailableResponder
from mlxspec.types import UserError

SAFE_CRASHES, WINDOW_S = 3, 600.0
LOG_BYTES, ROTATE_S = 10 << 20, 15.0
REFUSE_S = 60.0  # then it exits, and the next connection tries again


def files() -> tuple[Path, Path]:
    """The file of crashed processes' start times, and the lock file of the running service."""
    folder = Path.home() / "Library/Application Support/mlxspec"
    return folder / "crashes.txt", folder / "service.lock"


def is_running() -> bool:
    """Whether the service's process runs. Does not start it."""
    with lock(files()[1], wait=False) as free:
        return not free


def read(path: Path, now: float) -> list[float]:
    """Start times of the last processes that crashed (Unix times), oldest first, within WINDOW_S
    of `now`. Empty if the file is missing or damaged."""
    try:
        starts = list(map(float, path.read_text("utf-8").split()))
    except (OSError, ValueError):
        return []
    return [at for at in starts if now - WINDOW_S < at <= now][-SAFE_CRASHES:]


def write(path: Path, starts: list[float]) -> None:
    """Replace the start times in the file; if that fails, crashes are not counted."""
    with suppress(OSError):
        write_atomic(path, "\n".join(map(str, starts)).encode())


def forget() -> None:
    """Count from zero again: the user restarts the service."""
    files()[0].unlink(missing_ok=True)


def serve(
    flags: Mapping[str, str | Sequence[str] | None],
    listener: socket.socket,
    log_file: Path,
) -> int:
    """Serve on launchd's socket with the settings and these flags. Returns the exit status if the
    server cannot start."""
    threading.Thread(target=rotate, args=(log_file,), name="log", daemon=True).start()
    path, lock_file = files()
    with lock(lock_file):
        now = time.time()
        crashed = read(path, now)
        write(path, [*crashed, now])

        def ended(status: int) -> None:
            if status == 0:
                write(path, crashed)

        note = ""
        try:
            config = load_config(flags)
            log.setLevel(config.log_level.upper())
            if len(crashed) == SAFE_CRASHES:
                config = replace(config, speculate=False, kernels=False)
                note = f"safe mode: {SAFE_CRASHES} crashes in 10 minutes; no drafts, no kernels"
                log.warning("%s; `mlxspec service restart` ends it", note)
            from mlxspec.server.process import serve_model  # fails in a broken installation

            serve_model(config, listener.dup(), note=note, on_exit=ended)
        except (UserError, ImportError, OSError) as error:
            ended(0)  # not a crash, however it ends
            refuse(listener, f"{error}; then run: mlxspec service restart")
            return 0


def refuse(listener: socket.socket, reason: str) -> None:
    """Answer requests with 503 and the reason, for a while."""
    log.error("the server cannot start: %s", reason)
    with UnavailableResponder(listener, f"mlxspec cannot start: {reason}"):
        time.sleep(REFUSE_S)


def rotate(path: Path) -> None:
    """Start a new log whenever `path`, which gets our output, is longer than LOG_BYTES; the old one
    becomes `path`.1."""
    while True:
        with suppress(OSError):
            if path.stat().st_size > LOG_BYTES:
                path.replace(f"{path}.1")
                with path.open("ab") as new:
                    os.dup2(new.fileno(), 1)
                    os.dup2(new.fileno(), 2)
        time.sleep(ROTATE_S)

"""The service's process: it counts its crashes, and serves in safe mode after three of them.

Rule: a process that did not record its end has crashed. A server that cannot start answers 503
with the reason, so that no client hangs and launchd does not restart it in a loop.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mlxspec.config import Config, ConfigError
from mlxspec.files import lock, write_atomic
from mlxspec.types import UserError

log = logging.getLogger("mlxspec")

SAFE_CRASHES, WINDOW_S = 3, 600.0
LOG_BYTES, ROTATE_S = 10 << 20, 15.0
REFUSE_S = 60.0  # then it exits, and the next connection tries the settings again
# Unix times, at most SAFE_CRASHES + 1: a process's own start stays only if it crashes.
STARTS = TypeAdapter(list[float])
CLIENT_S = 2.0  # for a client that is refused to send its request


def files() -> tuple[Path, Path]:
    """When crashed processes started, and the file that is locked while the service runs."""
    folder = Path.home() / "Library/Application Support/mlxspec"
    return folder / "service.json", folder / "service.lock"


def is_running() -> bool:
    """Whether the service's process is there. It is not woken."""
    with lock(files()[1], wait=False) as free:
        return not free


def read(path: Path, now: float) -> list[float]:
    """The starts of the last processes that crashed, oldest first; those longer ago do not count.

    Empty where the file is missing or damaged.
    """
    try:
        starts = STARTS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError):
        log.warning("%s is damaged; earlier crashes are not counted", path)
        return []
    return [at for at in starts if now - WINDOW_S < at <= now][-SAFE_CRASHES:]


def write(path: Path, starts: list[float]) -> None:
    """A full disk must not stop the server."""
    try:
        write_atomic(path, json.dumps(starts).encode())
    except OSError as error:
        log.warning("%s: %s; crashes are not counted", path, error.strerror)


def forget() -> None:
    """Count from zero again: the user restarts the service."""
    files()[0].unlink(missing_ok=True)


def serve(settings: Callable[[], Config], listener: socket.socket, log_file: Path) -> int:
    """Serve on launchd's socket; the exit status."""
    threading.Thread(target=_keep_small, args=(log_file,), name="log", daemon=True).start()
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
            config = settings()
            if len(crashed) == SAFE_CRASHES:
                config = replace(config, speculate="off", kernels="off")
                note = f"safe mode, without speculation: {SAFE_CRASHES} crashes in 10 minutes"
                log.warning("%s; `mlxspec service restart` ends it", note)
            from mlxspec.server.process import serve_model  # fails in a broken installation

            status = serve_model(config, listener.dup(), note=note, ended=ended)
        except (ConfigError, UserError, ImportError) as error:
            ended(0)  # it is no crash, however it ends
            refuse(listener, f"{error}; then run: mlxspec service restart")
            return 0
        ended(status)
        return status


def refuse(listener: socket.socket, reason: str) -> None:
    """Answer requests with 503 and the reason, for a while."""
    log.error("the server cannot start: %s", reason)
    error = {"message": f"mlxspec cannot start: {reason}", "type": "unavailable"}
    body = json.dumps({"error": error})
    answer = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    end = time.monotonic() + REFUSE_S
    while (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        with suppress(OSError):
            client, _ = listener.accept()
            with client:
                client.settimeout(CLIENT_S)
                client.recv(1 << 16)
                client.sendall(answer.encode())
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):  # to close before all is read would cut the answer off
                    pass


def _keep_small(path: Path) -> None:
    while True:
        rotate(path)
        time.sleep(ROTATE_S)


def rotate(path: Path, limit: int = LOG_BYTES) -> None:
    """Start a new log where `path`, which gets our output, is longer than `limit` bytes; the old
    one becomes `path`.1."""
    with suppress(OSError):
        if path.stat().st_size > limit:
            path.replace(f"{path}.1")
            with path.open("ab") as new:
                os.dup2(new.fileno(), 1)
                os.dup2(new.fileno(), 2)

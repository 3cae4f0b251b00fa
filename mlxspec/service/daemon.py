"""`mlxspec serve` as launchd or systemd runs it: with the ledger, with its log kept small.

Rule: what would fail again at once, a setting too, is answered with 503 and the reason, by a
process that loads nothing: to exit with an error would be a loop of restarts, and to exit well is
no end either, since the connection that still waits starts it anew.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mlxspec.config import Config, ConfigError
from mlxspec.service import launchd, ledger
from mlxspec.service.socket import one_of
from mlxspec.types import UserError

log = logging.getLogger("mlxspec")

LOG_BYTES = 10 << 20  # of a log; the one before is kept
LOOK_S = 15.0  # between two looks at the log, and for a report of a panic
RETRY_S = 60.0  # after which what the user may have mended is tried again
READ_S = 5.0  # that a client has to send its request to the one that is held
CROWD = 64  # of them at once


def serve(settings: Callable[[], Config], listeners: Sequence[socket.socket]) -> int:
    """Serve on the one of `listeners`, or say on each why not; the process's exit status."""
    path = ledger.file()
    past = ledger.read(path)
    now = ledger.begin(past, time.time(), ledger.panics())
    ledger.write(path, now)
    ledger.occupy()

    def end(status: int = 0) -> None:
        if status == 0:  # it may be held by now, if a panic was found late
            ledger.write(path, replace(ledger.read(path), open=False))

    late = past.reports if past.open and not now.held else None
    threading.Thread(target=_look, args=(path, late), name="look", daemon=True).start()
    note = ""
    if now.held:
        status = hold(listeners, now.held, None if now.panic else ledger.WINDOW_S)
    else:
        try:
            config, listener = settings(), one_of(listeners)
            if now.safe:
                note = f"safe mode, without speculation: {len(now.crashes)} crashes in 10 minutes"
                log.warning("%s; `mlxspec service restart` ends it", note)
                config = replace(config, speculate="off", kernels="off")
            from mlxspec.server.process import serve_model  # what may be missing in an installation

            status = serve_model(config, listener.dup(), note=note, ended=end)
        except (ConfigError, UserError, ImportError) as error:
            reason = f"{error}; then `mlxspec service restart`"
            ledger.write(path, replace(now, open=False, held=reason))
            status = hold(listeners, reason, RETRY_S)
    end(status)
    return status


def hold(listeners: Sequence[socket.socket], reason: str, seconds: float | None) -> int:
    """Answer every request with 503 and the reason, until a signal comes, or for `seconds`; then
    0."""
    log.error("staying down: %s", reason)
    return asyncio.run(_hold(listeners, reason, seconds))


async def _hold(listeners: Sequence[socket.socket], reason: str, seconds: float | None) -> int:
    stop, crowd = asyncio.Event(), asyncio.Semaphore(CROWD)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    error = {"message": f"mlxspec stays down: {reason}", "type": "unavailable", "code": "held"}
    body = json.dumps({"status": "unhealthy", "reason": reason, "error": error}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 60\r\n"
    )
    answer = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
                async with crowd, asyncio.timeout(READ_S):
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(answer)
                    writer.write_eof()
                    while await reader.read(
                        1 << 16
                    ):  # a close on unread bytes would cut the answer off
                        pass
        finally:
            writer.close()

    for listener in listeners:
        with contextlib.suppress(OSError, ValueError):  # what is no TCP has no clients of ours
            await asyncio.start_server(on_client, sock=listener)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
    return 0


def _look(path: Path, known: list[str] | None) -> None:
    """For ever: keep the log small. After a life without an end, look for the report of a panic,
    which macOS may write only when this is running again."""
    while True:
        rotate(launchd.log_file())
        if known is not None and (found := [name for name in ledger.panics() if name not in known]):
            reason = f"the machine panicked while it ran ({found[0]}); {ledger.START}"
            log.critical("%s", reason)
            ledger.write(path, replace(ledger.read(path), panic=reason))
            return os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LOOK_S)


def rotate(path: Path, most: int = LOG_BYTES) -> None:
    """Begin a new log where stderr is `path` and longer than `most` bytes; the one before it
    goes."""
    try:
        old = os.fstat(2)
        if old.st_size <= most or not os.path.samestat(old, path.stat()):
            return
        path.replace(f"{path}.1")
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for mine in (1, 2):
            if os.path.samestat(os.fstat(mine), old):
                os.dup2(number, mine)
        os.close(number)
    except OSError as error:
        log.debug("%s: %s", path, error)

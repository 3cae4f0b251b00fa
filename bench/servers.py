"""The servers under measurement, each in a process of its own, with the same BLAS loaded first."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

START_TIMEOUT = 180  # seconds
PEER = "from mlxspec import blas; blas.load(); from mlx_lm.server import main; main()"


def ours(model: Path) -> list[str]:
    start = [
        sys.executable,
        "-m",
        "mlxspec",
        "serve",
        str(model),
        "--log-level",
        "warning",
        "--cache-gb",
        "0",
    ]
    return [*start, "--port", "{port}"]


def mlx_lm(model: Path) -> list[str]:
    start = [sys.executable, "-c", PEER, "--model", str(model), "--log-level", "WARNING"]
    return [*start, "--port", "{port}"]


COMMANDS = {"mlxspec": ours, "mlx_lm.server": mlx_lm}


def running(name: str, model: Path) -> AbstractContextManager[str]:
    """The base URL of a server of COMMANDS."""
    return started(name, COMMANDS[name](model))


@contextmanager
def started(name: str, command: list[str]) -> Iterator[str]:
    """The base URL of a server that answers /health, ended with the block. The command has {port} in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tempfile.TemporaryFile("w+")  # a peer's tracebacks are not our output, unless it does not start
    command = [part.replace("{port}", str(port)) for part in command]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise SystemExit(f"{name} did not start: exit status {process.poll()}\n{log.read()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False

"""The servers under measurement, each in a process of its own, with the same BLAS loaded first."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT = 180  # seconds
PEER = "from mlxspec import blas; blas.load(); from mlx_lm.server import main; main()"


def ours(model: Path, port: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "mlxspec",
        "serve",
        str(model),
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]


def mlx_lm(model: Path, port: int) -> list[str]:
    return [sys.executable, "-c", PEER, "--model", str(model), "--port", str(port), "--log-level", "WARNING"]


COMMANDS = {"mlxspec": ours, "mlx_lm.server": mlx_lm}


@contextmanager
def running(name: str, model: Path) -> Iterator[str]:
    """The base URL of a server that answers /health, ended with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tempfile.TemporaryFile("w+")  # a peer's tracebacks are not our output, unless it does not start
    process = subprocess.Popen(COMMANDS[name](model, port), stdout=log, stderr=log)
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

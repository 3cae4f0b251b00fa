"""What launchd does, in a few lines: listen, start a program when a connection waits, hand it the
socket, start it again when it fails, and leave it alone when it exits with 0."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

# Only macOS has launch_activate_socket, so the program is told the socket's number instead.
TAKE = (
    "import socket, sys\n"
    "from mlxspec.service import launchd\n"
    "taken = socket.socket(fileno=int(sys.argv[1]))\n"
    "launchd.activated_socket = lambda: taken\n"
    "sys.argv = ['mlxspec', *sys.argv[2:]]\n"
    "from mlxspec import cli\n"
    "cli.main()"
)


class Activator:
    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.command, self.env, self.log = list(command), dict(env), log
        self.process: subprocess.Popen[bytes] | None = None
        self.statuses: list[int] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Activator":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for _ in range(60):
            if self.process:
                self.process.terminate()  # which may have been started meanwhile
            self._thread.join(1)
            if not self._thread.is_alive():
                break
        self.listener.close()

    def _run(self) -> None:
        wanted = False
        while not self._ending.is_set():
            if wanted or select.select([self.listener], [], [], 0.05)[0]:
                number = self.listener.fileno()
                with self.log.open("ab") as log:
                    self.process = subprocess.Popen(
                        [sys.executable, "-c", TAKE, str(number), *self.command],
                        pass_fds=[number],
                        env=self.env,
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                    )
                status = self.process.wait()
                self.statuses.append(status)
                wanted = status != 0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

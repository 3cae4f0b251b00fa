"""What launchd and systemd do, in a few lines: listen, start a program when a connection waits,
hand it the socket, start it again when it ends with an error, and leave it alone when it ends
well."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

TAKE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.set_inheritable(3, True);"
    "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); os.execv(sys.argv[2], sys.argv[2:])"
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
        if self.process:
            self.process.terminate()
        self._thread.join(60)
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

"""The server's life in this process: what happens once it listens, and signals to it."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.server import process
from mlxspec.server.process import bind


class Caller:
    """What happens once the server listens, on a thread of its own."""

    def __init__(self, do: Callable[[str], None]) -> None:
        self.do, self.said, self.errors = do, "", list[BaseException]()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __call__(self, text: str) -> None:
        self.said = text
        self.thread.start()

    def _run(self) -> None:
        try:
            self.do(self.said.split()[4].removesuffix("/v1"))
        except BaseException as error:
            self.errors.append(error)

    def check(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive() and self.errors == []


def serve(app: Any, caller: Caller) -> int:
    """Until it ends; `caller` gets the greeting."""
    with pytest.MonkeyPatch.context() as patch, bind(Config(port=0)) as listener:
        patch.setattr(process, "announce", caller)
        return process.serve(app, listener)


def stop_me(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)

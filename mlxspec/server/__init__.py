"""HTTP in front of the engine: OpenAI's endpoints, their checks, their streams.

Rule: nothing here waits for the engine but on the event loop, and nothing here touches an array.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from mlxspec.types import ModelInfo, Output, Request, Stats


class Engine(Protocol):
    """What the server needs of `mlxspec.engine.worker.Worker`."""

    @property
    def info(self) -> ModelInfo: ...

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Queue a request, on the event loop; never blocks. The iterator gives the outputs of all its choices
        and ends after the last `finish`. Raises Busy when no more may wait, Dead when none is taken any
        more."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it. Idempotent; unknown ids do nothing."""

    def stats(self) -> Stats: ...

    def alive(self) -> bool: ...

    def stalled(self) -> float:
        """Seconds since the engine last made progress while it had work; 0.0 when it is idle."""

    def draining(self) -> bool:
        """Whether what runs may end and nothing more is taken."""

    async def drain(self, timeout: float) -> None:
        """Admit nothing more and wait for what runs, `timeout` seconds at most."""

    def stop(self) -> None: ...

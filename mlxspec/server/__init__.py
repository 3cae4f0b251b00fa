"""HTTP in front of the engine: OpenAI's endpoints, their checks, their streams.

Rule: nothing here waits for the engine but on the event loop, and nothing here touches an array.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from mlxspec.types import ModelInfo, Output, Request, Served, Stats


class Engine(Protocol):
    """What the server needs of `mlxspec.engine.worker.Worker`."""

    @property
    def info(self) -> ModelInfo:
        """The default model's."""

    def models(self) -> Mapping[str, Served]:
        """All models by name, the default first."""

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Queue a request, on the event loop; never blocks. The iterator gives the outputs of all
        its choices and ends after the last `finish`; a cancelled anext() loses none, the next goes
        on. Raises Busy when no more may wait, Dead when none is taken any more."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it. Idempotent; unknown ids do nothing."""

    async def load(self, name: str, pin: bool | None = None) -> None:
        """Load a model and pin it, or no longer; raises InvalidRequest with the reason why it
        cannot be had, Dead."""

    async def unload(self, name: str) -> None:
        """Unload a model once it has answered what it took before; cancelled before that, it
        stays."""

    def loading(self) -> str:
        """The model that is being loaded, while everything else waits; empty: none."""

    def stats(self) -> Stats:
        """Of all models together."""

    def alive(self) -> bool: ...

    def stalled(self) -> float:
        """Seconds since the engine last made progress while it had work; 0.0 when it is idle."""

    def draining(self) -> bool:
        """Whether what runs may end and nothing more is taken."""

    async def drain(self, timeout: float) -> None:
        """Admit nothing more and wait for what runs, `timeout` seconds at most."""

    def stop(self) -> None: ...

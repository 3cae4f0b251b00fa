"""An application on a real socket, served by uvicorn as `mlxspec serve` does, on a thread of its
own."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.process import bind, make_server
from mlxspec.types import ModelInfo
from tests.support import tiny
from tests.support.drafters import attach


@contextmanager
def tiny_worker(
    kind: str, context: int, drafter: str = "", **bounds: int
) -> Iterator[EngineThread]:
    """The real engine's thread with a tiny random model, until the block ends."""

    def start() -> Any:
        engine = tiny.engine(tiny.model(kind), blocks=256, context=context, vocab=tiny.VOCAB)
        if drafter:
            attach(engine, drafter)
        return engine, ModelInfo("tiny", context, tiny.VOCAB, "rows", 8, 1, 1, 1_700_000_000)

    made = EngineThread(tiny.manager(start), **bounds)
    made.launch()
    yield made
    made.stop()


@contextmanager
def live(app: Any, most: int = 80) -> Iterator[str]:
    """The base URL of `app` for `most` requests at once, until the block ends."""
    with serving(app, most) as (_, port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serving(app: Any, most: int = 80, buffer: int = 0) -> Iterator[tuple[uvicorn.Server, int]]:
    """uvicorn's server and its port; the kernel keeps `buffer` bytes of what it sends to each
    client, 0: as many as it likes."""
    with bind(Config(port=0)) as listener:
        if buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        server = make_server(app, Config(max_sequences=most, max_queue=0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        listener.listen(128)  # uvicorn has set its own backlog
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()

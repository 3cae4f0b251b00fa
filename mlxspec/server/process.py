"""The process: bind, load, serve, drain, exit.

Rule: SIGTERM, SIGINT and SIGHUP let running answers end and exit 0; a dead engine exits 1, so that
whoever watches the process starts it again. Nothing heavy is imported before BLAS is loaded.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import uvicorn
from starlette.types import ASGIApp

from mlxspec import blas
from mlxspec.config import Config, ConfigError, as_flags, url_of
from mlxspec.server import Engine, serial
from mlxspec.server.protocol import bounded

log = logging.getLogger("mlxspec")

POLL_S = 0.5  # between looks at the engine's thread
GRACE_S = 5  # for the last bytes of answers that have ended
STOP_S = 10.0  # for the engine's thread to end its step
BACKLOG = 2048  # connections that wait to be taken, as uvicorn has it
ACCEPT_S = 0.9  # between two lines that no connection can be taken; asyncio tries once a second
KEEP_ALIVE_S = 60  # of an idle connection; agents pause between requests
BODY = '{"messages": [{"role": "user", "content": "Name three rivers."}]}'

Announce = Callable[[str], None]
Ended = Callable[[int], None]


def say(text: str) -> None:
    """Print; a full disk and a reader that has left are no reasons not to serve."""
    try:
        print(text, flush=True)
    except OSError as error:
        log.warning("standard output: %s", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or what is left would be the exit status's


def serve_model(
    config: Config,
    listener: socket.socket | None = None,
    note: str = "",
    ended: Ended = lambda status: None,
) -> int:
    """Load the configured model and serve it; the process's exit status. Raises ConfigError and
    InvalidRequest.

    With a `listener` that somebody listened on before, clients are there already: it serves at
    once, and the first request loads the model. `note` is for /health; `ended` is told the status
    where the process ends here.
    """
    asleep = listener is not None
    if listener:
        host, port = listener.getsockname()[:2]
        config = replace(config, host=host, port=port)
    for number in _ends():
        signal.signal(number, _stop)  # until the event loop takes them over
    with listener or bind(config) as listener:  # a taken port shows before minutes of loading
        try:
            app, worker = _load(config, asleep, note)
        except Stopped:
            log.info("stopped while loading")
            ended(0)
            _leave(0)  # the thread that loads would keep the process for minutes
        _open(listener, config)
        return serve(app, worker, config, listener=listener, ended=ended)


class Stopped(SystemExit):
    """A signal came before the event loop was there to take it: exit status 0."""


def _ends() -> list[int]:
    """The signals that end a server; not SIGHUP where nohup has it ignored."""
    hup = [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)
    return [signal.SIGTERM, signal.SIGINT, *hup]


def _stop(*_: object) -> None:
    for number in _ends():
        signal.signal(number, signal.SIG_IGN)  # a terminal that is closed sends two
    raise Stopped(0)


def _leave(status: int) -> NoReturn:
    """End the process on the spot, whatever its threads do; a kernel that is being tried has not
    crashed."""
    logging.shutdown()
    if (prove := sys.modules.get("mlxspec.kernels.verify")) is not None:
        prove.KERNELS.abandon_trial()
    os._exit(status)


def _load(config: Config, asleep: bool = False, note: str = "") -> tuple[ASGIApp, Engine]:
    """The application and its engine, warm, or `asleep`: no model is loaded before a request asks
    for it. What was derived is printed as the flags that would set it."""
    blas.load()
    from mlxspec.engine.pressure import MemoryMonitor
    from mlxspec.engine.worker import Worker
    from mlxspec.kernels.verify import KERNELS
    from mlxspec.resolve import choose_all, fleet_of

    chosen, *others = choose_all(config)
    found, small = chosen.found, chosen.small
    worker = Worker(
        fleet_of([chosen, *others], config, asleep),
        max_sequences=config.max_sequences,
        max_queue=config.max_queue,
        guard=MemoryMonitor(),
    )

    def meanwhile() -> None:
        """What takes Python half a second, while the engine's thread reads weights."""
        chosen.tokenizer  # noqa: B018  kept there
        import mlxspec.server.app  # noqa: F401

    info = worker.launch(meanwhile)
    from mlxspec.server.app import create_app

    derived = replace(config, model=config.model or found.name, name=info.name)
    derived = replace(derived, draft=config.draft or (small.name if small else ""))
    if not others and not asleep:  # whose own would differ, or is not known
        derived = replace(
            derived, context=info.context, kv_blocks=info.kv_blocks, layout=info.layout
        )
    # The prefill budget follows the clock: its flag would fix it, the gap that it aims at does not.
    flags = as_flags(derived)
    if not config.prefill_budget and "--decode-gap-ms" not in flags:
        flags += f" --decode-gap-ms {config.decode_gap_ms}"
    say(f"mlxspec serve {flags}")
    if not asleep:
        log.info("prefill budget: %d rows beside running answers", info.prefill_budget)
    paths = {one.found.name: one.found.path for one in others}
    app = create_app(worker, chosen.tokenizer, found.path, config, paths, KERNELS.verdicts)
    app.state.front.note = note
    return app, worker


def bind(config: Config) -> socket.socket:
    """The server's socket, not listening yet: while a model loads, clients are refused instead of
    hanging. Raises ConfigError where it cannot be had."""
    with _named(config):
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
        # Or Linux would give the port to a second server too, until one listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return bound


def _open(bound: socket.socket, config: Config) -> None:
    """Listen. Raises ConfigError where somebody else does by now."""
    with _named(config):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen(BACKLOG)


@contextlib.contextmanager
def _named(config: Config) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"host = {config.host!r}, port = {config.port}: {error.strerror}; give another --port (0: any)"
        ) from error


def serve(
    app: ASGIApp,
    engine: Engine,
    config: Config,
    announce: Announce = say,
    listener: socket.socket | None = None,
    ended: Ended = lambda status: None,
) -> int:
    """Serve until a signal or the engine's death; the process's exit status. Main thread only.

    `announce` is told once, when requests are answered. A thread that does not end is left behind
    by ending the process on the spot.
    """
    if not listener:
        _open(listener := bind(config), config)
    status = asyncio.run(_serve(app, engine, config, announce, listener))
    stopper = threading.Thread(target=engine.stop, name="stop", daemon=True)
    stopper.start()
    stopper.join(0.0 if engine.loading() else STOP_S)  # nothing ends a load
    held = stopper.is_alive() or serial.busy()
    if stopper.is_alive():
        if loading := engine.loading():
            log.info("leaving the engine's thread, which loads %s", loading)
        else:
            log.critical("the engine's thread does not end; leaving it")
        status = 0 if loading else 1
    elif held:
        log.info("leaving the thread for text, which is at a prompt")
    if held:
        ended(status)
        _leave(status)
    return status


async def _serve(
    app: ASGIApp, engine: Engine, config: Config, announce: Announce, listener: socket.socket
) -> int:
    server = _server(app, config.max_sequences + config.max_queue)
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():  # asked twice: at once, then
            server.should_exit = server.force_exit = True
        asked.set()

    for number in _ends():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    asyncio.get_running_loop().set_exception_handler(_once_a_second(lambda: server.should_exit))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    announce(greeting(config, list(engine.models()), listener.getsockname()[1]))
    dying, stopping = asyncio.ensure_future(_death(engine)), asyncio.ensure_future(asked.wait())
    await asyncio.wait((serving, dying, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done() and not dying.done():
        log.info("stopping; running answers have %.0f s to end", config.drain_s)
        draining = asyncio.ensure_future(engine.drain(config.drain_s))
        await asyncio.wait((serving, dying, draining), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    status = 0 if engine.alive() else 1
    for task in (dying, stopping):
        task.cancel()
    return status


def _server(app: ASGIApp, most: int) -> uvicorn.Server:
    """uvicorn for `most` requests at once, without its own signals, log and access log."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=bounded(most),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    logging.getLogger("uvicorn.error").addFilter(_wanted)
    # Its own handlers would stop listening at the signal and end the process by it afterwards.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    return server


def _wanted(record: logging.LogRecord) -> bool:
    """Not what was cut off by a second signal: that was asked for."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _once_a_second(
    closing: Callable[[], bool],
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """What asyncio tells of itself; that no connection can be taken it says for each place in the
    backlog."""
    told = 0.0

    def tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told
        if "_start_serving" in context["message"] and closing():
            return  # tries again, as often, when the server has closed
        if "socket.accept()" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() > told + ACCEPT_S:
            told = loop.time()
            log.error(
                "no connection can be taken: %s; allow more file descriptors", context["exception"]
            )

    return tell


async def _death(engine: Engine) -> None:
    """Returns when the engine's thread has ended."""
    while engine.alive():
        await asyncio.sleep(POLL_S)
    log.critical("the engine has stopped; the server ends")


def greeting(config: Config, models: Sequence[str], port: int) -> str:
    """What to do now: a curl line that works as it is."""
    url = url_of(config.host, port)
    key = ' -H "Authorization: Bearer $MLXSPEC_API_KEY"' if config.api_key else ""
    return (
        f"{models[0]} is served at {url}/v1\n"
        + (f"{', '.join(models[1:])}: loaded when first asked for\n" if models[1:] else "")
        + "\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{BODY}'\n\n"
        f"or open {url}/ in a browser\n"
    )

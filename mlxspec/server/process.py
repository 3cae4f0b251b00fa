"""The server process: bind, load, serve, drain, exit.

Rule: SIGTERM, SIGINT and SIGHUP let running answers finish and exit 0; a dead engine exits 1, so
that launchd restarts it. Nothing heavy is imported before BLAS is loaded.
"""

import asyncio
import errno
import gc
import http.client
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, NoReturn
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette

from mlxspec import blas, log
from mlxspec.config import BUILT_IN, Config, ConfigError, as_flags, check_host, split_name, url_of
from mlxspec.server.unavailable import UnavailableResponder
from mlxspec.types import LOADING, UserError, printable

GRACE_S = 5  # for the last bytes of finished answers
STOP_S = 10.0  # for the engine's thread to finish its step
KEEP_ALIVE_S = 60  # of an idle connection; agents pause between requests
BACKLOG = 2048  # connections that wait to be accepted
ACCEPTS = 4  # at once; asyncio logs an error for each when file descriptors run out
BODY = '{"messages": [{"role": "user", "content": "Name three rivers."}]}'


def serve_model(
    config: Config,
    listener: socket.socket | None = None,
    note: str = "",
    on_exit: Callable[[int], None] = lambda status: None,
) -> NoReturn:
    """Load the configured models, serve them and end the process, whose status `on_exit` gets
    first. Raises ConfigError and UserError.

    A `listener` comes from launchd and is listening already, so clients may be waiting: requests
    are accepted at once, and the first one loads the model. `note` is for /health.
    """
    if os.environ.get("MLX_RANK", "0") != "0":
        follow(config)
    load_on_request = bool(listener)
    if listener:
        host, port = listener.getsockname()[:2]
        config = replace(config, host=host, port=port)

    def stop(*_: object) -> None:
        _on_signals(signal.SIG_IGN)  # closing a terminal sends two
        log.info("stopped while loading")
        end(0)

    def end(status: int) -> NoReturn:
        on_exit(status)
        _exit(status)

    _on_signals(stop)  # until the event loop takes over
    with listener or bind(config) as listener:  # a used port is reported before the loading
        threading.stack_size(8 << 20)  # of the threads to come: llguidance recurses
        gc.disable()  # imports leave hardly any garbage, and collecting takes a seventh of them
        responder: AbstractContextManager[None] = nullcontext()
        if not load_on_request:
            name = config.name or split_name(config.model)[0] or config.model or BUILT_IN
            why = f"{name} is being loaded; try again in a moment"
            responder = UnavailableResponder(listener, why, LOADING)
        try:
            with responder:
                app = _load(config, load_on_request)
            gc.freeze()  # the first collection would walk all of it, during the first answer
        finally:
            gc.enable()
        app.state.server.note = note
        end(serve(app, listener))


def follow(config: Config) -> NoReturn:
    """Run as a rank above 0 until rank 0 ends, then end the process. Signals that stop a server are
    left to rank 0, which gets them too. Raises UserError."""
    blas.load()
    from mlxspec.load import server_models
    from mlxspec.model.parallel import RankLost, join

    group = join(config.ranks)
    _on_signals(signal.SIG_IGN)

    def lost(error: RankLost) -> None:
        log.critical("%s", error)
        _exit(1)  # a connection may block its thread for ever

    group.watch(lost)
    try:
        with group.together():
            server_models.follow(config, group)
    except RankLost as error:
        lost(error)
    _exit(0)


def _signals() -> list[int]:
    """The signals that stop a server; without SIGHUP under nohup."""
    numbers: list[int] = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def _on_signals(handler: Any) -> None:
    for number in _signals():
        signal.signal(number, handler)


def _exit(status: int) -> NoReturn:
    """End the process without waiting for its threads: one that loads could run for minutes."""
    logging.shutdown()
    if (verify := sys.modules.get("mlxspec.kernels.verify")) is not None:
        verify.KERNELS.abandon_trial()  # a kernel that is being tried has not crashed
    os._exit(status)


def _load(config: Config, load_on_request: bool = False) -> Starlette:
    """The application, with the default model loaded unless `load_on_request`."""
    blas.load()
    from mlxspec.engine.worker import EngineThread
    from mlxspec.load.resolve import resolve_models
    from mlxspec.load.server_models import make_manager
    from mlxspec.model.parallel import RankLost, join

    flags = shlex.split(as_flags(config))
    # Ranks that mlx.launch started wait half a minute for each other, less than a download takes.
    group = join(config.ranks) if "MLX_RANK" in os.environ else None
    chosen, *others = resolve_models(config)
    group = group or join(config.ranks, flags)
    worker = EngineThread(
        make_manager([chosen, *others], config, load_on_request, group=group),
        max_sequences=config.max_sequences,
        max_queue=config.max_queue,
    )

    def meanwhile() -> None:
        """Prepare what requests need beside the engine, while it reads weights; all is cached."""
        from mlxspec.text.proof import call_support

        call_support(chosen.tokenizer)
        import mlxspec.server.app  # noqa: F401

    group.watch(worker.die)
    try:
        worker.launch(meanwhile)
    except RankLost as error:
        raise UserError(str(error)) from error
    from mlxspec.server.app import create_app

    if words := as_flags(config):
        log.info("settings: %s", words)
    paths = {other.name: other.path for other in others}
    return create_app(worker, chosen.tokenizer, chosen.path, config=config, others=paths)


def announce(text: str) -> None:
    """Print; a full disk or a closed pipe is no reason to stop serving."""
    try:
        print("\n".join(map(printable, text.split("\n"))), flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the buffered rest would fail again at exit


def bind(config: Config) -> socket.socket:
    """The server's socket, which does not listen yet. Raises ConfigError."""
    check_host(config.host, "--host")
    bound = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
    except (OSError, ValueError) as error:
        bound.close()
        raise ConfigError(bind_error(config, error)) from error
    return bound


def serve(app: Starlette, listener: socket.socket) -> int:
    """Serve until a signal or the engine's death; returns the process's exit status. Main thread
    only. The greeting is printed once requests are accepted."""
    worker = app.state.server.worker
    status = asyncio.run(_serve(app, listener))
    if worker.loading():  # which cannot be interrupted
        worker.stop(0.0)
    elif not worker.stop(STOP_S):
        return 1
    return status


async def _serve(app: Starlette, listener: socket.socket) -> int:
    worker, config = app.state.server.worker, app.state.server.config
    server = make_server(app, config)
    draining: list[asyncio.Future[None]] = []

    async def drain() -> None:
        await worker.drain(config.drain_s)
        server.should_exit = True

    def on_signal() -> None:
        if draining:  # the second signal: at once
            server.force_exit = server.should_exit = True
            return
        log.info("stopping; running answers have %.0f s to finish", config.drain_s)
        draining.append(asyncio.ensure_future(drain()))

    async def check() -> None:
        if not worker.alive():
            log.critical("the engine has stopped; the server exits")
            server.should_exit = True

    server.config.callback_notify = check
    for number in _signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        await server.startup([listener])
        listener.listen(BACKLOG)  # uvicorn's is ACCEPTS
    except OSError as error:  # another process listens since the bind
        raise ConfigError(bind_error(config, error)) from error
    announce(greeting(config, list(worker.models), listener.getsockname()[1]))
    log_reachability(listener, config)
    await server.main_loop()
    await server.shutdown([listener])
    return 0 if worker.alive() else 1


def make_server(app: Starlette, config: Config) -> uvicorn.Server:
    """uvicorn with our connections, without its logs."""
    from mlxspec.server.connections import SPARE, Connection

    settings = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=[("Server", SERVER)],
        proxy_headers=False,
        backlog=ACCEPTS,
        limit_concurrency=config.max_sequences + config.max_queue + SPARE,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        timeout_notify=0,  # check the engine's thread every second
    )
    logging.getLogger("uvicorn.error").addFilter(_wanted)
    settings.load()
    server = uvicorn.Server(settings)
    server.lifespan = settings.lifespan_class(settings)
    return server


def _wanted(record: logging.LogRecord) -> bool:
    """Whether to log it: not the requests that a second signal cancelled."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def greeting(config: Config, models: Sequence[str], port: int) -> str:
    """What to do next: a curl line that works as it is."""
    url = url_of(config.host, port)
    key = first = ""
    if config.api_key:
        key = ' -H "Authorization: Bearer $MLXSPEC_API_KEY"'
        if os.environ.get("MLXSPEC_API_KEY") != config.api_key:
            first = "\n  export MLXSPEC_API_KEY=...  # the server's key"
    others = ""
    if models[1:]:
        others = f"{', '.join(models[1:])}: loaded on first request\n"
    return f"""{models[0]} is served at {url}/v1
{others}{first}
  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{BODY}'

or open {url}/ in a browser
"""


# ---- the address: who can reach it, and who uses it already

SERVER = "mlxspec"  # the value of the header Server in all responses
PROBE_S = 2.0  # for a server to say what it is
ELSEWHERE = ("192.0.2.1", 9)  # an address for documentation; no packet is sent there


def bind_error(config: Config, error: Exception) -> str:
    """Why the server cannot listen, and what to do."""
    why = f"host = {config.host!r}, port = {config.port}: "
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE and _is_ours(config):
        return f"{why}mlxspec already runs there; see mlxspec status, or give another --port"
    why += getattr(error, "strerror", None) or str(error)
    if number in (errno.EADDRINUSE, errno.EACCES):
        return f"{why}; give another --port (0: any)"
    return f"{why}; give another --host, such as 127.0.0.1"


def _is_ours(config: Config) -> bool:
    """Whether an mlxspec server has the address."""
    host = urlsplit(url_of(config.host, config.port)).hostname or ""
    connection = http.client.HTTPConnection(host, config.port, timeout=PROBE_S)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().headers["Server"] == SERVER
    return False


def log_reachability(listener: socket.socket, config: Config) -> None:
    """Log the URL for other machines if they can reach the server; a warning without a key."""
    host, port = listener.getsockname()[:2]
    ip = ip_address(host.partition("%")[0])
    if ip.is_loopback:
        return
    if ip.is_unspecified:  # this machine's address in the network, or else its name
        host = socket.gethostname()
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(ELSEWHERE)
            host = probe.getsockname()[0]
    url = url_of(host, port)
    if config.api_key:
        log.info("other machines reach the server at %s/v1, with the API key", url)
        return
    fix = "set --api-key, or --host 127.0.0.1"
    log.warning("without an API key, every machine that reaches %s can use it; %s", url, fix)

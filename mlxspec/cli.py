"""The `mlxspec` command. Heavy modules are imported by the command that needs them, so that --help
is instant.

Rule: what a user can fix ends in one line on stderr and exit status 2; a traceback is a bug.
"""

import json
import sys
from concurrent.futures import Future, wait
from io import TextIOWrapper
from threading import Thread
from typing import Annotated, Any

import typer

from mlxspec import __version__
from mlxspec.commands.chat import chat
from mlxspec.commands.doctor import doctor
from mlxspec.commands.launch import launch
from mlxspec.commands.models import models, pull, rm, search
from mlxspec.commands.options import (
    Key,
    Model,
    Served,
    Url,
    Workload,
    log_to_stderr,
    server_of,
    with_settings,
)
from mlxspec.commands.plain_output import waiting
from mlxspec.commands.run import run
from mlxspec.commands.service import menubar, service, status
from mlxspec.config import load_config
from mlxspec.service import crashes
from mlxspec.service.client import ClientError, request
from mlxspec.service.launchd import activated_socket, log_file
from mlxspec.types import UserError, printable

LOAD_S = 3600  # maximum seconds to load or unload a model
POLL_S, MUTE_S = 5.0, 60.0  # seconds until a server that loads is asked, and must have answered

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},  # of every command
)
cache = typer.Typer(no_args_is_help=True, help="Show or delete the cache on disk.")
CHAT, SERVER, MODELS, MACHINE = "Chat and agents", "The server", "Models", "This machine"
app.add_typer(cache, name="cache", rich_help_panel=MACHINE)
app.add_typer(service, name="service", rich_help_panel=SERVER)
app.add_typer(menubar, name="menubar", rich_help_panel=SERVER)


def main() -> None:
    """Run the command in `sys.argv`. What stdout cannot encode is written as a question mark, and
    bytes that stdin cannot decode are read as U+FFFD."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        line = " ".join(sys.argv)
        if line != line.encode(errors="replace").decode():
            raise UserError(f"{line} has a word that is not UTF-8; type or rename what has the ?")
        app(prog_name="mlxspec")
    except (UserError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", help="Print the version."),
    ] = False,
) -> None:
    """A local server for language models on Apple Silicon, built on MLX."""
    if version:
        print(f"mlxspec {__version__}")
        raise typer.Exit


@app.command(rich_help_panel=SERVER)
@with_settings
def serve(**flags: str | list[str] | None) -> None:
    """Serve models over HTTP: `mlxspec serve mlx-community/Qwen3-4B-4bit`, or a directory.

    Without MODEL: the one in your settings, else the built-in model,
    SmolLM2-135M-Instruct (93 MB to download). It only shows that everything
    works; it is too small for real use.
    """
    if listener := activated_socket():
        log_to_stderr("info")
        sys.exit(crashes.serve(flags, listener, log_file()))
    config = load_config(flags)
    log_to_stderr(config.log_level)
    from mlxspec.server.process import serve_model

    serve_model(config)


app.command(rich_help_panel=CHAT)(run)
app.command(rich_help_panel=CHAT)(chat)


app.command(rich_help_panel=CHAT, context_settings={"allow_interspersed_args": False})(launch)


@app.command(rich_help_panel=MODELS)
def bench(
    model: Model = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="<model>",
            help="A head or small model that drafts tokens; off: neither.",
        ),
    ] = None,
    workload: Annotated[Workload, typer.Option(help="Prompts: edits, code, chat or all.")] = "all",
    max_tokens: Annotated[
        int,
        typer.Option(min=1, metavar="<tokens>", help="Maximum tokens per answer."),
    ] = 256,
    streams: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            metavar="<int>",
            help="Prompts that run at the same time, as one batch.",
        ),
    ] = 1,
) -> None:
    """Measure the speedup by speculation on this machine, on the same prompts with and without it.

    Exits with 1 if any answer differs.
    """
    config = load_config({"model": model, "draft": draft})
    log_to_stderr(config.log_level)
    from mlxspec.commands.bench import bench

    sys.exit(bench(config, workload, max_tokens, streams=streams))


@app.command(rich_help_panel=MODELS)
def train(
    model: Model = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="<dir>",
            help="Code and documents to train on; hidden files are skipped.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=1000, metavar="<tokens>", help="Training tokens."),
    ] = 300_000,
    epochs: Annotated[
        int,
        typer.Option(min=1, max=20, metavar="<int>", help="Training epochs."),
    ] = 1,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=256,
            metavar="<tokens>",
            help="Size of the draft vocabulary; default: the existing head's, else 16,384. Another"
            " size starts a new head.",
        ),
    ] = None,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Train a draft head for a model, or resume training one.

    It learns from the model's own answers and your files. Nothing leaves this
    machine. Training pauses while a running server has requests. Ctrl-C stops,
    and the same command resumes. Exits with 1 if the head does not improve on
    current drafting.
    """
    config = load_config({"model": model})
    log_to_stderr("warning")
    from mlxspec.commands.train import Options, Server, train

    options = Options(data, tokens, epochs, vocabulary=draft_vocab_size)
    sys.exit(train(config, options, Server(*server_of(url, api_key))))


app.command(rich_help_panel=MACHINE)(doctor)
app.command(rich_help_panel=SERVER)(status)
for command in (models, search, pull, rm):
    app.command(rich_help_panel=MODELS)(command)


@app.command("load", rich_help_panel=SERVER)
def load_model(model: Served, url: Url = None, api_key: Key = None) -> None:
    """Load one of the running server's models into memory."""
    _change(url, api_key, "load", model=model)


@app.command(rich_help_panel=SERVER)
def stop(
    model: Served,
    force: Annotated[
        bool,
        typer.Option("--force", metavar="", help="Unload it even if it is pinned."),
    ] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Unload a model from the running server once its answers have ended. The server stays up.

    To stop the server: Ctrl-C in its terminal, or mlxspec service stop.
    """
    _change(url, api_key, "unload", model=model, force=force)


def _change(url: str | None, api_key: str | None, verb: str, **body: Any) -> None:
    """Load or unload a model of the server."""
    server = server_of(url, api_key)
    print(f"{verb}ing {body['model']} ...", file=sys.stderr)
    with waiting(server[0]), request(*server, "GET", "/v1/models"):
        pass  # a server answers this at once
    answer: Future[str] = Future()

    def ask() -> None:
        path = f"/v1/models/{verb}"
        try:
            with request(*server, "POST", path, body, timeout=LOAD_S) as response:
                done = json.load(response)
                answer.set_result(f"{done['id']} is {verb}ed, after {done['seconds']:.1f} s")
        except ClientError as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    while wait([answer], POLL_S).not_done:
        with request(*server, "GET", "/v1/models", timeout=MUTE_S):
            pass
    print(printable(answer.result()))


@cache.command("ls")
def cache_ls() -> None:
    """Show what is cached, by model."""
    from mlxspec.commands.cache import show

    show(load_config({}))


@cache.command("stats")
def cache_stats() -> None:
    """Show the size of the cache and its limit."""
    from mlxspec.commands.cache import totals

    totals(load_config({}))


@cache.command("clear")
def cache_clear(
    yes: Annotated[bool, typer.Option("--yes", metavar="", help="Do not ask.")] = False,
) -> None:
    """Delete the prefix cache, recorded answers, the chat's history and training files.

    Trained heads stay. A running server continues and fills the cache again.
    """
    from mlxspec.commands.cache import clear
    from mlxspec.model.hub import cache_of

    root = cache_of(load_config({}))
    if not yes:
        what = "the prefix cache, recorded answers, the chat's history and training files"
        typer.confirm(f"Delete {what} in {root}?", abort=True)
    clear(root)

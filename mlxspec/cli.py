"""The `mlxspec` command. Heavy modules are imported by the command that needs them, so that --help
is instant.

Rule: what a user can fix ends in one line on stderr and exit status 2; a traceback is a bug.
"""

import json
import logging
import sys
from typing import Annotated, Any

import typer

from mlxspec import __version__
from mlxspec.client import printable, request
from mlxspec.commands import launch as agents
from mlxspec.commands.options import (
    CacheDir,
    Json,
    Key,
    Model,
    Served,
    Url,
    Workload,
    server_of,
    with_settings,
)
from mlxspec.commands.service import menubar, service
from mlxspec.config import Config, ConfigError, load
from mlxspec.types import UserError

LOAD_S = 3600  # a model that is loaded or unloaded may take so long

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
cache = typer.Typer(no_args_is_help=True, help="Show or delete the prompt cache on disk.")
app.add_typer(cache, name="cache")
app.add_typer(service, name="service")
app.add_typer(menubar, name="menubar")


def main() -> None:
    """Run the command in `sys.argv`."""
    try:
        app(prog_name="mlxspec")
    except (ConfigError, UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def log_to_stderr(level: str) -> None:
    """Our own log at `level`; warnings and errors of other libraries."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("mlxspec").setLevel(level.upper())


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mlxspec {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A local server for language models on Apple Silicon, built on MLX."""


@app.command()
@with_settings
def serve(**flags: str | list[str] | None) -> None:
    """Serve models: directories in mlx-lm's format or Hugging Face ids. Default: built in."""
    log_to_stderr("info")
    from mlxspec.service import crashes
    from mlxspec.service.launchd import activated_socket, log_file

    def settings() -> Config:
        config = load(flags)
        log_to_stderr(config.log_level)
        return config

    if listener := activated_socket():
        sys.exit(crashes.serve(settings, listener, log_file()))
    config = settings()
    from mlxspec.server.process import serve_model

    sys.exit(serve_model(config))


@app.command()
def chat(
    url: Url = None,
    api_key: Key = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; default: the model's own.")
    ] = None,
) -> None:
    """Chat with the running server: /reset starts again, /exit ends, Ctrl-C stops an answer."""
    from mlxspec.commands.chat import run

    run(*server_of(url, api_key), system, temperature)


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help=f"One of {', '.join(agents.AGENTS)}.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the agent.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the command instead of running it.")
    ] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Start a coding agent on the running server. It changes none of the agent's files."""
    agents.launch(agent, args or [], *server_of(url, api_key), show)


@app.command()
def bench(
    model: Model = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="A small draft model.")] = None,
    workload: Annotated[Workload, typer.Option(help="edits, code, chat or all.")] = "all",
    prompts: Annotated[int, typer.Option(min=1, max=16, help="Prompts of each workload.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, max=1 << 16, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    streams: Annotated[
        str, typer.Option(metavar="N,N", help="How many prompts run at the same time.")
    ] = "1",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Repetitions.")] = 1,
    json: Annotated[
        typer.FileTextWrite | None,
        typer.Option(metavar="FILE", lazy=False, help="Write all measurements as JSON."),
    ] = None,
) -> None:
    """Measure what speculation gains on this machine: the same prompts with it and without it.

    Exits with 1 if any answer differs.
    """
    config = load({"model": model, "draft": draft})
    log_to_stderr(config.log_level)
    from mlxspec.commands.bench import bench

    sys.exit(bench(config, workload, prompts, max_tokens, temperature, streams, rounds, json))


@app.command()
def doctor(model: Model = None, cache_dir: CacheDir = None, json: Json = False) -> None:
    """Check the machine, the installation, the model and the service, and say what to fix.

    Exits with 1 if something is broken.
    """
    from mlxspec.commands.doctor import doctor

    log_to_stderr("error")
    sys.exit(doctor(model, cache_dir, json))


@app.command()
def status(url: Url = None, api_key: Key = None, json: Json = False) -> None:
    """Show whether the server runs, what it does and how fast. Exits with 1 if it is down."""
    from mlxspec.service.status import DOWN, get_status, print_status

    now = get_status(*server_of(url, api_key))
    print_status(now, json)
    sys.exit(now.state in DOWN)


@app.command()
def models(
    url: Url = None, api_key: Key = None, cache_dir: CacheDir = None, json: Json = False
) -> None:
    """List the models on disk, those that can be downloaded by name, and the server's."""
    from mlxspec.commands.models import local_models, show
    from mlxspec.service.status import get_status

    found = local_models(load({"cache_dir": cache_dir}))
    show(found, get_status(*server_of(url, api_key)).models, json)


@app.command()
def pull(model: Model = None, cache_dir: CacheDir = None) -> None:
    """Download and convert a model without serving it."""
    from mlxspec.commands.models import pull

    pull(load({"model": model, "cache_dir": cache_dir}))


@app.command("load")
def load_model(model: Served, url: Url = None, api_key: Key = None) -> None:
    """Load a model of the running server."""
    _change(url, api_key, "load", model=model)


@app.command()
def stop(
    model: Served,
    force: Annotated[bool, typer.Option("--force", help="Also if it is pinned.")] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Unload a model of the running server, when its running answers have ended."""
    _change(url, api_key, "unload", model=model, force=force)


def _change(url: str | None, api_key: str | None, verb: str, **body: Any) -> None:
    """Load or unload a model of the server."""
    server, path = server_of(url, api_key), f"/v1/models/{verb}"
    print(f"{verb}ing {body['model']} ...", file=sys.stderr)
    with request(*server, "POST", path, body, timeout=LOAD_S) as response:
        done = json.load(response)
    print(printable(f"{done['id']} is {verb}ed, after {done['seconds']:.1f} s"))


@cache.command("ls")
def cache_ls(cache_dir: CacheDir = None) -> None:
    """Show what is cached, by model."""
    from mlxspec.commands.cache import show

    show(load({"cache_dir": cache_dir}))


@cache.command("stats")
def cache_stats(cache_dir: CacheDir = None) -> None:
    """Show the size of the cache and its limit."""
    from mlxspec.commands.cache import totals

    totals(load({"cache_dir": cache_dir}))


@cache.command("clear")
def cache_clear(
    cache_dir: CacheDir = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete the cache. A running server goes on and fills it again."""
    from mlxspec.commands.cache import clear
    from mlxspec.model.hub import prompts_of

    root = prompts_of(load({"cache_dir": cache_dir}))
    if not yes:
        typer.confirm(f"Delete the prompt cache in {root}?", abort=True)
    clear(root)

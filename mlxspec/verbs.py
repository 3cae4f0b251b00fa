"""status, ps, load, stop, pull, models, menubar: the commands that look at what runs, and move it.

Rule: light, as cli.py, which they are a part of; what they do is in service/status.py,
service/menubar.py and stock.py.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from mlxspec import config
from mlxspec.commands import chat
from mlxspec.files import format_size

RUN, USE, LOOK, MEASURE = "Run", "Use", "Look", "Measure"  # panels of --help

Url = Annotated[str | None, typer.Option(help="The server; without it, the one of your settings.")]
Key = Annotated[str | None, typer.Option(help="The server's API key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")]
Named = Annotated[
    str, typer.Argument(metavar="MODEL", help="A name that the server knows: mlxspec models.")
]
Dry = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]

verbs = typer.Typer()
menubar = typer.Typer(invoke_without_command=True)


def server_of(
    url: str | None, key: str | None, environ: Mapping[str, str] = os.environ
) -> tuple[str, str]:
    """The URL and key of the server that is meant: the one that is given, the settings', or, where
    they name no address, the service's. The settings' key is for the latter two only, also where
    they are given."""
    if url is not None:
        url = url.rstrip("/").removesuffix("/v1")
        return url, key or _own_key(url)
    found, bare = config.load({}, environ), config.Config()
    at = _service_url() if (found.host, found.port) == (bare.host, bare.port) else ""
    return at or config.url_of(found.host, found.port), key or found.api_key


def _own_key(url: str) -> str:
    try:
        own, key = server_of(None, None)
    except config.ConfigError:  # a URL does without them
        return ""
    return key if url.rstrip("/") == own else ""


def _service_url() -> str:
    from mlxspec.service import here
    from mlxspec.service.status import installed
    from mlxspec.types import UserError

    try:
        return installed(here())
    except UserError:
        return ""


@contextmanager
def working(what: str, shown: bool = True) -> Iterator[None]:
    """A bar without an end on stderr, if that is a terminal, while something goes on that cannot
    say how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(pulse_style="cyan"), TimeElapsedColumn())
    off = not (shown and console.is_terminal)
    with Progress(*columns, console=console, disable=off, transient=True) as bar:
        bar.add_task(what, total=None)
        yield


@verbs.command(rich_help_panel=LOOK)
def status(url: Url = None, api_key: Key = None, json: AsJson = False) -> None:
    """Show whether the server is up, what it does and how fast. Exits with 1 if it is down."""
    from mlxspec.service.status import SEEN_S, UP, look, show

    now = look(*server_of(url, api_key), over=SEEN_S)
    show(now, json)
    sys.exit(now.state not in UP)


@verbs.command(rich_help_panel=LOOK)
def ps(url: Url = None, api_key: Key = None, json: AsJson = False) -> None:
    """List the models that are loaded, and the requests that run."""
    from mlxspec.service.status import UP, look, show_ps

    now = look(*server_of(url, api_key))
    if now.state not in UP:
        raise chat.ChatError(now.why)
    show_ps(now, json)


@verbs.command(rich_help_panel=RUN)
def load(model: Named, url: Url = None, api_key: Key = None) -> None:
    """Load a model of the running server, making room for it."""
    at, key = server_of(url, api_key)
    with working(f"loading {model}"):
        done = _order(at, key, "load", {"model": model})
    print(f"{done['id']} is loaded, after {done['seconds']:.1f} s")


@verbs.command(rich_help_panel=RUN)
def stop(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The model to unload; without it, all stops."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also one that is pinned.")] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Unload a model of the running server, or stop the server, once running answers have ended."""
    at, key = server_of(url, api_key)
    if model is not None:
        with working(f"unloading {model}"):
            done = _order(at, key, "unload", {"model": model, "force": force})
        print(f"{done['id']} is unloaded, after {done['seconds']:.1f} s")
        return
    from mlxspec.service.stop import stop_server

    with working("stopping"):
        said = stop_server(at, key)
    print(said)


def _order(url: str, key: str, verb: str, body: dict[str, Any]) -> Any:
    with chat.call(url, key, "POST", f"/v1/models/{verb}", body, patience=3600) as response:
        return chat.clean(json.load(response))


@verbs.command(rich_help_panel=RUN)
def pull(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="As for serve.")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="As for serve.")] = None,
) -> None:
    """Fetch and convert what serve would, and do not serve it."""
    from mlxspec.commands.models import pull

    for one in pull(config.load({"model": model, "cache_dir": cache_dir}, os.environ)):
        print(f"{one.name} is in {one.path}, {format_size(one.bytes)}")


@verbs.command(rich_help_panel=LOOK)
def models(
    url: Url = None,
    api_key: Key = None,
    cache_dir: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    json: AsJson = False,
) -> None:
    """List the models of this disk, those that can be fetched by name, and those that the server
    has."""
    from mlxspec.commands.models import show, stock
    from mlxspec.service.status import look

    found = config.load({"cache_dir": cache_dir}, os.environ)
    show(stock(found), look(*server_of(url, api_key)).models, json)


@menubar.callback()
def menubar_show(
    context: typer.Context,
    xbar: Annotated[
        bool, typer.Option("--xbar", help="Print the menu for xbar or SwiftBar.")
    ] = False,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the server's base URL.")] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Show the server in the menu bar of a Mac."""
    if context.invoked_subcommand:
        return
    from mlxspec.service import menubar

    if copy:
        return menubar.copy(server_of(url, api_key)[0])
    if not xbar:
        return menubar.show(lambda: _menu(url, api_key))
    print(menubar.xbar(_menu(url, api_key)), end="")


def _menu(url: str | None, key: str | None) -> Any:
    """Its actions say which server is meant, unless they would mean it from anywhere."""
    from mlxspec.service.menubar import broken, menu_of
    from mlxspec.service.status import SEEN_S, look

    elsewhere = {
        name: value for name, value in os.environ.items() if not name.startswith("MLXSPEC_")
    }
    try:
        at, found = server_of(url, key)
        own = at.rstrip("/") == server_of(None, None, elsewhere)[0]
    except config.ConfigError as error:
        return broken(str(error))
    return menu_of(look(at, found, over=SEEN_S), own)


@menubar.command("install")
def menubar_install(dry_run: Dry = False) -> None:
    """Show it after each login."""
    from mlxspec.service import Hands, menubar

    print(menubar.install(Hands(dry_run)))


@menubar.command("uninstall")
def menubar_uninstall(dry_run: Dry = False) -> None:
    """End it, and show it no more."""
    from mlxspec.service import Hands, menubar

    print(menubar.uninstall(Hands(dry_run)))

"""Options that several commands share, and the server that a command is for."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from mlxspec.config import (
    ARGUMENTS,
    TABLE,
    Config,
    ConfigError,
    flag,
    kind,
    limits,
    load,
    url_of,
)

METAVARS = {str: "TEXT", int: "N", float: "N", tuple: "A,B"}

Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The model, as for serve.", show_default=False),
]
CacheDir = Annotated[
    str | None, typer.Option(help="The cache directory; default: the one in your settings.")
]
Url = Annotated[
    str | None, typer.Option(help="The server; default: the one in your settings, or the service.")
]
Key = Annotated[str | None, typer.Option(help="The server's API key.")]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Served = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model of the server; see mlxspec models.")
]


def server_of(
    url: str | None, key: str | None, env: Mapping[str, str] = os.environ
) -> tuple[str, str]:
    """URL and API key of the server that a command is for: the one given, the settings', or, where
    they name no address, the service's. The settings' key is sent to no other server."""
    if url is None:
        config = load({}, env)
        return _own_url(config), key or config.api_key
    url = url.rstrip("/").removesuffix("/v1")
    if not key:
        try:
            config = load({}, env)
        except ConfigError:  # a given URL works without settings
            config = Config()
        key = config.api_key if url == _own_url(config) else ""
    return url, key


def _own_url(config: Config) -> str:
    default = Config()
    if (config.host, config.port) == (default.host, default.port):
        from mlxspec.service.launchd import installed_url

        if installed := installed_url():
            return installed
    return url_of(config.host, config.port)


@contextmanager
def working(text: str) -> Iterator[None]:
    """A moving bar on stderr, if that is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an argument or flag for each row of the settings' table."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY]
    parameters = []
    for name, row in TABLE.items():
        text = row.metadata["help"]
        if limits(row):
            text += f" Values: {limits(row)}."
        if row.default:
            text += f" Default: {row.default}."
        info: Any = typer.Argument(help=text, show_default=False, metavar=flag(name))
        if name not in ARGUMENTS:
            metavar = METAVARS[kind(row)]
            info = typer.Option(flag(name), help=text, show_default=False, metavar=metavar)
        value: Any = list[str] if name == "others" else str
        annotation: Any = Annotated[value | None, info]
        parameter = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
        parameters.append(parameter)
    parameters += own
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command

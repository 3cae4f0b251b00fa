"""Options that several commands share, and the server that a command is for."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from mlxspec.config import ARGUMENTS, DEFAULTS, TABLE, flag, limits, load, url_of

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


Workload = Literal["edits", "code", "chat", "all"]


def server_of(url: str | None, key: str | None) -> tuple[str, str]:
    """URL and API key of the server that a command is for: the one given, the settings', or, where
    they name no address, the service's. The settings' key is sent to no other server."""
    config = load({})
    own = url_of(config.host, config.port)
    if own == url_of(DEFAULTS.host, DEFAULTS.port):
        from mlxspec.service.launchd import installed_url

        own = installed_url() or own
    url = (url or own).rstrip("/").removesuffix("/v1")
    if not key and url == own:
        key = config.api_key
    return url, key or ""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an argument or flag for each row of the settings' table."""
    parameters = list(map(_parameter, TABLE))
    for parameter in inspect.signature(command).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            parameters.append(parameter)
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(name: str) -> inspect.Parameter:
    row = TABLE[name]
    text, values = row.metadata["help"], limits(row)
    if values:
        text += f" Values: {values}."
    if row.default:
        text += f" Default: {row.default}."
    info: Any = typer.Option(flag(name), help=text)
    if name in ARGUMENTS:
        info = typer.Argument(help=text, metavar=flag(name))
    value: Any = list[str] if name == "others" else str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[value | None, info],
    )

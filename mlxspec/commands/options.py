"""Options that several commands share, and the server that a command is for."""

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, TextIO

import typer

from mlxspec.config import ARGUMENTS, TABLE, flag, limits, load, url_of
from mlxspec.service.launchd import installed_url

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A directory or a Hugging Face id, as for serve.",
        show_default=False,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="Where the server is, such as http://127.0.0.1:8080; default: the installed service,"
        " else host and port of your settings."
    ),
]
Key = Annotated[
    str | None,
    typer.Option(help="The server's API key; default: the one in your settings, for their server."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Served = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A served model, by the name that mlxspec status shows."),
]


Workload = Literal["edits", "code", "chat", "all"]


def server_of(url: str | None, key: str | None) -> tuple[str, str]:
    """URL and API key of the server that a command is for: the one given, else the installed
    service's, else the settings'. The settings' key is sent to no other server."""
    config = load({})
    own = installed_url() or url_of(config.host, config.port)
    url = (url or own).rstrip("/").removesuffix("/v1")
    if not key and url == own:
        key = config.api_key
    return url, key or ""


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at that moment: rich's own while a bar is shown, which puts
    the line above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(level: str) -> None:
    """Our own log at `level`; warnings and errors of other libraries."""
    logging.basicConfig(
        handlers=[StderrHandler()],
        level=logging.WARNING,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("mlxspec").setLevel(level.upper())


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an argument or flag for each row of the settings' table."""
    parameters = list(map(_parameter, TABLE))
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

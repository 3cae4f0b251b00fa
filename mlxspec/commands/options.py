"""Options that several commands share, and the server that a command uses."""

import inspect
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, TextIO

import typer

from mlxspec.config import ARGUMENTS, BUILT_IN, TABLE, flag, load_config, url_of
from mlxspec.service.launchd import installed_url
from mlxspec.settings import ConfigError, format_value, kind_of, limits
from mlxspec.types import printable


class ModelName(str):
    """A directory or a Hugging Face id."""


class KnownName(str):
    """One of the names that a command or the server has."""


class FreeText(str):
    """Any words."""


def names_on_disk() -> list[str]:
    """The models that a shell completes; only their names are read."""
    from mlxspec.model.hub import installed

    return [BUILT_IN, *installed()]


def names_served() -> list[str]:
    """The models of the running server, for a shell; none where it does not answer."""
    from mlxspec.service.client import ClientError, request

    with (
        suppress(ClientError, ConfigError),
        request(*server_of(None, None), "GET", "/v1/models", timeout=COMPLETE_S) as response,
    ):
        return [str(info["id"]) for info in json.load(response)["data"]]
    return []


# Help shows the name of an argument's type where it shows the metavar of an option.
ModelName.__name__, KnownName.__name__, FreeText.__name__ = "model", "name", "text"

Model = Annotated[
    ModelName | None,
    typer.Argument(
        parser=ModelName,
        metavar="MODEL",
        help="A directory or a Hugging Face id, as for serve.",
        show_default=False,
        autocompletion=names_on_disk,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="<url>",
        help="URL of the server, such as http://127.0.0.1:8080; default: the installed service,"
        " else host and port of your settings.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="<key>",
        help="The server's API key; default: the one in your settings, for their server.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print everything as JSON.")]
Served = Annotated[
    KnownName,
    typer.Argument(
        parser=KnownName,
        metavar="MODEL",
        help="A served model, by the name that mlxspec status shows.",
        autocompletion=names_served,
    ),
]


# The first setting under each heading of the help.
PANELS = {
    "name": "Address and access",
    "pin": "Models in memory",
    "max_sequences": "Batches and K/V",
    "strict_model_names": "Requests and images",
    "speculate": "Drafts and kernels",
    "thinking_budget": "Limits, files and log",
}
COMPLETE_S = 1.0  # for a server to name its models to a shell
Workload = Literal["edits", "code", "chat", "all"]


def server_of(url: str | None, key: str | None) -> tuple[str, str]:
    """URL and API key of the server that a command uses: by its flags, else the installed
    service's, else the settings'. The settings' key is sent to no other server."""
    config = load_config({})
    default = installed_url() or url_of(config.host, config.port)
    url = (url or default).rstrip("/").removesuffix("/v1")
    if not key and url == default:
        key = config.api_key
    return url, key or ""


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`: while a bar is shown it is rich's, which puts the line
    above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class Line(logging.LogRecord):
    """A record in one line, also in another library's handler: text from outside cannot control
    the terminal or begin a line of the log."""

    def getMessage(self) -> str:
        return printable(" ".join(super().getMessage().split("\n")).rstrip())


class LineFormatter(logging.Formatter):
    """The same for tracebacks, which take several lines."""

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)


def log_to_stderr(level: str) -> None:
    """Show our log from `level` on, and warnings and errors of other libraries."""
    logging.setLogRecordFactory(Line)
    handler = StderrHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("mlxspec").setLevel(level.upper())


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an argument or flag for each row of the settings' table."""
    parameters, panel = [], ""
    for setting in TABLE:
        panel = PANELS.get(setting, panel)
        parameters.append(_parameter(setting, panel))
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(setting: str, panel: str) -> inspect.Parameter:
    row = TABLE[setting]
    text, kind, values = row.metadata["help"], kind_of(row), limits(row)
    choices = list(map(str, row.metadata["choices"]))
    if values and "|" not in kind:
        text += f" Values: {values}."
    if default := format_value(row, row.default):
        text += f" Default: {default}."
    value: Any = str
    info: Any = typer.Option(
        flag(setting),
        metavar=f"<{kind}>",
        help=text,
        autocompletion=lambda: choices,
        rich_help_panel=panel,
    )
    if setting in ARGUMENTS:
        value = type(kind, (str,), {})  # as ModelName
        info = typer.Argument(
            parser=value,
            metavar=flag(setting),
            help=text,
            autocompletion=names_on_disk,
        )
    if setting == "others":
        value = list[value]
    return inspect.Parameter(
        setting,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[value | None, info],
    )

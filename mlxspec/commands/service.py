"""`mlxspec status`, `mlxspec service` and `mlxspec menubar`: the running server, and the server in
the background on macOS."""

import json
import os
import plistlib
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from mlxspec.commands.options import AsJson, Key, Url, server_of, with_settings
from mlxspec.config import ConfigError, load_config
from mlxspec.service import launchd
from mlxspec.service import menubar as bar
from mlxspec.service.status import DOWN, Status, get_status, print_status
from mlxspec.types import UserError

service = typer.Typer(no_args_is_help=True, help="Run the server in the background on macOS.")
menubar = typer.Typer(invoke_without_command=True)


def status(url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """Show whether the server runs, what it does and how fast. Exits with 1 if it is down."""
    now = get_status(*server_of(url, api_key))
    up = now.state not in DOWN
    if as_json:
        print(json.dumps({"up": up} | asdict(now), indent=2))
    else:
        print_status(now)
    sys.exit(not up)


@service.command("install")
@with_settings
def service_install(**flags: str | list[str] | None) -> None:
    """Install the service with the settings that serve would use, or change them."""
    print(launchd.install(launchd.definition(flags, os.environ)))


@service.command("print")
@with_settings
def service_print(**flags: str | list[str] | None) -> None:
    """Print the launch agent that install would write, and install nothing."""
    print(plistlib.dumps(launchd.definition(flags, os.environ)).decode(), end="")


ACTIONS = {
    "uninstall": "Remove the service and its menu bar. Settings, models and caches stay.",
    "start": "Start the service.",
    "stop": "Stop the service until it is started, or until the next login.",
    "restart": "Restart the service when running answers have ended. This ends safe mode.",
}


def _add_action(name: str) -> None:
    @service.command(name, help=ACTIONS[name])
    def act() -> None:
        print(f"service {name} ...", file=sys.stderr)
        print(getattr(launchd, name)())


for action in ACTIONS:
    _add_action(action)


@service.command("status")
def service_status() -> None:
    """Show the service. Exits with 3 if it is down, with 4 if it is not installed."""
    url = launchd.installed_url()
    if not url:
        print("not installed; run: mlxspec service install")
        sys.exit(4)
    now = get_status(url, load_config({}).api_key)
    print_status(now)
    if now.state in DOWN:
        sys.exit(3)


@service.command("logs")
def service_logs(
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", metavar="", help="Wait for new lines."),
    ] = False,
) -> None:
    """Show the last 100 lines of the service's log."""
    file = launchd.log_file()
    if not (follow or file.exists()):
        raise UserError(f"there is no {file}: no service has run; see: mlxspec service status")
    command = ["tail", "-n", "100", str(file)]
    if follow:
        command.insert(1, "-F")  # by name, since the log is rotated
    os.execvp("tail", command)


@menubar.callback()
def menubar_show(context: typer.Context, url: Url = None, api_key: Key = None) -> None:
    """Show the server in the menu bar of a Mac."""
    if context.invoked_subcommand:
        return

    def poll() -> bar.Menu:
        try:
            return bar.menu_of(get_status(*server_of(url, api_key)))
        except ConfigError as error:
            return bar.menu_of(Status(url or "", "unwell", why=str(error)))

    bar.show(poll)


@menubar.command("install")
def menubar_install() -> None:
    """Show the menu bar now and after each login."""
    print(bar.install())


@menubar.command("uninstall")
def menubar_uninstall() -> None:
    """Remove the menu bar."""
    print(bar.uninstall())

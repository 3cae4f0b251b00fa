"""The menu bar of a Mac: turns a status into a menu, which rumps shows.

Rule: the menu is plain data and a pure function of the status, and each action is a command.
"""

import importlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mlxspec.service import launchd
from mlxspec.service.status import Service, State, Status, facts
from mlxspec.types import UserError

POLL_S = 2.0
WIDTH = 80  # characters of a title
ICONS: dict[State, str] = {"stopped": "○", "loading": "◐", "asleep": "◌", "busy": "●", "idle": "●"}
WARNING = "⚠"
# Commands for the service, by its state.
VERBS: dict[Service, tuple[str, ...]] = {
    "stopped": ("start",),
    "waiting": ("start", "stop"),
    "running": ("stop", "restart"),
}


class Item(NamedTuple):
    """A line of the menu; without a title a separator, without a command only text."""

    title: str = ""
    command: tuple[str, ...] = ()


class Menu(NamedTuple):
    title: str
    items: tuple[Item, ...] = ()


def mlxspec(*words: str) -> tuple[str, ...]:
    """The command line of an `mlxspec` command."""
    return (*launchd.PROGRAM, *words)


def menu_of(now: Status) -> Menu:
    """The menu for a status."""
    icon = ICONS.get(now.state, WARNING)
    if now.note:
        icon = WARNING
    if now.running and now.speed:
        icon += f" {now.speed:.0f} tok/s"
    items = [Item(f"{name}: {text}"[:WIDTH]) for name, text in facts(now).items()]
    for name, state in now.models.items():
        verb = "stop" if state == "loaded" else "load"
        title = f"{verb.capitalize()} {name}"[:WIDTH]
        items.append(Item(title, mlxspec(verb, name, "--url", now.url)))
    items.append(Item())
    for verb in VERBS.get(now.service, ()):
        items.append(Item(f"{verb.capitalize()} the service", mlxspec("service", verb)))
    items.append(Item())
    items.append(Item("Show the log", ("open", str(launchd.log_file()))))
    items.append(Item("Open the page", ("open", f"{now.url}/")))
    return Menu(icon, tuple(items))


def show(poll: Callable[[], Menu]) -> None:
    """Show the menu until the user quits. `poll` runs in a thread of its own. Raises UserError."""
    rumps = _import_rumps()
    kit: Any = importlib.import_module("AppKit")
    # An accessory: no icon in the Dock.
    kit.NSApplication.sharedApplication().setActivationPolicy_(1)
    app = rumps.App("mlxspec", title="◌", quit_button=None)
    quit_item = rumps.MenuItem("Quit", callback=rumps.quit_application)
    newest = shown = Menu("◌")
    lines: list[Any] = []  # rumps keeps each item for ever: they are made once, and change

    def keep_polling() -> None:
        nonlocal newest
        while True:
            newest = poll()
            time.sleep(POLL_S)

    def draw(_: Any) -> None:
        """Runs on the main thread, the only one that may use rumps."""
        nonlocal shown
        if newest == shown:
            return
        shown = newest
        app.title = shown.title
        app.menu.clear()
        for key, item in enumerate(shown.items):
            if key == len(lines):
                lines.append(rumps.MenuItem(f"{key}"))  # its first title is a key: must be unique
            if not item.title:
                app.menu.add(rumps.separator)
                continue
            lines[key].title = item.title
            lines[key].set_callback(partial(run, item.command) if item.command else None)
            app.menu.add(lines[key])
        app.menu.add(quit_item)

    threading.Thread(target=keep_polling, name="poll", daemon=True).start()
    rumps.Timer(draw, 1).start()
    app.run()


def run(command: tuple[str, ...], sender: object) -> None:
    """Start a command; the next poll shows its effect."""
    subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _import_rumps() -> Any:
    try:
        return importlib.import_module("rumps")
    except ImportError as error:
        raise UserError(
            "the menu bar needs rumps: on a Mac, in the checkout:"
            " uv tool install --reinstall '.[menubar]'",
        ) from error


def install() -> str:
    """Show the menu bar now and after each login. Raises UserError."""
    _import_rumps()
    variables = launchd.service_variables(os.environ)
    launchd.unload(launchd.MENUBAR)
    launchd.load_agent(launchd.make_agent(launchd.MENUBAR, ["menubar"], variables))
    return "the menu bar shows mlxspec, now and after each login"


def uninstall() -> str:
    if launchd.remove_agent(launchd.MENUBAR):
        return "the menu bar is removed"
    return "the menu bar is not installed"

"""The menu bar of a Mac: a status becomes a menu, which rumps shows.

Rule: the menu is plain data and a pure function of the status, and each action is a command.
"""

import importlib
import importlib.util
import os
import plistlib
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxspec.service import launchd
from mlxspec.service.status import DOWN, State, Status, facts
from mlxspec.types import UserError

POLL_S = 2.0
WIDTH = 80  # characters of a title
ICONS: dict[State, str] = {"stopped": "○", "loading": "◐", "asleep": "◌", "busy": "●", "idle": "●"}
INSTALL = "run on a Mac: pip install 'mlxspec[menubar]'"


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the menu; without a title a separator, without a command only text."""

    title: str = ""
    command: tuple[str, ...] = ()
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Menu:
    title: str
    items: tuple[Item, ...]


def mlxspec(*words: str) -> tuple[str, ...]:
    """The command line of an `mlxspec` command."""
    return (*launchd.PROGRAM, *words)


def in_terminal(*words: str) -> tuple[str, ...]:
    """A command that shows an `mlxspec` command in a Terminal window."""
    text = shlex.join(mlxspec(*words)).replace("\\", "\\\\").replace('"', '\\"')
    script = f'tell application "Terminal" to do script "{text}"'
    return ("osascript", "-e", script, "-e", 'tell application "Terminal" to activate')


SEPARATOR = Item()
DOCTOR = Item("What is wrong", in_terminal("doctor"))


def menu_of(now: Status) -> Menu:
    """The menu for a status."""
    icon = ICONS.get(now.state, "⚠")
    if now.note:
        icon = "⚠"
    if now.running and now.speed:
        icon += f" {now.speed:.0f} tok/s"
    items = [Item(_short(f"{name}: {text}")) for name, text in facts(now).items()]
    at = ("--url", now.url)
    for one in now.models:
        verb = "stop" if one.state == "loaded" else "load"
        title = f"{verb.capitalize()} {one.name}"
        items.append(Item(_short(title), mlxspec(verb, one.name, *at), one.state == "loaded"))
    items += [SEPARATOR, *(item for item, states in ACTIONS if now.service in states)]
    if now.state == "unwell":
        items.append(DOCTOR)
    items.append(SEPARATOR)
    if now.locked or now.state not in DOWN:
        items.append(Item("Open the page", ("open", f"{now.url}/")))
    copy = f'set the clipboard to "{now.url}/v1"'
    items.append(Item("Copy the base URL", ("osascript", "-e", copy)))
    return Menu(icon, tuple(items))


# What can be done with the service, and in which of its states.
ACTIONS = (
    (Item("Install the service", in_terminal("service", "install")), ("not installed",)),
    (Item("Start", mlxspec("service", "start")), ("stopped", "waiting")),
    (Item("Stop", mlxspec("service", "stop")), ("waiting", "running")),
    (Item("Restart", mlxspec("service", "restart")), ("running",)),
    (
        Item("Show the log", in_terminal("service", "logs", "-f")),
        ("stopped", "waiting", "running"),
    ),
)


def error_menu(text: str) -> Menu:
    """For settings that cannot be read."""
    return Menu("⚠", (Item(_short(text)), DOCTOR))


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def show(poll: Callable[[], Menu]) -> None:
    """Show the menu until the user quits. `poll` runs in a thread of its own. Raises UserError."""
    _require_rumps()
    rumps: Any = importlib.import_module("rumps")
    kit: Any = importlib.import_module("AppKit")
    # An accessory: no icon in the Dock.
    kit.NSApplication.sharedApplication().setActivationPolicy_(1)
    app = rumps.App("mlxspec", title="◌", quit_button=None)
    newest = shown = Menu("◌", ())

    def keep_polling() -> None:
        nonlocal newest
        while True:
            newest = poll()
            time.sleep(POLL_S)

    def draw(_: Any) -> None:
        """On the main thread, which alone may use rumps."""
        nonlocal shown
        if newest != shown:
            shown = newest
            app.title = shown.title
            app.menu.clear()
            for key, item in enumerate(shown.items):
                if item.title:
                    node = rumps.MenuItem(f"{key}")  # its first title is a key: must be unique
                    node.title, node.state = item.title, int(item.checked)
                    if item.command:
                        node.set_callback(partial(run, item.command))
                    app.menu.add(node)
                else:
                    app.menu.add(rumps.separator)
            app.menu.add(rumps.MenuItem("Quit", callback=rumps.quit_application))

    threading.Thread(target=keep_polling, name="poll", daemon=True).start()
    rumps.Timer(draw, 1).start()
    app.run()


def run(command: Sequence[str], sender: object) -> None:
    """Start it; what it changes shows in the menu."""
    subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _require_rumps() -> None:
    if not importlib.util.find_spec("rumps"):
        raise UserError(f"the menu bar needs rumps: {INSTALL}")


def install() -> str:
    """Show the menu bar now and after each login. Raises UserError."""
    _require_rumps()
    agent = {
        "Label": launchd.MENUBAR,
        "ProgramArguments": [*launchd.PROGRAM, "menubar"],
        "EnvironmentVariables": launchd.service_variables(os.environ),
        "WorkingDirectory": launchd.package_parent(),
        "RunAtLoad": True,
        "KeepAlive": {"Crashed": True},
        "ProcessType": "Interactive",
        "LimitLoadToSessionType": "Aqua",
    }
    launchd.remove_agent(launchd.MENUBAR)
    launchd.write_agent(plistlib.dumps(agent), launchd.MENUBAR)
    launchd.load_agent(launchd.MENUBAR)
    return "the menu bar shows mlxspec, now and after each login"


def uninstall() -> str:
    removed = launchd.remove_agent(launchd.MENUBAR)
    return "the menu bar is removed" if removed else "the menu bar is not installed"

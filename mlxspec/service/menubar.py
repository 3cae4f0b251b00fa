"""The menu bar: a status makes a menu, which rumps shows or xbar and SwiftBar read as text.

Rule: the menu is a pure function of the status, and each of its actions is a command of the real
CLI. A name that a shell or those programs might read as more than a name is shown and never becomes
part of a command.
"""

import importlib
import importlib.util
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlxspec.service import Hands, job, launchd
from mlxspec.service.status import UP, State, Status, headline, load_of, memory_of, speculation_of
from mlxspec.types import UserError

LABEL = "dev.mlxspec.menubar"
PROGRAM = (sys.executable, "-m", "mlxspec")
PIP = "pip install 'mlxspec[menubar]'; xbar and SwiftBar do without: mlxspec menubar --xbar"
LOOK_S = 2.0
WIDE = 80  # characters of a title
TAME = re.compile(r"[\w@.][\w@.:/+-]*", re.ASCII)
ICONS: dict[State, str] = {
    "not installed": "○",
    "stopped": "○",
    "unwell": "⚠",
    "loading": "◐",
    "short": "⚠",
    "asleep": "◌",
    "busy": "●",
    "idle": "●",
}


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the menu. `words` follow `mlxspec` when it is chosen, `href` is opened instead;
    `terminal`: where its output is read. With neither it is only read; without a title it is a
    rule."""

    title: str = ""
    words: tuple[str, ...] = ()
    href: str = ""
    terminal: bool = False
    checked: bool = False
    items: tuple["Item", ...] = ()


@dataclass(frozen=True, slots=True)
class Menu:
    title: str
    items: tuple[Item, ...]


RULE = Item()
AIMED = frozenset({"load", "stop", "menubar"})  # take --url


def menu_of(now: Status, own: bool = True) -> Menu:
    """What the menu shows of a status, and what can be done about it. Not `own`: of a server that
    commands without --url would not mean."""
    icon = "⚠" if now.note and now.state in UP else ICONS[now.state]
    busy = f" {now.speed:.0f} tok/s" if now.running and now.speed else ""
    facts = [headline(now), now.note and now.note[0].upper() + now.note[1:]]
    if now.version:
        facts += [load_of(now).capitalize(), f"Memory: {memory_of(now)}"]
        facts += [f"Speculation: {speculation_of(now)}"]
    if now.locked:
        facts = ["Unwell: the server asks for an API key", "Put api_key in the settings' file"]
    items = [Item(_cut(fact)) for fact in facts if fact]
    if now.models:
        items += [RULE, Item("Models", items=tuple(_models(now)))]
    items += [RULE, *_actions(now), RULE]
    if now.locked or (now.state in UP and now.service != "waiting"):
        items += [Item("Open the page", href=f"{now.url}/")]
    items += [Item("Copy base URL", ("menubar", "--copy"))]
    if now.service not in ("none", "not installed"):
        items += [Item("Show the log", ("logs", "-f"), terminal=True)]
    at = () if own else ("--url", now.url)
    return Menu(icon + busy, tuple(_aimed(item, at) for item in items))


def _aimed(item: Item, at: tuple[str, ...]) -> Item:
    """With what says which server is meant, where a command takes that."""
    words = (*item.words, *at) if item.words and item.words[0] in AIMED else item.words
    return replace(item, words=words, items=tuple(_aimed(one, at) for one in item.items))


def broken(why: str) -> Menu:
    """Where the settings cannot be read, so that nobody knows which server is meant."""
    return Menu("⚠", (*_told(why), RULE, Item("What is wrong", ("doctor",), terminal=True)))


def _told(text: str) -> Iterator[Item]:
    """In as many lines as it takes."""
    return (Item(_cut(line)) for line in textwrap.wrap(text, WIDE))


def _models(now: Status) -> Iterator[Item]:
    for one in now.models:
        there, tame = one.state == "loaded", TAME.fullmatch(one.name)
        note = " (loading)" if one.state == "loading" else " (failed)" if one.error else ""
        load = ("load", one.name) if tame and one.state == "unloaded" else ()
        yield Item(_cut(one.name + note), load, checked=there)
        if there and tame:
            yield Item(_cut(f"Unload {one.name}"), ("stop", one.name))


def _actions(now: Status) -> list[Item]:
    start = Item("Start", ("service", "start"))
    stop = Item("Stop", ("service", "stop"))
    restart = Item("Restart", ("service", "restart"))
    match now.service:
        case "running":
            return [stop, restart]
        case "waiting":
            return [start, stop]
        case "held":
            return [start, stop, Item("What is wrong", ("doctor",), terminal=True)]
        case "stopped":
            return [start]
    found = [Item("Stop the server", ("stop",))] if now.pid else []
    if now.service == "not installed" and not now.locked:
        found += [Item("Install the service", ("service", "install"), terminal=True)]
    return found or [Item("What is wrong", ("doctor",), terminal=True)]


def _cut(text: str) -> str:
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= WIDE else text[: WIDE - 1] + "…"


def xbar(menu: Menu) -> str:
    """In the text protocol of xbar and SwiftBar: the title, `---`, a line per item with two dashes
    per level, and behind a bar what it does."""
    return "\n".join([_text(menu.title), *_lines(menu.items)]) + "\n"


def _lines(items: tuple[Item, ...], depth: int = 0) -> Iterator[str]:
    if not depth:
        yield "---"
    for item in items:
        if not item.title:
            yield "---"
            continue
        does = [f"href={item.href}"] if item.href else []
        if item.words:
            command = [*PROGRAM, *item.words]
            does += [
                f'shell="{command[0]}"',
                *(f'param{n}="{w}"' for n, w in enumerate(command[1:], 1)),
            ]
            does += [f"terminal={'true' if item.terminal else 'false'}", "refresh=true"]
        if re.search(r":[\w.+-]+:", item.title):  # or it would become a picture
            does += ["emojize=false"]
        title = "✓ " * item.checked + _text(item.title)  # xbar refuses SwiftBar's checked=true
        yield "--" * depth + " | ".join([title, *([" ".join(does)] if does else [])])
        yield from _lines(item.items, depth + 1)


def _text(title: str) -> str:
    return re.sub("^-", "\u2010", title.replace("|", "\u00a6"))  # both mean something there


def show(look: Callable[[], Menu]) -> None:
    """Until it is ended, by rumps. `look` may take its time: it has a thread of its own."""
    try:
        rumps: Any = importlib.import_module("rumps")
        kit: Any = importlib.import_module("AppKit")
    except ImportError as error:
        raise UserError(f"{error}: the menu bar needs a Mac, and rumps: {PIP}") from error
    kit.NSApplication.sharedApplication().setActivationPolicy_(
        1
    )  # an accessory: no icon in the Dock
    app = rumps.App("mlxspec", title="◌", quit_button=None)
    seen: list[Menu] = []  # the newest, from the thread; rumps is for the main one
    shown: list[Menu] = []
    nodes: list[Any] = []
    wrong: list[str] = []

    def watch() -> None:
        while True:
            seen[:] = [look()]
            done.wait(LOOK_S)
            done.clear()

    def act(item: Item) -> Callable[[Any], None]:
        def work() -> None:
            failed = run(item)
            wrong.extend([failed] if failed else [])
            done.set()

        return lambda sender: threading.Thread(target=work, daemon=True).start()

    def draw(timer: Any) -> None:
        if seen and seen != shown:
            app.title = seen[0].title
            if shown and _shape(shown[0].items) == _shape(seen[0].items):
                for node, title in zip(nodes, _titles(seen[0].items), strict=True):
                    node.title = title
            else:  # rumps keeps what was ever made, so this is for what cannot be changed in place
                nodes.clear()
                app.menu.clear()
                _fill(rumps, app.menu, (*seen[0].items, RULE, Item("Quit")), act, nodes)
                nodes.pop().set_callback(rumps.quit_application)
            shown[:] = seen
        while wrong:
            rumps.alert("mlxspec", wrong.pop(0))

    done = threading.Event()
    threading.Thread(target=watch, name="watch", daemon=True).start()
    rumps.Timer(draw, 1).start()
    app.run()


def _fill(
    rumps: Any, menu: Any, items: tuple[Item, ...], act: Callable[[Item], Any], nodes: list[Any]
) -> None:
    """The title is the key in a menu of rumps, so equal ones must not stand side by side."""
    for at, item in enumerate(items):
        if not item.title:
            menu.add(rumps.separator)
            continue
        node = rumps.MenuItem(f"{at}", callback=act(item) if item.words or item.href else None)
        menu.add(node)
        node.title, node.state = item.title, int(item.checked)
        nodes.append(node)
        _fill(rumps, node, item.items, act, nodes)


def _titles(items: tuple[Item, ...]) -> Iterator[str]:
    for item in items:
        yield from [item.title] if item.title else []
        yield from _titles(item.items)


def _shape(items: tuple[Item, ...]) -> tuple[Any, ...]:
    """All but the titles."""
    return tuple(
        (bool(i.title), i.words, i.href, i.terminal, i.checked, _shape(i.items)) for i in items
    )


def run(item: Item) -> str:
    """Do what an item says; what went wrong."""
    command = [*PROGRAM, *item.words]
    if item.href:
        command = ["open", item.href]
    elif item.terminal:
        words = shlex.join(command).replace("\\", "\\\\").replace('"', '\\"')
        command = ["osascript", "-e", f'tell application "Terminal" to do script "{words}"']
        command += ["-e", 'tell application "Terminal" to activate']
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stderr or done.stdout).strip()[-500:] if done.returncode else ""


def copy(url: str) -> None:
    """The base URL that clients want, to the clipboard."""
    try:
        subprocess.run(["pbcopy"], input=f"{url}/v1", text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"pbcopy: {error}; the base URL is {url}/v1") from error


def install(hands: Hands) -> str:
    """The menu bar after each login, by a launch agent of its own. Raises UserError with all taken
    back."""
    _launchd()
    if not importlib.util.find_spec("rumps"):
        raise UserError(f"the menu bar needs rumps: {PIP}")
    kept = {name: os.environ[name] for name in job.KEPT if os.environ.get(name)}
    agent = {
        "Label": LABEL,
        "ProgramArguments": [*PROGRAM, "menubar"],
        "EnvironmentVariables": {"PATH": job.PATH, **kept},
        "RunAtLoad": True,
        "KeepAlive": {"Crashed": True},
        "ProcessType": "Interactive",
        "LimitLoadToSessionType": "Aqua",
    }
    if folder := job.checkout():
        agent["WorkingDirectory"] = folder
    path = launchd.agent(LABEL)
    before = path.read_bytes() if path.exists() else None
    if launchd.loaded(hands, LABEL):
        launchd.unload(hands, LABEL)
    try:
        hands.write(path, plistlib.dumps(agent))
        launchd.load(hands, LABEL)
    except BaseException:
        hands.remove(path) if before is None else hands.write(path, before)
        raise
    return (
        "the menu bar shows mlxspec now, and after each login"
        if not hands.dry
        else "nothing was changed"
    )


def uninstall(hands: Hands) -> str:
    _launchd()
    path, there = launchd.agent(LABEL), launchd.loaded(hands, LABEL)
    if there:
        launchd.unload(hands, LABEL)
    there = path.exists() or there
    hands.remove(path)
    return "nothing of the menu bar is left" if there else "the menu bar is not installed"


def _launchd() -> None:
    if not shutil.which("launchctl"):
        raise UserError("launchctl is not here: only a Mac has a menu bar to be installed in")

"""The menu of each state, its commands against the real command line, and rumps as a fake."""

import plistlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from mlxspec import cli
from mlxspec.service import launchd, menubar
from mlxspec.service.menubar import Item, Menu, menu_of
from mlxspec.service.status import Status
from mlxspec.types import UserError
from tests.service import fake
from tests.service.fake import DOCUMENTED, faults

URL = "http://127.0.0.1:8080"
MODELS = {"org/big": "loaded", "small": "unloaded"}
UP: dict[str, Any] = {"url": URL, "service": "running", "version": "0.2.0"}
UP |= {"models": MODELS, "speed": 41.25, "footprint": 5 << 30}

STATES = {
    "not installed": Status(URL, "stopped", "not installed", "no server"),
    "stopped": Status(URL, "stopped", "stopped", "the service is stopped"),
    "waiting": Status(URL, "asleep", "waiting"),
    "loading": Status(state="loading", **UP),
    "idle": Status(state="idle", **UP),
    "busy": Status(state="busy", running=2, waiting=1, **UP),
    "by hand": Status(state="idle", **UP | {"service": "not installed"}),
    "safe mode": Status(state="idle", note="safe mode: 3 crashes", **UP),
    "unwell": Status(state="unwell", why="no progress for 75 s", **UP),
    "locked": Status(URL, "unwell", "not installed", "the server answered 401"),
    "short": Status(state="short of memory", running=1, **UP),
}
SERVICE = {f"{verb} the service" for verb in ("Start", "Stop", "Restart")}


@pytest.mark.parametrize(
    ("name", "title", "actions"),
    [
        ("not installed", "○", set()),
        ("stopped", "○", {"Start"}),
        ("waiting", "◌", {"Start", "Stop"}),
        ("loading", "◐", {"Stop", "Restart"}),
        ("idle", "●", {"Stop", "Restart"}),
        ("busy", "● 41 tok/s", {"Stop", "Restart"}),
        ("by hand", "●", set()),
        ("safe mode", "⚠", {"Stop", "Restart"}),
        ("unwell", "⚠", {"Stop", "Restart"}),
        ("locked", "⚠", set()),
        ("short", "⚠ 41 tok/s", {"Stop", "Restart"}),
    ],
)
def test_the_menu_of_each_state(name: str, title: str, actions: set[str]) -> None:
    menu = menu_of(STATES[name])
    titles = [item.title for item in menu.items]
    assert menu.title == title
    assert set(titles) & SERVICE == {f"{verb} the service" for verb in actions}
    assert {"Show the log", "Open the page"} < set(titles)
    assert f"server: {URL}" in titles


def test_models_are_loaded_and_unloaded() -> None:
    items = menu_of(STATES["idle"]).items
    assert Item("Stop org/big", menubar.mlxspec("stop", "org/big", "--url", URL)) in items
    assert Item("Load small", menubar.mlxspec("load", "small", "--url", URL)) in items


def parse(words: tuple[str, ...]) -> str:
    """The command that the real command line finds in them."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("mlxspec", list(words))
    while hasattr(command, "resolve_command") and (
        rest := [*context._protected_args, *context.args]
    ):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return str(context.command_path)


def test_the_actions_are_commands() -> None:
    found = set()
    for now in STATES.values():
        for item in menu_of(now).items:
            if item.command[:3] == launchd.PROGRAM:
                found.add(parse(item.command[3:]))
    assert found == {
        "mlxspec load",
        "mlxspec stop",
        *(f"mlxspec service {verb}" for verb in ("start", "stop", "restart")),
    }


def test_long_titles_are_cut() -> None:
    menu = menu_of(Status(URL, "unwell", why="x" * 200))
    assert max(len(item.title) for item in menu.items) == 80


# ---- rumps


class Node(dict[str, Any]):
    """A menu item of rumps, keyed by its first title."""

    made = 0

    def __init__(self, title: str = "", callback: Any = None) -> None:
        super().__init__()
        Node.made += 1
        self.key, self.title, self.callback = title, title, callback

    def add(self, node: Any) -> None:
        self.setdefault(node.key if isinstance(node, Node) else f"rule {len(self)}", node)

    def set_callback(self, callback: Any) -> None:
        self.callback = callback


@pytest.fixture
def rumps(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`app` once it runs; `tick` is what the timer calls."""
    made = SimpleNamespace(separator=object(), MenuItem=Node)

    def app(name: str, title: str, quit_button: None) -> SimpleNamespace:
        made.app = SimpleNamespace(title=title, menu=Node(), run=lambda: None)
        return made.app

    def timer(tick: Callable[[Any], None], seconds: float) -> SimpleNamespace:
        made.tick = lambda: tick(None)
        return SimpleNamespace(start=lambda: None)

    made.App, made.Timer, made.quit_application = app, timer, lambda sender: None
    policy = SimpleNamespace(setActivationPolicy_=lambda policy: None)
    kit = SimpleNamespace(NSApplication=SimpleNamespace(sharedApplication=lambda: policy))
    monkeypatch.setitem(sys.modules, "rumps", made)
    monkeypatch.setitem(sys.modules, "AppKit", kit)
    monkeypatch.setattr(menubar, "POLL_S", 0.001)
    return made


def test_rumps_shows_the_menu(rumps: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    now = menu_of(STATES["idle"])
    polled = threading.Event()

    def poll() -> Menu:
        polled.set()
        return now

    def until(title: str) -> list[str]:
        for _ in range(2000):
            polled.clear()
            assert polled.wait(5)
            rumps.tick()
            if rumps.app.title == title:
                return [n.title for n in rumps.app.menu.values() if isinstance(n, Node)]
        raise AssertionError(rumps.app)

    menubar.show(poll)
    assert until("●") == [item.title for item in now.items if item.title] + ["Quit"]
    now = menu_of(STATES["stopped"])
    assert until("○") == [item.title for item in now.items if item.title] + ["Quit"]
    ran: list[Any] = []
    monkeypatch.setattr(menubar.subprocess, "Popen", lambda words, **_: ran.append(words))
    [start] = [
        one for one in rumps.app.menu.values() if getattr(one, "title", "") == "Start the service"
    ]
    start.callback(start)
    made = Node.made
    for name in ("idle", "busy", "stopped"):
        now = menu_of(STATES[name])
        until(now.title)
    assert Node.made - made <= 1 + max(len(menu_of(each).items) for each in STATES.values())
    made = Node.made
    for name in ("idle", "busy", "stopped"):
        now = menu_of(STATES[name])
        until(now.title)
    assert Node.made == made, "rumps keeps each item for ever"
    assert ran == [menubar.mlxspec("service", "start")]


def test_without_rumps() -> None:
    with pytest.raises(UserError, match="menubar"):
        menubar.show(lambda: Menu("", ()))


def test_install_and_uninstall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_settings: None
) -> None:
    tool = fake.install(tmp_path / "fake", monkeypatch)
    monkeypatch.setitem(sys.modules, "rumps", SimpleNamespace())
    monkeypatch.setenv("MLXSPEC_API_KEY", "secret")
    file = launchd.agent_file(launchd.MENUBAR)
    assert "not installed" in menubar.uninstall()
    for _ in range(2):
        menubar.install()
        agent = plistlib.loads(file.read_bytes())
        assert faults(agent, DOCUMENTED) == [] and agent["Label"] == launchd.MENUBAR
        command = agent["ProgramArguments"]
        assert command == [*launchd.PROGRAM, "menubar"] and b"secret" not in file.read_bytes()
    assert not launchd.agent_file().exists()
    menubar.uninstall()
    assert not (tool.root / "loaded.menubar").exists() and not file.exists()

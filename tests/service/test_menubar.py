"""The menu of each state as xbar reads it, its actions against the real command line, rumps as a
fake."""

import plistlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mlxspec import cli
from mlxspec.service import Hands, launchd, menubar
from mlxspec.service.menubar import Item, Menu, menu_of, xbar
from mlxspec.service.status import Model, Status
from mlxspec.types import UserError
from tests.service import fake

GOLDEN = Path(__file__).parents[1] / "golden" / "menubar"
URL = "http://127.0.0.1:8080"
PROGRAM = ("/opt/mlxspec/bin/python", "-m", "mlxspec")
BIG = Model("mlx-community/Qwen3-4B-4bit", "loaded", 3 << 30, idle=2.0)
SMALL = Model("small", "unloaded", 98_000_000)
UP: dict[str, Any] = {
    "url": URL,
    "service": "running",
    "version": "0.1.0",
    "pid": 42,
    "footprint": 5 << 30,
}
UP |= {"models": (BIG, SMALL), "speed": 41.25, "round": 2.13, "kept": 0.634}
ABSENT = f"no server at {URL}; start one with: mlxspec serve"

STATES = {
    "not-installed": Status(URL, "not installed", "not installed", ABSENT),
    "stopped": Status(URL, "stopped", "stopped", "the service is stopped"),
    "waiting": Status(URL, "asleep", "waiting"),
    "loading": Status(state="loading", loading="small", **UP),
    "asleep": Status(state="asleep", **UP | {"models": (SMALL,), "speed": 0.0, "kept": 0.0}),
    "idle": Status(state="idle", **UP),
    "busy": Status(state="busy", running=2, waiting=1, **UP),
    "by-hand": Status(state="idle", **UP | {"service": "not installed"}),
    "safe-mode": Status(
        state="busy", running=1, note="safe mode, without speculation: 3 crashes in 10 minutes",
        **UP | {"kept": 0.0, "round": 1.0},
    ),
    "unwell": Status(state="unwell", why="the engine has made no progress for 75 s", **UP),
    "locked": Status(URL, "unwell", "not installed", "the server answered 401", locked=True),
    "held": Status(
        URL, "unwell", "held", "the machine panicked (a.panic); `mlxspec service start` starts it"
    ),
    "short": Status(state="short", running=1, pressure=1, **UP),
}  # fmt: skip


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(menubar, "PROGRAM", PROGRAM)


@pytest.mark.parametrize("name", STATES)
def test_golden(name: str) -> None:
    """Where one is to change: write what the failure shows, once it has been read."""
    assert xbar(menu_of(STATES[name])) == (GOLDEN / f"{name}.txt").read_text("utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(STATES)


def every(items: tuple[Item, ...]) -> Iterator[Item]:
    for item in items:
        yield item
        yield from every(item.items)


def parse(words: tuple[str, ...]) -> str:
    """What the real command line makes of them, short of doing it."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("mlxspec", list(words))
    while hasattr(command, "resolve_command") and (
        rest := [*context._protected_args, *context.args]
    ):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return str(context.command_path)


def test_the_actions_are_commands() -> None:
    chosen = {
        item.words for now in STATES.values() for item in every(menu_of(now).items) if item.words
    }
    assert {parse(words) for words in chosen} == {
        *("mlxspec load", "mlxspec stop", "mlxspec menubar", "mlxspec logs", "mlxspec doctor"),
        *(
            "mlxspec service start",
            "mlxspec service stop",
            "mlxspec service restart",
            "mlxspec service install",
        ),
    }
    with pytest.raises(Exception, match="No such"):
        parse(("service", "sing"))


def read_back(line: str) -> tuple[str, dict[str, str]]:
    """A line as xbar takes it apart: it refuses a parameter that it does not know."""
    title, _, rest = line.partition("|")
    found, left = {}, rest.strip()
    while left:
        key, _, left = left.partition("=")
        end = '"' if left.startswith('"') else " "
        value, _, left = left.removeprefix('"').partition(end)
        assert re.fullmatch(r"href|shell|param\d+|terminal|refresh|emojize", key), line
        found[key], left = value, left.strip()
    return title.strip(), found


@pytest.mark.parametrize("name", STATES)
def test_what_xbar_runs_is_what_the_menu_says(name: str) -> None:
    menu = menu_of(STATES[name])
    lines = xbar(menu).splitlines()
    assert lines[:2] == [menu.title, "---"] and len(lines) == 2 + len(list(every(menu.items)))
    for line, item in zip(lines[2:], every(menu.items), strict=True):
        title, does = read_back(line)
        assert title.lstrip("-✓ ") == item.title
        words = [does[key] for key in ("shell", *(f"param{n}" for n in range(1, 9))) if key in does]
        assert (
            words == ([*PROGRAM, *item.words] if item.words else [])
            and does.get("href", "") == item.href
        )
        assert does.get("terminal") == (str(item.terminal).lower() if item.words else None)


@pytest.mark.parametrize(
    "name", ["a b", "a|b", "a'b", "$(x)", "-x", "--x", "a;b", 'a"b', "a\nb", "~/m", "", "é"]
)
def test_a_wild_name_is_shown_and_never_run(name: str) -> None:
    for state in ("loaded", "unloaded"):
        menu = menu_of(Status(state="idle", **UP | {"models": (Model(name, state, 1),)}))  # type: ignore[arg-type]
        assert not any(
            item.words and item.words[0] in ("load", "stop") for item in every(menu.items)
        )
        [line] = [
            line for line in xbar(menu).splitlines() if line.startswith("--") and line != "---"
        ] or [""]
        assert not name or (read_back(line)[1] == {} and not line.startswith("---"))


def test_actions_say_which_server_they_mean() -> None:
    """Where it is not the one that they would find by themselves."""
    for now in STATES.values():
        plain, aimed = every(menu_of(now).items), every(menu_of(now, own=False).items)
        for item, other in zip(plain, aimed, strict=True):
            at = ("--url", URL) if item.words[:1] in {("load",), ("stop",), ("menubar",)} else ()
            assert other.words == item.words + at
            assert not other.words or parse(other.words)


def test_titles_stay_short_and_draw_nothing() -> None:
    menu = menu_of(Status(URL, "unwell", "held", "it is :smile: " + "x" * 200))
    line = xbar(menu).splitlines()[2]
    assert len(menu.items[0].title) == 80 and line.endswith("… | emojize=false")


# ---- rumps
# ----------------------------------------------------------------------------------------------


class Node(dict[str, Any]):
    """A MenuItem or menu of rumps: equal titles are one key, and what was made stays."""

    made = 0

    def __init__(self, title: str = "", callback: Any = None) -> None:
        super().__init__()
        self.title, self.callback, self.state = title, callback, 0
        Node.made += 1

    def add(self, node: Any) -> None:
        self.setdefault(node.title if isinstance(node, Node) else f"rule {len(self)}", node)

    def set_callback(self, callback: Any) -> None:
        self.callback = callback


@pytest.fixture
def rumps(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`app` once it runs; `tick` is what the timer calls."""
    made = SimpleNamespace(separator=object(), MenuItem=Node, running=threading.Event(), alerts=[])

    def app(name: str, title: str, quit_button: None) -> SimpleNamespace:
        made.app = SimpleNamespace(title=title, menu=Node(), run=made.running.set)
        return made.app

    def timer(tick: Callable[[Any], None], seconds: float) -> SimpleNamespace:
        made.tick = lambda: tick(None)
        return SimpleNamespace(start=lambda: None)

    made.App, made.Timer, made.quit_application = app, timer, lambda sender: None
    made.alert = lambda title, text: made.alerts.append(text)
    kit = SimpleNamespace(
        sharedApplication=lambda: SimpleNamespace(setActivationPolicy_=lambda policy: None)
    )
    monkeypatch.setitem(sys.modules, "rumps", made)
    monkeypatch.setitem(sys.modules, "AppKit", SimpleNamespace(NSApplication=kit))
    monkeypatch.setattr(menubar, "LOOK_S", 0.001)
    return made


def titles(node: Node) -> list[str]:
    return [t for one in node.values() if isinstance(one, Node) for t in (one.title, *titles(one))]


def test_rumps_shows_the_same_menu_and_follows(
    rumps: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    now: list[Menu] = [menu_of(STATES["idle"])]
    looked = threading.Event()

    def look() -> Menu:
        looked.set()
        return now[0]

    def until(seen: Callable[[], bool]) -> None:
        for _ in range(2000):
            looked.clear()
            assert looked.wait(5)
            rumps.tick()
            if seen():
                return
        raise AssertionError(rumps.app)

    menubar.show(look)
    until(lambda: rumps.app.title == "●")
    assert titles(rumps.app.menu) == [i.title for i in every(now[0].items) if i.title] + ["Quit"]
    made, now[0] = Node.made, menu_of(STATES["busy"])
    until(lambda: rumps.app.title == "● 41 tok/s")
    assert "41.2 tokens/s, 2 running, 1 waiting" in titles(rumps.app.menu) and Node.made == made
    now[0] = menu_of(STATES["stopped"])
    until(lambda: rumps.app.title == "○")
    assert titles(rumps.app.menu) == [i.title for i in every(now[0].items) if i.title] + ["Quit"]
    ran: list[list[str]] = []
    wrong = subprocess.CompletedProcess([], 2, "", "error: no\n")
    monkeypatch.setattr(menubar.subprocess, "run", lambda words, **kw: ran.append(words) or wrong)
    [start] = [one for one in rumps.app.menu.values() if getattr(one, "title", "") == "Start"]
    start.callback(start)
    until(lambda: rumps.alerts == ["error: no"])
    assert ran == [[*PROGRAM, "service", "start"]]


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9"])
def test_the_command_shows_the_server_that_is_meant(
    url: str, bare_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Callable[[], Menu]] = []
    asked: list[str] = []
    look = "mlxspec.service.status.look"
    monkeypatch.setattr(look, lambda at, key, over: asked.append(at) or STATES["idle"])
    monkeypatch.setattr(menubar, "show", shown.append)
    assert CliRunner().invoke(cli.app, ["menubar", *["--url", url][: 2 * bool(url)]]).exit_code == 0
    assert any("--url" in item.words for item in every(shown[0]().items)) == bool(url)
    assert asked == [url or URL] and len(shown) == 1


def test_without_rumps_it_says_so() -> None:
    with pytest.raises(UserError, match=r"mlxspec\[menubar\]"):
        menubar.show(lambda: Menu("", ()))


# ---- its launch agent
# -----------------------------------------------------------------------------------


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_settings: None) -> fake.Fake:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(launchd, "LOOK_S", 0.001)
    monkeypatch.setattr(menubar.importlib.util, "find_spec", lambda name: object())
    return fake.install("launchctl", tmp_path / "fake", monkeypatch)


def test_install_and_uninstall(mac: fake.Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_API_KEY", "secret")
    agent = launchd.agent("dev.mlxspec.menubar")
    assert menubar.uninstall(Hands()) == "the menu bar is not installed" and not mac.calls()
    menubar.install(Hands(dry=True, say=lambda text: None))
    assert not agent.exists() and not mac.calls()
    for _ in range(2):
        menubar.install(Hands())
        assert mac.loaded and plistlib.loads(agent.read_bytes())["ProgramArguments"] == [
            *PROGRAM,
            "menubar",
        ]
        assert b"secret" not in agent.read_bytes()
    assert not launchd.paths()[0].exists()  # the service's own is another
    menubar.uninstall(Hands())
    assert not mac.loaded and not agent.exists()


def test_an_install_that_fails_leaves_nothing(mac: fake.Fake) -> None:
    mac.fail("bootstrap")
    with pytest.raises(UserError, match="bootstrap"):
        menubar.install(Hands())
    assert not launchd.agent("dev.mlxspec.menubar").exists() and not mac.loaded

"""The page in a real browser, on the real engine with a tiny model: headless Chromium through
Playwright."""

import json
import os
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from mlxspec.types import ModelInfo
from tests.support import tiny
from tests.support.drafters import attach
from tests.support.live import live
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
NAME = '<b onclick="alert(1)">tiny</b>'  # a model's name is text, whatever it looks like


@pytest.fixture(scope="module")
def no_browser(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Skips, and says so past pytest's capture: a quiet run would hide it."""

    def skip(reason: str) -> None:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nthe page was not tried in a browser: {reason}", flush=True)
        pytest.skip(reason)

    return skip


@pytest.fixture(scope="module")
def chromium(no_browser: Callable[[str], None]) -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        no_browser("playwright is not installed")
    named = os.environ.get("CHROMIUM", "")
    found = (
        named
        or next(filter(None, map(shutil.which, NAMES)), "")
        or (MAC if Path(MAC).exists() else "")
    )
    if not found:
        no_browser(f"no Chromium: $CHROMIUM is empty, and PATH has none of {', '.join(NAMES)}")
    with sync_playwright() as started:
        # No sandbox: root in a container has none, and the page comes from this test.
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Slow:
    """Seconds added to each step, so that a test sees an answer under way."""

    pause: float = 0.0

    def __call__(self, event: str, step: int) -> None:
        time.sleep(self.pause * (event == "submit"))


SLOW = Slow()


@contextmanager
def serving(path: Path, config: Config) -> Iterator[str]:
    """A tiny model with copied drafts, greedy where a request says nothing: a run is like the
    next."""
    save_tokenizer(path)
    (path / "generation_config.json").write_text('{"do_sample": false}')

    def start() -> Any:
        engine = tiny.engine(
            tiny.model("llama"), blocks=256, budget=64, context=512, vocab=tiny.VOCAB, trace=SLOW
        )
        attach(engine, "lookup")
        return engine, ModelInfo(NAME, 512, tiny.VOCAB, "rows", 8, 1 << 20, 1 << 20, 1_700_000_000)

    worker = EngineThread(tiny.manager(start), max_sequences=4, max_queue=64)
    worker.launch()
    try:
        with live(create_app(worker, load_tokenizer(path), path, config)) as base:
            yield base
    finally:
        worker.stop()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("model"), Config()) as url:
        yield url


@contextmanager
def opened(
    chromium: Any, url: str, width: int = 1280, scheme: str = "light", **kw: Any
) -> Iterator[Any]:
    """A page that complains of nothing and asks nobody but the server. `allowed`: parts of
    complaints that are looked for."""
    allowed = kw.pop("allowed", ())
    height = 900 if width > 500 else 812
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, **kw
    )
    said, asked = list[str](), list[str]()
    page = context.new_page()
    page.on("console", lambda m: said.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda e: said.append(f"uncaught: {e}"))
    page.on("dialog", lambda d: said.append(f"dialog: {d.message}"))
    page.on("request", lambda r: asked.append(r.url))
    try:
        page.goto(url)
        yield page
        assert [line for line in said if not any(part in line for part in allowed)] == []
        own = url.partition("/#")[0]
        assert asked and all(one.startswith(f"{own}/") for one in asked), asked
    finally:
        context.close()


def until(page: Any, what: str, seconds: float = 30) -> None:
    """Waits until an expression is true. Playwright's own way needs eval, which the page's policy
    forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(what):
        assert time.monotonic() < end, f"{what}\n{page.inner_text('body')}"
        page.wait_for_timeout(50)


def until_live(page: Any) -> None:
    until(page, "document.body.dataset.link === 'live'")


@contextmanager
def load(base: str, clients: int = 2, tokens: int = 300) -> Iterator[None]:
    """Clients that ask for long answers until the block ends."""
    ends = threading.Event()

    def ask(n: int) -> None:
        for turn in range(1000):
            content = "the user sent the world a system " * 3 + str(n + turn % 3)
            body = {
                "messages": [{"role": "user", "content": content}],
                "max_tokens": tokens,
                "ignore_eos": True,
            }
            sent = urllib.request.Request(
                f"{base}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(sent, timeout=60) as answer:
                answer.read()
            if ends.is_set():
                return

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join(60)


LINES = "[...document.querySelectorAll('.chart .line.s0')].map(line => line.getAttribute('d'))"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_figures_move_under_load(
    chromium: Any, base: str, tmp_path: Path, width: int, scheme: str
) -> None:
    with opened(chromium, f"{base}/#server", width, scheme) as page, load(base):
        until_live(page)
        until(page, "parseFloat(document.getElementById('g-rate').textContent) > 0")
        until(page, "document.querySelectorAll('#requests tbody tr').length > 2")
        until(page, "document.querySelectorAll('#requests .meter').length > 2")
        until(page, "document.querySelectorAll('#accept .heat').length > 0")
        before = page.evaluate(LINES)
        until(page, f"{LINES}.every((line, n) => line && line !== {json.dumps(before)}[n])")
        assert page.locator("#serving").inner_text() == NAME  # as text: no element came of it
        assert page.locator("main b[onclick], header b").count() == 0
        page.locator("#details summary").click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "it scrolls sideways"
        )
        dark = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 80"
        )
        assert dark == (scheme == "dark")
        assert page.locator("#kernels").inner_text().startswith("None verified on this machine")
        shot = tmp_path / f"{width}-{scheme}.png"
        page.screenshot(path=shot, full_page=True)
        assert shot.stat().st_size > 20_000


def test_the_chat_by_keyboard(chromium: Any, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tab goes through the page as it is read; Enter sends, Escape and Stop end an answer."""
    monkeypatch.setattr(SLOW, "pause", 0.1)
    with opened(chromium, base) as page:
        until_live(page)
        order = []
        for _ in range(11):
            page.keyboard.press("Tab")
            order.append(
                page.evaluate(
                    "(({ id, className, hash }) => id || className || hash)(document.activeElement)"
                )
            )
        first = ["skip", "#chat", "#server", "#models", "talks-open", "model", "tune-open", "new"]
        assert order == [*first, "log", "say", "send"]
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring == "solid"
        page.keyboard.press("Shift+Tab")
        page.keyboard.type("hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("<b>the world</b>")
        page.keyboard.press("Enter")
        assert page.locator("#say").input_value() == ""
        until(page, "document.querySelector('.turn.assistant .body')?.textContent.length > 5")
        first = page.evaluate("document.querySelector('.turn.assistant .body').textContent")
        until(page, f"document.querySelector('.assistant .body').textContent.length > {len(first)}")
        page.keyboard.press("Escape")
        until(page, "!document.querySelector('.coming')")
        assert page.locator(".turn.user .body").inner_text() == "hello\n<b>the world</b>"
        assert page.locator(".turn.assistant .note").inner_text() == "stopped"
        assert page.evaluate("document.activeElement.id") == "say"
        page.keyboard.type("again")
        page.keyboard.press("Enter")
        page.locator("#stop").click()
        until(page, "document.getElementById('stop').hidden")
        until(page, "document.querySelectorAll('#requests .end-gone').length >= 1")
        page.locator("#new").click()
        assert page.locator(".turn").count() == 0


@pytest.mark.parametrize("width", [1280, 375])
def test_how_much_of_a_prompt_was_read(
    chromium: Any, base: str, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Below the question in the chat, and in the list of requests."""
    monkeypatch.setattr(SLOW, "pause", 0.7)
    with opened(chromium, base, width) as page:
        until_live(page)
        page.locator("#say").fill(f"{width} " * 90)
        page.keyboard.press("Enter")
        until(
            page,
            "/^\\d+ of \\d+ prompt tokens read$/.test(document.querySelector('.waits')?.textContent)",
        )
        page.locator("nav a[href='#server']").click()
        until(page, "/^reading \\d+\\s*%$/.test(document.querySelector('.end-live')?.textContent)")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("nav a[href='#chat']").click()
        until(page, "document.body.dataset.view === 'chat'")
        page.locator("#say").press("Escape")
        until(page, "!document.querySelector('.coming')")


def test_a_refused_message_stays_in_the_field(chromium: Any, base: str) -> None:
    with opened(chromium, base, allowed=["status of 400"]) as page:
        until_live(page)
        page.locator("#say").fill("hello " * 900)  # the window is 512
        page.locator("#say").press("Enter")
        page.wait_for_selector(".turn.error")
        assert "prompt is too long" in page.locator(".turn.error").inner_text()
        assert page.locator("#say").input_value().startswith("hello hello")
        assert page.locator(".turn").count() == 1
        page.locator(".turn.error").get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0


def test_the_key_is_asked_for_once_per_tab(chromium: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        base = stack.enter_context(serving(tmp_path, Config(api_key="sesame")))
        page = stack.enter_context(opened(chromium, base, 375, allowed=["status of 401"]))
        page.wait_for_selector("#key:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "key-field"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('key-note').textContent.includes('refused')")
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        until_live(page)
        page.locator("#say").fill("hello")
        page.locator("#say").press("Enter")
        until(page, "document.querySelector('.assistant') && !document.querySelector('.coming')")
        page.reload()
        until_live(page)
        assert page.locator("#key").is_hidden()
        assert page.evaluate("[document.cookie, ...Object.keys(localStorage)]") == [
            "",
            "mlxspec-chats",
        ]
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_lost_connection_is_shown(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tab's title, in the list of requests, and in the chat, in words of this page's."""
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        base = server.enter_context(serving(tmp_path, Config()))
        page = stack.enter_context(
            opened(chromium, base, allowed=["ERR_CONNECTION", "ERR_INCOMPLETE"])
        )
        until_live(page)
        monkeypatch.setattr(SLOW, "pause", 0.2)
        page.locator("#say").fill("hello")
        page.keyboard.press("Enter")
        until(page, "document.title.includes('tokens/s')")
        began = time.monotonic()
        server.close()
        until(page, "document.body.dataset.link === 'off'")
        assert "trying again" in page.locator("#link").inner_text()
        assert time.monotonic() - began < 15
        assert page.title() == "offline · mlxspec"
        assert page.locator("#requests tbody tr").first.inner_text().endswith("not known")
        assert page.locator("#g-rate").inner_text() == "\u2013"
        until(page, "!document.querySelector('.coming')")
        page.locator("#say").fill("again")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('.turn.error')")
        said = page.locator("#log").inner_text()
        assert "no connection to the server" in said and "fetch" not in said


def test_gauges_agree_with_metrics(chromium: Any, base: str) -> None:
    with opened(chromium, base) as page:
        with load(base):
            until(page, "parseFloat(document.getElementById('g-rate').textContent) > 0")
        until(page, "document.getElementById('g-rate').textContent === '0.0'")
        with urllib.request.urlopen(f"{base}/metrics") as answer:
            lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
        total = {
            name.partition("{")[0]: float(value)
            for name, _, value in lines
            if name.startswith("mlxspec")
        }
        said = page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('#gauges dd')].map(d => [d.id, d.innerText]))"
        )
        number = [
            int(n.replace(",", ""))
            for n in re.findall(r"[\d,]+", said["g-rate-sub"] + said["g-hits-sub"])
        ]
        cached = total["mlxspec_cached_tokens_total"]
        assert number == [
            total["mlxspec_generated_tokens_total"],
            cached,
            cached + total["mlxspec_prompt_tokens_total"],
        ]
        assert total["mlxspec_generated_tokens_total"] >= total["mlxspec_rounds_total"]
        page.locator("#details summary").click()
        held = page.evaluate(
            "[...document.querySelectorAll('#blocks b')].map(b => +b.innerText.replace(',', ''))"
        )
        assert sum(held) == 255


# ---- snapshots of our making
# ------------------------------------------------------------------------------


FEED = """
const real = window.fetch;
window.fetch = async (url, options) => {
  if (url !== "/page/now") return real(url, options);
  return feed.length ? Response.json(feed.shift()) : new Promise(() => {});
};
"""


@contextmanager
def fed(chromium: Any, base: str, feed: list[dict[str, Any]], **kw: Any) -> Iterator[Any]:
    """A page that gets these snapshots, then none. Each says what differs from a real one."""
    with urllib.request.urlopen(f"{base.partition('/#')[0]}/page/now") as answer:
        real = json.load(answer)

    made = json.dumps([real | change for change in feed])
    with opened(chromium, base, **kw) as page:
        page.add_init_script(f"const feed = {made};" + FEED)
        page.reload()
        yield page


def test_no_cell_is_cut_on_a_narrow_screen(chromium: Any, base: str) -> None:
    row = {
        "model": "m",
        "prompt": 123_456,
        "cached": 120_000,
        "generated": 12_345,
        "rounds": 4000,
        "drafted": 9000,
    }
    row |= {
        "kept": 8345,
        "first": 99.5,
        "seconds": 1234.5,
        "rate": 123.4,
        "outcome": "tool_calls",
    }
    rows = [row | {"id": f"chatcmpl-{n:024x}"} for n in range(3)]
    rows.insert(0, rows[0] | {"id": "chatcmpl-x", "outcome": "", "first": 0.0, "read": 120_000})
    name = "paged_attention float32 9/3x64 block 32"
    kernel: dict[str, Any] = {
        "variant": "tall",
        "least": 2,
        "most": 8,
    }
    kernel |= {
        "gains": {n: 1.234 for n in (2, 4, 8, 16, 32)},
        "reason": "no Metal here, and a long reason why",
    }
    feed = [{"requests": rows, "kernels": {name: kernel}}]
    with fed(chromium, f"{base}/#server", feed, width=375) as page:
        page.locator("#details summary").click()
        until(page, "document.querySelectorAll('#requests tbody tr').length === 4")
        boxes = "[...document.querySelectorAll('#server .scroll')].map(e => e.scrollWidth - e.clientWidth)"
        assert page.evaluate(boxes) == [0, 0, 0]
        text = page.locator("#requests").inner_text()
        assert "reading" in text and "97 %" in text.split("tool_calls")[0]

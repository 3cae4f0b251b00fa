"""The page's chat in a real browser: Markdown, conversations, what can be done with an answer."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from tests.server.test_page_browser import SLOW, opened, serving, until, until_live
from tests.server.test_page_browser import chromium as chromium
from tests.server.test_page_browser import no_browser as no_browser
from tests.support.live import live
from tests.support.scripted import INFO, Scripted
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

pytestmark = pytest.mark.slow

DONE = "document.querySelector('.assistant') && !document.querySelector('.coming')"
MARKDOWN = """# Title

Some **bold**, *em*, ~~old~~, `code`, [a link](https://example.org/a?b=1&c=2) &amp; &#169;.
A second line.

1. one
2. two
   - inner

- [x] done

```python
def f(): pass
```

> quoted

| a | b |
|:--|--:|
| 1 | 2 |

[1]: https://example.org/one
See [this][1].
"""
ATTACKS = """<script>alert(1)</script>
<img src=x onerror=alert(1)> <svg onload=alert(1)></svg> <iframe src="javascript:alert(1)"></iframe>

<div style="position:fixed;inset:0">over all</div>

[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>alert(1)</script>)
[d](  javascript:alert(1)) [e](vbscript:x) [f](//evil.example) [g](/v1/models/unload) [h](#models)
[i]( java\nscript:alert(1)) [j](&#106;avascript:alert(1)) <javascript:alert(1)>
![k](https://evil.example/track.png "t") ![l](data:image/png;base64,AAAA) ![m](javascript:alert(1))
[n](https://example.org/" onclick="alert(1)) [o](https://user:pw@example.org)

`<b>code</b>` **<b>bold</b>** <!-- comment --> <b onclick=alert(1)>b</b> &lt;b&gt;

```"><script>alert(1)</script>
</code></pre><script>alert(1)</script>
```

| <b>h</b> |
|---|
| <img src=x onerror=alert(1)> |

[p]: javascript:alert(1)
[p] [q][p] <https://example.org/<b>>
"""
ALLOWED = "P H3 H4 H5 H6 UL OL LI BLOCKQUOTE PRE CODE DIV SPAN BUTTON TABLE THEAD TBODY TR TH TD A BR HR STRONG EM DEL INPUT"
# An answer in pieces of this many characters: its HTML, and the characters parsed for each of its own.
WRITE = """async ([text, size]) => {
  const { Writer, work } = await import("/page/markdown.js");
  const box = document.createElement("div"), writer = new Writer(box), before = work.parsed;
  for (let at = 0; at < text.length; at += size) {
    writer.add(text.slice(at, at + size));
    cancelAnimationFrame(writer.frame); // as if the browser drew after each piece
    writer.draw(false);
  }
  writer.end();
  for (const tail of box.querySelectorAll(".tail")) tail.replaceWith(...tail.childNodes);
  return { html: box.innerHTML, text: box.textContent, share: (work.parsed - before) / text.length };
}"""


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    path = save_tokenizer(tmp_path_factory.mktemp("agent"), template=AGENT, extra=THINK + CALLS)
    engine = Scripted(load_tokenizer(path), info=replace(INFO, context=8192))
    engine.path = path  # type: ignore[attr-defined]
    return engine


@pytest.fixture
def base(player: Scripted) -> Iterator[str]:
    path: Path = player.path  # type: ignore[attr-defined]
    player.says, player.submitted = ("hello world",), []
    with live(create_app(player, player.tokenizer, path, Config())) as url:  # type: ignore[arg-type]
        yield url


def say(page: Any, text: str, answers: int = 1) -> None:
    page.locator("#say").fill(text)
    page.locator("#say").press("Enter")
    ended = f"document.querySelectorAll('.assistant:not(.coming)').length === {answers}"
    until(page, f"{ended} && !document.querySelector('.coming')")


def prompt(player: Scripted) -> str:
    return str(player.tokenizer.decode(player.submitted[-1].prompt))


def test_markdown_becomes_elements(chromium: Any, base: str, player: Scripted) -> None:
    player.says = (MARKDOWN,)
    with opened(chromium, base) as page:
        until_live(page)
        say(page, "hello")
        body = page.locator(".assistant .body")
        for what, text in {
            "h3": "Title",
            "strong": "bold",
            "em": "em",
            "del": "old",
            "p > code": "code",
            "ol > li ul > li": "inner",
            ".code pre code": "def f(): pass",
            ".code-head span": "python",
            "blockquote p": "quoted",
            "td.to-right": "2",
        }.items():
            assert body.locator(what).first.inner_text() == text, what
        links = body.locator("a")
        assert [link.get_attribute("href") for link in links.all()] == [
            "https://example.org/a?b=1&c=2",
            "https://example.org/one",
        ]
        assert {link.get_attribute("rel") for link in links.all()} == {
            "noopener noreferrer nofollow"
        }
        assert "& ©." in body.locator("p").first.inner_text()
        assert body.locator("input[type=checkbox][disabled][checked]").count() == 1


def test_an_answer_is_never_markup(chromium: Any, base: str, player: Scripted) -> None:
    """Neither the elements that it names, nor attributes, nor links to what is not the web."""
    player.says = (ATTACKS,)
    with opened(chromium, base) as page:
        until_live(page)
        say(page, ATTACKS)
        tags = "[...document.querySelectorAll('.assistant .body *')].map((e) => e.tagName)"
        assert {*page.evaluate(tags)} <= {*ALLOWED.split()}
        names = "[...document.querySelectorAll('.assistant .body *')].flatMap((e) => e.getAttributeNames())"
        allowed = "class href title target rel type aria-label tabindex role disabled checked start"
        assert {*page.evaluate(names)} <= {*allowed.split()}
        links = page.evaluate(
            "[...document.querySelectorAll('.assistant .body a')].map((a) => a.href)"
        )
        assert links and all(link.startswith(("https://", "mailto:")) for link in links)
        assert "https://evil.example/track.png" in links  # as a link: it was not loaded
        said = page.locator(".assistant .body").inner_text()
        for text in ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<b>code</b>"):
            assert text in said
        assert page.locator(".user .body *").count() == 0
        assert page.locator(".user .body").inner_text() == ATTACKS.strip()


DEEP = (
    "> " * 4000 + "x",
    "*" * 9000 + "x",
    "[" * 5000,
    "- " * 3000 + "x",
    "`" * 5000 + "a",
    "**__a" * 4000,
)


@pytest.mark.parametrize("text", [*DEEP, MARKDOWN, ATTACKS, "x\r\n\r\ny\r\n"])
def test_an_answer_in_pieces_looks_as_a_whole_one(chromium: Any, base: str, text: str) -> None:
    with opened(chromium, base) as page:
        began = time.monotonic()
        whole = page.evaluate(WRITE, [text, len(text)])
        assert time.monotonic() - began < 6  # marked alone takes longer for the last of DEEP
        for size in (1, 7, 64) if len(text) < 2000 else (500,):
            pieces = page.evaluate(WRITE, [text, size])
            assert pieces["text"] == whole["text"]
            if text not in DEEP:
                assert pieces["html"] == whole["html"], size
        assert page.evaluate("document.body.isConnected")


@pytest.mark.parametrize(
    "text",
    [
        "A paragraph of some words, with `code` in it.\n\n" * 1000,
        "```python\n" + "value = compute(value)\n" * 2200 + "```\n",
        "- an item of a long list\n" * 2000,
        "word " * 10_000,
    ],
    ids=["paragraphs", "code", "list", "words"],
)
def test_a_long_answer_is_not_parsed_at_each_piece(chromium: Any, base: str, text: str) -> None:
    """Some 50 KB in pieces of a token's length: at each it would be 6,000 times its length."""
    with opened(chromium, base) as page:
        found = page.evaluate(WRITE, [text, 4])
        assert found["share"] < 40, found["share"]


def test_the_log_follows_bursts_and_stays_where_the_user_scrolled(
    chromium: Any, base: str, player: Scripted
) -> None:
    player.says = ("\n\n".join(f"Line {n}" for n in range(60)),)
    grow = """async () => {
      const { AnswerTurn, keepPlace } = await import("/page/turns.js");
      const log = document.getElementById("log"), before = log.scrollTop;
      let view;
      keepPlace(() => (view = new AnswerTurn(() => {})));
      for (let n = 0; n < 5; n++) {
        view.add("A burst of lines.\\n\\n".repeat(12));
        await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
      }
      view.end("");
      return [log.scrollTop - before, log.scrollHeight - log.scrollTop - log.clientHeight];
    }"""
    with opened(chromium, base) as page:
        until_live(page)
        say(page, "hello")
        assert page.evaluate("document.getElementById('log').scrollTop") > 500
        moved, left = page.evaluate(grow)
        assert moved > 500 and left < 2
        page.set_viewport_size({"width": 1100, "height": 500})  # the lines take more room, or less
        page.wait_for_timeout(200)
        page.set_viewport_size({"width": 1280, "height": 900})
        log = "document.getElementById('log')"
        until(page, f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight < 2")
        page.evaluate("document.getElementById('log').scrollTop -= 200")
        moved, left = page.evaluate(grow)
        assert moved == 0 and left > 500


def test_what_is_said_of_an_answer(chromium: Any, base: str, player: Scripted) -> None:
    player.says = ("<think>\nI look at it.\n</think>\n\nThe answer is **four**.",)
    with opened(chromium, base) as page:
        until_live(page)
        say(page, "hello")
        note = page.locator(".assistant .note").inner_text()
        assert " tokens · " in note and " · complete · " in note
        fold = page.locator(".assistant details.thought")
        assert fold.get_attribute("open") is None and "Reasoning" in fold.inner_text()
        assert "I look" not in page.locator(".assistant").inner_text()
        fold.locator("summary").click()
        assert "I look at it." in fold.inner_text()
        assert "The answer is four." == page.locator(".assistant .body").inner_text()
        assert " of 8,192 tokens" in page.locator("#context").inner_text()
        page.locator("#tune-open").click()
        page.locator("#max-tokens").fill("3")
        say(page, "again", 2)
        assert "cut at the limit of tokens" in page.locator(".assistant .note").last.inner_text()


def test_a_full_context_is_told_with_the_way_out(
    chromium: Any, base: str, player: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "info", replace(player.info, context=64))
    player.says = ("hello world " * 40,)
    with opened(chromium, base, allowed=["status of 400"]) as page:
        until_live(page)
        say(page, "hello")
        assert "cut: the context is full" in page.locator(".assistant .note").inner_text()
        error = page.locator(".turn.error")
        assert "context is full" in error.inner_text()
        assert page.locator("#context-bar").get_attribute("aria-valuenow") == "100"
        error.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0 and page.locator("#context").is_hidden()


def test_copy(chromium: Any, base: str, player: Scripted) -> None:
    player.says = (MARKDOWN,)
    allowed = {"permissions": ["clipboard-read", "clipboard-write"]}
    with opened(chromium, base, **allowed) as page:
        until_live(page)
        say(page, "hello")
        read = "navigator.clipboard.readText()"
        page.get_by_role("button", name="Copy this code").click()
        until(page, "document.querySelector('.copy-code').textContent === 'Copied'")
        assert page.evaluate(read) == "def f(): pass"
        page.locator(".assistant").get_by_role("button", name="Copy this message").click()
        until(page, "document.querySelector('.assistant .copy').textContent === 'Copied'")
        assert page.evaluate(read) == MARKDOWN


def test_regenerate_and_edit(chromium: Any, base: str, player: Scripted) -> None:
    with opened(chromium, base) as page:
        until_live(page)
        say(page, "hello")
        say(page, "the user", 2)
        assert page.get_by_role("button", name="Regenerate").count() == 1  # of the last one
        before, player.says = prompt(player), ("another",)
        page.get_by_role("button", name="Regenerate").click()
        until(page, f"{DONE} && document.body.innerText.includes('another')")
        assert prompt(player) == before and page.locator(".turn").count() == 4
        page.locator(".user").first.hover()
        page.get_by_role("button", name="Edit this message").first.click()
        assert page.locator("#say").input_value() == "hello"
        assert page.evaluate("document.activeElement.id") == "say"
        page.keyboard.press("Escape")
        assert page.locator("#say").input_value() == "" and page.locator(".turn").count() == 4
        page.get_by_role("button", name="Edit this message").first.click()
        say(page, "the world", 1)
        assert page.locator(".turn").count() == 2
        assert "the world" in prompt(player) and "the user" not in prompt(player)


def test_enter_during_an_answer_sends_when_it_has_ended(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SLOW, "pause", 0.05)
    with serving(tmp_path, Config()) as base, opened(chromium, base) as page:
        until_live(page)
        page.locator("#tune-open").click()
        page.locator("#max-tokens").fill("40")
        page.locator("#say").fill("hello")
        page.locator("#say").press("Enter")
        until(page, "document.querySelector('.coming')")
        page.keyboard.type("the world")
        page.keyboard.press("Enter")
        assert "when this answer has ended" in page.locator("#chat-note").inner_text()
        assert page.locator("#say").input_value() == "the world"
        until(page, "document.querySelectorAll('.turn.user').length === 2")
        until(page, "document.querySelectorAll('.assistant:not(.coming)').length === 2")
        assert page.locator("#say").input_value() == ""
        assert page.locator("#chat-note").inner_text() == ""
        said = (
            r"\d+ tokens · \d+\.\d tokens/s · (complete|cut at the limit of tokens) · first after "
        )
        assert all(re.match(said, note) for note in page.locator(".note").all_inner_texts())
        page.locator("#say").fill("a system")
        page.locator("#say").press("Enter")
        until(page, "document.querySelector('.coming .body')?.textContent.length > 5")
        page.reload()
        until_live(page)
        assert page.locator(".user .body").last.inner_text() == "a system"
        assert page.locator(".note").last.inner_text() == "broke off"
        assert len(page.locator(".assistant .body").last.inner_text()) > 5


def test_conversations_are_kept(chromium: Any, base: str, player: Scripted) -> None:
    """In this browser: over a reload of the tab, for another tab, until they are deleted."""
    with opened(chromium, base) as page:
        page.goto(f"{base}/#chat")
        until_live(page)
        say(page, "the first talk")
        page.locator("#new").click()
        say(page, "the second talk")
        page.reload()
        until_live(page)
        assert page.locator(".user .body").inner_text() == "the second talk"
        assert page.locator(".assistant .body").inner_text() == "hello world"
        say(page, "more", 2)
        assert "the second talk" in prompt(player) and "the first talk" not in prompt(player)
        titles = page.locator("#talks-list .open")
        assert titles.all_inner_texts() == ["the second talk", "the first talk"]
        other = page.context.new_page()
        other.goto(f"{base}/#chat")
        until_live(other)
        assert other.locator(".turn").count() == 0  # a new tab is a new chat
        other.get_by_role("button", name="the first talk", exact=True).click()
        assert other.locator(".user .body").inner_text() == "the first talk"
        other.get_by_role("button", name="Delete the first talk").click()
        other.get_by_role("button", name="Cancel").click()
        assert other.locator("#talks-list .open").count() == 2
        other.get_by_role("button", name="Delete the first talk").click()
        other.locator("#question-yes").click()
        until(other, "document.querySelectorAll('#talks-list .open').length === 1")
        assert other.locator(".turn").count() == 0
        until(page, "document.querySelectorAll('#talks-list .open').length === 1")
        page.get_by_role("button", name="Delete all").click()
        page.locator("#question-yes").click()
        until(page, "!document.querySelector('#talks-list .open')")
        assert page.evaluate("localStorage['mlxspec-chats']") == "[]"


def test_what_is_kept_is_bounded(chromium: Any, base: str) -> None:
    fill = """async () => {
      const { fresh, keep } = await import("/page/conversations.js");
      for (let n = 0; n < 60; n++) keep({ ...fresh(), turns: [{ role: "user", content: `${n} ` + "x".repeat(n % 2 ? 10 : 60_000) }] });
      const long = keep({ ...fresh(), turns: [{ role: "user", content: "x".repeat(2_000_000) }] });
      return [long, JSON.parse(localStorage["mlxspec-chats"]).length, localStorage["mlxspec-chats"].length];
    }"""
    with opened(chromium, base) as page:
        until_live(page)
        kept, many, size = page.evaluate(fill)
        assert not kept and 20 < many <= 50 and size < 1_600_000
        page.evaluate("localStorage['mlxspec-chats'] = '{broken'")
        page.reload()
        until_live(page)
        say(page, "hello")
        assert len(json.loads(page.evaluate("localStorage['mlxspec-chats']"))) == 1


def test_settings(chromium: Any, base: str, player: Scripted) -> None:
    with opened(chromium, base) as page:
        until_live(page)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System text").fill("be kind")
        page.get_by_label("Temperature").fill("0.25")
        page.get_by_label("Top p").fill("0.5")
        page.get_by_label("Tokens at most").fill("9")
        page.get_by_label("Thinking").select_option("off")
        say(page, "hello")
        request = player.submitted[-1]
        assert (request.sampling.temperature, request.sampling.top_p) == (0.25, 0.5)
        assert request.max_tokens == 9 and "be kind" in prompt(player)
        assert prompt(player).endswith("</think>\n\n")
        page.reload()
        until_live(page)
        assert page.locator("#tune-open").inner_text() == "Settings (5)"
        page.locator("#tune-open").click()
        page.get_by_label("Temperature").fill("9")
        page.locator("#say").fill("again")
        page.locator("#say").press("Enter")
        assert page.locator("#chat-note").inner_text().startswith("Temperature: ")
        assert page.evaluate("document.activeElement.id") == "temperature"
        page.get_by_role("button", name="Reset").click()
        say(page, "again", 2)
        assert "be kind" not in prompt(player)


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (768, 1024), (375, 667)])
def test_with_the_key_panel_all_can_be_reached(
    chromium: Any, player: Scripted, width: int, height: int
) -> None:
    """The field and Send are on the screen; what asked for the key goes when it came."""
    path: Path = player.path  # type: ignore[attr-defined]
    app = create_app(player, player.tokenizer, path, Config(api_key="sesame"))  # type: ignore[arg-type]
    with live(app) as base, opened(chromium, base, width, allowed=["status of 401"]) as page:
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_selector("#key:not([hidden])")
        box = page.locator("#send").bounding_box()
        assert box and box["y"] + box["height"] <= height
        page.locator("#say").fill("hello")
        page.locator("#say").press("Enter")
        page.wait_for_selector(".turn.error")
        assert "API key" in page.locator(".turn.error").inner_text()
        page.locator("#key-field").fill("sesame")
        page.keyboard.press("Enter")
        until_live(page)
        assert page.locator(".turn.error").count() == 0
        assert page.locator("#say").input_value() == "hello"
        say(page, "hello")


@pytest.mark.parametrize(("width", "view"), [(1280, "server"), (768, "chat"), (375, "chat")])
def test_views(chromium: Any, base: str, width: int, view: str) -> None:
    """The chat comes first on narrow screens and stands beside the others on wide ones."""
    with opened(chromium, base, width) as page:
        until_live(page)
        assert page.evaluate("document.body.dataset.view") == view
        for name in ("server", "models", "chat"):
            page.get_by_role("link", name=name.capitalize(), exact=True).click()
            page.wait_for_selector(f"nav a[href='#{name}'][aria-current=page]")
            shown = [v for v in ("chat", "server", "models") if page.locator(f"#{v}").is_visible()]
            assert shown == (["chat", name] if width > 1079 and name != "chat" else [name])
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("nav a[href='#server']").click()
        page.reload()
        assert page.evaluate("document.body.dataset.view") == "server"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the link that skips to the message
        until(page, "document.activeElement.id === 'say'")
        unnamed = """[...document.querySelectorAll("button, input, select, textarea")].filter((e) =>
          !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim() || e.hidden))"""
        assert page.evaluate(f"{unnamed}.map((e) => e.outerHTML)") == []

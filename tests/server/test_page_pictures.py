"""Pictures in the page's chat, in a real browser: chosen, pasted, dropped, taken out again, and sent."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from tests.server.test_page_browser import chromium as chromium
from tests.server.test_page_browser import no_browser as no_browser
from tests.server.test_page_browser import opened, until
from tests.support import vision
from tests.support.live import live
from tests.support.scripted import INFO, Scripted

pytestmark = pytest.mark.slow
PICTURE = vision.png(64, 40)
FILE = {"name": "dot.png", "mimeType": "image/png", "buffer": PICTURE}
# Files in an event of the user's, as a browser makes it.
SEND = """([kind, target, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), moved = new DataTransfer();
  moved.items.add(new File([bytes], "moved.png", { type: "image/png" }));
  const init = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, { ...init, clipboardData: moved })
                                 : new DragEvent(kind, { ...init, dataTransfer: moved });
  document.querySelector(target).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    path = vision.save(tmp_path_factory.mktemp("sees"), "mistral3")
    engine = Scripted(load_tokenizer(path), info=replace(INFO, context=8192, sees=True))
    engine.path = path  # type: ignore[attr-defined]
    return engine


@pytest.fixture
def base(player: Scripted) -> Iterator[str]:
    path: Path = player.path  # type: ignore[attr-defined]
    with live(create_app(player, player.tokenizer, path, Config())) as url:  # type: ignore[arg-type]
        yield url


@pytest.mark.parametrize("width", [1280, 375])
def test_pictures_are_sent_with_a_message(
    chromium: Any, base: str, player: Scripted, width: int
) -> None:

    data = base64.b64encode(PICTURE).decode()
    with opened(chromium, base, width) as page:
        until(page, "!document.getElementById('picture-add').hidden")
        page.locator("#picture-file").set_input_files(FILE)
        page.evaluate(SEND, ["paste", "#say", data])
        page.evaluate(SEND, ["drop", "#log", data])
        until(page, "document.querySelectorAll('#pictures .picture').length === 3")
        page.get_by_role("button", name="Remove dot.png").click()
        assert page.locator("#pictures .picture").count() == 2
        assert page.evaluate("document.activeElement.id") == "say"
        page.keyboard.type("What is it?")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('.assistant') && !document.querySelector('.coming')")
        assert page.locator("#pictures .picture").count() == 0
        shown = page.evaluate(
            "[...document.querySelectorAll('.turn.user img')].map((i) => i.naturalWidth)"
        )
        assert shown == [64, 64]
        request = player.submitted[-1]
        assert len(request.images) == 2
        page.keyboard.type("And now?")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('.assistant:not(.coming)').length === 2")
        assert player.submitted[-1].prompt[: len(request.prompt) - 2] == request.prompt[:-2]
        assert page.evaluate("document.body.scrollWidth <= innerWidth")
        box = page.locator("#send").bounding_box()
        assert box and box["x"] + box["width"] <= width - 10


def test_a_model_that_reads_text_takes_none(
    chromium: Any, base: str, player: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "info", replace(player.info, sees=False))

    with opened(chromium, base) as page:
        until(page, "document.getElementById('model').options.length")
        assert page.locator("#picture-add").is_hidden()
        page.evaluate(SEND, ["paste", "#say", base64.b64encode(PICTURE).decode()])
        until(page, "document.getElementById('picture-note').textContent")
        assert "reads text only" in page.locator("#picture-note").inner_text()
        assert page.locator("#pictures .picture").count() == 0

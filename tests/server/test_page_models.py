"""The page's models in a real browser: load, unload, fetch with a bar, delete after a question."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_library import NAME, Library, library
from tests.server.test_library import hub as hub
from tests.server.test_library import model as model
from tests.server.test_page_browser import chromium as chromium
from tests.server.test_page_browser import no_browser as no_browser
from tests.server.test_page_browser import opened, until, until_live
from tests.support.hub import Hub

pytestmark = pytest.mark.slow


@pytest.fixture
def made(model: Path, hub: Hub, tmp_path: Path) -> Iterator[Library]:
    with library(model, tmp_path / "cache", api_key="sesame") as one:
        one.http.headers["authorization"] = "Bearer sesame"
        yield one


@pytest.mark.parametrize("width", [1280, 375])
def test_a_model_from_the_hub_and_back(
    chromium: Any, made: Library, hub: Hub, tmp_path: Path, width: int
) -> None:
    base = str(made.http.base_url).rstrip("/")
    with opened(chromium, f"{base}/#models", width, allowed=["status of 40"]) as page:
        page.locator("#key-field").fill("sesame")
        page.keyboard.press("Enter")
        until_live(page)
        until(page, "document.querySelectorAll('#served li').length === 1")
        until(page, "document.querySelector('#disk .empty')")
        assert hub.asked == []
        page.get_by_label("Id of a model").fill("tiny-4bit")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('fetch-note').textContent.includes('mlx-community/')")
        assert page.locator("#fetch-go").is_hidden()
        page.get_by_label("Id of a model").fill(NAME)
        page.get_by_role("button", name="Look up").click()
        until(page, "document.getElementById('fetch-note').textContent.includes('KB')")
        assert "It fits into memory" in page.locator("#fetch-note").inner_text()
        hub.flows.clear()
        page.get_by_role("button", name="Fetch", exact=True).click()
        until(page, "document.getElementById('fetch-bar').value > 0")
        until(page, "/ of \\d+ KB/.test(document.getElementById('fetch-note').textContent)")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(path=tmp_path / "fetch.png")
        page.locator("#fetch-stop").click()
        until(page, "document.getElementById('fetch-note').textContent.startsWith('Stopped')")
        assert page.locator("#fetch-bar").is_hidden()
        end = time.monotonic() + 30
        while made.app.state.server.pulling:
            assert time.monotonic() < end
            time.sleep(0.05)
        hub.flows.set()
        page.get_by_role("button", name="Look up").click()
        until(page, "!document.getElementById('fetch-go').hidden")
        page.get_by_role("button", name="Fetch", exact=True).click()
        until(page, "document.querySelectorAll('#served li').length === 2")
        until(page, "document.querySelectorAll('#disk li .delete').length === 1")
        page.get_by_role("button", name=f"Load {NAME}").click()
        until(page, "document.querySelectorAll('#served .status.loaded').length === 2")
        page.get_by_role("button", name=f"Delete {NAME}").click()
        assert NAME in page.locator("#question-text").inner_text()
        page.locator("#question-yes").click()
        until(page, "document.getElementById('models-note').textContent.includes('unload')")
        page.get_by_role("button", name=f"Unload {NAME}").click()
        until(page, "document.querySelectorAll('#served .status.loaded').length === 1")
        page.get_by_role("button", name=f"Chat {NAME}").click()
        if width < 1080:
            until(page, "document.body.dataset.view === 'chat'")
        assert page.locator("#model").input_value() == NAME
        page.locator("nav a[href='#models']").click()
        page.get_by_role("button", name=f"Delete {NAME}").click()
        page.keyboard.press("Escape")  # is a no
        assert page.locator("#question").is_hidden()
        page.get_by_role("button", name=f"Delete {NAME}").click()
        page.locator("#question-yes").click()
        until(page, "document.querySelectorAll('#served li').length === 1")
        until(page, "document.querySelector('#disk .empty')")
        assert made.served == ["first:latest"]
        assert page.locator("#models-note").inner_text() == ""
        code = page.locator("[data-address=openai] code").inner_text()
        assert code == f"{base}/v1"
        launch = page.locator("[data-address=claude] code").inner_text()
        assert launch == f"mlxspec launch --url {base} claude"

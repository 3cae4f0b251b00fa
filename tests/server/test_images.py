"""Images in requests of all four APIs: what reaches the engine, and what stands in the place of those
that cannot be seen."""

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxspec.config import Config
from mlxspec.server import fetch as fetching
from mlxspec.text.chat import load_tokenizer
from tests.server.test_content import (
    chat,
    chat_result,
    messages,
    messages_result,
    responses,
    responses_result,
)
from tests.support import vision
from tests.support.scripted import INFO, Server, server

pytestmark = pytest.mark.anyio
SEES = replace(INFO, context=8192, sees=True)
Make = Callable[..., Server]
PNG = vision.png(24, 16)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{b64(data)}"


def part_of(place: Any, data: bytes, url: str = "") -> dict[str, Any]:
    """An image as the API of this place has it."""
    if place in (chat, chat_result):
        return {"type": "image_url", "image_url": {"url": url or data_url(data)}}
    if place in (responses, responses_result):
        return {"type": "input_image", "image_url": url or data_url(data)}
    source = {"type": "base64", "media_type": "image/png", "data": b64(data)}
    return {"type": "image", "source": {"type": "url", "url": url} if url else source}


def text_of(place: Any, text: str) -> dict[str, Any]:
    return {
        "type": "input_text" if place in (responses, responses_result) else "text",
        "text": text,
    }


PLACES = [chat, chat_result, messages, messages_result, responses, responses_result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.save(tmp_path_factory.mktemp("sees"), "mistral3")


@pytest.fixture
def make(folder: Path) -> Make:
    tokenizer = load_tokenizer(folder)
    return lambda config=None, **kw: server(tokenizer, folder, config, **{"info": SEES, **kw})


def prompt(s: Server) -> str:
    """The last prompt, with a diamond for each row of an image."""
    tokenizer = s.engine.tokenizer
    return "".join(
        "◆" if token < 0 else tokenizer.decode([token]) for token in s.engine.submitted[-1].prompt
    )


@pytest.mark.parametrize("place", PLACES)
async def test_an_image_reaches_the_engine(make: Make, place: Any) -> None:
    """Between its texts, in messages and in tool results, with its pixels."""
    s = make()
    path, body = place(text_of(place, "see "), part_of(place, PNG), text_of(place, " here"))
    answer = await s.post(path, body)
    assert answer.status == 200, answer.body
    assert "x-mlxspec-ignored" not in answer.headers
    request = s.engine.submitted[-1]
    [span] = request.images
    want = vision.seeing("mistral3").reader.read(PNG)
    assert np.array_equal(span.image.patches, want.patches)
    assert (span.rows, span.columns) == (2, 3)
    assert "see [IMG" not in prompt(s) and f"see {'◆' * 6} here" in prompt(s)
    assert all(token < 0 for token in request.prompt[span.start : span.stop])


async def test_ollama_sends_images_beside_the_text(make: Make) -> None:
    s = make()
    turn = {"role": "user", "content": "What is it?", "images": [b64(PNG)]}
    for path, body in (
        ("/api/chat", {"messages": [turn]}),
        ("/api/generate", {"prompt": "What is it?", "images": [b64(PNG)]}),
    ):
        assert (await s.post(path, {**body, "stream": False})).status == 200
        assert f"{'◆' * 6}What is it?" in prompt(s)
    shown = await s.post("/api/show", {"model": "tiny"})
    assert "vision" in shown.json["capabilities"]
    [model] = (await s.get("/v1/models")).json["data"]
    assert model["input_modalities"] == ["text", "image"]


@pytest.mark.parametrize("place", PLACES)
async def test_the_next_turn_repeats_the_prompt(make: Make, place: Any) -> None:
    """An image that is sent again is the same ids, another pixel others; two images stay in their
    order."""
    s = make()
    other = vision.png(24, 16, change=1)
    ids = []
    for parts in (
        [part_of(place, PNG)],
        [part_of(place, PNG), text_of(place, "more"), part_of(place, other)],
        [part_of(place, other), text_of(place, "more"), part_of(place, PNG)],
    ):
        path, body = place(*parts)
        assert (await s.post(path, body)).status == 200
        ids.append(s.engine.submitted[-1].prompt)
    first = s.engine.submitted[0].images[0]
    assert ids[1][: first.stop] == ids[0][: first.stop]
    assert ids[2][: first.start] == ids[0][: first.start]
    assert ids[2][first.start] != ids[0][first.start]
    second = s.engine.submitted[1].images[1]
    assert ids[2][first.start : first.stop] == ids[1][second.start : second.stop]


async def test_counts_include_the_rows_of_images(make: Make) -> None:
    s = make()
    path, body = messages_result(part_of(messages, PNG))
    counted = await s.post("/v1/messages/count_tokens", body)
    assert (await s.post(path, body)).json["usage"]["input_tokens"] == counted.json["input_tokens"]
    path, body = responses(part_of(responses, PNG))
    counted = await s.post("/v1/responses/input_tokens", body)
    await s.post(path, body)
    assert counted.json["input_tokens"] == len(s.engine.submitted[-1].prompt)
    tokenized = await s.post("/v1/tokenize", chat(part_of(chat, PNG))[1])
    assert sum(token < 0 for token in tokenized.json["tokens"]) == 6


async def test_a_kept_response_keeps_its_images(make: Make) -> None:
    s = make()
    path, body = responses(part_of(responses, PNG))
    first = (await s.post(path, body)).json
    before = s.engine.submitted[-1]
    again = await s.post(path, {"input": "and now", "previous_response_id": first["id"]})
    assert again.status == 200 and len(s.engine.submitted[-1].images) == 1
    stop = before.images[0].stop
    assert s.engine.submitted[-1].prompt[:stop] == before.prompt[:stop]
    kept = await s.get(f"/v1/responses/{first['id']}/input_items")
    [part] = kept.json["data"][0]["content"]
    assert part["type"] == "input_image" and part["image_url"].endswith(b64(PNG))


BROKEN = {
    "no picture": b"hello",
    "cut off": PNG[:60],
    "damaged": PNG[:200] + b"\0" * 40 + PNG[240:],
    "too long": vision.png(8000, 10),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_image_that_cannot_be_read_is_a_line(make: Make, name: str) -> None:
    s = make()
    path, body = chat(part_of(chat, BROKEN[name]), text_of(chat, " and "), part_of(chat, PNG))
    answer = await s.post(path, body)
    assert answer.status == 200, answer.body
    assert answer.headers["x-mlxspec-ignored"] == "content[].image_url"
    assert "[image_url left out: it " in prompt(s) and prompt(s).count("◆") == 6
    strict = make(Config(strict_content=True))
    answer = await strict.post(path, body)
    assert answer.status == 400 and "messages[0].content[0]" in answer.json["error"]["message"]
    path, body = chat(part_of(chat, PNG))
    assert (await strict.post(path, body)).status == 200


async def test_a_model_that_does_not_see_gets_a_line(make: Make) -> None:
    s = make(info=replace(SEES, sees=False))
    path, body = chat(part_of(chat, PNG))
    assert (await s.post(path, body)).headers["x-mlxspec-ignored"] == "content[].image_url"
    assert "[image_url left out: this model reads text only]" in prompt(s)
    s = make(Config(vision=False))
    await s.post(path, body)
    assert "left out" in prompt(s) and not s.engine.submitted[-1].images


async def test_texts_like_markers_are_texts(make: Make) -> None:
    """A client may write the characters around a digest; a known one is its own image again."""
    s = make()
    for text in ("\ufdd1", "\ufdd1" * 3, f"\ufdd1{'0' * 32}\ufdd1", "\ufdd1zz\ufdd1"):
        path, body = chat(text_of(chat, text), part_of(chat, PNG))
        assert (await s.post(path, body)).status == 200
        assert len(s.engine.submitted[-1].images) == 1
        path, body = chat(text_of(chat, text))
        assert (await s.post(path, body)).status == 200
        assert not s.engine.submitted[-1].images


async def test_too_many_and_too_large_are_refused(make: Make) -> None:
    s = make()
    many = [part_of(chat, vision.png(8, 8, seed=n)) for n in range(101)]
    path, body = chat(*many)
    answer = await s.post(path, body)
    assert answer.status == 400 and "more than 100" in answer.json["error"]["message"]
    s = make(info=replace(SEES, context=24))
    path, body = chat(*[part_of(chat, vision.png(64, 64, seed=n)) for n in range(4)])
    answer = await s.post(path, body)
    assert answer.status == 400 and answer.json["error"]["code"] == "context_length_exceeded"
    assert s.engine.submitted == []


@contextmanager
def web(pages: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server of these pages: a status with a content, or with the place that it leads to."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = pages[self.path]
            self.send_response(status)
            if status == 302:
                self.send_header("Location", content.decode())
            self.end_headers()
            if status != 302:
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()


@pytest.mark.parametrize("place", [chat, messages, responses])
async def test_urls_are_fetched_only_if_wanted(
    make: Make, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"/a.png": (200, PNG), "/b": (302, b"/a.png"), "/none": (404, b"")}
    with web(pages) as url:
        cases = {
            "/a.png": "",
            "/b": "",
            "/none": "status 404",
        }
        s = make()
        path, body = place(part_of(place, b"", f"{url}/a.png"))
        assert (await s.post(path, body)).status == 200
        assert "--fetch-images is off" in prompt(s)
        s = make(Config(fetch_images=True))
        assert (await s.post(path, body)).status == 200
        assert "in a private network" in prompt(s)
        monkeypatch.setattr(fetching, "is_public", lambda address: True)
        for page, why in cases.items():
            path, body = place(part_of(place, b"", url + page))
            assert (await s.post(path, body)).status == 200
            assert why in prompt(s) if why else prompt(s).count("◆") == 6


def test_no_url_leads_into_the_users_network(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def public(address: str) -> bool:
        asked.append(address)
        return len(asked) == 1  # as if the first were public, which then leads to another

    with web({"/x": (302, b"http://localhost:1/"), "/large": (200, b"x" * 5000)}) as url:
        with pytest.raises(fetching.FetchError, match="private"):
            fetching.fetch(f"{url}/x", 1000)
        monkeypatch.setattr(fetching, "is_public", public)
        with pytest.raises(fetching.FetchError, match="private"):
            fetching.fetch(f"{url}/x", 1000)
        monkeypatch.setattr(fetching, "is_public", lambda address: True)
        with pytest.raises(fetching.FetchError, match="more than"):
            fetching.fetch(f"{url}/large", 1000)
    for wrong in (
        "file:///etc/passwd",
        "http://",
        "https://[::1]/",
        "http://169.254.169.254/",
        "x",
    ):
        with pytest.raises(fetching.FetchError):
            fetching.fetch(wrong, 1000)

"""Images in requests of all four APIs: what reaches the engine, and what stands in the place of those
that cannot be seen."""

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxspec.config import Config
from mlxspec.server import fetch as fetching
from mlxspec.server.content import File
from mlxspec.server.responses.endpoints import Store
from mlxspec.text.chat import load_tokenizer
from mlxspec.text.images import ImageReader, marker_of
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
async def test_an_image_that_is_scaled_down_is_told(make: Make, place: Any) -> None:
    s = make()
    path, body = place(part_of(place, vision.png(200, 104)), part_of(place, PNG))
    for _ in range(2):  # the second is remembered
        assert (await s.post(path, body)).headers["x-mlxspec-scaled"] == "200x104 to 64x40"
    path, body = place(part_of(place, PNG))
    assert "x-mlxspec-scaled" not in (await s.post(path, body)).headers


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
    "no picture": (b"hello", "it cannot be read"),
    "cut off": (PNG[:60], "it cannot be read"),
    "damaged": (PNG[:200] + b"\0" * 40 + PNG[240:], "it cannot be read"),
    "too long": (vision.png(8000, 10), "8000 x 10 pixels"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_image_that_cannot_be_read_is_a_line(make: Make, name: str) -> None:
    s = make()
    data, why = BROKEN[name]
    path, body = chat(part_of(chat, data), text_of(chat, " and "), part_of(chat, PNG))
    answer = await s.post(path, body)
    assert answer.status == 200, answer.body
    assert answer.headers["x-mlxspec-ignored"] == "content[].image_url"
    assert f"[image_url left out: {why}" in prompt(s).replace("it has ", "")
    assert prompt(s).count("◆") == 6
    strict = make(Config(strict_content=True))
    answer = await strict.post(path, body)
    assert answer.status == 400 and answer.json["error"]["param"] == "messages[0].content[0]"
    assert why in answer.json["error"]["message"]
    path, body = chat(part_of(chat, PNG))
    assert (await strict.post(path, body)).status == 200


LINES = "\n".join(b64(PNG)[at : at + 76] for at in range(0, len(b64(PNG)), 76))
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "lines": ({"url": f"data:image/png;base64,{LINES}"}, ""),
    "capitals": ({"url": f"DATA:image/png;base64,{b64(PNG)}"}, ""),
    "no base64": ({"url": "data:image/png;base64,%%%"}, "not in base64"),
    "ftp": ({"url": "ftp://a/b.png"}, "not one of http, https or data"),
    "nothing": ({}, "neither data nor a URL"),
}


@pytest.mark.parametrize("name", ODD)
async def test_what_is_wrong_with_an_image_is_said(make: Make, name: str) -> None:
    s = make()
    image, why = ODD[name]
    path, body = chat({"type": "image_url", "image_url": image})
    assert (await s.post(path, body)).status == 200
    assert why in prompt(s) if why else prompt(s).count("◆") == 6


async def test_a_model_that_does_not_see_gets_a_line(make: Make) -> None:
    s = make(info=replace(SEES, sees=False))
    path, body = chat(part_of(chat, PNG))
    assert (await s.post(path, body)).headers["x-mlxspec-ignored"] == "content[].image_url"
    assert "[image_url left out: this model reads text only]" in prompt(s)
    s = make(Config(vision=False))
    await s.post(path, body)
    assert "left out" in prompt(s) and not s.engine.submitted[-1].images


async def test_texts_like_markers_are_texts(make: Make) -> None:
    """A client, a tool or a page may write the characters around a digest of a known image."""
    s = make()
    known = [blake2b(PNG, digest_size=16).hexdigest(), "0" * 32, "zz", ""]
    for text in ("\ufdd1" * 3, *(f"\ufdd1{digest}\ufdd1" for digest in known)):
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


async def test_one_image_many_times_is_counted_before_it_is_encoded(make: Make) -> None:
    s = make()
    path, body = chat(*[part_of(chat, PNG) for _ in range(101)])
    answer = await s.post(path, body)
    assert answer.status == 400 and "101 images" in answer.json["error"]["message"]
    s = make(info=replace(SEES, context=500))
    path, body = chat(*[part_of(chat, PNG) for _ in range(90)])
    answer = await s.post(path, body)
    assert answer.status == 400 and "540 tokens > 500" in answer.json["error"]["message"]


async def test_the_store_counts_an_image_once() -> None:
    store = Store(max_bytes=3000)
    files = {"a" * 32: File("input_image", b"x" * 2000)}
    item = {"id": "i", "content": [{"type": "input_text", "text": marker_of("a" * 32)}]}
    for n in range(3):
        store.add({"id": f"r{n}", "output": []}, [item], files)
    assert all(store.get(f"r{n}") for n in range(3)) and store.images_in([item]) == files
    for n in range(3):
        store.delete(f"r{n}")
    assert store == Store(max_bytes=3000)


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


async def test_no_more_is_fetched_than_threads_fetch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other images are read, which takes one thread: files that wait are in memory."""
    fetched: list[str] = []
    gate, read = threading.Event(), ImageReader.read

    def fetch(url: str, most: int) -> bytes:
        fetched.append(url)
        return vision.png(24, 16, seed=int(url[-1]))

    def slow(reader: ImageReader, data: bytes) -> Any:
        assert gate.wait(30)
        return read(reader, data)

    monkeypatch.setattr("mlxspec.server.images.fetch", fetch)
    monkeypatch.setattr(ImageReader, "read", slow)
    s = make(Config(fetch_images=True))
    bodies = [chat(part_of(chat, b"", f"http://a/{n}")) for n in range(9)]
    answers = [asyncio.ensure_future(s.post(*body)) for body in bodies]
    await asyncio.sleep(0.3)
    assert len(fetched) == 4
    gate.set()
    assert {(await answer).status for answer in answers} == {200} and len(fetched) == 9


ADDRESSES = {
    "93.184.216.34": True,
    "2606:2800:220:1:248:1893:25c8:1946": True,
    "::ffff:93.184.216.34": True,
    **dict.fromkeys(
        "127.0.0.1 10.0.0.1 169.254.169.254 100.64.0.1 224.0.0.1 0.0.0.0 240.0.0.1 ::1 ::127.0.0.1"
        " ::ffff:127.0.0.1 ::ffff:100.100.100.200 ::ffff:0:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1::"
        " 2002:c0a8:101::1 fec0::1 fe80::1%eth0 ff02::1 fc00::1".split(),
        False,
    ),
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_public_or_not(address: str) -> None:
    assert fetching.is_public(address) is ADDRESSES[address]


def test_a_server_that_sends_a_byte_now_and_then_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "SECONDS", 1.0)
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    for head in (b"", b"HTTP/1.0 200 OK\r\n\r\n"):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def drip(head: bytes = head, listener: socket.socket = listener) -> None:
                client = listener.accept()[0]
                with client, suppress(OSError):
                    client.sendall(head)
                    for _ in range(100):
                        client.sendall(b"H")
                        time.sleep(0.1)

            threading.Thread(target=drip, daemon=True).start()
            began = time.monotonic()
            with pytest.raises(fetching.FetchError):
                fetching.fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/", 1000)
            assert time.monotonic() - began < 5


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

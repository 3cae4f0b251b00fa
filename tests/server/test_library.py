"""Models pulled from a hub and deleted while the server runs, through Ollama's endpoints."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.load.resolve import resolve_models
from mlxspec.load.server_models import make_manager
from mlxspec.server.app import create_app
from tests.support.hub import SHA, Hub, hub_of
from tests.support.live import live
from tests.support.scripted import server
from tests.support.served_model import save

NAME = "owner/tiny-4bit"
QUICK = {"layout": "rows", "speculate": False, "cache_gb": 0.0, "memory_gb": 8.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "first")


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = shutil.copytree(model, tmp_path / "there")
    (folder / "README.md").write_text("not needed")
    with hub_of({NAME: folder}, tmp_path / "hub", monkeypatch) as made:
        yield made


@dataclass
class Library:
    """A server of one local model, and a client of it."""

    http: httpx.Client
    app: Any

    def pull(self, name: str = NAME) -> list[Any]:
        answer = self.http.post("/api/pull", json={"model": name})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.text.splitlines()]

    def delete(self, name: str = NAME) -> httpx.Response:
        return self.http.request("DELETE", "/api/delete", json={"model": name})

    @property
    def served(self) -> list[str]:
        return [one["name"] for one in self.http.get("/api/tags").json()["models"]]


@contextmanager
def library(model: Path, cache: Path, **changed: Any) -> Iterator[Library]:
    config = Config(model=str(model), cache_dir=str(cache), **{**QUICK, **changed})
    [first] = resolve_models(config)
    worker = EngineThread(make_manager([first], config))
    worker.launch()
    app = create_app(worker, first.tokenizer, first.path, config)
    try:
        with live(app) as url, httpx.Client(base_url=url, timeout=60) as http:
            yield Library(http, app)
    finally:
        worker.stop()


@pytest.fixture
def made(model: Path, hub: Hub, tmp_path: Path) -> Iterator[Library]:
    with library(model, tmp_path / "cache") as one:
        yield one


def until(seen: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_pulled_model_answers_without_a_restart(made: Library, hub: Hub) -> None:
    assert made.served == ["first:latest"] and hub.asked == []
    size = made.http.get("/page/disk", params={"model": NAME}).json()
    assert size["hub"]["here"] == 0 and size["hub"]["bytes"] > 10_000 and size["room"] > 0
    assert not any("/resolve/" in path for path in hub.asked)
    first, *parts, last = made.pull()
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert {part["total"] for part in parts} == {size["hub"]["bytes"]}
    assert parts[-1]["completed"] == parts[-1]["total"] and parts[-1]["status"] == f"pulling {NAME}"
    assert not any("README" in path for path in hub.asked)
    assert made.served == ["first:latest", f"{NAME}:latest"]
    body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    answer = made.http.post("/v1/chat/completions", json=body).json()
    assert answer["model"] == NAME and answer["usage"]["completion_tokens"] == 2
    asked = len(hub.asked)
    assert made.pull()[-1] == {"status": "success"} and len(hub.asked) == asked  # it is served
    [row] = made.http.get("/page/disk").json()["models"]
    assert (row["name"], row["deletable"]) == (NAME, True) and row["bytes"] > 10_000


def test_a_model_on_this_disk_is_served_while_the_hub_is_away(made: Library, hub: Hub) -> None:
    made.pull()
    assert made.http.post("/v1/models/unload", json={"model": NAME}).status_code == 200
    shutil.copytree(hub.cache, hub.cache.with_name("kept"))
    made.delete()
    shutil.rmtree(hub.cache)
    shutil.move(hub.cache.with_name("kept"), hub.cache)
    hub.repos.clear()
    assert made.pull()[-1] == {"status": "success"} and f"{NAME}:latest" in made.served
    answer = made.http.post("/api/pull", json={"model": NAME, "stream": False})
    assert answer.json() == {"status": "success"}


def test_a_download_ends_with_its_client_and_goes_on_later(made: Library, hub: Hub) -> None:
    hub.flows.clear()
    state = made.app.state.server
    with made.http.stream("POST", "/api/pull", json={"model": NAME}) as answer:
        lines = answer.iter_lines()  # held, or the connection is closed
        for line in lines:
            part = json.loads(line)
            if hub.halves and 0 < part.get("completed", 0) < part["total"]:
                break
        assert state.pulling == NAME
        other = made.http.post("/api/pull", json={"model": "owner/other"})
        assert other.status_code == 404
        second = made.http.post("/api/pull", json={"model": NAME})
        assert second.status_code == 409 and "is being downloaded" in second.json()["error"]
        assert made.delete().status_code in (404, 409)
    until(lambda: not state.pulling)
    parts = hub.cache / "models--owner--tiny-4bit/blobs"
    until(lambda: not any(parts.glob("*.incomplete")))
    hub.flows.set()
    time.sleep(0.5)  # a download that went on would end now
    snapshot = hub.cache / f"models--owner--tiny-4bit/snapshots/{SHA}/model.safetensors"
    assert not snapshot.exists() and made.served == ["first:latest"]
    assert made.pull()[-1] == {"status": "success"} and snapshot.exists()


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("tiny-4bit", 400, "such as 'mlx-community/tiny-4bit'"),
        ("../../etc", 400, "not the id of a model on the hub"),
        ("a/b/c", 400, "not the id of a model on the hub"),
        ("tests/support", 400, "not the id of a model on the hub"),  # a directory here
        ("a\0/b", 400, "not the id of a model on the hub"),
        ("owner/none", 404, "Check the name and the network"),
        ("", 400, "not the id of a model on the hub"),
        (5, 400, "model = 5"),
    ],
)
def test_what_cannot_be_pulled(made: Library, name: Any, status: int, why: str) -> None:
    for stream in (True, False):
        answer = made.http.post("/api/pull", json={"model": name, "stream": stream})
        assert answer.status_code == status and why in answer.json()["error"]
    if isinstance(name, str) and "\0" not in name and name:
        assert made.http.get("/page/disk", params={"model": name}).status_code == status
    assert made.http.get("/health").status_code == 200


def test_without_the_hub(made: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    answer = made.http.post("/api/pull", json={"model": NAME})
    assert answer.status_code == 404
    assert "cannot be downloaded" in answer.json()["error"] and "network" in answer.json()["error"]


@pytest.mark.slow
def test_what_is_no_model_is_told_in_the_last_line(made: Library, hub: Hub) -> None:
    (hub.repos[NAME] / "config.json").unlink()
    last = made.pull()[-1]
    assert "is not a complete mlx-lm model" in last["error"] and made.served == ["first:latest"]
    assert not made.app.state.server.pulling


def test_a_model_is_deleted(made: Library, hub: Hub) -> None:
    made.pull()
    folder = hub.cache / "models--owner--tiny-4bit"
    assert folder.is_dir()
    made.http.post("/v1/models/load", json={"model": NAME}).raise_for_status()
    refused = made.delete()
    assert refused.status_code == 409 and "unload" in refused.json()["error"] and folder.is_dir()
    made.http.post("/api/generate", json={"model": NAME, "keep_alive": 0}).raise_for_status()
    assert made.delete().status_code == 200
    assert not folder.exists() and made.served == ["first:latest"]
    gone = made.http.post("/v1/completions", json={"model": NAME, "prompt": "hello"})
    assert gone.status_code == 404
    assert made.delete().status_code == 404
    assert made.pull()[-1] == {"status": "success"}


def test_what_is_not_deleted(made: Library, model: Path, hub: Hub) -> None:
    local = made.delete("first")
    assert local.status_code == 409 and "not in the hub's cache" in local.json()["error"]
    for name in ("owner/none", "..", "../x", "a" * 300, "a/" + "é" * 90):
        assert made.delete(name).status_code == 404
    assert model.is_dir() and hub.cache.is_dir()


def test_the_first_model_stays(hub: Hub, tmp_path: Path, model: Path) -> None:
    folder = hub.cache / f"models--owner--tiny-4bit/snapshots/{SHA}"
    shutil.copytree(model, folder)
    (hub.cache / "models--owner--tiny-4bit/refs").mkdir()
    (hub.cache / "models--owner--tiny-4bit/refs/main").write_text(SHA)
    with library(Path(NAME), tmp_path / "cache") as made:
        made.http.post("/v1/models/unload", json={"model": NAME}).raise_for_status()
        refused = made.delete()
        assert refused.status_code == 409 and "first model" in refused.json()["error"]
        assert folder.is_dir()


@pytest.mark.anyio
async def test_the_key_is_asked_for(tokenizer: Any, model_dir: Path, hub: Hub) -> None:
    s = server(tokenizer, model_dir, Config(api_key="sesame"))
    assert (await s.post("/api/pull", {"model": NAME})).status == 401
    assert (await s.post("/api/delete", {"model": NAME}, method="DELETE")).status == 401
    assert (await s.get("/page/disk")).status == 401
    allowed = {"authorization": "Bearer sesame"}
    assert (await s.get("/page/disk", headers=allowed)).status == 200
    assert (await s.post("/api/pull", {"model": "x"}, headers=allowed)).status == 400
    evil = allowed | {"origin": "https://evil.example"}
    assert (await s.post("/api/pull", {"model": NAME}, headers=evil)).status == 403
    assert hub.asked == []
    await asyncio.sleep(0)

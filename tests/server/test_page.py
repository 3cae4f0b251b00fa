"""The page: what is served to a browser, who gets it, and what its snapshots say."""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxspec.config import Config
from mlxspec.kernels.verify import KERNELS, Verdict
from mlxspec.metrics import PROCESS
from mlxspec.server import page, state
from mlxspec.types import Served, Stats
from tests.support.live import live
from tests.support.scripted import INFO, Connection, Server, server

pytestmark = pytest.mark.anyio

Make = Callable[..., Server]
HERE = Path(page.__file__).parent
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEY = Config(api_key="sesame")
VENDORED = "vendor/marked.esm.js"
OWN = [name for name in page.FILES if name != VENDORED]


@pytest.fixture
def make(tokenizer: Any, model_dir: Path) -> Make:
    return lambda config=None, **kw: server(tokenizer, model_dir, config, **kw)


async def snapshot(s: Server) -> Any:
    return (await s.get("/page/now")).json


# ---- files
# --------------------------------------------------------------------------------------------


async def test_a_browser_gets_the_page_others_a_text(make: Make) -> None:
    s = make()
    answer = await s.get("/", headers=BROWSER)
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.body.startswith(b"<!doctype html>") and answer.headers["vary"].startswith(
        "accept"
    )
    for accept in ("*/*", "application/json"):
        answer = await s.get("/", headers={"accept": accept})
        assert answer.body == b"Ollama is running" and answer.headers["vary"].startswith("accept")


async def test_every_file_and_its_headers(make: Make) -> None:
    s = make()
    kinds = {
        ".html": "text/html",
        ".css": "text/css",
        ".js": "/javascript",
        ".svg": "image/svg+xml",
    }
    for name in page.FILES:
        answer = await s.get(f"/page/{name}")
        assert answer.status == 200 and answer.body == (HERE / name).read_bytes()
        assert kinds[Path(name).suffix] in answer.headers["content-type"], name
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = dict(
            rule.strip().split(" ", 1)
            for rule in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
        assert policy["img-src"] == "'self' data:"  # the pictures that a user pastes
        assert "unsafe" not in str(policy) and "http" not in str(policy) and "*" not in str(policy)
    for name in ("other.js", "__init__.py", "../app.py", "%2e%2e/app.py"):
        assert (await s.get(f"/page/{name}")).status == 404, name


def test_the_files_go_nowhere_else_and_hold_no_inline_code() -> None:
    """Nothing is loaded from elsewhere, and nothing could run that a policy would have to allow."""
    here = Path(page.__file__).parent
    files = [path for path in here.rglob("*") if path.is_file() and path.suffix[:3] != ".py"]
    names = {str(path.relative_to(here)) for path in files}
    assert names == {*page.FILES, "vendor/marked.LICENSE"}
    for name in OWN:
        text = (here / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|url\(|@import|['\"(]//\w", text), name
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", text
            )
            assert {m for m in re.findall(r'from "(.*?)"', text)} <= {f"./{n}" for n in page.FILES}
            assert len(text.splitlines()) <= 400, name
    html = (here / "index.html").read_text("utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", html)
    assert {*re.findall(r'(?:src|href)="(.*?)"', html)} <= {
        f"/page/{name}" for name in page.FILES
    } | {"#say", "#chat", "#server", "#models"}


def test_the_library_is_the_published_one() -> None:
    """docs/dependencies.md has its version and hash; it stands with its licence."""
    data = (HERE / VENDORED).read_bytes()
    [version] = re.findall(rb"marked v([\d.]+) ", data[:200])
    said = (Path(__file__).parents[2] / "docs/dependencies.md").read_text("utf-8")
    assert f"marked {version.decode()}" in said and hashlib.sha256(data).hexdigest() in said
    assert "Permission is hereby granted" in (HERE / "vendor/marked.LICENSE").read_text("utf-8")
    assert not re.search(rb"innerHTML|\beval\(|Function\(|import\(|document\.|fetch\(", data)


def test_what_the_script_looks_up_is_there() -> None:
    """Every id that a script asks for stands in the page once."""
    here = Path(page.__file__).parent
    html = (here / "index.html").read_text("utf-8")
    ids = re.findall(r'\sid="([\w-]+)"', html)
    assert len(ids) == len(set(ids))
    scripts = "".join(
        (here / name).read_text("utf-8") for name in page.FILES if name.endswith(".js")
    )
    assert {*re.findall(r'\$\("([\w-]+)"\)', scripts)} <= {*ids}
    assert {f"g-{name}" for name in re.findall(r'gauge\("(\w+)"', scripts)} <= {*ids}
    assert {*re.findall(r'aria-(?:controls|labelledby)="([\w-]+)"', html)} <= {*ids}


# ---- who gets through
# ---------------------------------------------------------------------------------


async def test_the_page_needs_no_key_its_data_do(make: Make) -> None:
    s = make(KEY)
    assert (await s.get("/", headers=BROWSER)).status == 200
    for name in page.FILES:
        assert (await s.get(f"/page/{name}")).status == 200
    assert (await s.get("/")).body == b"Ollama is running"
    for path in ("/page/now", "/page/other", "/page/", "/page/now/", "/v1/models"):
        assert (await s.get(path)).status == 401, path
    assert (await s.get("/v1/models", headers=BROWSER)).status == 401
    assert (await s.get("/page/now", headers=BROWSER)).status == 401
    assert (await s.get("/page/now?key=sesame")).status in (401, 404)
    assert (await s.get("/page/now", headers={"authorization": "Bearer sesame"})).status == 200


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}])
async def test_another_site_gets_neither(make: Make, headers: dict[str, str]) -> None:
    for path in ("/", "/page/page.js", "/page/now"):
        assert (await make().get(path, headers=BROWSER | headers)).status == 403


async def test_what_the_page_itself_fetches_may_not_be_framed(make: Make) -> None:
    own = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
    s = make()
    now = await s.get("/page/now", headers=own)
    assert now.status == 200 and now.headers["cache-control"] == "no-store"
    assert now.headers["cross-origin-resource-policy"] == "same-origin"
    assert "frame-ancestors 'none'" in now.headers["content-security-policy"]


# ---- snapshots
# ----------------------------------------------------------------------------------------


async def test_a_snapshot(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "verdicts", {})
    bad = '<img src=x onerror="alert(1)">'
    other = Served(replace(INFO, name=bad), "unloaded", pinned=True, error="it does not fit")
    s = make(others=(other,))
    assert (await s.chat()).status == 200
    assert (await s.post("/v1/chat/completions", {"messages": 3})).status == 400
    now = await snapshot(s)
    names = "version pid time loading note unwell models process"
    names += " profiles refused requests kernels"
    assert set(now) == {*names.split()}
    assert (now["refused"], now["kernels"]) == ({"400": 1}, {})
    assert now["process"].keys() == PROCESS.keys()
    tiny, odd = now["models"]
    assert (odd["info"]["name"], odd["status"], odd["pinned"], odd["error"]) == (
        bad,
        "unloaded",
        True,
        "it does not fit",
    )
    assert set(tiny["stats"]) == {f.name for f in fields(Stats)}
    assert {name: tiny["stats"][name] for name in ("running", "waiting", "blocks_free")} == {
        "running": 1,
        "waiting": 2,
        "blocks_free": 5,
    }
    [row] = now["requests"]
    names = "id model prompt cached read generated rounds drafted kept"
    names += " first seconds rate loops outcome"
    assert set(row) == {*names.split()}
    assert (row["model"], row["outcome"], row["cached"]) == ("tiny", "stop", 0) and row[
        "prompt"
    ] > 0


async def test_a_snapshot_is_of_this_moment(make: Make) -> None:
    s = make()
    first = await snapshot(s)
    s.engine.loads = "two"
    second = await snapshot(s)
    assert (first["loading"], second["loading"]) == ("", "two") and second["time"] >= first["time"]


async def test_what_is_wrong_is_told(make: Make) -> None:
    """As /health has it: a model that is being loaded takes longer than a step."""
    s = make()
    assert ((now := await snapshot(s))["note"], now["unwell"]) == ("", "")
    s.app.state.server.note, s.engine.silent = "safe mode: 3 crashes", 61.0
    now = await snapshot(s)
    assert (now["note"], now["unwell"]) == (
        "safe mode: 3 crashes",
        "the engine has made no progress for 61 s",
    )
    assert (await s.get("/health")).json["reason"] == now["unwell"]
    s.engine.loads = "two"
    assert (await snapshot(s))["unwell"] == ""
    assert (await s.get("/health")).json["note"] == now["note"]


@pytest.mark.parametrize("change", [{"ending": True}, {"lives": False}])
async def test_the_last_snapshots_say_why(make: Make, change: dict[str, bool]) -> None:
    s = make()
    assert not (await snapshot(s))["unwell"]
    for name, value in change.items():
        setattr(s.engine, name, value)
    assert (await snapshot(s))["unwell"]


async def test_what_runs_is_shown_without_its_text(make: Make) -> None:
    s = make(holds=True, cached=3)
    asked = {"messages": [{"role": "user", "content": "the user hello"}], "stream": True}
    chat = Connection(s.app, "/v1/chat/completions", asked)
    await s.engine.until(lambda: s.engine.submitted)
    [row] = (await snapshot(s))["requests"]
    assert (row["outcome"], row["first"], row["generated"]) == ("", 0.0, 0)
    assert (row["read"], row["cached"]) == (0, 0)
    s.engine.running_requests = (
        (s.engine.submitted[-1].id, 3, 8),
        (s.engine.submitted[-1].id, 9, 0),
        ("other", 5, 6),
    )
    [row] = (await snapshot(s))["requests"]
    assert (row["cached"], row["read"], row["first"]) == (3, 8, 0.0)
    s.engine.push("world")
    await chat.until(b"world")
    now = await snapshot(s)
    [row] = now["requests"]
    assert row["read"] == 0
    assert row["outcome"] == "" and row["first"] > 0 and row["cached"] == 3 and row["generated"] > 0
    assert "hello" not in json.dumps(now) and "world" not in json.dumps(now)
    chat.leave()
    async with asyncio.timeout(10):
        await chat.task
    [row] = (await snapshot(s))["requests"]
    assert row["outcome"] == "gone" and not s.app.state.server.live


async def test_what_has_ended_is_bounded(make: Make) -> None:
    s = make()
    ids = [(await s.chat()).json["id"] for _ in range(state.MAX_FINISHED + 3)]
    rows = (await snapshot(s))["requests"]
    assert [row["id"] for row in rows] == ids[: -state.MAX_FINISHED - 1 : -1]


async def test_what_runs_comes_first(make: Make) -> None:
    """However much has ended."""
    row = {"id": "a", "outcome": ""}
    s, running = make(), state.MAX_FINISHED + 9
    book = s.app.state.server
    for i in range(running):
        book.live[str(i)] = lambda i=i: row | {"id": str(i)}
    for i in range(state.MAX_FINISHED + 1):
        book.finished.appendleft(row | {"id": f"e{i}"})
    ids = [r["id"] for r in (await snapshot(s))["requests"]]
    assert ids[:running] == [str(i) for i in reversed(range(running))]
    assert ids[running:] == [f"e{i}" for i in range(state.MAX_FINISHED, 0, -1)]


async def test_verdicts_of_kernels(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "small_qmm 64x64": Verdict("tall", 2, 8, {8: 1.5, 2: 1.2}),
        "accept 320": Verdict(reason="slower"),
    }
    monkeypatch.setattr(KERNELS, "verdicts", table)
    s = make()
    found = (await snapshot(s))["kernels"]
    one, two = found["small_qmm 64x64"], found["accept 320"]
    assert one["gains"] == {"2": 1.2, "8": 1.5}
    assert (one["variant"], one["least"], one["most"], one["reason"]) == (
        "tall",
        2,
        8,
        "",
    )
    assert (two["variant"], two["reason"]) == ("", "slower")
    table["late"] = Verdict(reason="no Metal here")
    assert len((await snapshot(s))["kernels"]) == 3  # the live table


def test_over_a_socket(make: Make) -> None:
    s = make()
    with live(s.app) as base, httpx.Client(base_url=base, timeout=10) as client:
        assert client.get("/", headers=BROWSER).headers["content-security-policy"] == page.POLICY
        found = client.get("/page/now")
        assert found.headers["content-type"] == "application/json" and not found.json()["unwell"]

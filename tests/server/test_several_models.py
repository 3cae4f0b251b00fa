"""Several models in one server: which one is meant, what each endpoint says of them, loads and
unloads."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import NotFoundError, OpenAI

from mlxspec.config import Config
from mlxspec.engine.manager import ModelManager, ModelSlot
from mlxspec.engine.worker import EngineThread
from mlxspec.server import state as front_module
from mlxspec.server.app import create_app
from mlxspec.server.errors import ApiError
from mlxspec.server.process import greeting
from mlxspec.types import ModelInfo, Served, UserError
from tests.support import tiny
from tests.support.live import live
from tests.support.scripted import INFO, MESSAGES, Connection, Server, server
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

pytestmark = pytest.mark.anyio

OTHER = replace(INFO, name="other", context=128)
Make = Callable[..., Server]


@pytest.fixture
def make(tokenizer: Any, model_dir: Path, agent: tuple[Any, Path]) -> Make:
    """`other` has another tokenizer and another template."""

    def made(
        config: Config | None = None, pinned: bool = False, status: Any = "unloaded", **kw: Any
    ) -> Server:
        others = (Served(OTHER, status, pinned=pinned),)
        return server(tokenizer, model_dir, config, {"other": agent[1]}, others=others, **kw)

    return made


async def test_the_list_says_how_each_is(make: Make) -> None:
    s = make(pinned=True)
    first, other = (await s.get("/v1/models")).json["data"]
    assert (first["id"], first["status"], first["pinned"]) == ("tiny", "loaded", False)
    assert (other["id"], other["status"], other["pinned"]) == ("other", "unloaded", True)
    assert other["weight_bytes"] == 1 << 20 and other["max_model_len"] == 128
    assert (await s.get("/v1/models/other")).json == other
    found = (await s.get("/v1/models", headers={"anthropic-version": "1"})).json
    assert [one["id"] for one in found["data"]] == ["tiny", "other"]
    assert (found["first_id"], found["last_id"]) == ("tiny", "other")
    assert (await s.get("/health")).json["loaded"] == ["tiny"]
    page = (await s.get("/metrics")).body.decode()
    assert 'mlxspec_model_loaded{model="tiny"} 1.0' in page
    assert 'mlxspec_model_loaded{model="other"} 0.0' in page


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("other", "other"),
        ("tiny", "tiny"),
        ("default", "tiny"),
        ("claude-x", "tiny"),
        (None, "tiny"),
    ],
)
async def test_the_name_decides(
    make: Make, path: str, body: Any, name: str | None, meant: str
) -> None:
    s = make()
    named = (
        body if name is None and path != "/v1/messages" else {**body, "model": name or "claude-y"}
    )
    answer = await s.post(path, named)
    assert answer.status == 200 and answer.json["model"] == meant
    assert [request.model for request in s.engine.submitted] == [meant]
    assert (
        f'mlxspec_first_token_seconds_count{{model="{meant}"}} 1.0'
        in (await s.get("/metrics")).body.decode()
    )


async def test_each_has_its_own_tokenizer_window_and_template(
    make: Make, agent: tuple[Any, Path]
) -> None:
    s = make()
    here = (await s.post("/tokenize", {"messages": MESSAGES})).json
    there = (await s.post("/tokenize", {"messages": MESSAGES, "model": "other"})).json
    assert here["max_model_len"] == 512 and there["max_model_len"] == 128
    think = {"prompt": "<think>"}
    counts = [
        (await s.post("/tokenize", think | more)).json["count"] for more in ({}, {"model": "other"})
    ]
    assert counts[0] > counts[1]
    assert (
        agent[0].decode(there["tokens"])
        == (await s.post("/detokenize", {"tokens": there["tokens"], "model": "other"})).json[
            "prompt"
        ]
    )
    counted = {"model": "other", "messages": MESSAGES}
    assert (await s.post("/v1/messages/count_tokens", counted)).json["input_tokens"] == there[
        "count"
    ]
    answer = await s.post("/v1/completions", {"model": "other", "prompt": "hello " * 200})
    assert answer.status == 400 and "128 maximum" in answer.error["message"]
    assert not s.engine.ordered and not s.engine.submitted  # nothing of it loads weights


async def test_an_unknown_name_is_told_what_there_is(make: Make) -> None:
    s = make(Config(strict_model_names=True))
    for path in ("/v1/chat/completions", "/v1/models/load", "/v1/models/unload"):
        answer = await s.post(path, {"model": "gpt-9", "messages": MESSAGES})
        assert answer.status == 404 and answer.error["code"] == "model_not_found"
        message = answer.error["message"]
        assert "'tiny'" in message and "'other'" in message and "/api/pull" in message


async def test_the_publisher_s_name_may_be_left_out(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make().app.state.server
    served = {"a/one": 1, "a/two": 2, "b/two": 3}
    monkeypatch.setattr(type(server.worker), "models", served)
    assert server.resolve_name("one") == server.resolve_name("one:latest") == "a/one"
    with pytest.raises(ApiError, match="no model 'two' here; send 'a/two', 'b/two', 'a/one' or"):
        server.resolve_name("two")


async def test_a_name_is_taken_in_other_letters(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = make().app.state.server
    server.paths["C"] = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2" / "snapshots" / "1"
    served = dict.fromkeys(("a/Qwen3-8B", "b/one", "B/ONE", "C", "a/Qwen3-8B:code"), 1)
    monkeypatch.setattr(type(server.worker), "models", served)
    for name, model in {
        "A/QWEN3-8b": "a/Qwen3-8B",
        "qwen3-8b": "a/Qwen3-8B",
        "qwen3-8b:latest": "a/Qwen3-8B",
        "QWEN3-8B:code": "a/Qwen3-8B:code",
        "b/one": "b/one",
        "B/ONE": "B/ONE",
        "c": "C",
        "huggingfacetb/smollm2": "C",
    }.items():
        assert server.resolve_name(name) == model
    with pytest.raises(ApiError, match="no model 'b/One' here; send 'b/one', 'B/ONE', "):
        server.resolve_name("b/One")


async def test_few_of_many_models_are_named_the_nearest_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make().app.state.server
    served = dict.fromkeys((*(f"a/model-{i}" for i in range(300)), "b/Llama-3-8B"), 1)
    monkeypatch.setattr(type(server.worker), "models", served)
    with pytest.raises(ApiError) as caught:
        server.resolve_name("llama3:8b")
    message = caught.value.message
    assert message.startswith("no model 'llama3:8b' here; send 'b/Llama-3-8B', 'a/model-")
    assert message.count("'a/model-") == 9 and "/v1/models" in message


async def test_a_tokenizer_loads_off_the_event_loop_and_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real, paths = threading.Event(), front_module.load_tokenizer, list[Path]()

    def slow(path: Path) -> Any:
        paths.append(path)
        assert gate.wait(10)
        return real(path)

    monkeypatch.setattr(front_module, "load_tokenizer", slow)
    s = make()
    waiting = [asyncio.ensure_future(s.chat(model="other")) for _ in range(3)]
    while not paths:
        await asyncio.sleep(0)
    assert (await s.get("/health")).status == 200
    gate.set()
    assert [a.status for a in await asyncio.gather(*waiting)] == [200] * 3 and len(paths) == 1


async def test_a_broken_tokenizer_is_told_in_each_shape(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> Any:
        raise UserError("no usable tokenizer")

    monkeypatch.setattr(front_module, "load_tokenizer", broken)
    s = make()
    answer = await s.chat(model="other")
    assert answer.status == 503 and answer.error["code"] == "model_not_loaded"
    said = (
        await s.post("/v1/messages", {"model": "other", "messages": MESSAGES, "max_tokens": 9})
    ).json
    assert (
        said["error"]["message"] == "no usable tokenizer"
        and said["error"]["type"] == "overloaded_error"
    )
    assert (await s.chat()).status == 200


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("model", 503, "model_not_loaded"),
        ("prompt", 400, "context_length_exceeded"),
        ("engine", 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_loading_brings_to_light(
    make: Make, fault: Any, status: int, code: str | None, stream: bool
) -> None:
    s = make(holds=True)
    connection = Connection(
        s.app, "/v1/chat/completions", {"model": "other", "messages": MESSAGES, "stream": stream}
    )
    await s.engine.until(lambda: s.engine.submitted)
    request = s.engine.submitted[0]
    output = replace(s.engine.output(request, 0, (), "error"), error="why not", fault=fault)
    s.engine.mailboxes[request.id].put(output)
    answer = await connection.answer()
    error = answer.events[-1]["error"] if stream else answer.error
    assert "why not" in error["message"] and error["code"] == code
    assert stream or (answer.status, answer.headers.get("retry-after")) == (
        status,
        "10" if fault == "model" else None,
    )


async def test_load_and_unload(make: Make) -> None:
    s = make()
    found = (await s.post("/v1/models/load", {"model": "other", "pin": True, "x": 1})).json
    assert (found["id"], found["status"], found["pinned"]) == ("other", "loaded", True)
    assert found["seconds"] >= 0 and found["object"] == "model"
    refused = await s.post("/v1/models/unload", {"model": "other"})
    assert refused.status == 409 and "send force: true" in refused.error["message"]
    assert (await s.post("/models/unload", {"model": "other", "force": True})).json[
        "status"
    ] == "unloaded"
    assert s.engine.ordered == [("other", True), ("other", "unload")]


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "model"), ({"model": 1}, "model"), ({"model": "other", "pin": "yes"}, "pin")],
)
async def test_wrong_loads(make: Make, body: Any, param: str) -> None:
    answer = await make().post("/v1/models/load", body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_loads_that_fail(make: Make) -> None:
    answer = await make(wrong="other cannot be loaded: no space").post(
        "/v1/models/load", {"model": "other"}
    )
    assert answer.status == 503 and answer.error["message"] == "other cannot be loaded: no space"
    for script, why in (({"ending": True}, "is stopping"), ({"lives": False}, "has stopped")):
        answer = await make(**script).post("/v1/models/load", {"model": "other"})
        assert answer.status == 503 and why in answer.error["message"]


async def test_an_unload_of_a_busy_model_is_given_up(make: Make) -> None:
    s = make(Config(drain_s=0.01), holds=True, status="loaded")
    answer = await s.post("/v1/models/unload", {"model": "other"})
    assert answer.status == 409 and "still busy after 1 s" in answer.error["message"]


async def test_a_client_that_leaves_cancels_its_load(make: Make) -> None:
    s = make(holds=True)
    connection = Connection(s.app, "/v1/models/load", {"model": "other"})
    await s.engine.until(lambda: s.engine.ordered)
    connection.leave()
    assert (await connection.answer()).status == 499


@pytest.mark.parametrize("path", ["/v1/models/load", "/v1/models/unload"])
async def test_they_are_guarded_as_all_else(make: Make, path: str) -> None:
    s, body = make(Config(api_key="k")), {"model": "other"}
    assert (await s.post(path, body)).status == 401
    for foreign in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        assert (await s.post(path, body, headers={"x-api-key": "k", **foreign})).status == 403
    assert not s.engine.ordered
    assert (await s.post(path, body, headers={"x-api-key": "k"})).status == 200


@pytest.mark.parametrize(("loads", "status"), [("other", 200), ("", 503)])
async def test_a_load_is_no_stall(make: Make, loads: str, status: int) -> None:
    assert (await make(silent=100.0, loads=loads).get("/health")).status == status
    assert (await make(silent=601.0, loads=loads).get("/health")).status == 503


async def test_a_conversation_may_change_its_model(make: Make, agent: tuple[Any, Path]) -> None:
    s = make()
    first = (await s.post("/v1/responses", {"input": "hello", "model": "tiny"})).json
    body = {"input": "and", "model": "other", "previous_response_id": first["id"]}
    second = (await s.post("/v1/responses", body)).json
    assert second["status"] == "completed" and second["model"] == "other"
    told = agent[0].decode(s.engine.submitted[1].prompt)
    assert "hello world" in told  # what the first one said, in the second one's template


def test_the_greeting_names_them_all() -> None:
    text = greeting(Config(), ["a", "b", "c"], 81)
    assert text.startswith(
        "a is served at http://127.0.0.1:81/v1\nb, c: loaded on first request\n\n"
    )


# ---- real tiny models, over a socket
# ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two models, of which one fits at a time, and one that never does."""
    one = save_tokenizer(tmp_path_factory.mktemp("one"))
    two = save_tokenizer(tmp_path_factory.mktemp("two"), template=AGENT, extra=THINK + CALLS)

    def loads(name: str, kind: str) -> Any:
        info = ModelInfo(name, 512, tiny.VOCAB, "rows", 8, 0, 1, 1)

        def start() -> Any:
            return tiny.engine(tiny.model(kind), blocks=128, vocab=tiny.VOCAB), info

        return ModelSlot(start, info)

    def memory_check(slot: ModelSlot, staying: int) -> str:
        return "it is too large" if slot.info.name == "huge" else "full" if staying else ""

    members = [loads("one", "qwen3"), loads("two", "llama"), loads("huge", "llama")]
    worker = EngineThread(ModelManager(members, memory_check), max_sequences=8, max_queue=16)
    worker.launch()
    tokenizer = front_module.load_tokenizer(one)
    app = create_app(worker, tokenizer, one, Config(keepalive_s=0.1), {"two": two, "huge": two})
    with live(app) as base:
        yield base
    worker.stop()


def say(client: OpenAI, model: str, text: str) -> str:
    options: Any = {"seed": 7, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], **options
    )
    assert answer.model == model
    return json.dumps(answer.choices[0].message.model_dump())


@pytest.mark.slow
def test_swaps_under_load_change_no_answer(url: str) -> None:
    """OpenAI's own client, four threads, two models by turns, against what each says when all is
    quiet."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        jobs = [("one" if i % 2 else "two", f"hello {i % 3}") for i in range(12)]
        quiet = {job: say(client, *job) for job in sorted(set(jobs))}
        found: list[tuple[Any, str]] = []

        def work(some: list[Any]) -> None:
            found.extend((job, say(client, *job)) for job in some)

        threads = [threading.Thread(target=work, args=(jobs[k::4],)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 12 and all(quiet[job] == said for job, said in found)
        assert [m.id for m in client.models.list()] == ["one", "two", "huge"]


def test_the_sdks_see_loads_that_fail(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        with pytest.raises(Exception, match="huge cannot be loaded: it is too large") as caught:
            say(client, "huge", "hello")
        assert getattr(caught.value, "status_code", 0) == 503
        with pytest.raises(NotFoundError, match="send 'one', 'two', 'huge' or 'default'"):
            say(client, "more", "hello")
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        with pytest.raises(Exception, match="too large"):
            client.messages.create(
                model="huge", max_tokens=4, messages=[{"role": "user", "content": "hello"}]
            )
        said = client.messages.create(
            model="two", max_tokens=4, messages=[{"role": "user", "content": "hello"}]
        )
        assert said.model == "two"


def test_load_and_unload_over_the_wire(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        found = client.post("/v1/models/load", json={"model": "one"}).json()
        assert (found["status"], found["pinned"]) == ("loaded", False)
        assert client.get("/health").json()["loaded"] == ["one"]
        assert (
            client.post("/v1/models/unload", json={"model": "one"}).json()["status"] == "unloaded"
        )
        assert client.get("/health").json()["loaded"] == []
        assert client.post("/v1/models/load", json={"model": "huge"}).status_code == 503

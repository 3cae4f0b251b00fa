"""Profiles in the APIs: models of their own there, over one engine, whose defaults a request's own
values replace."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mlxspec import cli
from mlxspec.config import Config
from mlxspec.profiles import Profile
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from mlxspec.types import BACKGROUND, UNLIMITED, Served
from tests.server.test_several_models import OTHER
from tests.server.test_thinking import LEVELS, OPENS
from tests.support.live import live, tiny_worker
from tests.support.scripted import INFO, MESSAGES, Server, server
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

pytestmark = pytest.mark.anyio

BASE = Profile("tiny", temperature=0.7, top_k=40, presence_penalty=0.5)
CODE = Profile("tiny:code", temperature=0.2, top_k=-1, seed=7, max_tokens=9, system="You code.")
CONFIG = Config(profiles=(BASE, CODE, Profile("other:x", min_p=0.1), Profile("gone:x", seed=1)))
SYSTEM = {"role": "system", "content": "You code."}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 50},
    "/v1/responses": {"input": "hello"},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}
Make = Callable[..., Server]


@pytest.fixture
def s(tokenizer: Any, model_dir: Path, agent: tuple[Any, Path]) -> Server:
    others = (Served(OTHER, "unloaded"),)
    return server(tokenizer, model_dir, CONFIG, {"other": agent[1]}, others=others)


async def test_they_are_models_of_their_own(s: Server) -> None:
    listed = (await s.get("/v1/models")).json
    names = ["tiny", "tiny:code", "other", "other:x"]
    assert [one["id"] for one in listed["data"]] == names
    assert (listed["first_id"], listed["last_id"]) == ("tiny", "other:x")
    base, code = listed["data"][:2]
    assert (base["root"], base["parent"]) == ("tiny", None)  # vLLM's fields
    own = {"id": "tiny:code", "display_name": "tiny:code", "parent": "tiny"}
    assert code == base | own and code["root"] == "tiny"
    assert [one["parent"] for one in listed["data"]] == [None, "tiny", None, "other"]
    assert (await s.get("/v1/models/tiny:code")).json == code
    tags = [one["name"] for one in (await s.get("/api/tags")).json["models"]]
    assert tags == ["tiny:latest", "tiny:code", "other:latest", "other:x"]
    loaded = [one["name"] for one in (await s.get("/api/ps")).json["models"]]
    assert loaded == ["tiny:latest", "tiny:code"]
    shown = (await s.post("/api/show", {"model": "tiny:code"})).json
    assert shown["model"] == "tiny:code" and "completion" in shown["capabilities"]
    refused = await s.chat(model="tiny:cod")
    assert refused.status == 404 and "'tiny:code', 'tiny'" in refused.error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_names_it_and_the_engine_gets_its_model(
    s: Server, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "mlxspec"):
        answer = await s.post(path, {**BODIES[path], "model": "tiny:code"})
    assert answer.status == 200 and answer.json["model"] == "tiny:code"
    [request] = s.engine.submitted
    assert request.model == "tiny"
    assert (request.sampling.temperature, request.sampling.top_k) == (0.2, 0)
    assert (request.sampling.presence_penalty, request.sampling.seed) == (0.5, 7)
    assert request.max_tokens == (50 if path == "/v1/messages" else 9)
    assert any(": tiny:code, " in line and " out, " in line for line in caplog.messages)
    page = (await s.get("/metrics")).body.decode()
    assert 'mlxspec_first_token_seconds_count{model="tiny:code"} 1.0' in page
    assert (await s.get("/page/now")).json["requests"][0]["model"] == "tiny:code"


async def test_a_models_own_table_is_its_default(s: Server) -> None:
    for more in ({}, {"model": "default"}, {"model": "gpt-5"}, {"model": "tiny:latest"}):
        await s.chat(**more)
    assert {r.sampling.temperature for r in s.engine.submitted} == {0.7}
    assert {r.sampling.top_k for r in s.engine.submitted} == {40}
    assert len({r.sampling.seed for r in s.engine.submitted}) == 4
    await s.post("/v1/chat/completions", {"messages": MESSAGES, "model": "other:x"})
    assert s.engine.submitted[-1].sampling.min_p == 0.1


async def test_a_requests_own_values_win(s: Server) -> None:
    own = {"temperature": 1.5, "top_k": 3, "presence_penalty": 0.0, "seed": 8, "max_tokens": 20}
    await s.chat(model="tiny:code", **own)
    await s.complete(model="tiny:code", **own)
    await s.post("/v1/messages", {**BODIES["/v1/messages"], "model": "tiny:code", **own})
    await s.post("/api/chat", {**BODIES["/api/chat"], "model": "tiny:code", "options": own})
    for request in s.engine.submitted:
        found = request.sampling
        assert (found.temperature, found.top_k, found.presence_penalty) == (1.5, 3, 0.0)
        assert (found.seed, request.max_tokens) == (8, 20)
    assert len(s.engine.submitted) == 4


async def test_no_limit_and_no_seed_are_values_too(s: Server) -> None:
    room = INFO.context - len("hello") - 30
    for path, own in (
        ("/v1/chat/completions", {"max_tokens": -1, "seed": -1}),
        ("/v1/responses", {"max_output_tokens": -1, "seed": -1}),
        ("/api/chat", {"options": {"num_predict": -1, "seed": -1}}),
    ):
        answer = await s.post(path, {**BODIES[path], "model": "tiny:code", **own})
        assert answer.status == 200
        request = s.engine.submitted[-1]
        assert request.max_tokens > room and request.sampling.seed != 7, path
    await s.post("/api/chat", {**BODIES["/api/chat"], "model": "tiny:code", "max_tokens": None})
    assert s.engine.submitted[-1].max_tokens == 9


async def prompt(s: Server, path: str, **body: Any) -> tuple[int, ...]:
    s.engine.submitted.clear()
    answer = await s.post(path, {**BODIES[path], "model": "tiny:code", **body})
    assert answer.status == 200, answer.body
    return s.engine.submitted[0].prompt


async def test_its_system_text_stands_where_a_client_sends_none(s: Server) -> None:
    want = await prompt(s, "/v1/chat/completions", messages=[SYSTEM, *MESSAGES])
    for path in BODIES:
        assert await prompt(s, path) == want, path
        assert await prompt(s, path, model="tiny") != want
    own = {
        "/v1/chat/completions": {"messages": [{**SYSTEM, "content": "Mine."}, *MESSAGES]},
        "/v1/messages": {"system": "Mine."},
        "/v1/responses": {"instructions": "Mine."},
        "/api/chat": {"messages": [{**SYSTEM, "content": "Mine."}, *MESSAGES]},
        "/api/generate": {"system": "Mine."},
    }
    want = await prompt(s, "/v1/chat/completions", **own["/v1/chat/completions"], model="tiny")
    for path, more in own.items():
        assert await prompt(s, path, **more) == want, path
    developer = [{**SYSTEM, "role": "developer", "content": "Mine."}, *MESSAGES]
    assert await prompt(s, "/v1/chat/completions", messages=developer) == want


async def test_counting_and_tokenizing_see_the_same_prompt(s: Server) -> None:
    asked = {"messages": MESSAGES, "model": "tiny:code"}
    tokens = (await s.post("/tokenize", asked)).json["tokens"]
    assert tuple(tokens) == await prompt(s, "/v1/chat/completions")
    counted = (await s.post("/v1/messages/count_tokens", asked)).json["input_tokens"]
    assert counted == len(tokens)
    asked = {"input": "hello", "model": "tiny:code"}
    assert (await s.post("/v1/responses/input_tokens", asked)).json["input_tokens"] == counted


async def test_errors_count_the_messages_that_the_client_sent(s: Server) -> None:
    answer = await s.chat(model="tiny:code", messages=[*MESSAGES, {"role": "x", "content": ""}])
    assert answer.status == 400 and answer.error["message"].startswith("messages[1].role")


async def test_a_response_says_what_it_was_drawn_with(s: Server) -> None:
    answer = await s.post("/v1/responses", {"input": "hello", "model": "tiny:code"})
    assert answer.json["temperature"] == 0.2 and answer.json["instructions"] is None
    more = {"input": "more", "previous_response_id": answer.json["id"], "model": "tiny:code"}
    assert (await s.post("/v1/responses", more)).status == 200
    first, second = (request.prompt for request in s.engine.submitted)
    assert second[: len(first)] == first


async def test_loads_and_unloads_are_its_models(s: Server) -> None:
    for verb, order in (("load", None), ("unload", "unload")):
        answer = await s.post(f"/v1/models/{verb}", {"model": "other:x"})
        assert answer.status == 200 and answer.json["id"] == "other:x"
        assert s.engine.ordered[-1] == ("other", order)
    await s.post("/api/chat", {"model": "other:x", "keep_alive": 0})
    assert s.engine.ordered[-1] == ("other", "unload")
    await s.post("/api/generate", {"model": "other:x"})
    assert s.engine.ordered[-1] == ("other", None)


async def test_embeddings_and_raw_prompts_by_its_name(s: Server) -> None:
    await s.complete(model="tiny:code")
    await s.post("/v1/embeddings", {"input": "hello", "model": "tiny:code"})
    completion, embedding = s.engine.submitted
    assert (completion.model, embedding.model) == ("tiny", "tiny")
    assert completion.sampling.temperature == 0.2 and completion.max_tokens == 9
    plain = await s.complete()
    assert s.engine.submitted[-1].prompt == completion.prompt, "a raw prompt has no system text"
    assert plain.json["model"] == "tiny"


async def test_answers_are_recorded_for_the_model(s: Server) -> None:
    kept: list[Any] = []
    s.app.state.server.recorder = SimpleNamespace(add=lambda *what: kept.append(what))
    await s.chat(model="tiny:code")
    assert [model for model, *_ in kept] == ["tiny"]


async def test_a_priority_goes_with_a_profile(s: Server) -> None:
    await s.chat(model="tiny:code", priority=5)
    assert [(r.model, r.priority) for r in s.engine.submitted] == [("tiny", 5)]


@pytest.mark.parametrize("path", BODIES)
async def test_a_profile_has_a_priority(path: str, tokenizer: Any, model_dir: Path) -> None:
    """A request's own wins, however it says it."""
    config = Config(profiles=(Profile("tiny:later", priority=50),))
    s = server(tokenizer, model_dir, config)
    body = BODIES[path] | {"model": "tiny:later"}
    await s.post(path, body)
    await s.post(path, body | {"priority": 0})
    await s.post(path, body | {"service_tier": "flex"})
    await s.post(path, body, headers={"x-mlxspec-priority": "3"})
    await s.post(path, BODIES[path] | {"model": "tiny"})
    assert [request.priority for request in s.engine.submitted] == [50, 0, BACKGROUND, 3, 0]


@pytest.mark.parametrize(("priority", "engine"), [(5, BACKGROUND), (-3, BACKGROUND), (200, 200)])
async def test_a_profile_lifts_no_embedding(
    priority: int, engine: int, tokenizer: Any, model_dir: Path
) -> None:
    """They go behind answers, unless a request says otherwise."""
    s = server(tokenizer, model_dir, Config(profiles=(Profile("tiny", priority=priority),)))
    await s.post("/v1/embeddings", {"input": "hello"})
    await s.post("/v1/embeddings", {"input": "hello", "priority": 3})
    await s.complete()
    assert [request.priority for request in s.engine.submitted] == [engine, 3, priority]


# ---- reasoning


def reasoning(tmp_path: Path, template: str, **values: Any) -> Server:
    path = save_tokenizer(tmp_path, template=template, extra=THINK + CALLS)
    config = Config(profiles=(Profile("tiny:p", **values),))
    return server(load_tokenizer(path), path, config, info=replace(INFO, context=2048))


async def asked(s: Server, path: str = "/v1/chat/completions", **body: Any) -> Any:
    """The end of the prompt, and the tokens of reasoning that are left."""
    s.engine.submitted.clear()
    answer = await s.post(path, {**BODIES[path], "model": "tiny:p", **body})
    assert answer.status == 200, answer.body
    [request] = s.engine.submitted
    text = s.engine.tokenizer.decode(request.prompt)
    left = request.grammar().inner.remaining  # of the thinking budget in the loop guard
    return text[-25:], None if left == UNLIMITED else left


async def test_thinking_where_the_template_has_a_switch(tmp_path: Path) -> None:
    s = reasoning(tmp_path, OPENS, thinking=False)
    closed, opened = "<think>\n\n</think>\n\n", "<think>\n"
    assert (await asked(s))[0].endswith(closed)
    assert (await asked(s, model="tiny"))[0].endswith(opened)
    wants: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": True}}),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 50}}),
        ("/v1/chat/completions", {"reasoning_effort": "high"}),
        ("/v1/responses", {"reasoning": {"effort": "low"}}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 50}}),
        ("/api/chat", {"think": True}),
    ]
    for path, own in wants:
        assert (await asked(s, path, **own))[0].endswith(opened), own
    for path in ("/v1/messages", "/api/chat", "/v1/responses"):
        assert (await asked(s, path))[0].endswith(closed), path
    assert (await asked(s, reasoning_effort="none"))[0].endswith(closed)


async def test_thinking_off_where_the_template_has_none(tmp_path: Path) -> None:
    plain = AGENT.replace("enable_thinking", "no_switch")
    s = reasoning(tmp_path, plain, thinking=False)
    assert (await asked(s))[1] == 0 and (await asked(s, model="tiny"))[1] is None
    assert (await asked(s, reasoning={"max_tokens": 5}))[1] == 5
    assert (await asked(s, reasoning_effort="low"))[1] == 1024
    on = reasoning(tmp_path, plain, thinking=True)
    assert (await asked(on))[1] is None


async def test_effort(tmp_path: Path) -> None:
    s = reasoning(tmp_path, OPENS, effort="low")
    assert (await asked(s))[1] == 1024 and (await asked(s, model="tiny"))[1] is None
    assert (await asked(s, reasoning_effort="medium"))[1] == 8192
    assert (await asked(s, reasoning={"max_tokens": 1500}))[1] == 1500
    assert (await asked(s, "/v1/responses", reasoning={"effort": "none"}))[1] == 0
    none = reasoning(tmp_path, OPENS, effort="none")
    assert (await asked(none))[1] == 0 and (await asked(none, "/api/chat", think=True))[1] is None
    levels = reasoning(tmp_path, LEVELS + "{{ reasoning_effort }}", effort="low")
    assert (await asked(levels))[0].endswith("low")
    assert (await asked(levels, reasoning_effort="high"))[0].endswith("high")


# ---- one engine


@pytest.fixture(scope="module")
def client(model_dir: Path) -> Iterator[httpx.Client]:
    tables = (Profile("tiny:a", temperature=0.0), Profile("tiny:b", temperature=0.8, seed=5))
    with tiny_worker("qwen3", 512, max_sequences=4, max_queue=8) as worker:
        app = create_app(worker, load_tokenizer(model_dir), model_dir, Config(profiles=tables))
        with live(app) as base, httpx.Client(base_url=base, timeout=60) as made:
            yield made


def answered(client: httpx.Client, model: str, **own: Any) -> Any:
    words = "the system and the user and you " * 6
    body = {"prompt": words, "max_tokens": 12, "ignore_eos": True, "model": model, **own}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_weights_and_prefix_cache_are_shared(client: httpx.Client, anyio_backend: str) -> None:
    first = answered(client, "tiny:a")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for name in ("tiny:b", "tiny"):
        then = answered(client, name, temperature=0)
        cached = then["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == first["usage"]["prompt_tokens"] - 1 and then["model"] == name
        assert then["choices"] == first["choices"], "with a request's own values it is the same"
    page = client.get("/metrics").text
    assert 'mlxspec_model_loads_total{model="tiny"} 1.0' in page
    assert 'mlxspec_model_loads_total{model="tiny:' not in page


def test_launch_takes_its_name(
    client: httpx.Client, bare_settings: None, anyio_backend: str
) -> None:
    words = ["launch", "--print", "--url", str(client.base_url), "--model", "tiny:a", "codex"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0 and "tiny:a" in done.stdout, done.output


def test_answers_are_those_of_a_request_that_says_it_all(
    client: httpx.Client, anyio_backend: str
) -> None:
    for name, own in (("tiny:a", {"temperature": 0}), ("tiny:b", {"temperature": 0.8, "seed": 5})):
        assert answered(client, name)["choices"] == answered(client, "tiny", **own)["choices"]
    assert json.dumps(answered(client, "tiny:a")["choices"]) != json.dumps(
        answered(client, "tiny:b")["choices"]
    )

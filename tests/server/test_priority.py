"""A request's priority, from its body or a header, in every API."""

from pathlib import Path
from typing import Any

import pytest

from mlxspec.types import BACKGROUND, MAX_PRIORITY
from tests.support.scripted import MESSAGES, Server, server

pytestmark = pytest.mark.anyio

HEADER = "x-mlxspec-priority"
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}
EMBED = {"/v1/embeddings": {"input": "hello"}, "/api/embeddings": {"prompt": "hello"}}


@pytest.fixture
def s(tokenizer: Any, model_dir: Path) -> Server:
    return server(tokenizer, model_dir)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("body", "header", "priority"),
    [
        ({}, None, 0),
        ({"priority": 7}, None, 7),
        ({"priority": -MAX_PRIORITY}, None, -MAX_PRIORITY),
        ({"service_tier": "flex"}, None, BACKGROUND),
        ({"service_tier": "auto"}, None, 0),
        ({"priority": 7, "service_tier": "flex"}, "3", 7),
        ({"priority": 0}, "3", 0),
        ({"priority": None}, "3", 3),
        ({"service_tier": "flex"}, "3", BACKGROUND),
        ({"service_tier": "default"}, "-3", -3),
        ({}, str(MAX_PRIORITY), MAX_PRIORITY),
    ],
)
async def test_reaches_the_engine(
    s: Server, path: str, body: Any, header: str | None, priority: int
) -> None:
    headers = {} if header is None else {HEADER: header}
    answer = await s.post(path, {**BODIES[path], **body}, headers=headers)
    assert answer.status == 200 and [r.priority for r in s.engine.submitted] == [priority]
    assert "x-mlxspec-ignored" not in answer.headers


async def test_may_be_one_of_ollamas_options(s: Server) -> None:
    body = BODIES["/api/chat"] | {"options": {"priority": 5.0}}
    assert (await s.post("/api/chat", body)).status == 200
    assert s.engine.submitted[0].priority == 5


@pytest.mark.parametrize("path", [*BODIES, *EMBED])
@pytest.mark.parametrize("header", ["1001", "-1001", "", "high", "1.5", "1e2", "+5", "9" * 5000])
async def test_a_wrong_header_is_refused_in_the_apis_format(
    s: Server, path: str, header: str
) -> None:
    answer = await s.post(path, BODIES.get(path) or EMBED[path], headers={HEADER: header})
    error = answer.json["error"]
    said = error if path.startswith("/api/") else error["message"]
    assert answer.status == 400 and not s.engine.submitted
    assert said.startswith(HEADER) and "-1000 to 1000" in said and len(said) < 200


@pytest.mark.parametrize("path", [*BODIES, *EMBED])
async def test_a_wrong_field_is_refused_in_the_apis_format(s: Server, path: str) -> None:
    body = {**(BODIES.get(path) or EMBED[path]), "priority": 1001}
    answer = await s.post(path, body, headers={HEADER: "5"})
    error = answer.json["error"]
    said = error if path.startswith("/api/") else error["message"]
    assert answer.status == 400 and said.startswith("priority = 1001: ") and "1000" in said


@pytest.mark.parametrize("path", EMBED)
async def test_embeddings_are_background(s: Server, path: str) -> None:
    for body, priority in (({}, BACKGROUND), ({"priority": 0}, 0), ({"priority": -5}, -5)):
        s.engine.submitted.clear()
        await s.post(path, {**EMBED[path], **body})
        assert [r.priority for r in s.engine.submitted] == [priority]


async def test_every_prompt_of_a_request_has_it(s: Server) -> None:
    await s.complete(prompt=["a", "b"], priority=9)
    assert [r.priority for r in s.engine.submitted] == [9, 9]

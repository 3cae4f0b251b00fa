"""The endpoints that only tell: models, health, metrics, tokens; and what the router refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxspec.server.errors import ApiError
from mlxspec.text.chat import encode, render_chat
from tests.support.scripted import INFO, MESSAGES, Server, server

pytestmark = pytest.mark.anyio


@pytest.fixture
def make(tokenizer: Any, model_dir: Any) -> Callable[..., Server]:
    return lambda **kw: server(tokenizer, model_dir, **kw)


async def test_models(make: Callable[..., Server]) -> None:
    s = make(info=replace(INFO, name="org/name"))
    found = (await s.get("/v1/models")).json
    [model] = found["data"]
    assert found["object"] == "list" and model["object"] == "model"
    assert (model["id"], model["context_window"], model["max_model_len"]) == ("org/name", 512, 512)
    for name in ("org/name", "default", "local"):
        assert (await s.get(f"/v1/models/{name}")).json == model
    answer = await s.get("/models/other")
    assert answer.status == 404 and answer.error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        ({}, 200, None),
        ({"silent": 59.0}, 200, None),
        ({"silent": 61.0}, 503, "no progress for 61 s"),
        ({"lives": False}, 503, "has stopped"),
        ({"ending": True}, 503, "the server is stopping"),
    ],
)
async def test_health(
    make: Callable[..., Server], script: Any, status: int, reason: str | None
) -> None:
    answer = await make(**script).get("/health")
    assert answer.status == status
    if reason:
        assert answer.json["status"] == "unhealthy" and reason in answer.json["reason"]
    else:
        assert answer.json == {"status": "ok", "loaded": ["tiny"]}


async def test_metrics(make: Callable[..., Server]) -> None:
    answer = await make().get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'mlxspec_generated_tokens_total{model="tiny"} 6.0' in answer.body.decode()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_tokenize(make: Callable[..., Server], tokenizer: Any, path: str) -> None:
    s = make()
    ids = encode(tokenizer, "hello world")
    found = (await s.post(path, {"prompt": "hello world", "model": "tiny"})).json
    assert found == {"count": 2, "max_model_len": 512, "tokens": ids}
    for flag in (True, False):
        body = {"messages": MESSAGES, "add_generation_prompt": flag}
        assert (await s.post(path, body)).json["tokens"] == render_chat(tokenizer, MESSAGES, flag)
    assert (await s.post(path, {"prompt": "", "add_special_tokens": False})).json["count"] == 0


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_detokenize(make: Callable[..., Server], tokenizer: Any, path: str) -> None:
    s = make()
    assert (await s.post(path, {"tokens": encode(tokenizer, "hello é")})).json == {
        "prompt": "hello é"
    }
    assert (await s.post(path, {"tokens": []})).json == {"prompt": ""}
    assert (
        await s.post(path, {"tokens": [310]})
    ).status == 200  # padding of the model's vocabulary


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "x"}]}, 400, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [320]}, 400, "tokens"),
        ("/detokenize", b"{", 400, None),
    ],
)
async def test_refusals(
    make: Callable[..., Server], path: str, body: Any, status: int, param: str | None
) -> None:
    answer = await make().post(path, body)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_unknown_fields_are_reported_here_too(make: Callable[..., Server]) -> None:
    answer = await make().post("/tokenize", {"prompt": "a", "return_token_strs": True})
    assert answer.headers["x-mlxspec-ignored"] == "return_token_strs"


async def test_a_refusal_names_the_unknown_fields_too(make: Callable[..., Server]) -> None:
    answer = await make().post("/tokenize", {"colour": 1})
    assert (answer.status, answer.headers["x-mlxspec-ignored"]) == (400, "colour")
    answer = await make().post("/api/show", {"model": "missing", "colour": 1})
    assert (answer.status, answer.headers["x-mlxspec-ignored"]) == (404, "colour")


@pytest.mark.parametrize(
    ("path", "twice"),
    [
        ("/v1/v1/messages", "/v1"),
        ("/v1/v1/chat/completions", "/v1"),
        ("/v1//v1/models", "/v1"),
        ("//v1/v1/v1/responses", "/v1"),
        ("/v1/v1", "/v1"),
        ("/api/api/chat", "/api"),
        ("/v1/v10", ""),
        ("/v1/nothing/v1", ""),
        ("/apiapi", ""),
    ],
)
async def test_a_prefix_that_stands_there_twice(
    tokenizer: Any, model_dir: Any, path: str, twice: str
) -> None:
    answer = await server(tokenizer, model_dir).post(path, {})
    assert answer.status == 404
    error = answer.json["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (f"{twice} is there twice: take it off" in message) == bool(twice)
    assert (answer.json.get("type") == "error") == ("messages" in path)
    assert isinstance(error, str) == path.startswith("/api/")


async def test_no_such_path_and_no_such_method(make: Callable[..., Server]) -> None:
    s = make()
    answer = await s.get("/v1/nothing")
    assert answer.status == 404 and "/v1/nothing: Not Found" in answer.error["message"]

    answer = await s.get("/v1/chat/completions")
    assert answer.status == 405 and answer.headers["allow"] == "POST"
    assert "Method Not Allowed" in answer.error["message"]
    answer = await make().post("/v1/responses/resp_1", {})
    assert answer.status == 405 and set(answer.headers["allow"].split(", ")) == {
        "GET",
        "HEAD",
        "DELETE",
    }
    answer = await s.post(
        "/v1/chat/completions", {"messages": MESSAGES}, headers={"origin": "http://localhost"}
    )
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost"


async def test_a_bug_is_a_500_in_openais_shape(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("secret detail")

    s = make()
    monkeypatch.setattr(s.engine, "stats", broken)
    from tests.support.scripted import Connection

    connection = Connection(s.app, "/health", method="GET")
    with pytest.raises(RuntimeError):  # for the log
        await connection.answer()
    body = connection.body.decode()
    assert connection.sent[0]["status"] == 500 and '"server_error"' in body and "secret" not in body


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", None),
        (401, "authentication_error", "invalid_api_key"),
        (403, "permission_error", None),
        (404, "invalid_request_error", None),
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (500, "server_error", None),
        (503, "server_error", None),
    ],
)
def test_shapes_of_errors(status: int, kind: str, code: str | None, anyio_backend: str) -> None:
    assert ApiError(status, "why", param="n").body() == {
        "error": {"message": "why", "type": kind, "param": "n", "code": code}
    }

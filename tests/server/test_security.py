"""API key, Host, Origin, size of the body."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.metrics import Metrics
from mlxspec.server.security import protect
from tests.support.scripted import MESSAGES, Answer, Connection, server

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def ask(
    config: Config, path: str = "/v1/models", method: str = "GET", **headers: str
) -> Answer:
    """What a tiny application behind the checks answers."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await inside(
        Connection(protect(app, config), path, method=method, headers=named)
    ).answer()


def inside(connection: Connection) -> Connection:
    """With the application in its scope, as Starlette puts it there."""
    state = SimpleNamespace(metrics=Metrics(dict))
    connection.scope["app"] = SimpleNamespace(state=SimpleNamespace(server=state))
    return connection


@pytest.mark.parametrize(
    ("config", "host", "ok"),
    [
        (Config(), "localhost", True),
        (Config(), "localhost:8080", True),
        (Config(), "LocalHost:8080", True),
        (Config(), "localhost.", True),
        (Config(), "127.0.0.1:8080", True),
        (Config(), "[::1]:8080", True),
        (Config(), "evil.example", False),
        (Config(), "localhost.evil.example", False),
        (Config(), "127.0.0.1.evil.example:8080", False),
        (Config(), "evil.example@localhost.evil.example", False),
        (Config(), "[::1", False),
        (Config(), "evil.example@localhost", False),
        (Config(host="0.0.0.0"), "192.168.1.5@192.168.1.5", False),
        (Config(), "", False),
        (Config(), "192.168.1.5:8080", False),
        (Config(), "0.0.0.0:8080", False),
        (Config(host="192.168.1.5"), "192.168.1.5:8080", True),
        (Config(host="0.0.0.0"), "192.168.1.5:8080", True),
        (Config(host="::"), "[fe80::1]:8080", True),
        (Config(host="0.0.0.0"), "evil.example", False),
        (Config(host="0.0.0.0"), "mac.local", False),
        (Config(host="0.0.0.0", allowed_hosts=("Mac.local",)), "mac.local:8080", True),
    ],
)
async def test_host(config: Config, host: str, ok: bool) -> None:
    answer = await ask(config, host=host)
    assert answer.status == (200 if ok else 403)
    if not ok:
        assert (
            answer.error["code"] == "host_not_allowed"
            and "--allowed-hosts" in answer.error["message"]
        )


async def test_no_host() -> None:
    assert (await ask(Config(), host="")).status == 403


MALFORMED = [
    *("", " ", "evil@localhost", "http://localhost", "localhost/", "localhost:", "localhost:x"),
    *("localhost:80:80", "localhost:123456", "localhost..", "[localhost]", "[::1", "::1", "[::1]x"),
    *("[.]", "[:]", "[::::]", "[1::2::3]", "[127.0.0.1]", "...", "1.2.3", "1.2.3.4.5", "999.1.1.1"),
    *("127.0.0.1, evil.example", "localhost evil.example", "localhost\\", "localhost?", "localhost#"),
]  # fmt: skip


@pytest.mark.parametrize("listens", ["", "0.0.0.0", "::", "127.0.0.1"])
@pytest.mark.parametrize("value", MALFORMED)
async def test_a_malformed_name_is_nobodys(value: str, listens: str) -> None:
    """Wherever the server listens, in a Host as in an Origin. Only an empty port is allowed."""
    config = Config(host=listens)
    if value != "localhost:":
        assert (await ask(config, host=value)).status == 403
    for origin in (value, f"http://{value}"):
        good = origin in ("http://localhost", "http://localhost:")
        assert (await ask(config, origin=origin)).status == (200 if good else 403)


@pytest.mark.parametrize(
    "origin",
    [
        "file://",
        "chrome-extension://abc",
        "localhost",
        "http:localhost",
        "http://",
        "https:///",
        "://",
    ],
)
@pytest.mark.parametrize("listens", ["", "0.0.0.0", "localhost"])
async def test_an_origin_without_a_name(origin: str, listens: str) -> None:
    assert (await ask(Config(host=listens), origin=origin)).status == 403


@pytest.mark.parametrize(
    ("origin", "ok"),
    [
        ("http://192.168.1.5:3000", True),  # this server's own
        ("http://localhost:3000", True),
        ("http://203.0.113.7", False),  # a web site without a name
        ("http://192.168.1.5@203.0.113.7", False),
        ("null", False),
    ],
)
async def test_origin_where_any_address_may_be_ours(origin: str, ok: bool) -> None:
    answer = await ask(Config(host="0.0.0.0"), host="192.168.1.5:8080", origin=origin)
    assert answer.status == (200 if ok else 403)


@pytest.mark.parametrize(
    ("origin", "ok"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1:8080", True),
        ("http://[::1]:8080", True),
        ("https://page.example", True),
        ("https://evil.example", False),
        ("null", False),
        ("", False),
        ("file://", False),
        ("chrome-extension://abc", False),
        ("http://localhost.evil.example", False),
    ],
)
async def test_origin(origin: str, ok: bool) -> None:
    answer = await ask(Config(allowed_hosts=("page.example",)), origin=origin)
    assert answer.status == (200 if ok else 403)
    assert answer.headers.get("access-control-allow-origin") == (origin if ok else None)


async def test_a_page_asks_first() -> None:
    """A preflight needs no key, and says what the page may send; an app's origin is allowed by a
    setting, which the error of others names."""
    config = Config(api_key="sesame", allowed_origins=("app://obsidian.md",))
    asks = {
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization,content-type",
    }
    for origin in ("app://obsidian.md", "http://localhost:3000"):
        answer = await ask(config, method="OPTIONS", origin=origin, **asks)
        assert answer.status == 200, answer.body
        assert answer.headers["access-control-allow-origin"] == origin
        assert "authorization" in answer.headers["access-control-allow-headers"]
        refused = await ask(config, origin=origin)  # without the key, told to the page
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == origin
    for origin in ("app://other", "https://evil.example"):
        answer = await ask(config, method="OPTIONS", origin=origin, **asks)
        assert answer.status == 403 and b"--allowed-origins" in answer.body
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer sesame"}, 200),
        ({"authorization": "bearer  sesame "}, 200),
        ({"x_api_key": "sesame"}, 200),
        ({"authorization": "Bearer wrong", "x_api_key": "sesame"}, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic sesame"}, 401),
        ({"authorization": "sesame"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"x_api_key": ""}, 401),
        ({"x_api_key": "sesame2"}, 401),
        ({"x_api_key": "sésame"}, 401),
    ],
)
async def test_key(headers: dict[str, str], status: int) -> None:
    config = Config(api_key="sesame")
    answer = await ask(config, **headers)
    assert answer.status == status
    if status == 401:
        assert (
            answer.error["code"] == "invalid_api_key"
            and answer.headers["www-authenticate"] == "Bearer"
        )
        assert "sesame" not in answer.error["message"]
    assert (await ask(config, "/metrics", **headers)).status == status
    assert (await ask(config, "/health", **headers)).status == 200


async def test_a_key_beyond_ascii() -> None:
    key = "schlüssel"
    as_sent = key.encode().decode("latin-1")
    assert (await ask(Config(api_key=key), x_api_key=as_sent)).status == 200


async def test_a_body_that_is_too_large(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir, Config(max_body_mb=1))
    exact = b'{"messages": [{"role": "user", "content": "a"}]}'.ljust(1 << 20)
    assert (await s.post(CHAT, exact)).status == 200
    for kw in (
        {"body": exact + b" "},
        {"chunks": [b" " * (1 << 19)] * 3},  # no length is announced
        {"body": b"{}", "headers": {"content-length": str(1 << 40)}},
    ):
        answer = await s.post(CHAT, **kw)
        assert answer.status == 413 and "larger than 1 MiB" in answer.error["message"]


async def test_a_body_in_pieces(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir)
    parts = [b'{"messages": [{"role": "user", ', b'"content": "hello"}]}']
    assert (await s.post(CHAT, chunks=parts)).status == 200


async def test_a_body_that_never_ends(
    tokenizer: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.server.body.BODY_S", 0.01)
    s = server(tokenizer, model_dir)
    connection = Connection(s.app, CHAT, chunks=[b"{", b""])
    connection._parts = [b"{"]

    async def receive() -> Any:
        if connection._parts:
            return {"type": "http.request", "body": connection._parts.pop(), "more_body": True}
        await asyncio.Event().wait()

    connection._receive = receive  # type: ignore[method-assign]
    answer = await connection.answer()
    assert answer.status == 408 and "did not arrive" in answer.error["message"]


async def test_a_client_that_leaves_while_it_sends(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir)
    connection = Connection(s.app, CHAT)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    connection._receive = receive  # type: ignore[method-assign]
    assert (await connection.answer()).status == 499


async def test_refusals_come_before_anything_runs(tokenizer: Any, model_dir: Any) -> None:
    s = server(tokenizer, model_dir, Config(api_key="sesame"))
    answer = await s.post(CHAT, {"messages": MESSAGES})
    assert answer.status == 401 and s.engine.submitted == []
    right = {"authorization": "Bearer sesame", "origin": "https://evil.example"}
    assert (await s.post(CHAT, {"messages": MESSAGES}, headers=right)).status == 403
    assert s.engine.submitted == []

"""Malformed and smuggled requests on a real socket: each gets one answer, never a 500 or a
traceback, and the next client is served."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from mlxspec.config import Config
from tests.support.live import live
from tests.support.scripted import Connection, Server, server

Address = tuple[str, int]

HOST = b"Host: localhost\r\n"
BODY = b'{"prompt": "a"}'
SIZE = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def post(headers: bytes, body: bytes = BODY, path: bytes = b"/v1/completions") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + headers + b"\r\n" + body


def get(
    target: bytes, headers: bytes = HOST, version: bytes = b"HTTP/1.1", method: bytes = b"GET"
) -> bytes:
    return method + b" " + target + b" " + version + b"\r\n" + headers + b"\r\n"


CASES: dict[str, tuple[bytes, tuple[int, ...]]] = {  # what is sent, the statuses that may come
    "honest": (post(SIZE), (200,)),
    "honest in chunks": (post(CHUNKED, CHUNK), (200,)),
    "one length, twice": (post(SIZE * 2), (200,)),
    "two lengths": (post(SIZE + b"Content-Length: 3\r\n"), (400,)),
    "two lengths in one": (post(b"Content-Length: 15, 3\r\n"), (400,)),
    "length with a sign": (post(b"Content-Length: +15\r\n"), (400,)),
    "negative length": (post(b"Content-Length: -1\r\n"), (400,)),
    "length of 5000 digits": (post(b"Content-Length: " + b"9" * 5000 + b"\r\n"), (400,)),
    "length in other digits": (post("Content-Length: ¹5\r\n".encode()), (400,)),
    "length and chunks": (post(SIZE + CHUNKED, CHUNK), (400,)),
    "chunks and no length": (post(CHUNKED + b"Content-Length: 0\r\n", CHUNK), (400,)),
    "chunked twice": (post(CHUNKED * 2, CHUNK), (400,)),
    "quoted chunked": (post(b'Transfer-Encoding: "chunked"\r\n', CHUNK), (400,)),
    "space before the colon": (post(b"Transfer-Encoding : chunked\r\n", CHUNK), (400,)),
    "identity": (post(b"Transfer-Encoding: identity\r\n" + SIZE), (400,)),
    "negative chunk": (post(CHUNKED, b"-1\r\na\r\n0\r\n\r\n"), (400,)),
    "chunk that goes on": (post(CHUNKED, b"f\r\n" + BODY + b"XX0\r\n\r\n"), (400,)),
    "extension of 1 MB": (post(CHUNKED, b"f;" + b"x" * (1 << 20) + b"\r\n" + BODY), (400,)),
    "trailers of 1 MB": (post(CHUNKED, b"f\r\n" + BODY + b"\r\n0\r\n" + b"A: b\r\n" * 200_000), (400,)),
    "folded header": (post(b"X: a\r\n Transfer-Encoding: chunked\r\n" + SIZE), (200, 400)),
    "nul in a name": (post(b"X\0: a\r\n" + SIZE), (400,)),
    "no name": (post(b": a\r\n" + SIZE), (400,)),
    "CR in a value": (post(b"X: a\rTransfer-Encoding: chunked\r\n" + SIZE), (400,)),
    "nul in a value": (post(b"X: a\0b\r\n" + SIZE), (400,)),
    "bytes in a value": (post(b"X: \xff\xfe\r\n" + SIZE), (200,)),
    "another's URI": (get(b"http://evil.example/v1/models"), (404,)),
    "a target of a bracket": (get(b"//["), (404,)),
    "OPTIONS *": (get(b"*", method=b"OPTIONS"), (404, 405)),
    "TRACE": (get(b"/", method=b"TRACE"), (405,)),
    "CONNECT": (get(b"[x:80", method=b"CONNECT"), (404, 405)),
    "HTTP/0.9": (b"GET /\r\n\r\n", (400,)),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 403)),
    "no Host": (get(b"/health", b""), (400,)),
    "two Hosts": (get(b"/health", HOST * 2), (400,)),
    "100k lines of headers": (get(b"/", HOST + b"X: y\r\n" * 100_000), (400,)),
    "header of 1 MB": (get(b"/", HOST + b"X: " + b"y" * (1 << 20) + b"\r\n"), (400,)),
    "URI of 1 MB": (get(b"/" + b"a" * (1 << 20)), (400,)),
    "websocket": (get(b"/health", HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"), (200,)),
    "another expectation": (post(b"Expect: gold\r\n" + SIZE), (200, 417)),
    "too large by its length": (post(b"Content-Length: %d\r\n" % (1 << 40)), (413,)),
    "too large in chunks": (post(CHUNKED, b"100001\r\n" + b" " * 0x100001 + b"\r\n0\r\n\r\n"), (413,)),
    **{
        f"path {path.decode()}": (get(path), (404,))
        for path in (
            *(b"/%2e%2e/%2e%2e/etc/passwd", b"/page/%2e%2e%2fapp.py", b"/page/..%5c..%5c", b"/page/%00"),
            *(b"/v1/models/%00", b"/v1/models/..%2f..%2fetc", b"/v1/models/%252e%252e", b"/%5b"),
            *(b"/page/%c0%ae%c0%ae/x", b"/v1/models/%ff%fe", b"/v1/models/%ed%a0%80"),
            *(b"/v1/models/%0d%0aX:y", b"//v1/models"),
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Address]]:
    from mlxspec.text.chat import load_tokenizer
    from tests.tiny_tokenizer import save_tokenizer

    path = save_tokenizer(tmp_path_factory.mktemp("model"))
    s = server(load_tokenizer(path), path, Config(max_body_mb=1))
    with live(s.app) as url:
        yield s, ("127.0.0.1", int(url.rsplit(":", 1)[1]))


def answers(address: Address, data: bytes, most: int = 1) -> list[tuple[int, bytes]]:
    """Status and body of up to `most` answers; fewer where the server closes. An answer is whole or
    fails."""
    found = []
    with socket.create_connection(address, 10) as sock, sock.makefile("rb") as file:
        try:
            sock.sendall(data)
        except ConnectionError:
            pass  # it has said what it has to say
        try:
            while len(found) < most and (line := file.readline()):
                version, status, _ = line.split(b" ", 2)
                assert version == b"HTTP/1.1" and line.endswith(b"\r\n")
                headers = {}
                while (line := file.readline()) != b"\r\n":
                    name, _, value = line.partition(b":")
                    headers[name.lower()] = value.strip()
                size = int(headers.get(b"content-length", -1))
                body = file.read(size)  # uvicorn's own 400 ends with the connection
                assert size in (-1, len(body))
                found.append((int(status), body))
        except ConnectionError:
            pass
    return found


@pytest.mark.parametrize("name", CASES)
def test_one_answer(
    name: str, place: tuple[Server, Address], caplog: pytest.LogCaptureFixture
) -> None:
    sent, statuses = CASES[name]
    with caplog.at_level(logging.ERROR):
        found = answers(place[1], sent)
        assert answers(place[1], post(SIZE))[0][0] == 200  # the next honest client
    # Another test's server may still say what it answered.
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    if not found and len(sent) > 1 << 18:
        return  # closed in the middle of it, which resets the connection
    assert [status for status, _ in found] in [[status] for status in statuses], found
    if found[0][0] > 400:
        assert json.loads(found[0][1])["error"]["message"]


def test_what_follows_a_body_is_a_request_of_its_own(place: tuple[Server, Address]) -> None:
    honest = post(SIZE)
    found = answers(place[1], honest + get(b"/health"), 2)
    assert [status for status, _ in found] == [200, 200] and b'"status":"ok"' in found[1][1]
    assert [status for status, _ in answers(place[1], honest + b"garbage\r\n\r\n", 3)] == [200, 400]
    smuggled = post(SIZE + CHUNKED, b"0\r\n\r\n" + get(b"/health"))
    assert [status for status, _ in answers(place[1], smuggled, 2)] == [400]  # and closed
    shorter = post(b"Content-Length: 2\r\n", b"{}" + get(b"/health"))
    assert [status for status, _ in answers(place[1], shorter, 2)] == [400, 200]


def test_a_client_that_waits_to_be_told_to_go_on(place: tuple[Server, Address]) -> None:
    with socket.create_connection(place[1], 10) as sock:
        sock.sendall(post(b"Expect: 100-continue\r\n" + SIZE, b""))
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(BODY)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost@evil.example", "evil@localhost", "[::1%eth0]:80", "::1"),
        *("localhost..", "localhost/evil", "localhost\\x", "localhost, evil", "local\thost"),
        *("localhost:80:90", "localhost:abc", "127.1", "[localhost]", "\xff", ""),
    ],
)
def test_a_host_that_is_not_ours(host: str, place: tuple[Server, Address]) -> None:
    found = answers(place[1], get(b"/health", b"Host: " + host.encode("latin-1") + b"\r\n"))
    assert [status for status, _ in found] == [403]


@pytest.mark.anyio
@pytest.mark.parametrize("key", ["", "sesame"])
async def test_no_route_answers_a_foreign_name(tokenizer: Any, model_dir: Path, key: str) -> None:
    """Of all that the application has, so that none is forgotten; with the key as well."""
    s = server(tokenizer, model_dir, Config(api_key=key))
    routes = [route for route in s.app.routes if isinstance(route, Route)]
    assert len(routes) == len(s.app.routes) > 30
    foreign = [
        {"host": "evil.example"},
        {"host": "evil.example:8080", "origin": "http://evil.example:8080"},
    ]
    foreign += [{"origin": "http://evil.example"}, {"origin": "null"}]
    for route in routes:
        path = (
            route.path.replace("{name:path}", "tiny")
            .replace("{name}", "page.js")
            .replace("{id}", "x")
        )
        for method in route.methods or ():
            for headers in foreign:
                headers = {**headers, "authorization": f"Bearer {key}"}
                answer = await Connection(
                    s.app, path, b"{}", method=method, headers=headers
                ).answer()
                assert answer.status == 403, (method, path)
                assert not [name for name in answer.headers if name.startswith("access-control")]
                why = "is not a name" if "host" in headers else "may not use this server"
                assert method == "HEAD" or why in str(answer.json["error"])
    assert s.engine.submitted == s.engine.ordered == []

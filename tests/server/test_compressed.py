"""Bodies that clients compress, as Codex does with zstd."""

import gzip
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

from tests.support.scripted import Server, server

pytestmark = pytest.mark.anyio


@pytest.fixture
def make(tokenizer: Any, model_dir: Any) -> Callable[..., Server]:
    return lambda **kw: server(tokenizer, model_dir, **kw)


BODY = {"messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 3}
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.compress,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
}


async def post(server: Server, body: bytes, encoding: str) -> Any:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    return await server.post("/v1/chat/completions", body, headers=headers)


@pytest.mark.parametrize("encoding", PACKED)
async def test_a_compressed_body_is_read(make: Callable[..., Server], encoding: str) -> None:
    plain = json.dumps(BODY).encode()
    answer = await post(make(), PACKED[encoding](plain), encoding)
    assert answer.status == 200 and answer.json["choices"]


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
async def test_what_is_not_compressed_so(make: Callable[..., Server], encoding: str) -> None:
    answer = await post(make(), b"{}", encoding)
    assert answer.status == 400 and encoding in answer.error["message"]


async def test_another_encoding(make: Callable[..., Server]) -> None:
    answer = await post(make(), b"{}", "br")
    assert answer.status == 415 and "zstd, gzip" in answer.error["message"]


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
async def test_a_small_body_that_is_large_inside(
    make: Callable[..., Server], encoding: str
) -> None:
    large = PACKED[encoding](b'{"messages": "' + b"a" * (40 << 20))
    assert len(large) < 1 << 20
    answer = await post(make(), large, encoding)
    assert answer.status == 413 and "decompressed" in answer.error["message"]


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "x-gzip", "deflate"])
async def test_a_body_that_is_cut(make: Callable[..., Server], encoding: str) -> None:
    s, whole = make(), PACKED[encoding](json.dumps(BODY).encode())
    for length in (0, 1, 5, len(whole) // 2, len(whole) - 1):
        answer = await post(s, whole[:length], encoding)
        assert answer.status == 400 and "is cut off" in answer.error["message"], length
        assert encoding in answer.error["message"]


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
async def test_several_members_are_one_body(make: Callable[..., Server], encoding: str) -> None:
    plain, pack = json.dumps(BODY).encode(), PACKED[encoding]
    parts = [plain[at : at + 7] for at in range(0, len(plain), 7)]
    answer = await post(make(), b"".join(map(pack, parts)), encoding)
    assert answer.status == 200 and answer.json["choices"]
    answer = await post(make(), pack(plain) + pack(b"x")[:-1], encoding)
    assert answer.status == 400 and "is cut off" in answer.error["message"]


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "deflate"])
@pytest.mark.parametrize("tail", [b"\0" * 8, b"garbage and more", b'{"n": 9}' * 100])
async def test_what_follows_the_end_is_refused(
    make: Callable[..., Server], encoding: str, tail: bytes
) -> None:
    answer = await post(make(), PACKED[encoding](json.dumps(BODY).encode()) + tail, encoding)
    assert answer.status == 400 and f"not valid {encoding}" in answer.error["message"]


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
async def test_many_empty_members_take_time_by_their_bytes(
    make: Callable[..., Server], encoding: str
) -> None:
    s, empty = make(), PACKED[encoding](b"")
    began = time.process_time()
    answer = await post(s, empty * ((1 << 20) // len(empty)), encoding)
    assert answer.status == 400 and time.process_time() - began < 2

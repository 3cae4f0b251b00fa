"""Bodies that clients compress, as Codex does with zstd."""

import gzip
import json
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

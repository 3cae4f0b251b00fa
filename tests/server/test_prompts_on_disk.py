"""What a client ends is on the disk after a restart, as is what ends by itself."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from tests.support import disk_cache, tiny
from tests.support.scripted import INFO, Connection

pytestmark = pytest.mark.anyio

PROMPT = [i * 37 % 290 for i in range(90)]
SAID = 40  # tokens
BLOCK = 8


@pytest.mark.parametrize("how", ["stop string", "leaves"])
async def test_an_answer_that_its_client_ends(
    tokenizer: Any, model_dir: Path, tmp_path: Path, how: str
) -> None:
    answer = tiny.Plain(tiny.model("qwen3"))(PROMPT, SAID, 0.8, 3)

    def start() -> Any:
        engine = tiny.engine(tiny.model("qwen3"), block=BLOCK, vocab=tiny.VOCAB)
        disk_cache.attach(engine, tmp_path)
        return engine, INFO

    worker = EngineThread(tiny.manager(start))
    worker.launch()
    app = create_app(worker, tokenizer, model_dir, Config())
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    text = tokenizer.decode(answer)
    if how == "stop string":
        body["stop"] = text[-6:]
        assert text.index(text[-6:]) == len(text) - 6
    connection = Connection(app, "/v1/completions", body | {"stream": True})
    if how == "leaves":
        async with asyncio.timeout(20):
            while connection.body.count(b"data: ") < SAID:
                await asyncio.sleep(0.001)
        connection.leave()
    async with asyncio.timeout(20):
        await connection.task
    assert (b"[DONE]" in connection.body) == (how == "stop string")
    await asyncio.to_thread(worker.stop)

    engine = tiny.engine(tiny.model("qwen3"), block=BLOCK)
    disk = disk_cache.attach(engine, tmp_path)
    engine.add(tiny.request("next", [*PROMPT, *answer, 5, 6, 7], 4))
    outputs = disk_cache.finish(engine, disk)
    assert outputs[-1].cached >= len(PROMPT) + SAID - 2 * BLOCK
    disk.close(5)

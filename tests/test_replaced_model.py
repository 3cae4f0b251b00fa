"""A model's directory that another model is put into, as a download or a training does it."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.config import Config
from mlxspec.server import process
from tests.support import tiny
from tests.support.parameter_rows import only
from tests.support.scripted import MESSAGES, Connection
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

ASKED = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/completions": {"prompt": "hello you", "max_tokens": 8},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "hello", "max_output_tokens": 8},
    "/v1/tokenize": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 8}},
}


def write(path: Path, seed: int, **tokenizer: Any) -> Path:
    """A model with random weights, in place of what is there; greedy by its own settings."""
    made = save_tokenizer(path.with_name("new"), **tokenizer)
    (made / "config.json").write_text(json.dumps({"model_type": "llama", **tiny.CONFIGS["llama"]}))
    (made / "generation_config.json").write_text('{"temperature": 0}')
    model = tiny.model("llama")
    mx.random.seed(seed)
    weights = {n: mx.random.normal(x.shape) for n, x in tree_flatten(model.parameters())}
    mx.save_safetensors(str(made / "model.safetensors"), weights)
    shutil.rmtree(path, ignore_errors=True)
    return made.rename(path)


@contextmanager
def served(path: Path) -> Iterator[Any]:
    app = process._load(Config(model=str(path), port=0, kv_blocks=64, speculate=False))
    try:
        yield app
    finally:
        app.state.server.worker.stop()


async def ask(app: Any, url: str, body: dict[str, Any] | None = None) -> Any:
    answer = await Connection(app, url, body or ASKED[url]).answer()
    assert answer.status == 200, answer.body
    return answer.json


def said(answer: Any) -> list[Any]:
    """Its text or tokens."""
    match answer:
        case {"tokens": found}:
            return [found]
        case {"choices": [{"message": {"content": found}} | {"text": found}]}:
            return [found]
        case {"message": {"content": found}} | {"content": [{"text": found}]}:
            return [found]
    return [item["content"][0]["text"] for item in answer["output"] if "content" in item]


async def everything(app: Any) -> list[Any]:
    return [said(await ask(app, url)) for url in ASKED]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model", 0)


def replace(path: Path) -> None:
    write(path, 1, template="you " + AGENT, extra=THINK + CALLS)


@pytest.mark.parametrize("way", only(["unloaded", "loaded"], 1))
def test_weights_and_tokenizer_are_of_one_model(path: Path, way: str, bare_settings: None) -> None:
    """Those that were loaded stay together; the next load reads all of the new one."""

    async def main(app: Any) -> tuple[list[Any], ...]:
        name = {"model": "model"}
        before = await everything(app)
        if way == "unloaded":
            await ask(app, "/v1/models/unload", name)
        replace(path)
        if way == "loaded":
            assert await everything(app) == before
            await ask(app, "/v1/models/unload", name)
        return before, await everything(app)

    with served(path) as app:
        before, after = asyncio.run(main(app))
    with served(path) as app:
        fresh = asyncio.run(everything(app))
    assert after == fresh
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_the_history_of_the_old_one_is_forgotten(path: Path, bare_settings: None) -> None:
    """Its tokens would mean something else."""

    async def main(app: Any) -> Any:
        answer = await ask(app, "/v1/chat/completions")
        turn = answer["choices"][0]["message"]
        talk = {"messages": [*MESSAGES, turn, *MESSAGES]}
        await ask(app, "/v1/models/unload", {"model": "model"})
        replace(path)
        return talk, await ask(app, "/v1/tokenize", talk)

    with served(path) as app:
        talk, after = asyncio.run(main(app))
    with served(path) as app:
        assert asyncio.run(ask(app, "/v1/tokenize", talk)) == after

"""A model whose numbers are not finite, behind every API: an error that says so, in a stream and in a body, with
log-probabilities and without; never NaN in JSON, and never another client's answer."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import encode
from mlxspec.types import ModelInfo
from tests.support import tiny
from tests.support.api_errors import CHAT, EMBED, MESSAGE, OLLAMA, PLAIN, RESPONSE, told
from tests.support.scripted import Answer, Connection
from tests.support.spoilt import spoilt_model

pytestmark = pytest.mark.anyio

BAD = "~"  # one token
SAID = "not finite"
PROMPTS: dict[str, Any] = {
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}]},
    PLAIN: lambda text: {"prompt": text},
    MESSAGE: lambda text: {"messages": [{"role": "user", "content": text}]},
    RESPONSE: lambda text: {"input": text},
    OLLAMA: lambda text: {"messages": [{"role": "user", "content": text}]},
    "/api/generate": lambda text: {"prompt": text},
}
LIMITS = {RESPONSE: {"max_output_tokens": 8}, OLLAMA: {"options": {"num_predict": 8}}}
LIMITS["/api/generate"] = LIMITS[OLLAMA]
LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "top_logprobs": 5},
    PLAIN: {"logprobs": 5},
}


@pytest.fixture(scope="module")
def worker(tokenizer: Any) -> Iterator[EngineThread]:
    [bad] = encode(tokenizer, BAD, special=False)

    def start() -> Any:
        engine = tiny.engine(spoilt_model("qwen3", bad), blocks=128, vocab=tiny.VOCAB)
        return engine, ModelInfo("tiny", 512, tiny.VOCAB, "rows", 8, 1, 1, 1_700_000_000)

    made = EngineThread(tiny.manager(start), max_sequences=8, max_queue=64)
    made.launch()
    yield made
    made.stop()


@pytest.fixture
def app(worker: EngineThread, tokenizer: Any, model_dir: Path) -> Any:
    return create_app(worker, tokenizer, model_dir, Config(max_sequences=8, max_queue=64))


def no_number(value: str) -> None:
    raise AssertionError(f"{value} is no JSON")


def checked(answer: Answer) -> Answer:
    """All of it is JSON."""
    for line in answer.body.decode().splitlines():
        text = line.removeprefix("data: ")
        if text.startswith(("{", "[")) and text != "[DONE]":
            json.loads(text, parse_constant=no_number)
    return answer


async def ask(app: Any, url: str, text: str, **more: Any) -> Answer:
    limit = LIMITS.get(url, {"max_tokens": 8})
    body = {**PROMPTS[url](text), **limit, "temperature": 0, **more}
    return checked(await Connection(app, url, body).answer())


def said(url: str, answer: Answer) -> str:
    if url == "/api/generate" or (url == OLLAMA and answer.status != 200):
        return str(json.loads(answer.body.splitlines()[-1])["error"])
    return told(url, answer)


def without_ids(answer: Answer) -> Any:
    """What is the same each time: its tokens, and not the last bits of their probabilities."""
    times = ("id", "created", "created_at", "completed_at", "item_id")
    durations = ("total_duration", "prompt_eval_duration", "eval_duration")
    drop = {*times, *durations, "usage", "logprob", "token_logprobs", "top_logprobs"}

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if k not in drop}
        return [plain(v) for v in value] if isinstance(value, list) else value

    return answer.status, plain(answer.json)


@pytest.mark.parametrize("url", PROMPTS)
async def test_each_api_says_so_and_neighbours_answer(app: Any, url: str) -> None:
    more = LOGPROBS.get(url, {})
    before = await ask(app, url, "hello world", stream=False, **more)
    assert before.status == 200
    asked = [
        ask(app, url, text, stream=stream, **extra)
        for text in (f"hello {BAD} world", "hello world", f"{BAD}{BAD}", "hello world")
        for stream in (False, True)
        for extra in ({}, more)
    ]
    answers = await asyncio.gather(*asked)
    for spoilt in (answers[:4], answers[8:12]):
        for i, answer in enumerate(spoilt):
            assert answer.status == (200 if i >= 2 else 500)
            why = said(url, answer)
            assert SAID in why and "tiny" in why and "download it again" in why
            if i < 2 and url in ("/v1/completions", "/v1/chat/completions"):
                [choice] = answer.json["choices"]  # what a stream would have sent
                assert choice["finish_reason"] == "error"
    for clean in (answers[4:8], answers[12:]):
        assert all(answer.status == 200 for answer in clean)
        assert without_ids(clean[1]) == without_ids(before)
    after = await ask(app, url, "hello world", stream=False, **more)
    assert without_ids(after) == without_ids(before)


async def test_what_came_before_is_in_the_stream(app: Any, tokenizer: Any) -> None:
    """A token that makes the next one fail, with its log-probability."""
    [bad] = encode(tokenizer, BAD, special=False)
    more = {"logit_bias": {str(bad): 100}, "logprobs": True, "top_logprobs": 3, "stream": True}
    answer = await ask(app, CHAT, "hello", **more)
    *events, last = answer.events
    found = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert [each["content"][0]["token"] for each in found] == [BAD]
    assert SAID in last["error"]["message"]


@pytest.mark.parametrize("more", [{}, {"encoding_format": "base64"}])
async def test_embeddings(app: Any, more: dict[str, Any]) -> None:
    texts = ["hello", f"the {BAD}", "world"]
    for given in (texts, texts[1], [texts[1]]):
        for url in (EMBED, "/api/embed"):
            body = {"input": given, **(more if url == EMBED else {})}
            answer = checked(await Connection(app, url, body).answer())
            why = answer.json["error"]
            assert answer.status == 500 and SAID in (why if url == "/api/embed" else why["message"])
    answer = checked(await Connection(app, EMBED, {"input": texts[::2], **more}).answer())
    assert answer.status == 200 and len(answer.json["data"]) == 2


async def test_figures_are_numbers(app: Any, worker: EngineThread) -> None:
    await ask(app, CHAT, BAD, stream=True)
    for url in ("/health", "/v1/models", "/page/now"):
        answer = await Connection(app, url, method="GET").answer()
        assert answer.status == 200
        checked(answer)
    metrics = await Connection(app, "/metrics", method="GET").answer()
    assert b"nan" not in metrics.body.lower() and b'finish="error"' in metrics.body
    assert tiny.stats(worker).blocks_used == 0

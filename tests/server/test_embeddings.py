"""/v1/embeddings: OpenAI's shapes, by its own client too, over the real engine with tiny models."""

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest
from openai import OpenAI

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.server.embeddings import embed
from mlxspec.server.openai.schema import Embeddings
from mlxspec.text.chat import encode
from mlxspec.types import Busy
from tests.support import tiny
from tests.support.live import live, tiny_worker
from tests.support.scripted import Answer, Connection, server

pytestmark = pytest.mark.anyio

CONTEXT = 512
TEXTS = ["hello world", "the system and the user", "a", "you and the other one in the world"]


@pytest.fixture(scope="module")
def worker() -> Iterator[EngineThread]:
    with tiny_worker("qwen3", CONTEXT, max_sequences=4, max_queue=4) as made:
        yield made


@pytest.fixture(scope="module")
def config() -> Config:
    return Config(max_sequences=4, max_queue=4)


@pytest.fixture
def app(worker: EngineThread, tokenizer: Any, model_dir: Path, config: Config) -> Any:
    return create_app(worker, tokenizer, model_dir, config)


async def ask(app: Any, given: Any, **body: Any) -> Answer:
    return await Connection(app, "/v1/embeddings", {"input": given, **body}).answer()


def truth(ids: Sequence[int], mean: bool = False, dimensions: int | None = None) -> np.ndarray:
    hidden = np.array(tiny.model("qwen3").model(mx.array([list(ids)]))[0])
    pooled = (hidden.mean(axis=0) if mean else hidden[-1])[:dimensions]
    return pooled / np.linalg.norm(pooled)


async def test_texts(app: Any, tokenizer: Any, worker: EngineThread) -> None:
    answer = (await ask(app, TEXTS, model="tiny", user="me")).json
    ids = [encode(tokenizer, text) for text in TEXTS]
    tokens = sum(map(len, ids))
    assert answer["object"] == "list" and answer["model"] == "tiny"
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for i, one in enumerate(answer["data"]):
        assert (one["object"], one["index"]) == ("embedding", i)
        assert one["embedding"] == pytest.approx(truth(ids[i]), abs=1e-3)
        assert np.linalg.norm(one["embedding"]) == pytest.approx(1, abs=1e-6)
    assert tiny.stats(worker).blocks_used == 0


async def test_ollamas_shapes(app: Any, tokenizer: Any) -> None:
    """One text or several, and the older endpoint, which takes one."""
    ids = [encode(tokenizer, text) for text in TEXTS]
    body = {"model": "tiny:latest", "input": TEXTS, "truncate": True}
    answer = await Connection(app, "/api/embed", body).answer()
    assert answer.json["model"] == "tiny:latest"
    assert answer.json["prompt_eval_count"] == sum(map(len, ids))
    for each, vector in zip(ids, answer.json["embeddings"], strict=True):
        assert vector == pytest.approx(truth(each), abs=1e-3)
    one = await Connection(app, "/api/embed", {"input": TEXTS[0], "dimensions": 8}).answer()
    assert one.json["embeddings"] == [pytest.approx(truth(ids[0], dimensions=8), abs=1e-3)]
    old = await Connection(app, "/api/embeddings", {"prompt": TEXTS[0]}).answer()
    assert old.json == {"embedding": pytest.approx(truth(ids[0]), abs=1e-3)}
    for wrong in ({"input": []}, {"input": [5.5]}, {}):
        refused = await Connection(app, "/api/embed", wrong).answer()
        assert refused.status == 400 and "input" in refused.json["error"]
    for wrong in ({"prompt": 5}, {"prompt": ""}, {"prompt": "hello " * 600}, {}):
        refused = await Connection(app, "/api/embeddings", wrong).answer()
        said = refused.json["error"]
        assert refused.status == 400 and "prompt" in said and "input" not in said


async def test_forms_of_the_input(app: Any, tokenizer: Any) -> None:
    """A text, a list, token ids and a list of them: the same vectors."""
    ids = encode(tokenizer, TEXTS[0])
    found = []
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids], [ids, TEXTS[0]]):
        data = (await ask(app, given, model="GPT-4")).json["data"]  # llama.vscode's name
        found += [one["embedding"] for one in data]
    assert len(found) == 6 and all(one == pytest.approx(found[0], abs=1e-5) for one in found)


async def test_base64_and_dimensions(app: Any, tokenizer: Any) -> None:
    want = truth(encode(tokenizer, TEXTS[1]), dimensions=16)
    body = (await ask(app, TEXTS[1], encoding_format="base64", dimensions=16)).json
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert len(raw) == 4 * 16 and np.frombuffer(raw, "<f4") == pytest.approx(want, abs=1e-3)
    answer = await ask(app, TEXTS[1], dimensions=65)
    assert answer.status == 400 and answer.error["param"] == "dimensions"
    assert "has 64" in answer.error["message"]


async def test_too_many_dimensions_are_refused_before_the_work(
    app: Any, worker: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Any] = []
    plain = worker.submit
    monkeypatch.setattr(worker, "submit", lambda *some: submitted.extend(some) or plain(*some))
    answer = await ask(app, ["a"] * 9, dimensions=65)
    assert answer.status == 400 and len(submitted) == 2  # the first group


async def test_fields_of_completions_are_ignored_and_named(app: Any) -> None:
    answer = await ask(app, "a", temperature=0.5, max_tokens=3)
    assert answer.headers["x-mlxspec-ignored"] == "temperature, max_tokens"


async def test_a_full_queue_loses_no_work(
    app: Any, worker: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first vector it is an error, after that the rest waits."""
    calls = 0
    plain = worker.submit

    def submit(*requests: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Busy(0.01)  # type: ignore[arg-type]
        return plain(*requests)

    monkeypatch.setattr(worker, "submit", submit)
    answer = await ask(app, ["a"] * 5)
    assert answer.status == 200 and len(answer.json["data"]) == 5 and calls == 4


@pytest.mark.slow
async def test_many_beside_an_answer(app: Any, tokenizer: Any) -> None:
    """More inputs than the queue holds, of all lengths, while an answer runs as if it were
    alone."""
    texts = ["hello world and the user " * (1 + i % 9) for i in range(60)]
    chat = {"prompt": "the system", "temperature": 0, "max_tokens": 100, "ignore_eos": True}
    alone = await Connection(app, "/v1/completions", chat).answer()
    running = Connection(app, "/v1/completions", {**chat, "stream": True})
    await running.until(b"data: ")
    answer = await ask(app, texts)
    streamed = (await running.answer()).events
    said = "".join(e["choices"][0]["text"] for e in streamed[:-1])
    assert said == alone.json["choices"][0]["text"]
    assert len(answer.json["data"]) == 60
    for text, one in zip(texts, answer.json["data"], strict=True):
        assert one["embedding"] == pytest.approx(truth(encode(tokenizer, text)), abs=1e-3)


@pytest.mark.parametrize(
    ("given", "body", "param", "text"),
    [
        ("hello " * 600, {}, "input[0]", "prompt is too long"),
        (["a", [5] * 600], {}, "input[1]", "600 tokens > 512 maximum"),
        (["a", ""], {}, "input[1]", "has no tokens"),
        ([[5, 400]], {}, "input[0]", "token id 400"),
        ([], {}, "input", "input"),
        ({}, {}, "input", "input"),
        ("a", {"dimensions": 0}, "dimensions", "dimensions = 0"),
        ("a", {"encoding_format": "int8"}, "encoding_format", "encoding_format"),
    ],
)
async def test_refused(app: Any, given: Any, body: Any, param: str, text: str) -> None:
    answer = await ask(app, given, **body)
    assert answer.status == 400 and str(answer.error["param"]).startswith(param)
    assert text in answer.error["message"]


@pytest.mark.parametrize(
    ("pooling", "mean"),
    [
        ({}, False),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, True),
        ({"pooling_mode": "lasttoken"}, False),
        ({"pooling_mode": "mean", "embedding_dimension": 64}, True),
    ],
)
async def test_pooling_is_the_models(
    worker: EngineThread, tokenizer: Any, tmp_path: Path, pooling: Any, mean: bool
) -> None:
    place = tmp_path / "1_Pooling"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(pooling))
    app = create_app(worker, tokenizer, tmp_path, Config())
    found = (await ask(app, TEXTS[1])).json["data"][0]["embedding"]
    assert found == pytest.approx(truth(encode(tokenizer, TEXTS[1]), mean), abs=1e-3)


@pytest.mark.parametrize("file", ["1_Pooling", "2_Dense"])
async def test_what_is_not_supported_is_refused(
    worker: EngineThread, tokenizer: Any, tmp_path: Path, file: str
) -> None:
    modes = {"pooling_mode_cls_token" if file == "1_Pooling" else "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    (tmp_path / file).mkdir(exist_ok=True)
    answer = await ask(create_app(worker, tokenizer, tmp_path, Config()), "a")
    assert answer.status == 400 and "not supported" in answer.error["message"]


async def test_busy_and_gone(tokenizer: Any, model_dir: Path) -> None:
    """What was queued for a client is aborted when it leaves."""
    s = server(tokenizer, model_dir, busy=3)
    assert (await ask(s.app, "a")).status == 429
    s = server(tokenizer, model_dir, holds=True)
    left = Connection(s.app, "/v1/embeddings", {"input": ["a", "b"]})
    await s.engine.until(lambda: len(s.engine.submitted) == 2)
    left.leave()
    await asyncio.wait([left.task])
    aborted = {id for id, _ in s.engine.aborted}
    assert aborted == {request.id for request in s.engine.submitted}


async def test_failures_of_the_engine(tokenizer: Any, model_dir: Path) -> None:
    s = server(tokenizer, model_dir, holds=True)
    asking = Connection(s.app, "/v1/embeddings", {"input": "a"})
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push(finish="error", error="it broke")
    answer = await asking.answer()
    assert answer.status == 500 and "it broke" in answer.error["message"]


async def test_for_other_apis(app: Any, tokenizer: Any) -> None:
    """The function that a dialect of its own calls."""
    state = app.state.server
    ids = encode(tokenizer, TEXTS[0])
    body = Embeddings(input=[TEXTS[0], ids], dimensions=8)
    [first, second], tokens = await embed(await state.model("default"), body)
    assert tokens == 2 * len(ids) and first == pytest.approx(second)
    assert first == pytest.approx(truth(ids, dimensions=8), abs=1e-3)


def test_openai_sdk(app: Any, tokenizer: Any, anyio_backend: str) -> None:
    """Which asks for base64 unless it is told otherwise."""
    with (
        live(app) as base,
        OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        made = client.embeddings.create(model="text-embedding-3-small", input=TEXTS)
        plain = client.embeddings.create(
            model="tiny", input=TEXTS[0], encoding_format="float", dimensions=32
        )
        with pytest.raises(openai.BadRequestError, match="too long"):
            client.embeddings.create(model="tiny", input="hello " * 600)
    for text, one in zip(TEXTS, made.data, strict=True):
        assert one.embedding == pytest.approx(truth(encode(tokenizer, text)), abs=1e-3)
    want = truth(encode(tokenizer, TEXTS[0]), dimensions=32)
    assert plain.data[0].embedding == pytest.approx(want, abs=1e-3)
    assert made.usage.prompt_tokens == made.usage.total_tokens

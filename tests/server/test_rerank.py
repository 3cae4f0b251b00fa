"""/v1/rerank over the real engine with a tiny model: scores are those of the model's own logits."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.server.rerank import HEAD, PAIR, TAIL, TASK
from mlxspec.text.chat import encode, load_tokenizer
from mlxspec.types import MAX_TOP_LOGPROBS, ModelInfo
from tests.support import tiny
from tests.support.live import live
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

DOCUMENTS = [f"{word} and the {other}" for word in ("hello", "you", "a") for other in "bcdefgh"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"), template=AGENT, extra=THINK + CALLS)


@pytest.fixture(scope="module")
def answers(path: Path) -> list[int]:
    """The tokens of yes and no."""
    tokenizer = load_tokenizer(path)
    return [encode(tokenizer, word, special=False)[-1] for word in ("yes", "no")]


@pytest.fixture(scope="module")
def model(answers: list[int]) -> Any:
    """It says both, nearly alike, or none of them."""
    made = tiny.model("llama")
    table = made.model.embed_tokens.weight
    table[mx.array(answers)] = table[answers[0]] * mx.array([[-4.0], [-3.9]])
    mx.eval(made.parameters())
    return made


@pytest.fixture(scope="module")
def served(path: Path, model: Any) -> Iterator[Callable[[str], httpx.Client]]:
    """A client of a server of the model under a name."""
    with ExitStack() as stack:

        def client(name: str) -> httpx.Client:
            def start() -> Any:
                engine = tiny.engine(model, blocks=256, context=1024, vocab=tiny.VOCAB)
                return engine, ModelInfo(name, 1024, tiny.VOCAB, "rows", 8, 1, 1, 1_700_000_000)

            worker = EngineThread(tiny.manager(start), max_sequences=8, max_queue=16)
            worker.launch()
            stack.callback(worker.stop)
            app = create_app(worker, load_tokenizer(path), path, Config())
            base = stack.enter_context(live(app))
            return stack.enter_context(httpx.Client(base_url=base, timeout=60))

        yield client


@pytest.fixture(scope="module")
def client(served: Callable[[str], httpx.Client]) -> httpx.Client:
    return served("Tiny-Reranker")


def ask(client: httpx.Client, path: str = "/v1/rerank", **body: Any) -> httpx.Response:
    return client.post(path, json={"query": "who?", "documents": DOCUMENTS} | body)


def truth(model: Any, path: Path, answers: list[int], text: str) -> tuple[float, int]:
    """The score of a document, and how many answers are among the likeliest tokens."""
    tokenizer = load_tokenizer(path)
    pair = PAIR.format(task=TASK, query="who?", text=text)
    ids = encode(tokenizer, HEAD) + encode(tokenizer, pair, special=False)
    ids += encode(tokenizer, TAIL)
    logits = np.array(model(mx.array([ids]))[0, -1])
    yes, no = logits[answers]
    seen = sum((logits > each).sum() < MAX_TOP_LOGPROBS for each in (yes, no))
    return 1 / (1 + math.exp(no - yes)), int(seen)


def test_scores(client: httpx.Client, model: Any, path: Path, answers: list[int]) -> None:
    answer = ask(client, return_documents=True)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert {each["index"] for each in results} == {*range(len(DOCUMENTS))}
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    unanswered, counts = set(), set()
    for each in results:
        text = DOCUMENTS[each["index"]]
        assert each["document"] == {"text": text}
        score, seen = truth(model, path, answers, text)
        counts.add(seen)
        if seen == 2:
            assert each["relevance_score"] == pytest.approx(score, rel=1e-4)
        elif not seen:  # neither chance is known
            assert each["relevance_score"] == 0
            unanswered.add(f"documents[{each['index']}]")
    assert counts >= {0, 2}, "the documents show too little"
    assert set(answer.headers["x-mlxspec-ignored"].split(", ")) == unanswered
    assert answer.json()["usage"]["total_tokens"] > 0


def test_a_model_that_answers_neither_is_told(
    client: httpx.Client, model: Any, path: Path, answers: list[int]
) -> None:
    unanswered = [text for text in DOCUMENTS if not truth(model, path, answers, text)[1]]
    answer = ask(client, documents=unanswered)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "model")
    assert "Tiny-Reranker" in error["message"] and "Qwen3-Reranker" in error["message"]


def test_the_forms_of_others(client: httpx.Client) -> None:
    objects = [{"text": text} for text in DOCUMENTS]
    best = ask(client).json()["results"][:3]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = ask(client, path, documents=objects, top_n=3).json()["results"]
        assert [each["index"] for each in found] == [each["index"] for each in best]
        for each, same in zip(found, best, strict=True):  # some rows come from the cache
            assert each["relevance_score"] == pytest.approx(same["relevance_score"], rel=1e-4)


def test_what_a_document_says_is_text(client: httpx.Client) -> None:
    """Control tokens in it are none, so it cannot answer for the model."""
    plain, forged = "a", f"a{TAIL}yes{HEAD}"
    counts = [
        ask(client, documents=[*DOCUMENTS, text]).json()["usage"]["total_tokens"]
        for text in (plain, forged)
    ]
    assert counts[1] - counts[0] > 40


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [5]}, "documents[0]"),
        ({"documents": "a"}, "documents"),
        ({"query": None}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["a", "word " * 3000]}, "documents[1]"),
    ],
)
def test_bad_input(client: httpx.Client, body: Any, param: str) -> None:
    answer = ask(client, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(param), error


def test_a_model_that_only_chats_is_refused(served: Callable[[str], httpx.Client]) -> None:
    answer = ask(served("chatty"))
    assert answer.status_code == 400 and "Qwen3-Reranker" in answer.json()["error"]["message"]

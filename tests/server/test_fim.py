"""Fill in the middle by its three endpoints: their shapes against a scripted engine, then what the
prefix cache has while somebody types, by a real one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import encode, load_tokenizer
from tests.support import tiny
from tests.support.live import tiny_worker
from tests.support.scripted import END, Connection, Server, server
from tests.tiny_tokenizer import PSM, save_tokenizer

pytestmark = pytest.mark.anyio

SPM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
FILLED = "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
CONTEXT = 512


def coder(path: Path, tokens: tuple[str, ...]) -> tuple[Any, Path]:
    return load_tokenizer(save_tokenizer(path, extra=tokens)), path


@pytest.fixture(scope="module")
def psm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return coder(tmp_path_factory.mktemp("psm"), PSM)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return coder(tmp_path_factory.mktemp("spm"), SPM)


@pytest.fixture
def make(psm: tuple[Any, Path]) -> Callable[..., Server]:
    return lambda **kw: server(*psm, **kw)


def asked(s: Server, tokenizer: Any) -> str:
    """The text of the newest prompt, control tokens and all."""
    return str(tokenizer.decode(s.engine.submitted[-1].prompt))


@pytest.mark.parametrize("raw", [False, True])
async def test_ollamas_suffix(
    make: Callable[..., Server], psm: tuple[Any, Path], raw: bool
) -> None:
    s = make()
    body = {"prompt": "def f(", "suffix": "): pass", "raw": raw, "stream": False}
    answer = await s.post("/api/generate", body)
    assert answer.json["response"] == "hello world" and answer.json["done_reason"] == "stop"
    assert list(s.engine.submitted[0].prompt) == encode(psm[0], FILLED)
    empty = await s.post("/api/generate", {**body, "prompt": ""})
    assert empty.status == 200 and len(s.engine.submitted) == 2
    refused = await s.post("/api/generate", {**body, "format": "json"})
    assert refused.status == 400 and "suffix" in refused.json["error"]


async def test_suffix(make: Callable[..., Server], psm: tuple[Any, Path]) -> None:
    """The prompt is the one made by hand; the family's tokens end the answer too."""
    s = make()
    answer = await s.complete(prompt="def f(", suffix="): pass", max_tokens=5)
    assert answer.json["choices"][0]["text"] == "hello world"
    assert answer.json["object"] == "text_completion"
    [request] = s.engine.submitted
    assert list(request.prompt) == encode(psm[0], FILLED)
    ends = {token: psm[0].convert_tokens_to_ids(token) for token in (*PSM, "<|endoftext|>")}
    assert request.stop_tokens == {END, *ends.values()}
    for prompt in ("a", "b"):
        await s.complete(prompt=prompt, suffix="")
        assert asked(s, psm[0]) == prompt and s.engine.submitted[-1].stop_tokens == {END}
    await s.complete(prompt=["a", "b"], suffix="c")
    assert asked(s, psm[0]) == "<|fim_prefix|>b<|fim_suffix|>c<|fim_middle|>"


@pytest.mark.parametrize("path", ["/v1/fim/completions", "/fim/completions"])
async def test_mistral(make: Callable[..., Server], psm: tuple[Any, Path], path: str) -> None:
    s = make()
    body = {"prompt": "def f(", "suffix": "): pass", "max_tokens": 9, "temperature": 0}
    made = (await s.post(path, body)).json
    assert made["object"] == "chat.completion" and asked(s, psm[0]) == FILLED
    [choice] = made["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "hello world"
    assert made["usage"]["completion_tokens"] == 3
    events = (await s.post(path, {**body, "stream": True})).events
    texts = [c["delta"].get("content", "") for e in events[:-1] for c in e["choices"]]
    assert "".join(texts) == "hello world" and events[-1] == "[DONE]"
    await s.post(path, {"prompt": "x", "suffix": None})
    assert asked(s, psm[0]) == "<|fim_prefix|>x<|fim_suffix|><|fim_middle|>"


@pytest.mark.parametrize("path", ["/infill", "/v1/infill"])
async def test_llama_cpp(make: Callable[..., Server], psm: tuple[Any, Path], path: str) -> None:
    """As llama.vscode asks: other files, the lines before, the line so far; then to warm up."""
    s = make(cached=7)
    extra = [{"filename": "a.py", "text": "x = 1", "time": 5}, {"text": "y"}]
    body = {
        "input_prefix": "import a\n",
        "prompt": "def f(",
        "input_suffix": "): pass",
        "input_extra": extra,
        "n_predict": 2,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_predict_ms": 1000,
        "stream": False,
        "n_indent": 4,
    }
    answer = await s.post(path, body)
    read = len(s.engine.submitted[-1].prompt)
    assert answer.json == {
        "content": "hello world",
        "stop": True,
        "tokens_predicted": 2,
        "tokens_evaluated": read,
        "tokens_cached": 7,
    }
    assert "cache_prompt" in answer.headers["x-mlxspec-ignored"]
    files = "<|file_sep|>a.py\nx = 1\n<|file_sep|>\ny\n<|file_sep|>\n"
    gap = "<|fim_prefix|>import a\ndef f(<|fim_suffix|>): pass<|fim_middle|>"
    assert asked(s, psm[0]) == files + gap
    for most, tokens in ((0, 1), (-1, 3)):
        answer = await s.post(path, {"input_extra": extra, "n_predict": most})
        assert answer.json["tokens_predicted"] == tokens


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/v1/completions", {"prompt": [1, 2], "suffix": "b"}, "prompt", "send it as text"),
        ("/v1/completions", {"prompt": "a", "suffix": 5}, "suffix", "suffix = 5"),
        ("/v1/fim/completions", {"suffix": "b"}, "prompt", "prompt is missing"),
        ("/v1/fim/completions", {"prompt": ["a", "b"]}, "prompt", 'prompt = ["a", "b"]'),
        ("/v1/fim/completions", {"prompt": "a", "echo": True}, "echo", "echo = true"),
        ("/v1/fim/completions", {"prompt": "a", "random_seed": 3}, "random_seed", "leave it out"),
        ("/infill", {"input_extra": ["a"]}, "input_extra[0]", "input_extra"),
        ("/infill", {"n": 2}, "n", "n = 2"),
        ("/infill", {"stream": True}, "stream", "stream = true"),
        ("/infill", {"input_prefix": "ab " * 9000}, "prompt", "too long"),
    ],
)
async def test_refused(
    make: Callable[..., Server], path: str, body: Any, param: str, text: str
) -> None:
    s = make()
    answer = await s.post(path, body)
    assert answer.status == 400 and answer.error["param"] == param
    assert text in answer.error["message"] and not s.engine.submitted


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/fim/completions", "/infill"])
async def test_a_model_without_the_tokens(tokenizer: Any, model_dir: Path, path: str) -> None:
    s = server(tokenizer, model_dir)
    key = "input_suffix" if path == "/infill" else "suffix"
    answer = await s.post(path, {"prompt": "a", key: "b"})
    assert answer.status == 400 and answer.error["param"] == "suffix"
    for said in ("tiny has no tokens to fill in the middle", "Qwen-Coder", "Codestral"):
        assert said in answer.error["message"]


# ---- with the real engine

SUFFIX = "\n    return the order of the system\n" + "and the user in the other world\n" * 8
PREFIX = "def hello(world):\n" + "    the = a + world\n" * 4


@pytest.fixture(scope="module")
def worker() -> Iterator[EngineThread]:
    with tiny_worker("qwen3", CONTEXT, "lookup", max_sequences=8, max_queue=16) as made:
        yield made


async def complete(worker: EngineThread, known: tuple[Any, Path], **body: Any) -> Any:
    app = create_app(worker, *known, Config())
    body = {"temperature": 0, **body}
    answer = await Connection(app, "/v1/completions", body).answer()
    assert answer.status == 200, answer.body
    return answer.json


async def test_typing_is_cached(worker: EngineThread, spm: tuple[Any, Path]) -> None:
    """Thirty keystrokes before a long suffix, one request each."""
    typed = "    for user in the systems: a"
    assert len(typed) == 30
    hits = []
    for n in range(31):
        answer = await complete(worker, spm, prompt=PREFIX + typed[:n], suffix=SUFFIX, max_tokens=4)
        usage = answer["usage"]
        hits.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert hits[0] < 0.5 and min(hits[1:]) >= 0.95, hits


@pytest.mark.parametrize("order", ["psm", "spm"])
async def test_equal_to_a_prompt_made_by_hand(
    worker: EngineThread, order: str, request: pytest.FixtureRequest
) -> None:
    """Token by token, with copies from the suffix tried as drafts."""
    known = request.getfixturevalue(order)
    prompt = f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    if order == "spm":
        prompt = f"<fim_prefix><fim_suffix>{SUFFIX}<fim_middle>{PREFIX}"
    options = {"max_tokens": 40, "ignore_eos": True}
    filled = await complete(worker, known, prompt=PREFIX, suffix=SUFFIX, **options)
    by_hand = await complete(worker, known, prompt=prompt, **options)
    assert filled["usage"]["prompt_tokens"] == by_hand["usage"]["prompt_tokens"]
    text = filled["choices"][0]["text"]
    assert by_hand["choices"][0]["text"].startswith(text) and text
    plain = tiny.Plain(tiny.model("qwen3"))(encode(known[0], prompt), 40)
    assert known[0].decode(plain).startswith(text)

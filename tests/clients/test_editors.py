"""What autocomplete and indexing ask: Continue's own adapters, and LangChain's embeddings, against a
tiny model that answers by the real engine."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from mlxspec.types import ModelInfo
from tests.clients import install
from tests.clients.conftest import Recorder
from tests.support import tiny
from tests.support.live import live
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

CONTEXT = 512
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")

CONTINUE = """
import { constructLlmApi } from "%s/@continuedev/openai-adapters/dist/index.js";

const [provider, base] = process.argv.slice(2);
const api = constructLlmApi({ provider, apiBase: base, apiKey: "none" });
const asked = { model: "local", prompt: "def f(", suffix: "): pass", max_tokens: 8,
                temperature: 0.01, stop: ["\\n\\n"], stream: true };
let said = "";
for await (const chunk of api.fimStream(asked, new AbortController().signal))
  said += chunk.choices[0]?.delta?.content ?? "";
const made = await api.embed({ model: "local", input: ["a b", "c"] });
console.log(JSON.stringify({ said, widths: made.data.map((one) => one.embedding.length) }));
"""

LANGCHAIN = """
import json, sys
from langchain_openai import OpenAIEmbeddings

made = OpenAIEmbeddings(
    model="local", base_url=sys.argv[1], api_key="none", check_embedding_ctx_length=False
)
texts = made.embed_documents(["the user and the system"] * 3 + ["a"])
print(json.dumps([texts, made.embed_query("a")]))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Recorder]]:
    path = save_tokenizer(tmp_path_factory.mktemp("coder"), extra=FIM)

    def start() -> Any:
        engine = tiny.engine(tiny.model("qwen3"), blocks=256, context=CONTEXT, vocab=tiny.VOCAB)
        return engine, ModelInfo("tiny", CONTEXT, tiny.VOCAB, "rows", 8, 1, 1, 1_700_000_000)

    worker = EngineThread(tiny.manager(start), max_sequences=8, max_queue=16)
    worker.launch()
    recorder = Recorder(create_app(worker, load_tokenizer(path), path, Config()))
    with live(recorder) as url:
        yield url, recorder
    worker.stop()


def output(*command: Any) -> Any:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("provider", ["mistral", "openai"])
def test_continue(served: tuple[str, Recorder], provider: str, tmp_path: Path) -> None:
    url, recorder = served
    modules = install.npm("@continuedev/openai-adapters", "1.37.0").parent
    script = tmp_path / "ask.mjs"
    script.write_text(CONTINUE % modules)
    recorder.exchanges.clear()
    found = output(install.node("22") / "node", script, provider, f"{url}/v1/")
    assert found["said"] and found["widths"] == [64, 64]
    paths = [(each.path, each.status) for each in recorder.exchanges]
    assert paths == [("/v1/fim/completions", 200), ("/v1/embeddings", 200)]


def test_langchain(served: tuple[str, Recorder]) -> None:
    url, _ = served
    python = install.pip("langchain-openai", "1.1.0") / "python"
    texts, query = output(python, "-c", LANGCHAIN, f"{url}/v1")
    assert len(texts) == 4 and texts[0] == pytest.approx(texts[2], abs=1e-5)
    assert query == pytest.approx(texts[3], abs=1e-5)
    assert sum(x * x for x in query) == pytest.approx(1, abs=1e-5)

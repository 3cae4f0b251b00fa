"""Models that cannot be used: each is refused by name in one line, and costs nobody else an
answer."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.config import Config
from mlxspec.server import process
from mlxspec.types import UserError
from tests.support import tiny
from tests.support.scripted import MESSAGES, Connection
from tests.tiny_tokenizer import save_tokenizer

Break = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tokenizer(tmp_path_factory.mktemp("whole"))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **tiny.CONFIGS["llama"]}))
    weights = dict(tree_flatten(tiny.model("llama").parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def config(**change: Any) -> Break:
    """Another value in config.json; None takes the key out."""

    def change_it(path: Path) -> None:
        file = path / "config.json"
        found = json.loads(file.read_text()) | change
        file.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    return change_it


def text(name: str, content: str | bytes) -> Break:
    return lambda p: (p / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def weights(change: Callable[[dict[str, mx.array]], object]) -> Break:
    def change_it(path: Path) -> None:
        file = str(path / "model.safetensors")
        found = dict(mx.load(file))
        mx.eval(found)
        change(found)
        mx.save_safetensors(file, found)

    return change_it


def gone(*names: str) -> Break:
    return lambda p: [(p / name).unlink() for name in names]


def cut(name: str, size: int) -> Break:
    return lambda p: os.truncate(p / name, size)


BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
}
LAYER = "model.layers.1.mlp.down_proj.weight"
HUGE = b"\xff" * 7 + b"\x7f" + b"{}"
BROKEN: dict[str, Break] = {
    "no directory": shutil.rmtree,
    "an empty directory": lambda p: [f.unlink() for f in p.iterdir()],
    "a file": lambda p: (shutil.rmtree(p), p.write_text("x")),
    "no config": gone("config.json"),
    "an empty config": text("config.json", ""),
    "a config that is no JSON": text("config.json", "{"),
    "a config that is no object": text("config.json", "[1]"),
    "a config that is null": text("config.json", "null"),
    "a config that is no text": text("config.json", b"\xff\xfe\x00"),
    "a config 100,000 deep": text("config.json", "[" * 100_000),
    "a config of 50 MB": text("config.json", '{"a": "' + "x" * 50_000_000),
    "no model type": config(model_type=None),
    "a model type unknown": config(model_type="nonesuch"),
    "a model type that is a path": config(model_type="../../x"),
    "a model type that is a number": config(model_type=3),
    "text for a number": config(hidden_size="64"),
    "a fraction for a number": config(num_attention_heads=4.5),
    "no heads": config(num_attention_heads=0),
    "no layers": config(num_hidden_layers=0),
    "layers below none": config(num_hidden_layers=-1),
    "more layers than tensors": config(num_hidden_layers=3_000_000),
    "a size below nothing": config(hidden_size=-64),
    "a size beyond all": config(intermediate_size=1 << 62),
    "a list for a number": config(vocab_size=[320]),
    "a number missing": config(hidden_size=None),
    "a list for a table": config(rope_scaling=[1]),
    "quantization that is text": config(quantization="4bit"),
    "quantization without bits": config(quantization={"group_size": 64}),
    "no weights": gone("model.safetensors"),
    "weights of nothing": cut("model.safetensors", 0),
    "weights cut in the header": cut("model.safetensors", 100),
    "weights cut in the data": cut("model.safetensors", 200_000),
    "weights that are no safetensors": text("model.safetensors", os.urandom(10_000)),
    "a header beyond the file": text("model.safetensors", HUGE),
    "a header that is no JSON": text("model.safetensors", (8).to_bytes(8, "little") + b"nonsense"),
    "weights in a directory": lambda p: (
        (p / "model.safetensors").unlink(),
        (p / "model.safetensors").mkdir(),
    ),
    "a tensor missing": weights(lambda w: w.pop(LAYER)),
    "a tensor too many": weights(lambda w: w.update(more=mx.zeros((2,)))),
    "another shape": weights(lambda w: w.update({LAYER: mx.zeros((64, 96))})),
    "weights that are no numbers": weights(lambda w: w.update({LAYER: w[LAYER] * float("nan")})),
    "no tokenizer": gone("tokenizer.json"),
    "a tokenizer that is no JSON": text("tokenizer.json", "{"),
    "a tokenizer of something else": text("tokenizer.json", '{"version": "1.0"}'),
    "a tokenizer config that is no JSON": text("tokenizer_config.json", "{"),
    "an end token that is text": config(eos_token_id="</s>"),
}


MENDS = re.compile(
    "give (the directory|a complete)|complete mlx-lm model|is missing|neither a directory|download them again"
)


@pytest.mark.parametrize("what", BROKEN)
def test_it_is_refused_in_one_line(copy: Path, what: str, bare_settings: None) -> None:
    BROKEN[what](copy)
    with pytest.raises(UserError, match=MENDS) as caught:
        process._load(Config(model=str(copy), port=0, kv_blocks=32, speculate=False))
    said = str(caught.value)
    assert str(copy) in said and "\n" not in said and len(said) < 800


@pytest.mark.parametrize(
    "what",
    [
        "weights cut in the data",
        *(
            pytest.param(what, marks=pytest.mark.slow)
            for what in ("a number missing", "no tokenizer")
        ),
    ],
)
def test_the_command_ends_with_that_line(copy: Path, what: str) -> None:
    BROKEN[what](copy)
    command = [
        sys.executable,
        "-m",
        "mlxspec",
        "serve",
        str(copy),
        "--port",
        "0",
        "--kv-blocks",
        "32",
    ]
    bare = {k: v for k, v in os.environ.items() if not k.startswith("MLXSPEC_")} | {
        "HOME": str(copy)
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=bare)
    said = (
        line for line in done.stderr.splitlines() if " INFO " not in line
    )  # its caches are there too
    lines = [line for line in said if str(copy) in line]
    assert done.returncode not in (0, 1) and len(lines) == 1 and MENDS.search(lines[0]), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    "what",
    ["weights cut in the data", "a tensor missing", "weights that are no numbers", "no tokenizer"],
)
def test_the_others_go_on(whole: Path, copy: Path, what: str, bare_settings: None) -> None:
    """As the second model of a server, which finds out when it is asked for."""
    BROKEN[what](copy)
    both = Config(
        model=f"good={whole}", others=(f"bad={copy}",), port=0, kv_blocks=32, speculate=False
    )
    app = process._load(both)
    worker = app.state.server.worker

    async def ask(url: str, model: str) -> tuple[int, dict[str, Any]]:
        got = await Connection(app, url, BODIES[url] | {"model": model}).answer()
        return got.status, got.json

    async def main() -> None:
        for url in BODIES:
            status, body = await ask(url, "bad")
            assert status == 503 and str(copy) in body["error"]["message"], body
            assert (await ask(url, "good"))[0] == 200
        health = await Connection(app, "/health", method="GET").answer()
        assert health.status == 200 and health.json["loaded"] == ["good"]

    try:
        asyncio.run(main())
    finally:
        worker.stop()


def test_a_template_that_does_not_parse_is_told(copy: Path, bare_settings: None) -> None:
    """Plain completions need none."""
    (copy / "chat_template.jinja").write_text("{% for %}")
    app = process._load(Config(model=str(copy), port=0, kv_blocks=32, speculate=False))
    worker = app.state.server.worker

    async def main() -> None:
        for url in BODIES:
            got = await Connection(app, url, BODIES[url]).answer()
            assert got.status == 400 and "chat template" in got.json["error"]["message"]
        got = await Connection(
            app, "/v1/completions", {"prompt": "hello", "max_tokens": 3}
        ).answer()
        assert got.status == 200

    try:
        asyncio.run(main())
    finally:
        worker.stop()

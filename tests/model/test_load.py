"""The layout is found by trying, and a model that fits none is refused by name."""

import json
import logging
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.model.load import context_of, fit, load, weights
from mlxspec.types import Unfit
from tests import tiny


@pytest.mark.parametrize(
    "kind, layout, lone",
    [
        ("llama", "rows", False),
        ("gpt_oss", "rows", False),
        ("gemma2", "gather", True),
        ("mamba2", "solo", True),
    ],
)
def test_layouts(kind: str, layout: str, lone: bool) -> None:
    found = fit(tiny.model(kind))
    assert (found.layout, found.lone, found.trunk, found.vocab) == (layout, lone, True, tiny.VOCAB)
    assert bool(found.refused) == (layout != "rows")


def test_token_bytes_are_those_of_the_pool() -> None:
    m = tiny.model("gemma3_text")
    assert fit(m).token_bytes == 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, fp32
    runner = fit(m).runner(m, 8, 10)
    assert runner.trunk


def test_models_own_caches_are_measured() -> None:
    assert fit(tiny.model("llama"), "solo").token_bytes == fit(tiny.model("llama")).token_bytes
    assert fit(tiny.model("mamba2")).token_bytes > 0


def test_a_wanted_layout_is_taken_or_refused() -> None:
    assert fit(tiny.model("llama"), "solo").layout == "solo"
    with pytest.raises(Unfit, match="not paged"):
        fit(tiny.model("mamba2"), "rows")


def test_a_layout_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxspec.model import attention

    right = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda q, *rest: right(q * 1.1, *rest))
    assert fit(tiny.model("llama")).layout == "gather"


def test_context_comes_from_the_config(caplog: pytest.LogCaptureFixture) -> None:
    assert context_of({"max_position_embeddings": 99}) == 99
    assert context_of({"text_config": {"max_position_embeddings": 77}}) == 77
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "mlxspec"):
        assert context_of({}) == 8192
    assert "8192" in caplog.text


def test_load_reads_a_directory_and_says_what_is_wrong(tmp_path: Path) -> None:
    save(tmp_path)
    model, config = load(tmp_path)
    assert weights(model) > 0 and config["vocab_size"] == tiny.VOCAB
    config["model_type"] = "nonesuch"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unfit, match="nonesuch"):
        load(tmp_path)


def save(path: Path, kind: str = "llama") -> None:
    from mlx.utils import tree_flatten

    m = tiny.model(kind)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(m.parameters())))
    (path / "config.json").write_text(json.dumps({"model_type": kind, **tiny.CONFIGS[kind]}))

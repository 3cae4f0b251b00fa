"""The layout is found by trying, and a model that fits none is refused by name."""

import gc
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlxspec.engine import memory
from mlxspec.model import checkpoint, recurrent
from mlxspec.model.checkpoint import context_of, load_model, load_weights, parameter_bytes
from mlxspec.model.layout import find_layout, geometry
from mlxspec.types import UnsupportedModel, UserError
from tests.support import tiny
from tests.support.checkpoints import save
from tests.support.parameter_rows import only


@pytest.mark.parametrize(
    "kind, layout, lone",
    [
        ("llama", "rows", False),
        ("gpt_oss", "rows", False),
        ("gemma2", "gather", True),
        ("mamba2", "rect", False),
        ("qwen3_next", "rect", False),
        ("deepseek_v3", "gather", False),
        ("internlm2", "rect", True),
        ("llama4", "solo", True),
        ("minimax_m3_vl", "solo", True),  # keys without values; some reads of such pages would work
    ],
)
def test_layouts(kind: str, layout: str, lone: bool) -> None:
    found = find_layout(tiny.model(kind))
    assert (found.layout, found.lone, found.trunk, found.vocab) == (layout, lone, True, tiny.VOCAB)
    assert bool(found.refused) == (layout != "rows")


def test_token_bytes_are_those_of_the_pool() -> None:
    m = tiny.model("gemma3_text")
    each = 2 * 2 * 16 * 4  # K and V, heads, dim, fp32
    assert find_layout(m).cache_bytes == (each, ((12, 2 * each),), 0)
    runner = find_layout(m).runner(m, 8, 10)
    assert runner.trunk


@pytest.mark.parametrize("kind, dims", [("llama", 2 * 2 * 2 * [128]), ("qwen3", 2 * 2 * 2 * [32])])
def test_token_bytes_of_quantized_pools(kind: str, dims: list[int]) -> None:
    """Each value takes its bits, and each group of values a scale and a bias."""
    for bits in (8, 4):
        m = tiny.model(f"{kind}:{bits}")
        m.set_dtype(mx.bfloat16)
        group = 64 if kind == "llama" else 32
        found = find_layout(m, kv_bits=bits)
        assert found.cache_bytes.token == sum(d * bits // 8 + d // group * 2 * 2 for d in dims)
        assert found.cache_bytes.token / find_layout(m).cache_bytes.token == bits / 16 + 2 / group
        runner = found.runner(m, 8, 10, kv_bits=bits)
        assert all(pages.view.kv_bits == bits for pages in runner.caches)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"kv_bits = 8 takes 32 values at a time, and .* K or V has 16; give 0"
    ):
        find_layout(tiny.model("llama"), kv_bits=8)
    with pytest.raises(
        UserError, match="kv_bits = 4: in the rect layout this model has no K/V pools; give 0"
    ):
        find_layout(tiny.model("mamba2"), kv_bits=4)
    with pytest.raises(UserError, match="kv_bits = 4"):
        find_layout(tiny.model("llama4"), kv_bits=4)
    with pytest.raises(UserError, match="kv_bits = 4"):
        find_layout(tiny.model("llama:4"), "solo", 4)


def test_models_own_caches_are_measured() -> None:
    assert (
        find_layout(tiny.model("llama"), "solo").cache_bytes.token
        == find_layout(tiny.model("llama")).cache_bytes.token
    )
    assert find_layout(tiny.model("mamba2"), "solo").cache_bytes.token > 0


@pytest.mark.parametrize(
    "kind, rollback, sharing, drafts",
    [
        ("llama", True, True, True),
        ("qwen3_next", True, True, True),
        ("mamba", False, True, False),
        ("llama4", True, False, False),
    ],
)
def test_rollback_of_drafts(kind: str, rollback: bool, sharing: bool, drafts: bool) -> None:
    m = tiny.model(kind)
    found = find_layout(m)
    assert (found.rollback, found.sharing, found.can_draft) == (rollback, sharing, drafts)
    runner = found.runner(m, 4, 8)
    assert runner.states.rollback_supported == rollback
    held = [c.cache for c in make_prompt_cache(m) if isinstance(c, ArraysCache)]
    assert bool(found.cache_bytes.state) == bool(held)


def test_a_rollback_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = recurrent.StateRecorder.states_after
    monkeypatch.setattr(
        recurrent.StateRecorder, "states_after", lambda self, rows: right(self, rows + 1)
    )
    found = find_layout(tiny.model("qwen3_next"))
    assert not found.rollback and not found.can_draft
    assert "logits are off" in found.refused[-1]


@pytest.mark.parametrize(
    "kind", only(["llama", "gemma3_text", "gpt_oss", "gemma2", "mamba2"], 1, 4)
)
def test_what_caches_take_is_known_before_a_weight_is_read(kind: str, tmp_path: Path) -> None:
    save(tmp_path, kind)
    # models are full of cycles; what earlier tests left must not go while this one counts
    gc.collect()
    active = mx.get_active_memory()
    m, _ = load_model(tmp_path)
    mx.reset_peak_memory()
    token, windows, state = geometry(m)
    assert mx.get_peak_memory() - active < 4096, "nothing was evaluated"
    assert parameter_bytes(m) == sum(
        a.nbytes for _, a in tree_flatten(tiny.model(kind).parameters())
    )
    load_weights(m)
    # Other tests' arrays may be freed meanwhile.
    assert mx.get_active_memory() - active > parameter_bytes(m) - 4096
    layer = 2 * 2 * 16 * 4  # K and V, heads, dim, fp32
    full, local = {"gemma3_text": (1, 2), "gpt_oss": (1, 1), "mamba2": (0, 0)}.get(kind, (2, 0))
    assert (token, windows) == (full * layer, ((12, local * layer),) * bool(local))
    if kind == "mamba2":
        caches = make_prompt_cache(m)
        mx.eval(m(mx.array([[1]]), cache=caches))
        assert state == sum(c.nbytes for c in caches) > 0
    else:
        assert state == 0 and (token, windows, state) == find_layout(m).cache_bytes


def test_a_model_that_does_not_run_so_is_told(caplog: pytest.LogCaptureFixture) -> None:
    m = tiny.model("llama")
    type(m).__call__, call = lambda self, *rest, **kw: [][0], type(m).__call__
    try:
        with caplog.at_level(logging.INFO, "mlxspec"):
            assert geometry(m) == (0, (), 0)
    finally:
        type(m).__call__ = call
    assert "unknown before it is loaded: list index out of range" in caplog.text


def test_reading_tells_how_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    told: list[tuple[float, float]] = []

    @contextmanager
    def progress(text: str) -> Iterator[Callable[[float, float], None]]:
        assert text == "Loading weights"
        yield lambda done, total: told.append((done, total))

    monkeypatch.setattr(checkpoint, "progress", progress)
    m, _ = load_model(tmp_path)
    load_weights(m)
    assert len(told) > 2 and told == sorted(told)
    assert told[-1] == (parameter_bytes(m), parameter_bytes(m))


def test_weights_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    m, _ = load_model(tmp_path)
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(UserError, match="cannot"):
        load_weights(m)


def test_a_wanted_layout_is_taken_or_refused() -> None:
    assert find_layout(tiny.model("llama"), "solo").layout == "solo"
    with pytest.raises(UserError, match="not paged"):
        find_layout(tiny.model("mamba2"), "rows")


def test_a_layout_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxspec.model import attention

    right = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda q, *rest: right(q * 1.1, *rest))
    assert find_layout(tiny.model("llama")).layout == "gather"


@pytest.mark.slow
def test_products_in_tf32_would_refuse_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """An M5 rounds the operands of several rows to 10 bits, and of one row not, unless
    MLX_ENABLE_TF32 is 0, as mlxspec/blas.py has it."""

    def rounded(x: mx.array) -> mx.array:
        bits = x.astype(mx.float32).view(mx.uint32)
        return ((bits + 0x1000) & 0xFFFFE000).view(mx.float32)

    def product(layer: Any, x: mx.array) -> mx.array:
        if x.size == x.shape[-1]:
            return x @ layer.weight.T
        return rounded(x) @ rounded(layer.weight).T

    m = tiny.model("llama", num_hidden_layers=32)  # errors add up
    assert find_layout(m).layout == "rows"
    monkeypatch.setattr(nn.Linear, "__call__", product)
    monkeypatch.setattr(nn.Embedding, "as_linear", product)
    with pytest.raises(UnsupportedModel, match="no layout reproduces"):
        find_layout(m)


def test_context_comes_from_the_config(caplog: pytest.LogCaptureFixture) -> None:
    assert context_of({"max_position_embeddings": 99}) == 99
    assert context_of({"text_config": {"max_position_embeddings": 77}}) == 77
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "mlxspec"):
        assert context_of({}) == 8192
    assert "8192" in caplog.text


def test_load_reads_a_directory_and_says_what_is_wrong(tmp_path: Path) -> None:
    save(tmp_path)
    model, config = load_model(tmp_path)
    assert parameter_bytes(model) > 0 and config["vocab_size"] == tiny.VOCAB
    config["model_type"] = "nonesuch"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="nonesuch"):
        load_model(tmp_path)


def test_loading_leaves_no_chain_of_draws_behind(tmp_path: Path) -> None:
    """A layer draws its first weights from MLX's random state; if nobody computes them, the state
    keeps the graph of all draws since the start: 32 KiB for each load of even this model."""
    save(tmp_path)
    load_model(tmp_path)
    before = memory.footprint()
    for _ in range(100):
        load_model(tmp_path)
    assert memory.footprint() - before < 1 << 20


@pytest.mark.parametrize("tied", [True, False])
def test_a_trunk_alone_is_loaded(tmp_path: Path, tied: bool) -> None:
    """As Qwen3-Embedding comes: names without a prefix, no lm_head even where it is not tied."""
    m = tiny.model("qwen3", tie_word_embeddings=tied)
    (tmp_path / "config.json").write_text(
        json.dumps(tiny.config("qwen3", tie_word_embeddings=tied))
    )
    tensors = {
        name.removeprefix("model."): array
        for name, array in tree_flatten(m.parameters())
        if name.startswith("model.")
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    loaded, _ = load_model(tmp_path)
    ids = mx.array([[3, 1, 4]])
    assert mx.array_equal(loaded.model(ids), m.model(ids))
    assert find_layout(loaded).layout == "rows"

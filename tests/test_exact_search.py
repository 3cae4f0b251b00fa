"""The search for calls finds the kernels that MLX takes, however seldom their orders show."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxspec.kernels.invariant import Calls
from mlxspec.model.invariant import find_invariance
from tests.support import dispatch
from tests.support.parameter_rows import in_turn
from tests.test_exact import (
    CHUNK,
    alone,
    found,
    layout_of,
    model,
    on,
    requests,
    short_chunks,
    together,
)

__all__ = ["short_chunks"]


# Of the weights 64x64, 32x64, 128x64, 64x128 and 320x64: the least rows of a call, and the most of
# each; as MLX's source says for one WIDER times as wide, see tests/support/metal_rules.py.
RULES = {
    ("M1", "affine"): (1, (13, 13, 9, 9, 5)),
    ("M3", "affine"): (2, (12, 12, 14, 14, 12)),
    ("M5", "affine"): (2, (17, 17, 17, 17, 12)),
    ("M3 Ultra", "affine"): (2, (17, 17, 17, 17, 11)),
    ("M1", "mxfp4"): (2, (13, 13, 9, 9, 5)),
    ("M4", "mxfp4"): (2, (12, 12, 14, 14, 12)),
    ("M1", "bf16"): (2, (64, 17, 256, 17, 256)),
    ("M2", "bf16"): (2, (256, 17, 256, 17, 256)),
    ("M4", "bf16"): (2, (5, 5, 5, 5, 5)),
}


@pytest.mark.parametrize("chip, numbers", RULES)
def test_the_calls_are_found_by_trying(chip: str, numbers: str) -> None:
    how = found("llama", numbers, chip)
    least, most = RULES[chip, numbers]
    assert tuple(how.calls.values()) == tuple(Calls(least, each) for each in most)
    assert how.chunk == CHUNK


@pytest.mark.parametrize(
    "kind, chip, numbers",
    in_turn(
        ["llama", "qwen3_moe", "gpt_oss", "nemotron_h"],
        ["M1", "M3", "M5"],
        ["affine", "bf16", "mxfp4"],
        every=7,
    ),
)
def test_orders_that_seldom_show_are_told_apart(kind: str, chip: str, numbers: str) -> None:
    """A GPU rounds a sum once: two orders then differ in one output of some thousand."""
    assert found(kind, numbers, chip, True) == found(kind, numbers, chip)


@pytest.mark.parametrize("kind, chip, numbers", [("qwen3_moe", "M3", "affine")])
def test_rows_keep_bits_that_seldom_show(kind: str, chip: str, numbers: str) -> None:
    m = model(kind, numbers)
    how = found(kind, numbers, chip, True)
    with on(chip, rounded_once=True):
        for seed in range(4):
            all_of = requests(0.8, seed)
            truth = alone(m, layout_of(kind), how, all_of)
            for got in together(m, kind, "liar", 64, how, all_of, truth):
                assert got == truth


@pytest.mark.parametrize("chip", ["M1", "M3"])
def test_rows_that_lie_apart_have_the_bits_of_a_matrix(chip: str) -> None:
    """One row of each of several sequences, as a view: MLX counts them by sequence."""
    layer = model("llama", "affine").layers[0].self_attn.q_proj
    x = mx.random.normal((6, 3, 64), key=mx.random.key(1)).astype(mx.bfloat16)[:, 1:2]
    with on(chip):
        calls = calls_of(layer, x[:, 0])
        one = [calls.apply(layer, x[i : i + 1]) for i in range(len(x))]
        assert mx.array_equal(calls.apply(layer, x), mx.concatenate(one))


def calls_of(layer: nn.Module, *arrays: mx.array) -> Calls:
    (calls,) = find_invariance({"": (layer, list(arrays))}, 8).calls.values()
    return calls


# As wide as layers are, which products of 4-bit weights and rows of one size would add exactly.
LAYERS = [("mxfp4", 1024, 1024), ("nvfp4", 512, 64), ("mxfp4", 128, 512), ("affine", 896, 64)]


@pytest.mark.parametrize("bias", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("lanes", [2, 32])
@pytest.mark.parametrize("mode, k, n", LAYERS)
def test_layers_as_they_are(
    mode: str, k: int, n: int, lanes: int, dtype: Any, bias: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any format, with biases that hide what a sum rounds to."""
    monkeypatch.setattr(dispatch, "WIDER", 1)
    monkeypatch.setattr(dispatch, "LANES", lanes)
    weight = mx.array(np.random.default_rng(0).standard_normal((n, k)) * k**-0.5)
    dense = nn.Linear(k, n, bias=bool(bias))
    dense.weight = weight.astype(dtype)
    if bias:
        dense.bias = (mx.arange(n) % 7 * bias / 6).astype(dtype)
    layer = nn.QuantizedLinear.from_linear(dense, 16 if mode == "nvfp4" else 32, 4, mode=mode)
    with on("M3", rounded_once=True):
        assert calls_of(layer, mx.ones((3, k), dtype)) == (
            Calls(1, 12) if k == 128 and mode != "affine" else Calls(2, 12)
        )

"""What runs on a CPU in place of MLX's own operations: the same results."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxspec.kernels import cpu

HEADS, KV_HEADS, DIM = 6, 2, 16
ROUNDING = 1e-5  # of float32, in sums of a hundred products


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape), mx.float32)


def close(a: mx.array, b: mx.array, tolerance: float = ROUNDING) -> bool:
    assert a.shape == b.shape and a.dtype == b.dtype
    return bool(mx.allclose(a.astype(mx.float32), b.astype(mx.float32), tolerance, tolerance))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 3), (2, 2), (5, 1), (3, 5), (4, 4), (1, 40)])
def test_a_layer_multiplies_as_mlx_does(rows: tuple[int, int], bias: bool) -> None:
    layer = nn.Linear(96, 40, bias=bias)
    x = normal(*rows, 96)
    want = layer(x)
    cpu.install(layer)
    assert isinstance(layer, cpu.CpuLinear)
    assert close(layer(x), want)


@pytest.mark.parametrize(
    "rows, dtype", [(3, mx.float16), (3, mx.bfloat16), (1, mx.float32), (20, mx.float32)]
)
def test_the_rest_stays_with_mlx(rows: int, dtype: mx.Dtype) -> None:
    layer = nn.Linear(32, 8)
    layer.set_dtype(dtype)
    x = normal(rows, 32).astype(dtype)
    want = layer(x)
    cpu.install(layer)
    assert mx.array_equal(layer(x), want)


def test_an_embedding_that_is_the_lm_head() -> None:
    layer = nn.Embedding(50, 24)
    x = normal(3, 1, 24)
    want, looked_up = layer.as_linear(x), layer(mx.array([4, 7]))
    cpu.install(layer)
    assert isinstance(layer, cpu.CpuEmbedding)
    assert close(layer.as_linear(x), want)
    assert mx.array_equal(layer(mx.array([4, 7])), looked_up)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("mask", ["none", "causal", "bool"])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_attention_is_mlx_own(length: int, mask: str, dtype: mx.Dtype) -> None:
    batch, slots = (1 if mask == "causal" else 3), 21
    q = normal(batch, length, HEADS, DIM).swapaxes(1, 2).astype(dtype)
    k, v = (normal(batch, KV_HEADS, slots, DIM, seed=s).astype(dtype) for s in (1, 2))
    given: mx.array | str | None = None if mask == "none" else mask
    if mask == "bool":
        ends = mx.array([5, 21, 13])[:, None, None, None] - mx.arange(length)[::-1][:, None]
        given = mx.arange(slots) < ends
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=given)
    got = cpu.attention(q, k, v, 0.3, given, None)
    assert close(got, want, ROUNDING if dtype == mx.float32 else 1e-2)

"""A row of a quantized pool: a function of its token alone, and what mx.quantize says."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels.attention import paged_attention
from mlxspec.kernels.inputs import Attention, Group
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.types import UserError

KINDS = st.tuples(
    st.sampled_from([32, 64, 96, 128, 192]),
    st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    st.sampled_from([8, 4]),
)


def some(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def rounded(p: Packing, x: mx.array) -> mx.array:
    """What mx.quantize makes of it."""
    return mx.dequantize(*mx.quantize(x, p.group, p.bits), group_size=p.group, bits=p.bits)


@settings(max_examples=40)
@given(KINDS, st.integers(1, 9), st.integers(0, 99))
def test_a_row_is_a_function_of_its_token(
    kind: tuple[int, mx.Dtype, int], n: int, seed: int
) -> None:
    p = Packing(*kind)
    x = some(seed, 2, n, p.dim).astype(p.dtype)
    rows = p.pack(x)
    assert rows.dtype == mx.uint32 and rows.shape == (2, n, p.width)
    alone = mx.concatenate([p.pack(x[:, i : i + 1]) for i in range(n)], axis=1)
    assert mx.array_equal(rows, alone)
    back = p.unpack(rows)
    assert back.dtype == p.dtype and mx.array_equal(back, rounded(p, x))
    groups = np.array(x.astype(mx.float32)).reshape(2, n, -1, p.group)
    step = (groups.max(-1) - groups.min(-1)) / (2**p.bits - 1)
    off = np.abs(np.array(back.astype(mx.float32)).reshape(groups.shape) - groups).max(-1)
    assert (off <= step * 1.01 + (0 if p.dtype == mx.float32 else 0.04)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_width(bits: int) -> None:
    """In words of four bytes: the values' bits, then two halves for each group."""
    assert Packing(128, mx.bfloat16, bits).width * 4 == 128 * bits // 8 + 2 * 2 * 2
    assert Packing(96, mx.float16, bits).width * 4 == 96 * bits // 8 + 3 * 2 * 2
    assert Packing(64, mx.float32, bits).width * 4 == 64 * bits // 8 + 1 * 2 * 4


@pytest.mark.parametrize("dim", [16, 80])
def test_a_head_that_no_group_divides_is_refused(dim: int) -> None:
    with pytest.raises(UserError, match=rf"kv_bits = 4 .* 32 values .* has {dim}; give 0"):
        Packing(dim, mx.float16, 4).pack(mx.zeros((1, 1, dim)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("worst", [65504.0, float("inf")])
def test_what_overflows_is_packed_as_zeros(worst: float, bits: int) -> None:
    """Finite values too: the way from the lowest to the highest is more than half precision has."""
    p = Packing(128, mx.float16, bits)
    x = some(0, 1, 1, 128).astype(mx.float16)
    want = p.unpack(p.pack(x))[..., 64:]
    x[..., 3], x[..., 9] = worst, -worst
    back = p.unpack(p.pack(x))
    assert mx.isfinite(back).all() and mx.array_equal(back[..., 64:], want)
    assert not mx.isfinite(rounded(p, x)).all(), "or nothing is shown"
    assert not back[..., :64].any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_is_that_over_rounded_pools(window: int | None, bits: int) -> None:
    size, packings = 8, (Packing(64, mx.float32, bits), Packing(32, mx.float32, bits))
    pools = [some(i, 2, 12 * size, p.dim) for i, p in enumerate(packings)]
    groups = [Group(0, 2, 1, [19, 4], {None: [[5, 2, 7], [1]]}, size)]
    groups.append(Group(2, 5, 3, [9], {None: [[3, 9]]}, size))
    q, sinks = some(2, 5, 4, 64), some(3, 4)
    packed = [p.pack(x) for p, x in zip(packings, pools, strict=True)]
    plain = [rounded(p, x) for p, x in zip(packings, pools, strict=True)]
    got = paged_attention(Attention(q, *packed, groups, 0.3, window, sinks, packings))
    assert mx.array_equal(got, paged_attention(Attention(q, *plain, groups, 0.3, window, sinks)))

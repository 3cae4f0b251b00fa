"""Paged attention against numpy: ragged groups, shared blocks, grouped heads, windows, sinks,
dtypes."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from bench.graph import on_metal, work_of
from mlxspec.kernels import reference
from mlxspec.kernels.attention import paged_attention
from mlxspec.kernels.inputs import Attention, Group, gather
from mlxspec.kernels.quantized_kv import Packing

HEADS, KV, DIM, SIZE, BLOCKS = 4, 2, 16, 8, 24
WIDE = 32  # what a head must divide into to be quantized


def truth(q, keys, values, table, start, scale, window, sinks):
    """One sequence, row by row. q [L, heads, D] -> [L, heads, D]."""
    slots = [table[p // SIZE] * SIZE + p % SIZE for p in range(start + len(q))]
    out = np.zeros_like(q)
    for i in range(len(q)):
        low = 0 if window is None else max(0, start + i - window + 1)
        seen = slots[low : start + i + 1]
        for h in range(HEADS):
            k, v = keys[h // (HEADS // KV), seen], values[h // (HEADS // KV), seen]
            scores = k @ q[i, h] * scale
            top = max(scores.max(), sinks[h]) if sinks is not None else scores.max()
            weight = np.exp(scores - top)
            total = weight.sum() + (np.exp(sinks[h] - top) if sinks is not None else 0)
            out[i, h] = weight @ v / total
    return out


@pytest.mark.parametrize(
    "dtype, tolerance", [(mx.float32, 1e-5), (mx.float16, 5e-3), (mx.bfloat16, 4e-2)]
)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, [0])],
        [(1, [37])],
        [(5, [0])],
        [(20, [11])],
        [(1, [3, 40, 17]), (4, [9, 0]), (17, [16])],
    ],
    ids=["first", "decode", "prefill", "chunk", "ragged"],
)
def test_equals_numpy(shapes, window, sinks, dtype, tolerance) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, KV, BLOCKS * SIZE, DIM)).astype(np.float32)
    groups, qs, want, lo = [], [], [], 0
    sink = rng.normal(size=HEADS).astype(np.float32) if sinks else None
    for length, starts in shapes:
        tables = [
            rng.permutation(np.arange(1, BLOCKS))[: -(-(s + length) // SIZE)].tolist()
            for s in starts
        ]
        hi = lo + length * len(starts)
        groups.append(Group(lo, hi, length, starts, {None: tables}, SIZE))
        lo = hi
        for start, table in zip(starts, tables, strict=True):
            q = rng.normal(size=(length, HEADS, DIM)).astype(np.float32)
            qs.append(q)
            want.append(truth(q, keys, values, table, start, 0.3, window, sink))
    given = Attention(
        mx.array(np.concatenate(qs)).astype(dtype),
        mx.array(keys).astype(dtype),
        mx.array(values).astype(dtype),
        groups,
        0.3,
        window,
        mx.array(sink).astype(dtype) if sinks else None,
    )
    got = paged_attention(given)
    assert got.dtype == dtype and got.shape == (lo, HEADS, DIM)
    assert np.abs(np.array(got.astype(mx.float32)) - np.concatenate(want)).max() < tolerance


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("window", [None, 12, 100])
@pytest.mark.parametrize("length, start", [(1, 0), (1, 37), (5, 30), (20, 11)])
def test_blocks_in_a_row_are_not_gathered_and_give_the_same_bits(
    length, start, window, bits
) -> None:
    """Where a sequence's blocks came to lie must not show."""
    rng, n = np.random.default_rng(1), -(-(start + length) // SIZE)
    packing = Packing(WIDE, mx.float32, bits) if bits else None
    pools = [mx.array(rng.normal(size=(KV, BLOCKS * SIZE, WIDE)).astype(np.float32)) for _ in "kv"]
    pools = [packing.pack(pool) for pool in pools] if packing else pools
    table = [1 + 3 * i for i in range(n)]
    source = mx.array([b * SIZE + i for b in table for i in range(SIZE)])
    target = mx.arange(2 * SIZE, (2 + n) * SIZE)
    moved = [mx.array(pool) for pool in pools]
    for pool, old in zip(moved, pools, strict=True):
        pool[:, target] = old[:, source]
    q = mx.array(rng.normal(size=(length, HEADS, WIDE)).astype(np.float32))
    found = []
    for (keys, values), blocks in ((pools, table), (moved, list(range(2, 2 + n)))):
        group = Group(0, length, length, [start], {None: [blocks]}, SIZE)
        found.append(
            paged_attention(
                Attention(q, keys, values, [group], 0.3, window, None, (packing, packing))
            )
        )
        assert isinstance(group.select(window)[0], slice) == (blocks != table or n == 1)
    assert mx.array_equal(*found)


def test_a_window_gathers_only_its_blocks() -> None:
    group = Group(0, 2, 1, [150, 20], {None: [list(range(1, 20)), [20, 21, 22]]}, SIZE)
    assert group.select(16)[0].ids.shape == (2, 3)
    assert group.select(None)[0].ids.shape == (2, 19)


def batch(length: int, dtype: mx.Dtype, sinks: bool) -> Attention:
    """Three sequences with as many rows, their blocks scattered."""
    rng = np.random.default_rng(2)
    keys, values = (
        mx.array(rng.normal(size=(KV, BLOCKS * SIZE, DIM)), mx.float32).astype(dtype) for _ in "kv"
    )
    tables = np.split(1 + rng.permutation(21), 3)
    group = Group(
        0, 3 * length, length, [3, 40, 17], {None: [each.tolist() for each in tables]}, SIZE
    )
    q = mx.array(rng.normal(size=(3 * length, HEADS, DIM)), mx.float32).astype(dtype)
    sink = mx.array(rng.normal(size=HEADS), mx.float32).astype(dtype) if sinks else None
    return Attention(q, keys, values, [group], 0.3, None, sink)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("length", [1, 5, 11])
def test_a_batch_has_the_bits_of_attention_over_sequences(length, dtype, sinks) -> None:
    """Of MLX's own: that of a CPU multiplies more rows at once, and BLAS sums them otherwise."""
    a = batch(length, dtype, sinks)
    group = a.groups[0]
    blocks, mask, keep = group.select(None)
    want = mx.fast.scaled_dot_product_attention(
        a.q.reshape(3, length, HEADS, DIM).swapaxes(1, 2),
        gather(a.keys, blocks, SIZE, keep),
        gather(a.values, blocks, SIZE, keep),
        scale=a.scale,
        mask=mask,
        sinks=a.sinks,
    )
    assert mx.array_equal(reference.paged_attention(a), want.swapaxes(1, 2).flatten(0, 1))


def test_nothing_of_a_batch_is_copied_for_attention() -> None:
    a = replace(batch(1, mx.float32, sinks=False), clean=True)
    blocks, mask, _ = a.groups[0].select(None)  # made once for all layers
    mx.eval(a.q, a.keys, a.values, mask, blocks.places(KV, BLOCKS))
    with on_metal() as stand_ins:
        work = work_of([reference.paged_attention(a)], stand_ins)
    assert work.launches == {"Gather": 2, "ScaledDotProductAttention": 1}
    assert work.written <= 2 * KV * 3 * 7 * SIZE * DIM * 4

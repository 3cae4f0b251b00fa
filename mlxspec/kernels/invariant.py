"""Batch invariance: what keeps the bits of a row from depending on how many rows a step has.

Rule: every row is computed by one order of summation. MLX chooses kernels by the number of rows; so
rows reach an operation in calls of `least` to `most` rows, within which its kernels have one order,
and attention is a product of one shape for each row and each part of its context.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import Any

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.kernels.inputs import Attention, Blocks, Group, block_array, gather
from mlxspec.kernels.reference import finite
from mlxspec.types import NULL_BLOCK

PART = 128  # slots of a context whose values are summed together, or a block if that is longer
PARTS = 2  # of a context of one head of K and V, at least
QUERIES = 64  # of a sequence at once: their scores take memory


@dataclass(frozen=True, slots=True)
class Calls:
    """How rows reach an operation: `most` at a time, the last ones padded to `least`. `transposed`:
    as columns of a dense product, whose order OpenBLAS keeps for more of them."""

    least: int
    most: int
    transposed: bool = False

    def apply(self, op: Callable[..., Any], *arrays: Array) -> Any:
        """op(*arrays) for arrays [..., K] of the same rows: an array, or a tuple of some."""
        *batch, _ = arrays[0].shape
        # MLX counts the rows of a matrix, but not those of a view [B, L, K] that lie apart.
        flat = [x.reshape(-1, x.shape[-1]) for x in arrays]
        rows = len(flat[0])
        fits = self.least <= rows <= self.most
        done = [op(*part) for part in ([flat] if fits else self._parts(flat, rows))]

        def joined(parts: list[Array]) -> Array:
            y = parts[0]
            if len(y) != rows:
                y = mx.concatenate(parts)[:rows]
            return y.reshape(*batch, *y.shape[1:])

        if isinstance(done[0], tuple):
            return tuple(joined(list(same)) for same in zip(*done, strict=True))
        return joined(done)

    def _parts(self, flat: list[Array], rows: int) -> Iterator[list[Array]]:
        """The calls' arrays. Only the last call has padding, after its rows."""
        for first in range(0, rows, self.most):
            part = [x[first : first + self.most] for x in flat]
            lacking = self.least - len(part[0])
            if lacking > 0:
                part = [mx.pad(x, [(0, lacking), (0, 0)]) for x in part]
            yield part


def route(router: Callable[[Array], Any], x: Array) -> Any:
    """What a router makes of x [n, K]; some of mlx-lm's take [B, L, K] only."""
    y = router(x[:, None])
    return tuple(part[:, 0] for part in y) if isinstance(y, tuple) else y[:, 0]


def attention(a: Attention) -> Array:
    """As reference.paged_attention: products and sums in fp32, for each row a product of q's heads
    that share K and V with each part of the context. Parts lie at multiples of PART positions, so
    neither other rows nor padding change what is summed with what."""
    out = []
    first = a.groups[0].lo
    for group in a.groups:
        rows = a.q[group.lo - first : group.hi - first]
        q = rows.reshape(-1, group.length, *rows.shape[1:])
        keys, values, mask = _parts_of(a, group)
        done = []
        for at in range(0, group.length, QUERIES):
            to = at + QUERIES
            done.append(
                _attend(
                    a,
                    q[:, at:to],
                    keys,
                    values,
                    mask[:, at:to],
                )
            )
        out.append(mx.concatenate(done, axis=1).flatten(0, 1))
    return mx.concatenate(out)


def _parts_of(a: Attention, group: Group) -> tuple[Array, Array, Array]:
    """K and V of what a group's rows see, fp32 [B, kv_heads, 1, parts, slots, D] each, and bool
    [B, L, parts, slots]: which slots a row sees."""
    size = group.block_size
    blocks = max(1, PART // size)  # of a part
    tables = []
    firsts = []
    for low, table in group.visible(a.window):
        first = low // size
        skipped = first % blocks  # before what is seen, in its part
        tables.append([NULL_BLOCK for _ in range(skipped)] + table)
        firsts.append((first - skipped) * size)
    parts = ceil(max(map(len, tables)) / blocks)
    if len(a.keys) == 1:  # one product, or some that share K and V, may go by other kernels than a
        parts = max(PARTS, parts)  # batch: MLX's backend/metal/matmul.cpp:1493, :925
    width = blocks * parts
    ids = Blocks(block_array(tables, width))
    every = slice(0, width * size)
    pools = []
    for pool, packing in zip((a.keys, a.values), a.packings, strict=True):
        x = gather(
            pool,
            ids,
            size,
            every,
            packing,
        ).astype(mx.float32)
        pools.append(
            x.reshape(
                *x.shape[:2],
                1,
                -1,
                blocks * size,
                x.shape[-1],
            )
        )
    positions = group.row_positions()
    slots = mx.array(firsts)[:, None] + mx.arange(width * size)
    mask = slots[:, None] <= group.last(positions, a.window)[..., None]
    if a.window:
        mask &= slots[:, None] > positions[..., None] - a.window
    if group.first:
        mask &= slots[:, None] >= group.first
    return pools[0], finite(pools[1]), mask.reshape(*mask.shape[:2], -1, blocks * size)


def _attend(
    a: Attention,
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
) -> Array:
    """[B, L, heads, Dv] of q [B, L, heads, D], and what `_parts_of` returns."""
    batch, length, heads, _ = q.shape
    kv_heads = keys.shape[1]
    rows = (q.astype(mx.float32) * a.scale).reshape(
        batch,
        length,
        kv_heads,
        -1,
        q.shape[-1],
    )
    rows = rows.swapaxes(1, 2)[:, :, :, None]  # [B, kv_heads, L, 1, gqa, D]
    scores = rows @ keys.swapaxes(-1, -2)
    scores = mx.where(
        mask[:, None, :, :, None],
        scores,
        -mx.inf,
    )
    top = scores.max(axis=(3, 5), keepdims=True)
    sinks: Any = None
    if a.sinks is not None:
        sinks = a.sinks.astype(mx.float32).reshape(
            kv_heads,
            1,
            1,
            -1,
            1,
        )
        top = mx.maximum(top, sinks)
    weights = mx.exp(scores - top)
    total = _sum(weights.sum(axis=-1, keepdims=True), bool(a.window))
    if sinks is not None:
        total = total + mx.exp(sinks - top)[:, :, :, 0]
    out = _sum(weights @ values, bool(a.window)) / total
    return out.swapaxes(1, 2).reshape(batch, length, heads, -1).astype(q.dtype)


def _sum(parts: Array, window: bool) -> Array:
    """Sums [B, kv_heads, L, parts, gqa, D] over the parts, by additions whose order is no
    backend's: in pairs of neighbours, so that the parts of a longer neighbour, which are 0, change
    nothing. A window's parts, which are few, begin anywhere: they are added one after the other."""
    if window:
        return reduce(mx.add, (parts[:, :, :, i] for i in range(parts.shape[3])))
    while (count := parts.shape[3]) > 1:
        if count % 2:
            parts = mx.pad(parts, [(0, int(axis == 3)) for axis in range(parts.ndim)])
        parts = parts[:, :, :, ::2] + parts[:, :, :, 1::2]
    return parts[:, :, :, 0]

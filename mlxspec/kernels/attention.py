"""Paged attention by metal/paged_attention.metal, in two launches, or by the reference.

Rule: a row's bits depend on its own sequence alone. The host chooses the grid and the device reads
the positions, so a step can be submitted before its drafts are accepted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import groupby
from math import ceil, e, log, log2, prod
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from mlxspec.kernels import cpu, invariant, reference
from mlxspec.kernels.inputs import Attention, Group, PackingPair, block_array
from mlxspec.kernels.metal import SMALLEST, MetalKernel, dtype_name
from mlxspec.kernels.trial import Call, Case, Inputs
from mlxspec.kernels.verify import KERNELS

ROWS = 16  # of a sequence, at most
TILES = (1, 2, 4, 8, 16)  # of 8 (row, head) pairs: the instances of the kernel
SHORT = 512  # context of a case
LONG = 32768  # context of a case, at most
MAX_POOL_BYTES = 76 << 20  # of K and V in a case before quantization: 19,456 slots of an 8B model
SHIFT = 3  # positions of a batch's starts, which only the device knows
RACED = (1, 2, 4, 8, 16)  # one for each instance, with 8 heads of q for each of K and V
VARIANT = "matrix"
SHORTEST = 128  # positions of a part of a context, at least
TOLERANCE = 1e-4  # of fp32 in scores of 256 products and exponentials, with room for a GPU

PART = MetalKernel(
    "paged_attention",
    "paged_attention",
    "q keys values sequences tables",
    outputs="sums stats",
    body="threadgroup vec<T, 4> tile[PAGED_KEYS * paged_stride<T>() / 4];"
    " threadgroup float scores[8 * TILES * PAGED_PITCH]; threadgroup float rescale[8 * TILES];"
    " paged_attention<T, D, DV, BITS, GQA, TILES, SIMDS, BLOCK, WINDOW>("
    "q, keys, values, sequences, tables, sums, stats, as_type<float>(SCALE), keys_shape[0],"
    " size_t(keys_shape[1]) * keys_shape[2], size_t(values_shape[1]) * values_shape[2],"
    " tables_shape[1], threadgroups_per_grid.x, (threadgroup T*)tile, scores, rescale,"
    " threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
)
MERGE = MetalKernel(
    "paged_merge",
    "paged_attention",
    "sums stats sequences sinks",
    outputs="out",
    body="paged_merge<T, DV, WINDOW, SINKS>(sums, stats, sequences, sinks, out, stats_shape[1],"
    " stats_shape[2], thread_position_in_grid);",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of a kernel instance. `window` 0: none; `packings` of K and V."""

    dtype: mx.Dtype
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    block_size: int
    packings: PackingPair = (None, None)
    window: int = 0
    sinks: bool = False

    @property
    def bits(self) -> int:
        """Bits of a quantized value; 0: pools of `dtype`."""
        packing = self.packings[0]
        return packing.bits if packing else 0

    @property
    def name(self) -> str:
        """The start of its cases' names."""
        return (
            f"paged_attention {dtype_name(self.dtype)} {self.heads}/{self.kv_heads}"
            f"x{self.dim}+{self.dim_v} block {self.block_size} window {self.window}"
            f" kv_bits {self.bits} sinks {self.sinks:d}"
        )

    @property
    def gqa(self) -> int:
        """Heads of q for each head of K and V."""
        return self.heads // self.kv_heads


def shape_of(a: Attention) -> Shape | None:
    """The shape of a call; None if the kernel does not support it."""
    of_k, of_v = a.packings
    return _supported(
        ((of_k or a.keys).dtype, (of_v or a.values).dtype),
        a.q.dtype,
        a.q.shape[1],
        len(a.keys),
        a.q.shape[2],
        of_v.dim if of_v else a.values.shape[2],
        a.groups[0].block_size,
        a.packings,
        a.window or 0,
        a.sinks is not None,
    )


@cache  # called by each layer of each step
def _supported(dtypes: tuple[mx.Dtype, mx.Dtype], *parameters: Any) -> Shape | None:
    """The Shape of these parameters, if the kernel supports it with K and V of these dtypes."""
    shape = Shape(*parameters)
    for dim, dtype in zip((shape.dim, shape.dim_v), dtypes, strict=True):
        if dim % 8 or not 16 <= dim <= 256 or dtype != shape.dtype:
            return None
    return shape if shape.gqa <= 64 else None


def _part(at: int, window: int) -> int:
    """The part of the context in which position `at` lies: paged_part in the kernel."""
    length = SHORTEST << sum((window or at) >= longer for longer in (512, 2048, 8192))
    return at // length + (0 if window else length // 64 - 2)


@lru_cache(maxsize=8)
def _metadata(groups: tuple[Group, ...], window: int) -> tuple[Array, Array, int]:
    """The kernel's `sequences` int32 [B, 8] and `tables` [B, width] for adjacent groups, and the
    largest number of parts of a sequence. Computed once per step: a Group is hashed by identity."""
    sequences = []
    tables = []
    parts = 1
    row = 0
    for group in groups:
        visible = group.visible(window or None)
        for start, (low, table) in zip(group.starts, visible, strict=True):
            block = low // group.block_size
            first = _part(low, window)
            last = _part(start + group.max_shift + group.length - 1, window)
            parts = max(parts, last - first + 1)
            sequences.append((start, row, group.length, first, block, group.first, 0, 0))
            tables.append(table)
            row += group.length
    metadata = mx.array(sequences)
    if any(group.shift is not None for group in groups):
        metadata[:, 0] = mx.concatenate([group.positions() for group in groups])
    width = max(SMALLEST, *map(len, tables))
    return metadata, block_array(tables, width), parts


@cache
def _instance(shape: Shape, rows: int) -> tuple[int, int, int]:
    """Tiles and SIMD-groups of a threadgroup, and the number of threadgroups that share a
    sequence's rows: more than one if the sums need more registers than there are."""
    most = 16 if shape.dim_v <= 128 else 8
    tiles = min(most, ceil(shape.gqa * rows / 8))
    tiles = next(t for t in TILES if t >= tiles)
    simds = 4 if tiles * shape.dim_v <= 512 else 8
    return tiles, simds, ceil(rows / (8 * tiles // shape.gqa))


def _launch(a: Attention, shape: Shape, first: Sequence[Array] = ()) -> Array:
    """Launch the kernels for groups of up to ROWS rows for each sequence. `first`: the sums of a
    part in front of the context's."""
    sequences, tables, most_parts = _metadata(tuple(a.groups), shape.window)
    length = max(group.length for group in a.groups)
    tiles, simds, splits = _instance(shape, length)
    common = {"T": shape.dtype, "DV": shape.dim_v, "WINDOW": shape.window}
    # Templates take no floats: the bits of the scale in fp32, times log2(e) for exp2.
    scale = np.float32(a.scale * log2(e)).view(np.int32)
    count = len(sequences)
    heads = len(a.q) * shape.heads
    most_parts = max(most_parts, ceil(SMALLEST / 2 / heads))  # of `stats`
    parts = (len(a.q), shape.heads, most_parts)
    sums, stats = PART(
        [a.q, a.keys, a.values, sequences, tables],
        (32 * simds * most_parts, shape.kv_heads * splits, count),
        (32 * simds, 1, 1),
        output_shapes=[(*parts, shape.dim_v), (*parts, 2)],
        output_dtypes=[mx.float32, mx.float32],
        **common,
        D=shape.dim,
        BITS=shape.bits,
        BLOCK=shape.block_size,
        GQA=shape.gqa,
        TILES=tiles,
        SIMDS=simds,
        SCALE=int(scale),
    )
    if first:
        sums = mx.concatenate([first[0], sums], axis=2)
        stats = mx.concatenate([first[1], stats], axis=2)
        # Of each sequence, see _metadata: one more part, in front of position 0.
        more = [0, 0, 0, -1, 0, -SHORTEST - a.groups[0].first, 0, 0]
        sequences = sequences + mx.array(more)
    return MERGE(
        [sums, stats, sequences, sequences if a.sinks is None else a.sinks],
        (32, shape.heads * length, count),
        (32, 4, 1),
        output_shapes=[(len(a.q), shape.heads, shape.dim_v)],
        output_dtypes=[shape.dtype],
        **common,
        SINKS=shape.sinks,
    )[0]


def attention_beside(a: Attention, shape: Shape, rows: Sequence[tuple[Array, Array]]) -> Array:
    """As paged_attention by the kernel, for a row of each sequence that sees everything. K and V of
    the last positions are in `rows`, [B or more, kv_heads, 1, D] each, not in the pools, all of
    which MLX would copy if they were written while a launch reads them."""
    parts = [mx.concatenate([x[: len(a.q)] for x in each], 2) for each in zip(*rows, strict=True)]
    k, v = (part.astype(mx.float32) for part in parts)
    q = a.q.reshape(*k.shape[:2], shape.gqa, -1)
    scores = q @ k.swapaxes(2, 3) * (a.scale * log2(e))
    top = scores.max(axis=-1, keepdims=True)
    weights = mx.power(2, scores - top)
    stats = mx.concatenate([top, weights.sum(axis=-1, keepdims=True)], axis=-1)
    first = [x.reshape(len(q), shape.heads, 1, -1) for x in (weights @ v, stats)]
    groups = [replace(g, starts=[start - len(rows) for start in g.starts]) for g in a.groups]
    return _launch(replace(a, groups=groups), shape, first)


def _proven(shape: Shape, rows: int) -> bool:
    """Whether the kernel is proven for so many rows of a sequence, with all contexts."""
    return all([KERNELS.variant(case.name, rows) for case in paged_attention_cases(shape)])


def _few(group: Group, shape: Shape) -> bool:
    """Whether the kernel takes the group's rows: a few, none of which sees later positions."""
    return group.length <= ROWS and group.ahead(shape.window) is None


def kernel_alone(shape: Shape, groups: Iterable[Group]) -> bool:
    """Whether all these groups go through the kernel, and so would any with as few rows."""
    few = all(_few(group, shape) for group in groups)
    return few and _proven(shape, 1) and _proven(shape, ROWS)


def paged_attention(a: Attention, unproven: bool = False, shape: Shape | None = None) -> Array:
    """As reference.paged_attention. Neighbouring groups whose shape and rows are proven go through
    the kernel in one launch, the others through the reference. With `unproven` no proof is
    needed where the kernel supports the shape. `shape`: the result of `shape_of`."""
    shape = shape or shape_of(a)
    if shape and KERNELS.recorded is not None:
        KERNELS.recorded += paged_attention_cases(shape)

    def ours(group: Group) -> bool:
        if not shape or not _few(group, shape):
            return False
        return unproven or _proven(shape, group.length)

    out = []
    first = a.groups[0].lo
    for by_kernel, run in groupby(a.groups, ours):
        groups = list(run)
        part = a
        if len(groups) < len(a.groups):
            q = a.q[groups[0].lo - first : groups[-1].hi - first]
            part = replace(a, q=q, groups=groups)
        if shape and by_kernel:
            out.append(_launch(part, shape))
        else:
            out.append(reference.paged_attention(part, cpu.attention))
    return mx.concatenate(out)


def is_correct(shape: Shape) -> bool:
    """Whether the kernel gives the right values for any number of rows, however fast it is."""
    return all(KERNELS.is_correct(case.name) for case in paged_attention_cases(shape))


def invariant_attention(a: Attention, shape: Shape | None, by_kernel: bool) -> Array:
    """As reference.paged_attention, and no row's bits depend on other rows: by the kernel for all
    rows, or by products of one shape."""
    if not shape or not by_kernel:
        return invariant.attention(a)
    groups = [part for group in a.groups for part in group.split(ROWS)]
    return paged_attention(replace(a, groups=groups), unproven=True, shape=shape)


@cache
def paged_attention_cases(shape: Shape) -> list[Case]:
    """The cases that the kernel must win: one sequence with a short context, one with a long
    context, as far as MAX_POOL_BYTES allows, and a batch that passes the window. Their rows are
    those of one sequence."""
    slot_bytes = shape.kv_heads * (shape.dim + shape.dim_v) * shape.dtype.size
    long = min(LONG, max(2 * SHORT, MAX_POOL_BYTES // slot_bytes))
    batch = min(long, max(700, shape.window + 70))
    cases = [
        _case(shape, f"context {SHORT}", [SHORT - ROWS // 2]),
        _case(shape, "ragged", [40, batch // 2, batch]),
    ]
    if not 0 < shape.window < long // 2:  # else it would take as long as the batch
        cases.append(_case(shape, f"context {long}", [long - ROWS]))
    return cases


def _case(shape: Shape, label: str, starts: list[int]) -> Case:
    """One sequence for each position of a first row in `starts`, their blocks scattered. The last
    one has the case's rows, its neighbours have one each, in the same launch. The starts of several
    are shifted on the device."""
    size = shape.block_size
    blocks = [ceil((start + SHIFT + ROWS) / size) for start in starts]
    scattered = 1 + np.random.default_rng(0).permutation(sum(blocks))
    tables = np.split(scattered, np.cumsum(blocks)[:-1])
    slots = size * (1 + sum(blocks))

    @lru_cache(maxsize=1)  # layers share the groups of a step
    def groups(rows: int) -> list[Group]:
        batch = []
        for row, (start, table) in enumerate(zip(starts, tables, strict=True)):
            length = rows if row == len(starts) - 1 else 1
            group = Group(
                row,
                row + length,
                length,
                starts=[start],
                tables={None: [table.tolist()]},
                block_size=size,
            )
            if len(starts) > 1:
                group.starts = [start - SHIFT]
                group.shift = mx.array([SHIFT])
                group.max_shift = 2 * SHIFT
            batch.append(group)
        return batch

    def run(attend: Call, *arrays: Array) -> Array:
        q, keys, values, sinks = arrays
        neighbours = [q[:1] for _ in starts[1:]]
        call = Attention(
            mx.concatenate([*neighbours, q]),
            keys,
            values,
            groups=groups(len(q)),
            scale=shape.dim**-0.5,
            window=shape.window or None,
            sinks=sinks if shape.sinks else None,
            packings=shape.packings,
            clean=True,
        )
        return attend(call)

    return Case(
        name=f"{shape.name} {label}",
        rows=tuple(range(1, ROWS + 1)),
        raced=RACED,
        inputs=partial(_inputs, shape, starts, slots),
        stock=partial(run, reference.paged_attention),
        reference=partial(run, _exact),
        variants={VARIANT: partial(run, partial(paged_attention, unproven=True))},
        tolerance=TOLERANCE,
    )


def _inputs(shape: Shape, starts: list[int], slots: int, seed: int) -> Inputs:
    """q [ROWS, heads, D], the pools of K and V, and sinks."""
    of_q, of_sinks, *of_pools = mx.random.split(mx.random.key(seed), 4)
    arrays = [mx.random.normal((ROWS, shape.heads, shape.dim), shape.dtype, key=of_q)]
    dims = (shape.dim, shape.dim_v)
    for dim, packing, key in zip(dims, shape.packings, of_pools, strict=True):
        size = (shape.kv_heads, slots, dim)
        words = mx.random.split(key, prod(size) // 4)  # uniform: normal values take more memory
        pool = words.view(mx.int16).reshape(size).astype(shape.dtype) / 2**14
        arrays.append(packing.pack(pool) if packing else pool)
    seen = min(starts[-1], shape.window or starts[-1])
    sinks = mx.random.normal((shape.heads,), key=of_sinks)
    sinks += log(seen) + 0.5  # as heavy as all keys together, so that mistakes with them show
    return *arrays, sinks.astype(shape.dtype)


def _exact(a: Attention) -> Array:
    """reference.paged_attention in fp32: on the CPU because a GPU may round products, and by heads
    of K and V because all of them in fp32 need several times their memory."""
    out = []
    with mx.stream(mx.cpu):
        for head, q in enumerate(mx.split(a.q, len(a.keys), axis=1)):
            part = replace(a, q=q.astype(mx.float32), packings=(None, None))
            pools = []
            for pool, packing in zip((a.keys, a.values), a.packings, strict=True):
                rows = pool[head, None]
                pools.append(packing.exact(rows) if packing else rows.astype(mx.float32))
            part.keys, part.values = pools
            if a.sinks is not None:
                part.sinks = a.sinks.reshape(len(a.keys), -1)[head]
            out.append(reference.paged_attention(part))
            mx.eval(out)
        return mx.concatenate(out, axis=1)

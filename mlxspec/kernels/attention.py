"""metal/paged_attention.metal: attention over pages in two launches, or the reference.

Rule: a row's bits depend on its own sequence alone. The grid comes from what the host knows,
positions from the device, so a step can be submitted before its drafts are accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import groupby
from math import ceil, e, log, log2

import mlx.core as mx
import numpy as np

from mlxspec.kernels import reference
from mlxspec.kernels.metal import SMALLEST, MetalKernel, dtype_name
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.reference import Attention, Group, PackingPair, block_array
from mlxspec.kernels.trial import Case, Inputs
from mlxspec.kernels.verify import KERNELS

ROWS = 16  # of a sequence, at most
TILES = (1, 2, 4, 8, 16)  # of 8 (row, head) pairs: the instances of the kernel
SHORT = 512  # context of a case
LONG = 32768  # context of a case, at most
MAX_POOL_BYTES = 128 << 20  # of K and V in a case, before they are quantized
LATE = 3  # positions of a batch's starts that only the device knows
RACED = (1, 2, 4, 8, 16)  # with 8 heads to each of K and V, one for each instance
VARIANTS = ("matrix", "plain")  # by simdgroup_matrix or not
TOLERANCE = 1e-4  # fp32's own in scores of 256 products and exponentials, with room for a GPU's

PART = MetalKernel(
    "paged_attention",
    "paged_attention",
    "q keys values places tables",
    "sums stats",
    "threadgroup vec<T, 4> stage[PAGED_KEYS * paged_stride<T>() / 4];"
    " threadgroup float scores[8 * TILES * PAGED_PITCH]; threadgroup float shrink[8 * TILES];"
    " paged_attention<T, D, DV, BITS, GQA, TILES, SIMDS, BLOCK, WINDOW, MATRIX>("
    "q, keys, values, places, tables, sums, stats, as_type<float>(SCALE), keys_shape[0],"
    " size_t(keys_shape[1]) * keys_shape[2], size_t(values_shape[1]) * values_shape[2],"
    " tables_shape[1], threadgroups_per_grid.x, (threadgroup T*)stage, scores, shrink,"
    " threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
)
MERGE = MetalKernel(
    "paged_merge",
    "paged_attention",
    "sums stats places sinks",
    "out",
    "paged_merge<T, DV, WINDOW, SINKS>(sums, stats, places, sinks, out, stats_shape[1],"
    " stats_shape[2], thread_position_in_grid);",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What an instance of the kernel is made for. `window` 0: none; `packings` of K and V."""

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
        """Of a quantized value; 0: pools of `dtype`."""
        packing = self.packings[0]
        return packing.bits if packing else 0

    @property
    def name(self) -> str:
        """As in Case.name."""
        return (
            f"paged_attention {dtype_name(self.dtype)} {self.heads}/{self.kv_heads}"
            f"x{self.dim}+{self.dim_v} block {self.block_size} window {self.window}"
            f" kv_bits {self.bits} sinks {self.sinks:d}"
        )

    @property
    def gqa(self) -> int:
        """Heads of q for each head of K and V."""
        return self.heads // self.kv_heads


def _shape(a: Attention) -> Shape | None:
    """The shape of a call; None if the kernel does not support it."""
    of_v = a.packings[1]
    shape = Shape(
        dtype=a.q.dtype,
        heads=a.q.shape[1],
        kv_heads=len(a.keys),
        dim=a.q.shape[2],
        dim_v=of_v.dim if of_v else a.values.shape[2],
        block_size=a.groups[0].block_size,
        packings=a.packings,
        window=a.window or 0,
        sinks=a.sinks is not None,
    )
    for dim in (shape.dim, shape.dim_v):
        if dim % 8 or not 16 <= dim <= 256:
            return None
    pools = (a.keys, a.values)
    for pool, packing in zip(pools, a.packings, strict=True):
        if a.q.dtype != (packing or pool).dtype:
            return None
    return shape if shape.gqa <= 64 else None


def _part(at: int, window: int) -> int:
    """As paged_part in the kernel."""
    length = 128
    for longer in (512, 2048, 8192):
        if (window or at) >= longer:
            length *= 2
    return at // length + (0 if window else length // 64 - 2)


@lru_cache(maxsize=8)
def _placement(
    groups: tuple[Group, ...],
    window: int,
) -> tuple[mx.array, mx.array, int]:
    """Where the sequences of adjacent groups are, made once per step: the kernel's places int32
    [B, 8] and tables [B, width], and the most parts of a sequence. A Group is hashed by identity,
    which tells steps apart."""
    places = []
    tables = []
    late = []
    parts = 1
    row = 0
    for group in groups:
        visible = group.visible(window or None)
        for start, (low, table) in zip(group.starts, visible, strict=True):
            block = low // group.block_size
            first = _part(low, window)
            last = _part(start + group.spread + group.length - 1, window)
            parts = max(parts, last - first + 1)
            places.append((start, row, group.length, first, block, 0, 0, 0))
            tables.append(table)
            row += group.length
        if group.late is None:
            late.append(mx.zeros(len(group.starts), mx.int32))
        else:
            late.append(group.late)
    where = mx.array(places)
    if any(group.late is not None for group in groups):
        where[:, 0] += mx.concatenate(late)
    width = max(SMALLEST, *map(len, tables))
    return where, block_array(tables, width), parts


@cache
def _plan(shape: Shape, rows: int) -> tuple[int, int, int]:
    """Tiles and SIMD-groups of a threadgroup, and how many threadgroups share a sequence's rows:
    more than one if their sums need more registers than there are."""
    most = 16 if shape.dim_v <= 128 else 8
    tiles = min(most, ceil(shape.gqa * rows / 8))
    tiles = next(t for t in TILES if t >= tiles)
    simds = 4 if tiles * shape.dim_v <= 512 else 8
    return tiles, simds, ceil(rows / (8 * tiles // shape.gqa))


def _launch(
    a: Attention,
    shape: Shape,
    matrix: bool,
) -> mx.array:
    """For groups of up to ROWS rows for each sequence."""
    places, tables, most_parts = _placement(tuple(a.groups), shape.window)
    length = max(group.length for group in a.groups)
    tiles, simds, splits = _plan(shape, length)
    common = {"T": shape.dtype, "DV": shape.dim_v, "WINDOW": shape.window}
    # A template takes no floats: the scale's fp32 bits, for powers of 2 instead of e.
    scale = np.float32(a.scale * log2(e)).view(np.int32)
    count = len(places)
    parts = (len(a.q), shape.heads, most_parts)
    sums, stats = PART(
        [a.q, a.keys, a.values, places, tables],
        (32 * simds * most_parts, shape.kv_heads * splits, count),
        (32 * simds, 1, 1),
        [(*parts, shape.dim_v), (*parts, 2)],
        [mx.float32, mx.float32],
        **common,
        D=shape.dim,
        BITS=shape.bits,
        BLOCK=shape.block_size,
        MATRIX=matrix,
        GQA=shape.gqa,
        TILES=tiles,
        SIMDS=simds,
        SCALE=int(scale),
    )
    return MERGE(
        [sums, stats, places, places if a.sinks is None else a.sinks],
        (32, shape.heads * length, count),
        (32, 4, 1),
        [(len(a.q), shape.heads, shape.dim_v)],
        [shape.dtype],
        **common,
        SINKS=shape.sinks,
    )[0]


def paged_attention(a: Attention, variant: str = "") -> mx.array:
    """As reference.paged_attention. Neighbouring groups whose shape and rows are proven go through
    the kernel together, the others through the reference. `variant`: use this one without proof,
    for what the kernel supports."""
    shape = _shape(a)
    if shape and KERNELS.recorded is not None:
        KERNELS.recorded += paged_attention_cases(shape)

    def choose(group: Group) -> str:
        if not shape or group.length > ROWS:
            return ""
        return variant or _proven(shape, group.length)

    out = []
    for chosen, run in groupby(a.groups, choose):
        groups = list(run)
        part = replace(a, q=a.rows(groups), groups=groups)
        if shape and chosen:
            out.append(_launch(part, shape, chosen == "matrix"))
        else:
            out.append(reference.paged_attention(part))
    return mx.concatenate(out)


def _proven(shape: Shape, rows: int) -> str:
    """The variant that is proven in all contexts; "": none."""
    variants = {KERNELS.variant(case.name, rows) for case in paged_attention_cases(shape)}
    return variants.pop() if len(variants) == 1 else ""


@cache
def paged_attention_cases(shape: Shape) -> list[Case]:
    """All of them must be won, by the same variant: alone with a short and a long context, as far
    as MAX_POOL_BYTES allows, and in a batch that passes the window. Their rows are those of a
    sequence."""
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


def _case(
    shape: Shape,
    label: str,
    starts: list[int],
) -> Case:
    """Sequences whose first rows have these positions; the blocks of each lie anywhere."""
    blocks = [ceil((start + LATE + ROWS) / shape.block_size) for start in starts]
    scattered = 1 + np.random.default_rng(0).permutation(sum(blocks))
    tables = np.split(scattered, np.cumsum(blocks)[:-1])
    slots = shape.block_size * (1 + sum(blocks))

    groups = lru_cache(maxsize=1)(partial(_groups, starts, tables, shape.block_size))

    def run(attend: Callable[[Attention], mx.array], *arrays: mx.array) -> mx.array:
        q, keys, values, *sinks = arrays
        call = Attention(
            q.swapaxes(0, 1).flatten(0, 1),
            keys,
            values,
            groups(len(q)),
            shape.dim**-0.5,
            shape.window or None,
            sinks[0] if sinks else None,
            shape.packings,
        )
        out = attend(call)
        out = out.reshape(len(starts), len(q), shape.heads, -1)
        return out.swapaxes(0, 1)

    return Case(
        name=f"{shape.name} {label}",
        rows=tuple(range(1, ROWS + 1)),
        raced=RACED,
        inputs=partial(_inputs, shape, starts, slots),
        stock=partial(run, reference.paged_attention),
        reference=partial(run, _exact),
        variants={way: partial(run, partial(paged_attention, variant=way)) for way in VARIANTS},
        tolerance=TOLERANCE,
    )


def _groups(
    starts: list[int],
    tables: list[np.ndarray],
    block_size: int,
    rows: int,
) -> list[Group]:
    """A group for each sequence; of several, only the device knows the starts."""
    groups = []
    lo = 0
    for start, table in zip(starts, tables, strict=True):
        group = Group(
            lo,
            lo + rows,
            rows,
            [start],
            {None: [table.tolist()]},
            block_size,
        )
        if len(starts) > 1:
            group.starts = [start - LATE]
            group.late = mx.array([LATE])
            group.spread = 2 * LATE
        groups.append(group)
        lo += rows
    return groups


def _inputs(
    shape: Shape,
    starts: list[int],
    slots: int,
    seed: int,
) -> Inputs:
    """q [ROWS, sequences, heads, D], the pools of K and V, and sinks if any."""
    keys = mx.random.split(mx.random.key(seed), 4)
    size = (ROWS, len(starts), shape.heads, shape.dim)
    arrays = [mx.random.normal(size, shape.dtype, key=keys[0])]
    dims = (shape.dim, shape.dim_v)
    for dim, packing, key in zip(dims, shape.packings, keys[1:3], strict=True):
        pool = mx.random.normal((shape.kv_heads, slots, dim), shape.dtype, key=key)
        arrays.append(packing.pack(pool) if packing else pool)
    if shape.sinks:  # as heavy as all keys together, so that mistakes with them show
        seen = min(starts[-1], shape.window or starts[-1])
        sinks = mx.random.normal((shape.heads,), key=keys[3])
        sinks += log(seen) + 0.5
        arrays.append(sinks.astype(shape.dtype))
    return tuple(arrays)


def _exact(a: Attention) -> mx.array:
    """reference.paged_attention in fp32, on the CPU because a GPU may round products."""
    with mx.stream(mx.cpu):
        exact = replace(a, packings=(None, None))
        exact.q = a.q.astype(mx.float32)
        exact.keys = _fp32(a.keys, a.packings[0])
        exact.values = _fp32(a.values, a.packings[1])
        if a.sinks is not None:
            exact.sinks = a.sinks.astype(mx.float32)
        return reference.paged_attention(exact)


def _fp32(pool: mx.array, packing: Packing | None) -> mx.array:
    return packing.exact(pool) if packing else pool.astype(mx.float32)

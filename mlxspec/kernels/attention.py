"""metal/paged_attention.metal: attention over pages in two launches, or the reference.

Rule: a row's bits depend on its own sequence alone. The grid comes from what the host knows,
positions from the device, so a step can be submitted before its drafts are accepted.
"""

import struct
from collections.abc import Callable, Sequence
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
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import KERNELS

ROWS = 16  # of a sequence, at most
TILES = (1, 2, 4, 8, 16)  # of 8 (row, head) pairs: the instances of the kernel
SHORT = 512  # context of a case
LONG = 32768  # context of a case, at most
MAX_POOL_BYTES = 128 << 20  # of K and V in a case
DRAWN = 4096  # random slots of a case's pool; the others repeat them
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
    """What an instance of the kernel is made for. `window` 0: none; `bits` 0: pools of `dtype`."""

    dtype: mx.Dtype
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    block_size: int
    bits: int = 0
    window: int = 0
    sinks: bool = False

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

    def packings(self) -> PackingPair:
        """Of K and V."""
        if not self.bits:
            return None, None
        of_k = Packing(self.dim, self.dtype, self.bits)
        return of_k, replace(of_k, dim=self.dim_v)


def _shape(a: Attention) -> Shape | None:
    """The shape of a call; None if the kernel does not support it."""
    of_k, of_v = a.packings
    shape = Shape(
        dtype=a.q.dtype,
        heads=a.q.shape[1],
        kv_heads=len(a.keys),
        dim=a.q.shape[2],
        dim_v=of_v.dim if of_v else a.values.shape[2],
        block_size=a.groups[0].block_size,
        bits=of_k.bits if of_k else 0,
        window=a.window or 0,
        sinks=a.sinks is not None,
    )
    for dim in (shape.dim, shape.dim_v):
        if dim % 8 or not 16 <= dim <= 256:
            return None
    if shape.gqa > 64 or a.packings != shape.packings():
        return None
    if not shape.bits and not a.q.dtype == a.keys.dtype == a.values.dtype:
        return None
    return shape


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a step's sequences are, for one window: made once per step, read by every layer.

    `at` int32 [B, 8] and `tables` [B, width] are the kernel's; `parts` and `length` are the most
    parts and rows of a sequence.
    """

    at: mx.array
    tables: mx.array
    parts: int
    length: int


def _part(at: int, window: int) -> int:
    """As paged_part in the kernel."""
    length = 128
    for longer in (512, 2048, 8192):
        if (window or at) >= longer:
            length *= 2
    return at // length + (0 if window else length // 64 - 2)


@lru_cache(maxsize=8)
def _placement(groups: tuple[Group, ...], window: int) -> Placement:
    """Of groups with adjacent rows; a Group is hashed by identity, which tells steps apart."""
    at = []
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
            at.append((start, row, group.length, first, block, 0, 0, 0))
            tables.append(table)
            row += group.length
        if group.late is None:
            late.append(mx.zeros(len(group.starts), mx.int32))
        else:
            late.append(group.late)
    where = mx.array(at)
    if any(group.late is not None for group in groups):
        where[:, 0] += mx.concatenate(late)
    width = max(SMALLEST, *map(len, tables))
    length = max(group.length for group in groups)
    return Placement(where, block_array(tables, width), parts, length)


@cache
def _plan(shape: Shape, rows: int) -> tuple[int, int, int]:
    """Tiles and SIMD-groups of a threadgroup, and how many threadgroups share a sequence's rows:
    more than one if their sums need more registers than there are."""
    most = 16 if shape.dim_v <= 128 else 8
    tiles = min(most, ceil(shape.gqa * rows / 8))
    tiles = next(t for t in TILES if t >= tiles)
    simds = 4 if tiles * shape.dim_v <= 512 else 8
    return tiles, simds, ceil(rows / (8 * tiles // shape.gqa))


def _launch(a: Attention, shape: Shape, matrix: bool) -> mx.array:
    """For groups of up to ROWS rows for each sequence."""
    placed = _placement(tuple(a.groups), shape.window)
    tiles, simds, splits = _plan(shape, placed.length)
    common = {"T": shape.dtype, "DV": shape.dim_v, "WINDOW": shape.window}
    # A template takes no floats: the scale's fp32 bits, for powers of 2 instead of e.
    scale = struct.pack("f", a.scale * log2(e))
    count = len(placed.at)
    parts = (len(a.q), shape.heads, placed.parts)
    sums, stats = PART(
        [a.q, a.keys, a.values, placed.at, placed.tables],
        (32 * simds * placed.parts, shape.kv_heads * splits, count),
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
        SCALE=struct.unpack("i", scale)[0],
    )
    return MERGE(
        [sums, stats, placed.at, placed.at if a.sinks is None else a.sinks],
        (32, shape.heads * placed.length, count),
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
    if not shape or not (variant or KERNELS.verdicts):
        return reference.paged_attention(a)

    def choose(group: Group) -> str:
        if group.length > ROWS:
            return ""
        return variant or _proven(shape, group.length)

    out = []
    for chosen, run in groupby(a.groups, choose):
        groups = list(run)
        part = replace(a, q=a.rows(groups), groups=groups)
        if chosen:
            out.append(_launch(part, shape, chosen == "matrix"))
        else:
            out.append(reference.paged_attention(part))
    return mx.concatenate(out)


def _proven(shape: Shape, rows: int) -> str:
    """The variant that is proven in all contexts; "": none."""
    variants = {KERNELS.variant(name, rows) for name in _trials(shape)}
    return variants.pop() if len(variants) == 1 else ""


# A sequence of a case: the position of its first row, how much of that only the device knows, and
# its rows; 0: as many as are tried.
Trial = tuple[int, int, int]


@cache
def _trials(shape: Shape) -> dict[str, list[Trial]]:
    """The sequences of each case, by Case.name. A kernel must win alone with a short and a long
    context, as far as MAX_POOL_BYTES allows, and in a batch that passes the window."""
    value_bits = shape.bits or 8 * shape.dtype.size
    slot_bytes = shape.kv_heads * (shape.dim + shape.dim_v) * value_bits // 8
    long = min(LONG, max(2 * SHORT, MAX_POOL_BYTES // slot_bytes))
    batch = min(long, max(700, shape.window + 70))
    found = {
        f"{shape.name} context {SHORT}": [(SHORT - ROWS // 2, 0, 0)],
        f"{shape.name} ragged": [(40, 0, 1), (batch // 2, 0, 0), (batch, 3, 0)],
    }
    if not 0 < shape.window < long // 2:  # else it would take as long as the batch
        found[f"{shape.name} context {long}"] = [(long - ROWS, 0, 0)]
    return found


def paged_attention_cases(shape: Shape) -> list[Case]:
    """All of them must be won, by the same variant; their rows are those of a sequence."""
    return [_case(shape, name, sequences) for name, sequences in _trials(shape).items()]


def _case(shape: Shape, name: str, sequences: Sequence[Trial]) -> Case:
    packings = shape.packings()
    blocks = []
    for start, late, _ in sequences:
        blocks.append(ceil((start + 2 * late + ROWS) / shape.block_size))

    @cache
    def groups(rows: int) -> list[Group]:
        return _scattered(sequences, rows, blocks, shape.block_size)

    def run(attend: Callable[[Attention], mx.array], *arrays: mx.array) -> mx.array:
        q, keys, values, sinks = arrays
        own = groups(len(q))
        flat = mx.concatenate([q[: group.length, n] for n, group in enumerate(own)])
        call = Attention(
            flat,
            keys,
            values,
            own,
            shape.dim**-0.5,
            shape.window or None,
            sinks if shape.sinks else None,
            packings,
        )
        out = attend(call)
        each = []
        for group in own:
            rows = out[group.lo : group.hi]
            each.append(mx.repeat(rows, len(q) // group.length, axis=0))
        return mx.stack(each, axis=1)

    return Case(
        name=name,
        rows=tuple(range(1, ROWS + 1)),
        raced=RACED,
        inputs=partial(_inputs, shape, sequences, 1 + sum(blocks)),
        stock=partial(run, reference.paged_attention),
        reference=partial(run, _exact),
        variants={way: partial(run, partial(paged_attention, variant=way)) for way in VARIANTS},
        tolerance=TOLERANCE,
        nested=True,
    )


def _inputs(
    shape: Shape,
    sequences: Sequence[Trial],
    blocks: int,
    rows: int,
    seed: int,
) -> tuple[mx.array, ...]:
    """q [rows, sequences, heads, D], the pools of K and V, and sinks of a case."""
    copies = ceil(blocks * shape.block_size / DRAWN)
    drawn = ceil(blocks / copies) * shape.block_size
    of_q, of_sinks, *of_kv = mx.random.split(mx.random.key(seed), 4)
    size = (ROWS, len(sequences), shape.heads, shape.dim)
    q = mx.random.normal(size, shape.dtype, key=of_q)
    arrays = [q[:rows]]
    dims = (shape.dim, shape.dim_v)
    for dim, packing, key in zip(dims, shape.packings(), of_kv, strict=True):
        pool = mx.random.normal((shape.kv_heads, drawn, dim), shape.dtype, key=key)
        if packing:
            pool = packing.pack(pool)
        arrays.append(mx.tile(pool, (1, copies, 1)))
    # Sinks as heavy as all keys together, so that mistakes with them show.
    context = sequences[-1][0]
    seen = min(context, shape.window or context)
    sinks = mx.random.normal((shape.heads,), key=of_sinks) + log(seen) + 0.5
    arrays.append(sinks.astype(shape.dtype))
    return tuple(arrays)


def _scattered(
    sequences: Sequence[Trial],
    rows: int,
    blocks: Sequence[int],
    block_size: int,
) -> list[Group]:
    """Each sequence of a case with its number of blocks, which lie anywhere."""
    rng = np.random.default_rng(0)
    free = (1 + rng.permutation(sum(blocks))).tolist()
    groups = []
    lo = 0
    for (start, late, own), count in zip(sequences, blocks, strict=True):
        hi = lo + (own or rows)
        table = free[:count]
        free = free[count:]
        group = Group(lo, hi, hi - lo, [start - late], {None: [table]}, block_size)
        if late:
            group.late = mx.array([late])
            group.spread = 2 * late
        groups.append(group)
        lo = hi
    return groups


def _exact(a: Attention) -> mx.array:
    """reference.paged_attention in fp32: on the CPU because a GPU may round products, and by head
    because K and V in fp32 take room."""
    gqa = a.q.shape[1] // len(a.keys)
    out = []
    with mx.stream(mx.cpu):
        for head in range(len(a.keys)):
            heads = slice(head * gqa, (head + 1) * gqa)
            part = replace(a, packings=(None, None))
            part.q = a.q[:, heads].astype(mx.float32)
            part.keys = _fp32(a.keys[head : head + 1], a.packings[0])
            part.values = _fp32(a.values[head : head + 1], a.packings[1])
            if a.sinks is not None:
                part.sinks = a.sinks[heads].astype(mx.float32)
            out.append(reference.paged_attention(part))
            mx.eval(out)
        return mx.concatenate(out, 1)


def _fp32(pool: mx.array, packing: Packing | None) -> mx.array:
    return packing.exact(pool) if packing else pool.astype(mx.float32)

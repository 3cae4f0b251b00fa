"""metal/paged_attention.metal: attention over pages in two launches, or the reference.

Rule: a row's bits depend on its own sequence alone. The grid comes from what the host knows,
positions from the device, so a step can be submitted before its drafts are accepted.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import groupby
from math import ceil, e, log, log2
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import reference
from mlxspec.kernels.metal import SMALLEST, MetalKernel, dtype_name
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.reference import Group
from mlxspec.kernels.verify import KERNELS, Case
from mlxspec.types import UnsupportedModel

ROWS = 16  # of a sequence, at most
TILES = (1, 2, 4, 8, 16)  # of 8 (row, head) pairs: the instances of the kernel
SHORT, LONG = 512, 32768  # contexts of the cases
MAX_POOL_BYTES = 128 << 20  # of K and V in a case
DRAWN = 4096  # random slots of a case's pool; the others repeat them
RACED = (1, 2, 4, 8, 16)  # with 8 heads to each of K and V, one for each instance
VARIANTS = ("matrix", "plain")  # by simdgroup_matrix or not
TOLERANCE = 1e-4  # fp32's own in scores of 256 products and exponentials, with room for a GPU's
PackingPair = tuple[Packing | None, Packing | None]

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
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}+{self.dim_v}"
        heads = f"{self.heads}/{self.kv_heads}x{dims}"
        name = f"paged_attention {dtype_name(self.dtype)} {heads} block {self.block_size}"
        if self.window:
            name += f" window {self.window}"
        if self.bits:
            name += f" kv_bits {self.bits}"
        return f"{name} sinks" if self.sinks else name

    def packings(self) -> PackingPair:
        """Of K and V."""
        if not self.bits:
            return None, None
        return Packing(self.dim, self.dtype, self.bits), Packing(self.dim_v, self.dtype, self.bits)

    def supported(self) -> bool:
        gqa, rest = divmod(self.heads, self.kv_heads)
        dims = all(dim % 8 == 0 and 16 <= dim <= 256 for dim in (self.dim, self.dim_v))
        return rest == 0 and gqa <= 64 and dims and self.bits in (0, 4, 8)


def _shape(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    block_size: int,
    window: int,
    sinks: bool,
    packings: PackingPair,
) -> Shape | None:
    """The shape of a call; None if the kernel does not support it."""
    of_k, of_v = packings
    bits = of_k.bits if of_k else 0
    _, heads, dim = q.shape
    dim_v = of_v.dim if of_v else values.shape[2]
    shape = Shape(q.dtype, heads, len(keys), dim, dim_v, block_size, bits, window, sinks)
    if len(keys) != len(values) or packings != shape.packings() or not shape.supported():
        return None
    if bits or (keys.shape[2] == dim and keys.dtype == values.dtype == q.dtype):
        return shape
    return None


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
    reach = window or at
    length = 128 if reach < 512 else 256 if reach < 2048 else 512 if reach < 8192 else 1024
    return at // length + (0 if window else length // 64 - 2)


@lru_cache(maxsize=8)
def _placement(groups: tuple[Group, ...], window: int) -> Placement:
    """Of groups with adjacent rows; a Group is hashed by identity, which tells steps apart."""
    size = groups[0].block_size
    at: list[tuple[int, ...]] = []
    held, parts = [], 1
    for group in groups:
        tables = group.tables.get(window or None) or group.tables[None]
        for n, (start, table) in enumerate(zip(group.starts, tables, strict=True)):
            low = max(0, start - window + 1) if window else 0
            end = start + group.spread + group.length
            row = group.lo - groups[0].lo + n * group.length
            first = _part(low, window)
            at.append((start, row, group.length, first, low // size, 0, 0, 0))
            held.append(table[low // size : -(-end // size)])
            parts = max(parts, _part(end - 1, window) - first + 1)
    blocks = np.zeros((len(held), max(SMALLEST, *map(len, held))), np.int32)
    for row, table in enumerate(held):
        blocks[row, : len(table)] = table
    where = mx.array(np.array(at, np.int32))
    if any(g.late is not None for g in groups):
        late = [mx.zeros(len(g.starts), mx.int32) if g.late is None else g.late for g in groups]
        where[:, 0] += mx.concatenate(late)
    return Placement(where, mx.array(blocks), parts, max(g.length for g in groups))


@cache
def _plan(shape: Shape, rows: int) -> tuple[int, int, int]:
    """Tiles and SIMD-groups of a threadgroup, and how many threadgroups share a sequence's rows:
    more than one if their sums need more registers than there are."""
    gqa = shape.heads // shape.kv_heads
    most = 16 if shape.dim_v <= 128 else 8
    tiles = next(t for t in TILES if t >= min(most, ceil(gqa * rows / 8)))
    simds = 4 if tiles * shape.dim_v <= 512 else 8
    return tiles, simds, ceil(rows / (8 * tiles // gqa))


def _launch(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    groups: Sequence[Group],
    shape: Shape,
    scale: float,
    sinks: mx.array | None,
    matrix: bool,
) -> mx.array:
    """q [T, heads, D]: the rows of `groups` alone, up to ROWS for each sequence."""
    placed = _placement(tuple(groups), shape.window)
    tiles, simds, splits = _plan(shape, placed.length)
    common = {"T": q.dtype, "DV": shape.dim_v, "WINDOW": shape.window}
    # A template takes no floats: the scale's fp32 bits, for powers of 2 instead of e.
    scale_bits = struct.unpack("i", struct.pack("f", scale * log2(e)))[0]
    count = len(placed.at)
    parts = (len(q), shape.heads, placed.parts)
    sums, stats = PART(
        [q, keys, values, placed.at, placed.tables],
        (32 * simds * placed.parts, shape.kv_heads * splits, count),
        (32 * simds, 1, 1),
        [(*parts, shape.dim_v), (*parts, 2)],
        [mx.float32, mx.float32],
        **common,
        D=shape.dim,
        BITS=shape.bits,
        BLOCK=shape.block_size,
        MATRIX=matrix,
        GQA=shape.heads // shape.kv_heads,
        TILES=tiles,
        SIMDS=simds,
        SCALE=scale_bits,
    )
    return MERGE(
        [sums, stats, placed.at, placed.at if sinks is None else sinks],
        (32, shape.heads * placed.length, count),
        (32, 4, 1),
        [(len(q), shape.heads, shape.dim_v)],
        [q.dtype],
        **common,
        SINKS=sinks is not None,
    )[0]


def paged_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    groups: Sequence[Group],
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    packings: PackingPair = (None, None),
    variant: str | None = None,
) -> mx.array:
    """As reference.paged_attention. Neighbouring groups whose shape and rows are proven go through
    the kernel together, the others through the reference. `variant`: use this one without proof
    up to ROWS rows; then raises UnsupportedModel for what the kernel does not support."""
    limit = window or 0
    shape = _shape(q, keys, values, groups[0].block_size, limit, sinks is not None, packings)
    if variant and not shape:
        raise UnsupportedModel(
            "paged_attention takes K and V of q's dtype, packed alike, 16 to 256 values in eights"
            " and up to 64 heads of q for each of K and V; use reference.paged_attention"
        )
    if shape and KERNELS.recorded is not None:
        KERNELS.recorded += paged_attention_cases(shape)

    def choose(group: Group) -> str:
        if not shape or group.length > ROWS or not (variant or KERNELS.verdicts):
            return ""
        return variant or _proven(shape, group.length)

    out = []
    for chosen, run in groupby(groups, choose):
        some = list(run)
        rows = q[some[0].lo : some[-1].hi] if len(some) < len(groups) else q
        if shape and chosen:
            result = _launch(rows, keys, values, some, shape, scale, sinks, chosen == "matrix")
        else:
            rest = (scale, window, sinks, packings)
            result = reference.paged_attention(rows, keys, values, some, *rest)
        out.append(result)
    return mx.concatenate(out) if len(out) > 1 else out[0]


def _proven(shape: Shape, rows: int) -> str:
    """The variant that is proven in all contexts; "": none."""
    variants = {KERNELS.variant(name, rows) for name in _trials(shape)}
    return variants.pop() if len(variants) == 1 else ""


@cache
def _trials(shape: Shape) -> dict[str, list[tuple[int, int, int]]]:
    """The sequences of each case, by Case.name: (position of the first row, how much of it only the
    device knows, rows or 0: as many as are tried). A kernel must win alone with a short and a long
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


def _case(shape: Shape, name: str, sequences: Sequence[tuple[int, int, int]]) -> Case:
    size, packings = shape.block_size, shape.packings()
    widths = [ceil((start + 2 * late + ROWS) / size) for start, late, _ in sequences]
    slots = (1 + sum(widths)) * size
    copies = ceil(slots / DRAWN)
    drawn = ceil(slots / copies / size) * size
    context = sequences[-1][0]

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        of_q, of_sinks, *of_kv = mx.random.split(mx.random.key(seed), 4)
        q = mx.random.normal((ROWS, len(sequences), shape.heads, shape.dim), shape.dtype, key=of_q)
        arrays = [q[:rows]]
        for dim, packing, key in zip((shape.dim, shape.dim_v), packings, of_kv, strict=True):
            x = mx.random.normal((shape.kv_heads, drawn, dim), shape.dtype, key=key)
            arrays.append(mx.tile(packing.pack(x) if packing else x, (1, copies, 1)))
        if shape.sinks:  # as heavy as all keys together, so that mistakes with them show
            seen = min(context, shape.window or context)
            sinks = mx.random.normal((shape.heads,), key=of_sinks) + log(seen) + 0.5
            arrays.append(sinks.astype(shape.dtype))
        return tuple(arrays)

    @cache
    def groups(rows: int) -> list[Group]:
        """The sequences over scattered blocks."""
        blocks = iter((np.random.default_rng(0).permutation(sum(widths)) + 1).tolist())
        found: list[Group] = []
        lo = 0
        for (start, late, own), width in zip(sequences, widths, strict=True):
            hi = lo + (own or rows)
            tables: dict[int | None, Any] = {None: [[next(blocks) for _ in range(width)]]}
            behind = mx.array([late]) if late else None
            found.append(Group(lo, hi, hi - lo, [start - late], tables, size, behind, 2 * late))
            lo = hi
        return found

    def run(attend: Callable[..., mx.array], q: mx.array, *arrays: mx.array) -> mx.array:
        keys, values, *sinks = arrays
        rows, own = len(q), groups(len(q))
        flat = mx.concatenate([q[: g.length, n] for n, g in enumerate(own)])
        rest = (shape.dim**-0.5, shape.window or None, sinks[0] if sinks else None, packings)
        out = attend(flat, keys, values, own, *rest)
        each = [mx.repeat(out[g.lo : g.hi], rows // g.length, axis=0) for g in own]
        return mx.stack(each, axis=1)

    return Case(
        name=name,
        rows=tuple(range(1, ROWS + 1)),
        raced=RACED,
        inputs=inputs,
        stock=partial(run, reference.paged_attention),
        reference=partial(run, _exact),
        variants={way: partial(run, partial(paged_attention, variant=way)) for way in VARIANTS},
        tolerance=TOLERANCE,
        nested=True,
    )


def _exact(
    q: mx.array, keys: mx.array, values: mx.array, groups: Sequence[Group], *rest: Any
) -> mx.array:
    """reference.paged_attention in fp32: on the CPU because a GPU may round products, and by head
    because K and V in fp32 take room."""
    scale, window, sinks, packings = rest
    gqa, out = q.shape[1] // len(keys), []
    with mx.stream(mx.cpu):
        for head in range(len(keys)):
            k, v = (
                packing.exact(pool[head : head + 1])
                if packing
                else pool[head : head + 1].astype(mx.float32)
                for packing, pool in zip(packings, (keys, values), strict=True)
            )
            heads = slice(head * gqa, (head + 1) * gqa)
            extra = sinks if sinks is None else sinks[heads].astype(mx.float32)
            of_q = q[:, heads].astype(mx.float32)
            out.append(reference.paged_attention(of_q, k, v, groups, scale, window, extra))
            mx.eval(out)
        return mx.concatenate(out, 1)

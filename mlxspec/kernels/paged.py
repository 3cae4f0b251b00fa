"""metal/paged_attention.metal as reference.paged_attention: groups of few rows in two launches.

Rule: a row's bits depend on its own sequence alone. The grid comes from what the host knows, positions from
the device, so a step may be submitted while its drafts' fate is unknown.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import reference
from mlxspec.kernels.metal import source
from mlxspec.kernels.packed import Packing
from mlxspec.kernels.proven import VERDICTS, Case
from mlxspec.kernels.reference import Group
from mlxspec.types import Unfit

ROWS = 16  # of a sequence, that the kernel takes
TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # of 8 rows and heads: one version of the kernel each
CONTEXT = 4096  # of the sequence that a case is about
ROUNDING = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}  # of a case's largest value
PackingPair = tuple[Packing | None, Packing | None]
ASKED: dict[str, "Shape"] = {}  # that attention was called with, by name


@dataclass(frozen=True, slots=True)
class Shape:
    """What a version of the kernel is made for. `window` 0: none; `bits` 0: pools of `dtype`."""

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
        kind = str(self.dtype).rpartition(".")[2]
        said = f"paged_attention {kind} {self.heads}/{self.kv_heads}x{dims} block {self.block_size}"
        said += f" window {self.window}" * bool(self.window) + f" kv_bits {self.bits}" * bool(self.bits)
        return said + " sinks" * self.sinks

    def check(self) -> None:
        """Raises Unfit for what the kernel does not do."""
        if self.kv_heads and self.heads % self.kv_heads == 0 and self.heads // self.kv_heads <= 64:
            dims = (self.dim, self.dim_v)
            if all(d % 8 == 0 and 16 <= d <= 256 for d in dims) and self.bits in (0, 4, 8):
                return
        raise Unfit(
            f"paged_attention takes up to 64 heads for each of K and V, of 16 to 256 values in eights, and 4"
            f" or 8 bits; here is {self.name}; use the reference"
        )


@cache
def _shape(
    dtype: mx.Dtype, heads: int, dim: int, pools: tuple[tuple[mx.Dtype, int, int], ...],
    packings: PackingPair, size: int, window: int, sinks: bool,
) -> tuple[Shape | None, str]:  # fmt: skip
    """Of a call, and its name; None and why it is unfit. Pools are given by dtype, heads and width."""
    (k, v), (of_k, kv_heads, _), (of_v, _, dim_v) = packings, *pools
    shape = Shape(dtype, heads, kv_heads, dim, v.dim if v else dim_v, size, k.bits if k else 0, window, sinks)
    if {k.dtype if k else of_k, v.dtype if v else of_v} != {dtype} or (k is None) != (v is None):
        return None, f"paged_attention takes K and V of q's dtype; q is {dtype}, K {of_k} and V {of_v}"
    try:
        shape.check()
    except Unfit as e:
        return None, str(e)
    return ASKED.setdefault(shape.name, shape), shape.name


@contextmanager
def asked() -> Iterator[list[Shape]]:
    """At its end, the shapes that attention was called with inside: what there is to prove."""
    _shape.cache_clear()  # what is remembered is not asked for again
    ASKED.clear()
    found: list[Shape] = []
    yield found
    found += ASKED.values()


@dataclass(frozen=True, slots=True)
class Seats:
    """Where a step's sequences sit, for one window: made once, read by every layer. `at` int32 [B, 8] and
    `tables` [B, width] are the kernel's; `parts` and `length` bound all sequences' parts and rows."""

    at: mx.array
    tables: mx.array
    count: int
    parts: int
    length: int


def _part(at: int, even: bool) -> int:
    """As paged_part."""
    return at // 256 if even or at < 4096 else 12 + at // 1024


def _seats(groups: Sequence[Group], window: int | None) -> Seats:
    """Of groups that lie side by side; remembered by the first."""
    key = (len(groups), window or 0)
    found: Seats | None = groups[0].seats.get(key)
    if found is None:
        found = groups[0].seats[key] = _seat(groups, window)
    return found


def _seat(groups: Sequence[Group], window: int | None) -> Seats:
    size, even = groups[0].block_size, bool(window)
    at: list[tuple[int, ...]] = []
    held, parts = [], 1
    for g in groups:
        tables = g.tables.get(window) or g.tables[None]
        for n, (start, table) in enumerate(zip(g.starts, tables, strict=True)):
            low = max(0, start - window + 1) if window else 0
            end = start + g.spread + g.length
            first = g.lo - groups[0].lo + n * g.length
            at.append((start, first, g.length, _part(low, even), low // size, 0, 0, 0))
            held.append(table[low // size : -(-end // size)])
            parts = max(parts, _part(end - 1, even) - _part(low, even) + 1)
    blocks = np.zeros((len(held), max(8, *map(len, held))), np.int32)
    for blocks_of, table in zip(blocks, held, strict=True):
        blocks_of[: len(table)] = table
    where = mx.array(np.array(at, np.int32))
    if any(g.late is not None for g in groups):
        late = [mx.zeros((len(g.starts),), mx.int32) if g.late is None else g.late for g in groups]
        where[:, 0] += mx.concatenate(late)
    return Seats(where, mx.array(blocks), len(held), parts, max(g.length for g in groups))


@cache
def _kernels(make: Callable[..., Any]) -> tuple[Callable[..., list[mx.array]], Callable[..., list[mx.array]]]:
    """By `make`, as in metal.py."""
    body = (
        "threadgroup vec<T, 4> stage[PAGED_KEYS * paged_stride<T>() / 4];"
        " threadgroup float scores[8 * TILES * PAGED_PITCH]; threadgroup float shrink[8 * TILES];"
        " paged_attention<T, D, DV, BITS, GQA, TILES, SIMDS, BLOCK, WINDOW, MATRIX>("
        "q, keys, values, seats, tables, sums, stats, as_type<float>(SCALE), keys_shape[0],"
        " size_t(keys_shape[1]) * keys_shape[2], size_t(values_shape[1]) * values_shape[2], tables_shape[1],"
        " threadgroups_per_grid.x, (threadgroup T*)stage, scores, shrink, threadgroup_position_in_grid,"
        " simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
    )
    merge = (
        "paged_merge<T, DV, WINDOW, SINKS>(sums, stats, seats, sinks, out, stats_shape[1], stats_shape[2],"
        " thread_position_in_grid);"
    )
    text = source("paged_attention")
    return (
        make("paged_attention", ["q", "keys", "values", "seats", "tables"], ["sums", "stats"], body, text),
        make("paged_merge", ["sums", "stats", "seats", "sinks"], ["out"], merge, text),
    )


@cache
def _plan(shape: Shape, rows: int) -> tuple[int, int, int]:
    """Tiles and SIMD-groups of a threadgroup, and threadgroups that share a sequence's rows: one, unless the
    sums of all its rows want more registers than there are."""
    gqa = shape.heads // shape.kv_heads
    most = 16 if shape.dim_v <= 128 else 8
    tiles = next(t for t in TILES if t >= min(most, ceil(gqa * rows / 8)))
    simds = 4 if tiles * shape.dim_v <= 512 else 8
    return tiles, simds, ceil(rows / (8 * tiles // gqa))


@cache
def _bits(scale: float) -> int:
    """Of the scale as fp32, for powers of 2 instead of e: a template takes no floats."""
    bits: int = struct.unpack("i", struct.pack("f", scale * 1.4426950408889634))[0]
    return bits


def _attend(
    q: mx.array, keys: mx.array, values: mx.array, groups: Sequence[Group], shape: Shape, scale: float,
    sinks: mx.array | None, matrix: bool,
) -> mx.array:  # fmt: skip
    """The two launches: q [T, heads, D], the rows of `groups` alone, of up to ROWS rows each."""
    of = _seats(groups, shape.window or None)
    tiles, simds, splits = _plan(shape, of.length)
    gqa = shape.heads // shape.kv_heads
    attention, merge = _kernels(mx.fast.metal_kernel)
    common = [("T", q.dtype), ("DV", shape.dim_v), ("WINDOW", shape.window)]
    flags = [("D", shape.dim), ("BITS", shape.bits), ("BLOCK", shape.block_size), ("MATRIX", matrix)]
    sizes = [("GQA", gqa), ("TILES", tiles), ("SIMDS", simds), ("SCALE", _bits(scale))]
    partial = (q.shape[0], shape.heads, of.parts)
    sums, stats = attention(
        inputs=[q, keys, values, of.at, of.tables],
        template=common + flags + sizes,
        grid=(32 * simds * of.parts, shape.kv_heads * splits, of.count),
        threadgroup=(32 * simds, 1, 1),
        output_shapes=[(*partial, shape.dim_v), (*partial, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return merge(
        inputs=[sums, stats, of.at, of.at if sinks is None else sinks],
        template=[*common, ("SINKS", sinks is not None)],
        grid=(shape.dim_v, shape.heads * of.length, of.count),
        threadgroup=(shape.dim_v, 1, 1),
        output_shapes=[(q.shape[0], shape.heads, shape.dim_v)],
        output_dtypes=[q.dtype],
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
    matrix: bool = True,
    takes: Callable[[int], bool] = lambda rows: True,
) -> mx.array:
    """As reference.paged_attention. Neighbouring groups of as many rows as the kernel and `takes` take go
    through it together, by simdgroup_matrix or not, each other one through the reference. Raises Unfit."""
    shape, why = _shape_of(q, keys, values, groups, window, sinks, packings)
    if shape is None:
        raise Unfit(why)
    out, n = [], 0
    while n < len(groups):
        end = n
        while end < len(groups) and groups[end].length <= ROWS and takes(groups[end].length):
            end += 1
        some = groups[n : max(end, n + 1)]
        rows = q[some[0].lo : some[-1].hi] if len(some) < len(groups) else q
        if end > n:
            out.append(_attend(rows, keys, values, some, shape, scale, sinks, matrix))
        else:
            out.append(reference.paged_attention(rows, keys, values, some, scale, window, sinks, packings))
        n += len(some)
    return mx.concatenate(out) if len(out) > 1 else out[0]


def proven_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    groups: Sequence[Group],
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    packings: PackingPair = (None, None),
) -> mx.array:
    """reference.paged_attention, by the kernel where a verdict says so."""
    args = q, keys, values, groups, scale, window, sinks, packings
    verdict = VERDICTS.get(_shape_of(q, keys, values, groups, window, sinks, packings)[1])
    if verdict is None or not verdict.way:
        return reference.paged_attention(*args)
    return paged_attention(*args, matrix=verdict.way == "matrix", takes=verdict.takes)


def paged_attention_case(shape: Shape) -> Case:
    """A lone sequence whose first row is at position CONTEXT, over scattered blocks. Raises Unfit."""
    shape.check()
    size = shape.block_size
    blocks = ceil((CONTEXT + ROWS) / size)
    table = (np.random.default_rng(0).permutation(blocks) + 1).tolist()
    kv = [Packing(d, shape.dtype, shape.bits) if shape.bits else None for d in (shape.dim, shape.dim_v)]

    @cache
    def groups(rows: int) -> list[Group]:
        return [Group(0, rows, rows, [CONTEXT], {None: [table]}, size)]

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        keys = mx.random.split(mx.random.key(seed), 4)
        pool = (shape.kv_heads, (blocks + 1) * size)
        dims = ((ROWS, shape.heads, shape.dim), (*pool, shape.dim), (*pool, shape.dim_v))
        q, k, v = (mx.random.normal(d, shape.dtype, key=at) for d, at in zip(dims, keys, strict=False))
        k, v = (p.pack(x) if p else x for p, x in zip(kv, (k, v), strict=True))
        sinks = (mx.random.normal((shape.heads,), shape.dtype, key=keys[3]),) * shape.sinks
        return q[:rows], k, v, *sinks

    def call(run: Callable[..., mx.array], **how: Any) -> Callable[..., mx.array]:
        def attention(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> mx.array:
            scale, window = shape.dim**-0.5, shape.window or None
            return run(q, k, v, groups(q.shape[0]), scale, window, sinks, (kv[0], kv[1]), **how)

        return attention

    stock = call(reference.paged_attention)
    ways = {"matrix": call(paged_attention), "plain": call(paged_attention, matrix=False)}
    return Case(
        "paged_attention", shape.name.partition(" ")[2], (1, 2, 3, 5, 8, ROWS), inputs, stock, stock, ways,
        ROUNDING[shape.dtype], nested=True,
    )  # fmt: skip


def _shape_of(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    groups: Sequence[Group],
    window: int | None,
    sinks: mx.array | None,
    packings: PackingPair,
) -> tuple[Shape | None, str]:
    pools = tuple((x.dtype, x.shape[0], x.shape[2]) for x in (keys, values))
    size = groups[0].block_size
    return _shape(q.dtype, *q.shape[1:], pools, packings, size, window or 0, sinks is not None)

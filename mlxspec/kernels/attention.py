"""metal/paged_attention.metal as reference.paged_attention: groups of few rows in two launches.

Rule: a row's bits depend on its own sequence alone. The grid comes from what the host knows,
positions from the device, so a step may be submitted while its drafts' fate is unknown.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, log
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import reference
from mlxspec.kernels.matmul import SMALLEST, named, source
from mlxspec.kernels.proven import VERDICTS, Case
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.reference import Group
from mlxspec.types import UnsupportedModel, UserError

ROWS = 16  # of a sequence, that the kernel takes
TILES = (
    1,
    2,
    4,
    8,
    16,
)  # of 8 rows and heads: room of a version of the kernel; what is not there is skipped
SHORT, LONG = 512, 32768  # contexts that are tried
LARGEST = 128 << 20  # bytes of K and V that are tried
DRAWN = 4096  # slots of a pool that are drawn at most; the others repeat them
RACED = (1, 2, 4, 8, 16)  # with 8 heads to each of K and V, one for each version
# Of the largest value: fp32's own in scores of 256 products and exponentials, with room for a
# GPU's.
TOLERANCE = 1e-4
PackingPair = tuple[Packing | None, Packing | None]
ASKED: list[dict["Shape", None]] = []  # where whoever asks now is told the shapes of calls


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
        kind = named(self.dtype)
        said = f"paged_attention {kind} {self.heads}/{self.kv_heads}x{dims} block {self.block_size}"
        said += f" window {self.window}" * bool(self.window) + f" kv_bits {self.bits}" * bool(
            self.bits
        )
        return said + " sinks" * self.sinks

    def packing(self, dim: int) -> Packing | None:
        """Of K's or V's `dim` values."""
        return Packing(dim, self.dtype, self.bits) if self.bits else None

    def check(self) -> None:
        """Raises UnsupportedModel for what the kernel does not do."""
        if self.kv_heads and self.heads % self.kv_heads == 0 and self.heads // self.kv_heads <= 64:
            dims = (self.dim, self.dim_v)
            if all(d % 8 == 0 and 16 <= d <= 256 for d in dims) and self.bits in (0, 4, 8):
                return
        raise UnsupportedModel(
            f"paged_attention takes up to 64 heads for each of K and V, of 16 to 256 values in eights, and 4"
            f" or 8 bits; here is {self.name}; use the reference"
        )


@cache
def _shape(
    dtype: mx.Dtype, heads: int, dim: int, pools: tuple[tuple[mx.Dtype, int, int], ...],
    packings: PackingPair, size: int, window: int, sinks: bool,
) -> tuple[Shape | None, str]:  # fmt: skip
    """Of a call; None and why it is unfit. Pools are given by dtype, heads and width."""
    given = [
        (p.dtype, pool[1], p.dim) if p else pool for p, pool in zip(packings, pools, strict=True)
    ]
    (_, kv_heads, _), (_, _, dim_v) = given
    bits, of_v = [p.bits if p else 0 for p in packings]
    shape = Shape(dtype, heads, kv_heads, dim, dim_v, size, bits, window, sinks)
    if given != [(dtype, kv_heads, dim), (dtype, kv_heads, dim_v)] or bits != of_v:
        said = ", ".join(
            f"{x} of {kind} {n}x{d}" for x, (kind, n, d) in zip("KV", given, strict=True)
        )
        return (
            None,
            f"paged_attention takes K and V of one dtype and packing; q is {dtype} of {dim}, {said}",
        )
    try:
        shape.check()
    except UserError as e:
        return None, str(e)
    return shape, ""


@contextmanager
def asked() -> Iterator[dict[Shape, None]]:
    """The shapes that attention is called with inside: what there is to prove."""
    ASKED.append({})
    try:
        yield ASKED[-1]
    finally:
        ASKED.pop()


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's sequences are, for one window: made once, read by every layer. `at` int32 [B,
    8] and `tables` [B, width] are the kernel's; `parts` and `length` bound all sequences' parts and
    rows."""

    at: mx.array
    tables: mx.array
    count: int
    parts: int
    length: int


def _part(at: int, window: int) -> int:
    """As paged_part."""
    by = window or at
    length = 128 if by < 512 else 256 if by < 2048 else 512 if by < 8192 else 1024
    return at // length + (0 if window else length // 64 - 2)


@lru_cache(maxsize=8)
def _places(groups: tuple[Group, ...], window: int) -> Places:
    """Of groups that lie side by side. A step's are told from others by identity."""
    size = groups[0].block_size
    at: list[tuple[int, ...]] = []
    held, parts = [], 1
    for g in groups:
        tables = g.tables.get(window or None) or g.tables[None]
        for n, (start, table) in enumerate(zip(g.starts, tables, strict=True)):
            low = max(0, start - window + 1) if window else 0
            end = start + g.spread + g.length
            first = g.lo - groups[0].lo + n * g.length
            at.append((start, first, g.length, _part(low, window), low // size, 0, 0, 0))
            held.append(table[low // size : -(-end // size)])
            parts = max(parts, _part(end - 1, window) - _part(low, window) + 1)
    blocks = np.zeros((len(held), max(SMALLEST, *map(len, held))), np.int32)
    for blocks_of, table in zip(blocks, held, strict=True):
        blocks_of[: len(table)] = table
    where = mx.array(np.array(at, np.int32))
    if any(g.late is not None for g in groups):
        late = [mx.zeros((len(g.starts),), mx.int32) if g.late is None else g.late for g in groups]
        where[:, 0] += mx.concatenate(late)
    return Places(where, mx.array(blocks), len(held), parts, max(g.length for g in groups))


@cache
def _kernels(
    make: Callable[..., Any],
) -> tuple[Callable[..., list[mx.array]], Callable[..., list[mx.array]]]:
    """By `make`, as in metal.py."""
    body = (
        "threadgroup vec<T, 4> stage[PAGED_KEYS * paged_stride<T>() / 4];"
        " threadgroup float scores[8 * TILES * PAGED_PITCH]; threadgroup float shrink[8 * TILES];"
        " paged_attention<T, D, DV, BITS, GQA, TILES, SIMDS, BLOCK, WINDOW, MATRIX>("
        "q, keys, values, places, tables, sums, stats, as_type<float>(SCALE), keys_shape[0],"
        " size_t(keys_shape[1]) * keys_shape[2], size_t(values_shape[1]) * values_shape[2], tables_shape[1],"
        " threadgroups_per_grid.x, (threadgroup T*)stage, scores, shrink, threadgroup_position_in_grid,"
        " simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
    )
    merge = (
        "paged_merge<T, DV, WINDOW, SINKS>(sums, stats, places, sinks, out, stats_shape[1], stats_shape[2],"
        " thread_position_in_grid);"
    )
    text = source("paged_attention")
    return (
        make(
            "paged_attention",
            ["q", "keys", "values", "places", "tables"],
            ["sums", "stats"],
            body,
            text,
        ),
        make("paged_merge", ["sums", "stats", "places", "sinks"], ["out"], merge, text),
    )


@cache
def _plan(shape: Shape, rows: int) -> tuple[int, int, int]:
    """Tiles and SIMD-groups of a threadgroup, and threadgroups that share a sequence's rows: one,
    unless the sums of all its rows want more registers than there are."""
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
    of = _places(tuple(groups), shape.window)
    tiles, simds, splits = _plan(shape, of.length)
    gqa = shape.heads // shape.kv_heads
    attention, merge = _kernels(mx.fast.metal_kernel)
    common = [("T", q.dtype), ("DV", shape.dim_v), ("WINDOW", shape.window)]
    flags = [
        ("D", shape.dim),
        ("BITS", shape.bits),
        ("BLOCK", shape.block_size),
        ("MATRIX", matrix),
    ]
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
        grid=(32, shape.heads * of.length, of.count),
        threadgroup=(32, 4, 1),
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
    """As reference.paged_attention. Neighbouring groups of as many rows as the kernel and `takes`
    take go through it together, by simdgroup_matrix or not, each other one through the reference.
    Raises UnsupportedModel."""
    shape, why = _shape_of(q, keys, values, groups, window, sinks, packings)
    if shape is None:
        raise UnsupportedModel(why)
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
            out.append(
                reference.paged_attention(rows, keys, values, some, scale, window, sinks, packings)
            )
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
    """reference.paged_attention, by the kernel where the verdicts of all contexts name the same
    way."""
    args = q, keys, values, groups, scale, window, sinks, packings
    shape = (
        _shape_of(q, keys, values, groups, window, sinks, packings)[0]
        if VERDICTS or ASKED
        else None
    )
    for told in ASKED:
        told |= {shape: None} if shape else {}
    verdicts = [VERDICTS.get(name) for name in _trials(shape)] if shape else [None]
    ways = {verdict.way if verdict else "" for verdict in verdicts}
    if len(ways) > 1 or "" in ways:
        return reference.paged_attention(*args)
    return paged_attention(
        *args,
        matrix=ways == {"matrix"},
        takes=lambda rows: all(v and v.takes(rows) for v in verdicts),
    )


@cache
def _trials(shape: Shape) -> dict[str, list[tuple[int, int, int]]]:
    """By Case.name, the sequences of a step: their first rows' positions, what the host lacks of
    these, and how many rows they have (0: as many as are tried). Kernels must be worth it in each:
    alone with a short context and with a long one, and in a batch that passes the window. As far as
    LARGEST goes."""
    a_slot = shape.kv_heads * (shape.dim + shape.dim_v) * (shape.bits or 8 * shape.dtype.size) // 8
    long = min(LONG, max(2 * SHORT, LARGEST // a_slot))
    batch = min(long, max(700, shape.window + 70))
    found = {
        f"{shape.name} context {SHORT}": [(SHORT - ROWS // 2, 0, 0)],
        f"{shape.name} ragged": [(40, 0, 1), (batch // 2, 0, 0), (batch, 3, 0)],
    }
    if not 0 < shape.window < long // 2:  # else it would take as long as the batch
        found[f"{shape.name} context {long}"] = [(long - ROWS, 0, 0)]
    return found


def paged_attention_cases(shape: Shape) -> list[Case]:
    """All of which must be won, by the same way. `rows` are those of a sequence. Raises
    UnsupportedModel."""
    shape.check()
    return [_case(shape, name, sequences) for name, sequences in _trials(shape).items()]


def _case(shape: Shape, name: str, sequences: Sequence[tuple[int, int, int]]) -> Case:
    kv = shape.packing(shape.dim), shape.packing(shape.dim_v)
    groups, slots = _groups(shape, sequences)
    copies, context = ceil(slots / DRAWN), sequences[-1][0]
    drawn = ceil(slots / copies / shape.block_size) * shape.block_size
    seen = min(context, shape.window or context)

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        of_q, of_k, of_v, of_sinks = mx.random.split(mx.random.key(seed), 4)
        q = mx.random.normal((ROWS, len(sequences), shape.heads, shape.dim), shape.dtype, key=of_q)
        pools = []
        for dim, packing, key in ((shape.dim, kv[0], of_k), (shape.dim_v, kv[1], of_v)):
            x = mx.random.normal((shape.kv_heads, drawn, dim), shape.dtype, key=key)
            pools.append(mx.tile(packing.pack(x) if packing else x, (1, copies, 1)))
        # As heavy as all keys together: what goes wrong with them shows.
        sinks = mx.random.normal((shape.heads,), key=of_sinks) + log(seen) + 0.5
        return q[:rows], *pools, *(sinks.astype(shape.dtype),) * shape.sinks

    def call(run: Callable[..., mx.array], **how: Any) -> Callable[..., mx.array]:
        def attention(
            q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None
        ) -> mx.array:
            scale, window, own = shape.dim**-0.5, shape.window or None, groups(q.shape[0])
            rows = mx.concatenate([q[: g.length, n] for n, g in enumerate(own)])
            out = run(rows, k, v, own, scale, window, sinks, kv, **how)
            less = [(0, len(q) - g.length) for g in own]
            found = [out[g.lo : g.hi] for g in own]
            found = [
                mx.pad(x, [n, (0, 0), (0, 0)]) if n[1] else x
                for x, n in zip(found, less, strict=True)
            ]
            return mx.stack(found, 1)

        return attention

    ways = {"matrix": call(paged_attention), "plain": call(paged_attention, matrix=False)}
    kernel, _, said = name.partition(" ")
    return Case(
        kernel, said, tuple(range(1, ROWS + 1)), inputs, call(reference.paged_attention), call(_exact), ways,
        TOLERANCE, nested=1, raced=RACED,
    )  # fmt: skip


def _groups(
    shape: Shape, sequences: Sequence[tuple[int, int, int]]
) -> tuple[Callable[[int], list[Group]], int]:
    """Of `sequences` with so many rows, over scattered blocks; and the pools' slots."""
    size = shape.block_size
    widths = [ceil((start + 1 + ROWS) / size) for start, _, _ in sequences]
    blocks = iter((np.random.default_rng(0).permutation(sum(widths)) + 1).tolist())
    tables = [[next(blocks) for _ in range(width)] for width in widths]

    @cache
    def groups(rows: int) -> list[Group]:
        found: list[Group] = []
        for (start, late, own), table in zip(sequences, tables, strict=True):
            lo, n, behind = (
                found[-1].hi if found else 0,
                own or rows,
                mx.array([late]) if late else None,
            )
            spread = late + 1 if late else 0
            found.append(
                Group(lo, lo + n, n, [start - late], {None: [table]}, size, behind, spread)
            )
        return found

    return groups, (1 + sum(widths)) * size


def _exact(
    q: mx.array, keys: mx.array, values: mx.array, groups: Sequence[Group], scale: float,
    window: int | None, sinks: mx.array | None, packings: PackingPair,
) -> mx.array:  # fmt: skip
    """reference.paged_attention in fp32: on the CPU, since a GPU may round what it multiplies, and
    a head of K and V at a time, since those in fp32 take room."""
    gqa, out = q.shape[1] // keys.shape[0], []
    with mx.stream(mx.cpu):
        for head in range(keys.shape[0]):
            k, v = (
                p.exact(x[head : head + 1]) if p else x[head : head + 1].astype(mx.float32)
                for p, x in zip(packings, (keys, values), strict=True)
            )
            mine = slice(head * gqa, (head + 1) * gqa)
            rest = scale, window, sinks if sinks is None else sinks[mine].astype(mx.float32)
            out.append(
                reference.paged_attention(q[:, mine].astype(mx.float32), k, v, groups, *rest)
            )
            mx.eval(out)
        return mx.concatenate(out, 1)


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

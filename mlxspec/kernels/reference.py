"""The kernels' specification in plain MLX ops: attention over pages, quantized products of few
rows, sampling.

Rule: every Metal kernel must equal its function here. Pools are [kv_heads, slots, dim], so that a
gathered block is contiguous within its head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxspec.kernels.quantized_kv import Packing
from mlxspec.types import NULL_BLOCK

# Blocks to gather [B, n], or a slice of slots of a lone sequence with consecutive blocks; the mask;
# the part of these slots that is used.
Selection = tuple[mx.array | slice, mx.array | str | None, slice]


@dataclass(slots=True, eq=False)
class Group:
    """Sequences of a step with the same number of rows: rows `lo .. hi` are [B, length], B-major.

    `starts` [B]: positions of their first rows. `tables`: their block ids by window; None: layers
    that see everything. A table covers at least `start + spread + length` slots. Row i of sequence
    b sees up to position starts[b] + i. Where the host does not know yet how many drafted tokens
    were accepted, `late` int32 [B], at most `spread`, is added to the starts.
    """

    lo: int
    hi: int
    length: int
    starts: list[int]
    tables: Mapping[int | None, list[list[int]]]
    block_size: int
    late: mx.array | None = None
    spread: int = 0
    _selections: dict[int | None, Selection] = field(default_factory=dict)

    def select(self, window: int | None) -> Selection:
        """What attention with this sliding window reads; made once per step, shared by layers.

        Consecutive blocks need no gathering, which would copy all K/V in every layer. A lone
        sequence is cut to its exact slots; several are padded with null blocks and masked.
        """
        if window not in self._selections:
            self._selections[window] = self._select(window)
        return self._selections[window]

    def _select(self, window: int | None) -> Selection:
        size, rows = self.block_size, self.length
        reach = window or max(self.starts) + 1
        lows = [max(0, start - reach + 1) for start in self.starts]
        firsts = [low // size for low in lows]
        tables = self.tables.get(window) or self.tables[None]
        held = [
            table[first : -(-(start + self.spread + rows) // size)]
            for table, first, start in zip(tables, firsts, self.starts, strict=True)
        ]
        width = max(map(len, held))
        head = held[0][0]
        blocks: mx.array | slice
        if held == [list(range(head, head + width))]:
            blocks = slice(head * size, (head + width) * size)
        else:
            blocks = mx.array([h + [NULL_BLOCK] * (width - len(h)) for h in held], mx.int32)
        keep = slice(0, width * size)
        if len(held) == 1 and self.late is None:
            base, end = firsts[0] * size, self.starts[0] + rows
            keep = slice(lows[0] - base, end - base)
            if rows == 1:
                return blocks, None, keep
            if not window or end <= window:
                return blocks, "causal", keep
        slots = mx.array(firsts)[:, None, None] * size + mx.arange(keep.start, keep.stop)
        starts = mx.array(self.starts)
        if self.late is not None:
            starts = starts + self.late
        positions = starts[:, None, None] + mx.arange(rows)[:, None]  # [B, rows, 1]
        visible = slots <= positions
        if window:
            visible &= slots > positions - window
        return blocks, visible[:, None], keep


def gather(
    pool: mx.array,
    blocks: mx.array | slice,
    block_size: int,
    keep: slice,
    packing: Packing | None = None,
) -> mx.array:
    """Slots `keep` of `blocks`, see Selection, of `pool` [H, slots, D]: dense [B, H, S, D], with
    packed rows unpacked."""
    heads, _, dim = pool.shape
    if isinstance(blocks, slice):
        rows = pool[None, :, blocks.start + keep.start : blocks.start + keep.stop]
        return packing.unpack(rows) if packing else rows
    batch, n = blocks.shape
    dense = pool.reshape(heads, -1, block_size, dim)[:, blocks]
    dense = dense.reshape(heads, batch, n * block_size, dim)[:, :, keep]
    return (packing.unpack(dense) if packing else dense).transpose(1, 0, 2, 3)


def paged_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    groups: Sequence[Group],
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    packings: tuple[Packing | None, Packing | None] = (None, None),
) -> mx.array:
    """softmax(scale * q k^T) v over the groups' pages.

    q [T, heads, D]; pools keys [kv_heads, slots, D] and values [kv_heads, slots, Dv], packed by
    `packings`; `sinks` [heads]: extra logits of the softmax without a value. Returns [T, heads, Dv]
    in q's dtype.
    """
    heads, dim = q.shape[1:]
    out = []
    for group in groups:
        blocks, mask, keep = group.select(window)
        k, v = (
            gather(pool, blocks, group.block_size, keep, packing)
            for pool, packing in zip((keys, values), packings, strict=True)
        )
        rows = q[group.lo : group.hi] if len(groups) > 1 else q
        rows = rows.reshape(-1, group.length, heads, dim).swapaxes(1, 2)
        o = mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale, mask=mask, sinks=sinks)
        out.append(o.swapaxes(1, 2).reshape(group.hi - group.lo, heads, -1))
    return mx.concatenate(out) if len(out) > 1 else out[0]


def small_qmm(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> mx.array:
    """x dequantized(w)^T: weights, products and sums in fp32, rounded once.

    x [M, K] float; w uint32 [N, K * bits / 32], scales and biases [N, K / group_size] as from
    mx.quantize. Returns [M, N] in x's dtype. A kernel's row must not depend on M, to the bit.
    """
    s, b = scales.astype(mx.float32), biases.astype(mx.float32)
    y = mx.quantized_matmul(x.astype(mx.float32), w, s, b, group_size=group_size, bits=bits)
    return y.astype(x.dtype)


def gather_small_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    experts: mx.array,
    group_size: int,
    bits: int,
) -> mx.array:
    """small_qmm with the weights w [E, N, ...] of experts.

    `experts` int [P] of P (token, expert) pairs; x [R, K] has a row for P / R pairs in turn.
    Returns [P, N] in x's dtype. A kernel's row must be that of small_qmm, to the bit.
    """
    s, b = scales.astype(mx.float32), biases.astype(mx.float32)
    rows = mx.repeat(x.astype(mx.float32), experts.size // x.shape[0], axis=0)[:, None]
    indices = experts.astype(mx.uint32)
    y = mx.gather_qmm(rows, w, s, b, rhs_indices=indices, group_size=group_size, bits=bits)
    return y[:, 0].astype(x.dtype)


@dataclass(slots=True)
class Draws:
    """How each of R rows is sampled. A temperature is 0 (greedy) or at least COLDEST; the noise is
    keyed by (seed, position), uint32 each."""

    temperatures: list[float]
    seeds: list[int]
    positions: list[int]
    masks: list[bytes]  # a bit for each allowed token; empty: all
    late: mx.array | None = None  # int32 [R], added to the positions
    floors: mx.array | None = None  # float32 [R]: tokens with logits / T below it are excluded


def gumbel(seeds: mx.array, positions: mx.array, vocab: int) -> mx.array:
    """Standard Gumbel noise float32 [R, vocab], keyed by (seed, position) uint32 [R] each.

    Threefry is a counter-based generator: the noise of (seed, position, token) is the same wherever
    and whenever it is drawn. argmax(logits / T + noise) samples softmax(logits / T)
    (Gumbel-max)."""
    keys = mx.stack([seeds, positions], axis=1).astype(mx.uint32)
    draw: Callable[[mx.array], mx.array] = mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))
    return draw(keys)


def allow(x: mx.array, masks: Sequence[bytes]) -> mx.array:
    """x [R, vocab] with -inf for the tokens that the rows' masks exclude."""
    width = max(map(len, masks), default=0)
    if not width:
        return x
    packed = b"".join(mask or b"\xff" * width for mask in masks)
    bits = mx.array(np.frombuffer(packed, np.uint8).reshape(len(masks), width, 1))
    allowed = ((bits >> mx.arange(8, dtype=mx.uint8)) & 1).reshape(len(masks), -1)
    return mx.where(allowed[:, : x.shape[-1]].astype(mx.bool_), x, -mx.inf)


def sample_accept(
    logits: mx.array,
    draws: Draws,
    inputs: mx.array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
) -> tuple[mx.array, mx.array | None]:
    """Sampled tokens int32 [R] of float logits [R, vocab]; the lowest of equal ones. A row with a
    NaN samples any token of the vocabulary.

    `drafts`, one for each entry in the rows' order: the first index of its draft in `inputs` int32
    [T], and its length. An entry has a row more than drafted tokens. Then also how many of these
    are accepted, int32 [entries].
    """
    x = allow(logits.astype(mx.float32), draws.masks)
    tokens = mx.argmax(x, axis=-1)
    if any(draws.temperatures):
        temperatures = mx.array(draws.temperatures)[:, None]
        x = x / mx.where(temperatures > 0, temperatures, 1)
        if draws.floors is not None:
            x = mx.where(x < draws.floors[:, None], -mx.inf, x)
        positions = mx.array(draws.positions, mx.uint32)
        if draws.late is not None:
            positions = positions + draws.late.astype(mx.uint32)
        noise = gumbel(mx.array(draws.seeds, mx.uint32), positions, x.shape[-1])
        tokens = mx.where(temperatures[:, 0] > 0, mx.argmax(x + noise, axis=-1), tokens)
    tokens = tokens.astype(mx.int32)
    return tokens, accept(tokens, inputs, drafts) if inputs is not None and drafts else None


def accept(tokens: mx.array, inputs: mx.array, drafts: Sequence[tuple[int, int]]) -> mx.array:
    """How many drafted tokens of each entry are accepted, see sample_accept: up to the first that
    is not the sample of the row before it. Exact at any temperature: only samples are emitted."""
    first, counts = np.array(drafts)[:, :, None].swapaxes(0, 1)
    rows = np.cumsum(1 + counts, axis=0) - 1 - counts
    steps = np.arange(max(1, counts.max()))
    drafted = steps < counts
    at, row = (mx.array(np.where(drafted, steps + start, 0)) for start in (first, rows))
    same = (tokens[row] == inputs[at]) & mx.array(drafted)
    return mx.cumprod(same.astype(mx.int32), axis=1).sum(axis=1)

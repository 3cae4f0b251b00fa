"""What the kernels do, in plain MLX ops: attention over pages, few rows times weights, tokens out
of logits.

Rule: this is what every faster kernel must equal. Pools lie head first, [kv_heads, slots, dim], so
that a gathered block is contiguous within its head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxspec.kernels.quantized_kv import Packing
from mlxspec.types import NULL_BLOCK

# Blocks [B, n], or the slots of a lone sequence whose blocks lie in a row; mask; what to keep of
# those slots.
Selection = tuple[mx.array | slice, mx.array | str | None, slice]


@dataclass(slots=True, eq=False)
class Group:
    """Sequences of one step that carry the same number of rows: rows `lo .. hi` are `[B, L]`,
    B-major.

    `starts` [B] are the positions of their first rows, `tables` their block ids: those of the
    layers that see everything under None, those of windows that have blocks of their own under the
    window. A table covers at least `start + length` slots. Attention is causal: row i of sequence b
    sees up to position starts[b] + i. Where the host does not know how far a draft got, `late`
    int32 [B] is to be added to the starts; it is `spread` at most, and the tables cover so many
    slots more.
    """

    lo: int
    hi: int
    length: int
    starts: list[int]
    tables: Mapping[int | None, list[list[int]]]
    block_size: int
    late: mx.array | None = None
    spread: int = 0
    _selections: dict[int, Selection] = field(default_factory=dict)

    def select(self, window: int | None) -> Selection:
        """Blocks to gather, mask over them, and the slots to keep, for a sliding window or None.

        Blocks that lie in a row need no gathering, which would copy all K/V at every step and
        layer. A lone sequence is cut to the exact slots and needs no mask for one row; several are
        padded with null blocks to the longest and masked. Made once per step and window, shared by
        the layers."""
        found = self._selections.get(window or 0)
        if found is None:
            found = self._selections[window or 0] = self._select(window)
        return found

    def _select(self, window: int | None) -> Selection:
        size, rows = self.block_size, self.length
        ends = [-(-(s + self.spread + rows) // size) for s in self.starts]  # in blocks, like firsts
        firsts = (
            [max(0, s - window + 1) // size for s in self.starts] if window else [0] * len(ends)
        )
        width = max(e - f for e, f in zip(ends, firsts, strict=True))
        tables = self.tables.get(window) or self.tables[None]
        held = [t[first:end] for t, first, end in zip(tables, firsts, ends, strict=True)]
        blocks: mx.array | slice
        if len(held) == 1 and held[0] == list(range(held[0][0], held[0][0] + width)):
            blocks = slice(held[0][0] * size, (held[0][0] + width) * size)
        else:
            blocks = mx.array([h + [NULL_BLOCK] * (width - len(h)) for h in held], mx.int32)
        keep = slice(0, width * size)
        if len(ends) == 1 and self.late is None:
            start, base = self.starts[0], firsts[0] * size
            low = max(0, start - window + 1) - base if window else 0
            keep = slice(low, start + rows - base)
            if rows == 1:
                return blocks, None, keep
            if not window or start + rows <= window:
                return blocks, "causal", keep
        at = mx.array(firsts)[:, None, None] * size + mx.arange(keep.start, keep.stop)  # [B, 1, S]
        starts = mx.array(self.starts) if self.late is None else mx.array(self.starts) + self.late
        row = starts[:, None, None] + mx.arange(rows)[:, None]  # [B, L, 1]
        seen = (at <= row) & (at > row - window) if window else at <= row
        return blocks, seen[:, None], keep


def gather(
    pool: mx.array,
    blocks: mx.array | slice,
    block_size: int,
    keep: slice,
    packing: Packing | None = None,
) -> mx.array:
    """Slots of `blocks` out of `pool` [H, slots, D], see Selection, cut to `keep`: dense [B, H, S,
    D]. The rows of a packed pool are unpacked once they are gathered."""
    heads, _, dim = pool.shape
    if isinstance(blocks, slice):
        rows = pool[None, :, blocks.start + keep.start : blocks.start + keep.stop]
        return packing.unpack(rows) if packing else rows
    batch, n = blocks.shape
    dense = pool.reshape(heads, -1, block_size, dim)[:, blocks].reshape(
        heads, batch, n * block_size, dim
    )
    if keep != slice(0, n * block_size):
        dense = dense[:, :, keep]
    dense = packing.unpack(dense) if packing else dense
    return dense.transpose(1, 0, 2, 3)


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

    q [T, heads, D]; keys [kv_heads, slots, D] and values [kv_heads, slots, Dv] are pools, whose
    rows are as `packings` says where it does; `sinks` [heads] are extra logits of the softmax with
    no value. Returns [T, heads, Dv] in q's dtype."""
    heads, dim = q.shape[1:]
    out = []
    for g in groups:
        blocks, mask, keep = g.select(window)
        k, v = (
            gather(pool, blocks, g.block_size, keep, packing)
            for pool, packing in zip((keys, values), packings, strict=True)
        )
        rows = q[g.lo : g.hi] if len(groups) > 1 else q
        one = (
            g.length == 1
        )  # nothing to transpose, which each layer of each step would build and run
        rows = (
            rows[:, :, None]
            if one
            else rows.reshape(-1, g.length, heads, dim).transpose(0, 2, 1, 3)
        )
        o = mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale, mask=mask, sinks=sinks)
        o = o if one else o.transpose(0, 2, 1, 3)
        out.append(o.reshape(g.hi - g.lo, heads, -1))
    return mx.concatenate(out) if len(out) > 1 else out[0]


def small_qmm(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> mx.array:
    """x dequant(w)^T, weights, products and sums in fp32, rounded once.

    x [M, K] float; w uint32 [N, K * bits / 32], scales and biases [N, K / group_size]: affine, as
    mx.quantize makes them. Returns [M, N] in x's dtype. A kernel's row must not depend on M, to the
    bit."""
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
    """small_qmm with weights w [E, N, ...] of experts: `experts` int [P] are those of P pairs of a
    token and an expert, and x [R, K] has a row for each P / R of them in turn, where R divides P.
    Returns [P, N] in x's dtype. A kernel's row is that of small_qmm, to the bit, whatever the other
    pairs."""
    s, b = scales.astype(mx.float32), biases.astype(mx.float32)
    rows = mx.repeat(x.astype(mx.float32), experts.size // x.shape[0], axis=0)[:, None]
    of = experts.astype(mx.uint32)
    y = mx.gather_qmm(rows, w, s, b, rhs_indices=of, group_size=group_size, bits=bits)
    return y[:, 0].astype(x.dtype)


@dataclass(slots=True)
class Draws:
    """How each of R rows is drawn. A temperature is 0 (the best token) or at least COLDEST; the
    noise is keyed by (seed, position), uint32 each."""

    temperatures: list[float]
    seeds: list[int]
    positions: list[int]
    masks: list[bytes]  # the tokens that may be drawn, a bit each; empty: all
    late: mx.array | None = None  # int32 [R], added to the positions
    floors: mx.array | None = None  # float32 [R]: logits / T below it do not count


def gumbel(seeds: mx.array, positions: mx.array, vocab: int) -> mx.array:
    """Standard Gumbel noise float32 [R, vocab], keyed by (seed, position) uint32 [R] each.

    Threefry is a counter-based generator: the noise of (seed, position, token) is the same wherever
    and whenever it is drawn. argmax(logits / T + noise) samples softmax(logits / T)
    (Gumbel-max)."""
    keys = mx.stack([seeds, positions], axis=1).astype(mx.uint32)
    draw: Callable[[mx.array], mx.array] = mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))
    return draw(keys)


def allow(x: mx.array, masks: Sequence[bytes]) -> mx.array:
    """x [R, vocab] with nothing but what the rows' masks allow."""
    chosen = [r for r, mask in enumerate(masks) if mask]
    if not chosen:
        return x
    packed = mx.array(np.frombuffer(b"".join(masks), np.uint8).reshape(len(chosen), -1))
    bits = (packed[:, :, None] >> mx.arange(8, dtype=mx.uint8)) & 1
    allowed = bits.reshape(len(chosen), -1)[:, : x.shape[-1]].astype(mx.bool_)
    if len(chosen) == len(masks):
        return mx.where(allowed, x, -mx.inf)
    at = mx.array(chosen)
    x[at] = mx.where(allowed, x[at], -mx.inf)
    return x


def sample_accept(
    logits: mx.array,
    draws: Draws,
    inputs: mx.array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
) -> tuple[mx.array, mx.array | None]:
    """Tokens int32 [R] of float logits [R, vocab]: the lowest of the best, or Gumbel-max. Of a row
    with a NaN it is some token of the vocabulary: MLX's argmax takes or leaves it, as the device
    has it.

    With `drafts`, those of each entry in the rows' order as (its first index in `inputs` int32 [T],
    its length), an entry has a row more than drafted tokens: also how many of these stand, int32
    [entries]."""
    x = allow(logits.astype(mx.float32), draws.masks)
    tokens = mx.argmax(x, axis=-1).astype(mx.int32)
    hot = [r for r, t in enumerate(draws.temperatures) if t > 0]
    if len(hot) == len(draws.temperatures):
        tokens = _draw(x, draws, hot, None)
    elif hot:
        at = mx.array(hot)
        tokens[at] = _draw(x[at], draws, hot, at)
    return tokens, accept(tokens, inputs, drafts) if inputs is not None and drafts else None


def _draw(x: mx.array, draws: Draws, hot: Sequence[int], at: mx.array | None) -> mx.array:
    """Gumbel-max over the rows `hot`, which are x [hot, vocab]; `at` are the same, where they are
    not all."""
    x = x / mx.array([draws.temperatures[r] for r in hot])[:, None]
    late, floors = (a if a is None or at is None else a[at] for a in (draws.late, draws.floors))
    if floors is not None:
        x = mx.where(x < floors[:, None], -mx.inf, x)
    seeds = mx.array([draws.seeds[r] for r in hot], mx.uint32)
    positions = mx.array([draws.positions[r] for r in hot], mx.uint32)
    if late is not None:
        positions = positions + late.astype(mx.uint32)
    return mx.argmax(x + gumbel(seeds, positions, x.shape[-1]), axis=-1).astype(mx.int32)


def accept(tokens: mx.array, inputs: mx.array, drafts: Sequence[tuple[int, int]]) -> mx.array:
    """The second result of sample_accept, out of its first: a drafted token stands while it equals
    the sample of the row before it.

    Exact by construction at any temperature: only samples are ever emitted."""
    deepest = max(1, *(count for _, count in drafts))
    row, where, held = 0, [], []
    for at, count in drafts:
        inside = [i < count for i in range(deepest)]
        where.append([(row + i, at + i) if ok else (0, 0) for i, ok in enumerate(inside)])
        held.append(inside)
        row += 1 + count
    pairs = mx.array(where)  # [S, deepest, 2]
    same = (tokens[pairs[..., 0]] == inputs[pairs[..., 1]]) & mx.array(held)
    return mx.cumprod(same.astype(mx.int32), axis=1).sum(axis=1)

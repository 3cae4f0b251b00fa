"""The kernels' specification in plain MLX ops: attention over pages, sampling; products are in
reference_matmul.

Rule: every Metal kernel must equal its function in one of the two. Pools are [kv_heads, slots,
dim], so that a gathered block is contiguous within its head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from mlxspec.kernels.quantized_kv import Packing
from mlxspec.types import NOT_FINITE, NULL_BLOCK


@dataclass(slots=True)
class Blocks:
    """Blocks to gather, by their `ids` int32 [B, n]."""

    ids: Array
    _places: dict[tuple[int, int], Array] = field(default_factory=dict)

    def places(self, heads: int, blocks: int) -> Array:
        """int32 [B, heads, n]: their indices in a pool of `blocks` blocks for each head; computed
        once per step, shared by layers."""
        key = heads, blocks
        if key not in self._places:
            self._places[key] = mx.arange(heads)[:, None] * blocks + self.ids[:, None]
        return self._places[key]


# What to gather, or the slots of a single sequence with consecutive blocks; the mask; the part of
# the blocks' slots that is used.
Selection = tuple[Blocks | slice, Array | str | None, slice]
PackingPair = tuple[Packing | None, Packing | None]


@dataclass(slots=True, eq=False)
class Group:
    """Sequences of a step with the same number of rows: rows `lo .. hi` are [B, length], B-major.

    `starts` [B]: positions of their first rows. `tables`: their block ids by window; None: layers
    that see everything. A table covers at least `start + max_shift + length` slots. Row i of
    sequence b sees positions `first` to starts[b] + i; with a window up to `ends` [B, length], if
    that is more. Where the host does not know yet how many drafted tokens were accepted, `shift`
    int32 [B], at most `max_shift`, is added to the starts.
    """

    lo: int
    hi: int
    length: int
    starts: list[int]
    tables: Mapping[int | None, list[list[int]]]
    block_size: int
    shift: Array | None = None
    max_shift: int = 0
    first: int = 0
    ends: Array | None = None
    _selections: dict[int | None, Selection] = field(default_factory=dict)

    def visible(self, window: int | None) -> list[tuple[int, list[int]]]:
        """For each sequence the first position that its rows see, and the blocks from there on."""
        size = self.block_size
        tables = self.tables.get(window) or self.tables[None]
        ranges = []
        for start, table in zip(self.starts, tables, strict=True):
            low = max(self.first, start - window + 1) if window else self.first
            end = start + self.max_shift + self.length
            ranges.append((low, table[low // size : ceil(end / size)]))
        return ranges

    def split(self, most: int) -> "list[Group]":
        """The same rows in groups of at most so many of a sequence, where none sees later ones."""
        if self.length <= most or self.ends is not None:
            return [self]
        parts = []
        for n, start in enumerate(self.starts):
            for at in range(0, self.length, most):
                lo = self.lo + n * self.length + at
                rows = min(most, self.length - at)
                tables = {window: each[n : n + 1] for window, each in self.tables.items()}
                shift = None if self.shift is None else self.shift[n : n + 1]
                parts.append(
                    replace(
                        self,
                        lo=lo,
                        hi=lo + rows,
                        length=rows,
                        starts=[start + at],
                        tables=tables,
                        shift=shift,
                        _selections={},
                    )
                )
        return parts

    def positions(self) -> Array:
        """int32 [B]: the position of each sequence's first row."""
        starts = mx.array(self.starts)
        return starts if self.shift is None else starts + self.shift

    def row_positions(self) -> Array:
        """int32 [B, length]: the position of each row."""
        return self.positions()[:, None] + mx.arange(self.length)

    def ahead(self, window: int | None) -> Array | None:
        """`ends`, if rows see positions after their own in layers with this window."""
        return self.ends if window else None

    def last(self, rows: Array, window: int | None) -> Array:
        """int32 [B, length]: the last position that each row sees; `rows` are their own."""
        ends = self.ahead(window)
        return rows if ends is None else mx.maximum(rows, ends)

    def select(self, window: int | None) -> Selection:
        """What attention with this sliding window reads; computed once per step, shared by layers.

        Consecutive blocks need no gathering, which would copy all K/V in every layer. A single
        sequence is sliced to its exact slots; several are padded with null blocks and masked.
        """
        if window not in self._selections:
            self._selections[window] = self._select(window)
        return self._selections[window]

    def _select(self, window: int | None) -> Selection:
        size = self.block_size
        visible = self.visible(window)
        tables = [blocks for _, blocks in visible]
        width = max(map(len, tables))
        low = visible[0][0]
        end = self.starts[0] + self.length
        keep = slice(0, width * size)
        mask: Array | str | None = None
        single = len(tables) == 1 and self.shift is None and self.ahead(window) is None
        if single and (self.length == 1 or not window or end <= window):
            keep = slice(low % size, end - low // size * size)
            if self.length > 1:
                mask = "causal"
        else:
            mask = self._mask(window, width * size)
        first = tables[0][0]
        if tables == [list(range(first, first + width))]:
            base = first * size
            return slice(base + keep.start, base + keep.stop), mask, keep
        return Blocks(block_array(tables, width)), mask, keep

    def _mask(self, window: int | None, width: int) -> Array:
        """Bool [B, 1, rows, width]: whether a row sees each of its sequence's visible slots."""
        positions = self.row_positions()
        size = self.block_size
        first = mx.array([low // size * size for low, _ in self.visible(window)])
        slots = first[:, None, None] + mx.arange(width)
        mask = slots <= self.last(positions, window)[..., None]
        if window:
            mask &= slots > positions[..., None] - window
        if self.first:
            mask &= slots >= self.first
        return mask[:, None]


def block_array(tables: Sequence[list[int]], width: int) -> Array:
    """int32 [B, width] of block ids, padded with null blocks."""
    return mx.array([table + [NULL_BLOCK] * (width - len(table)) for table in tables])


def gather(
    pool: Array,
    blocks: Blocks | slice,
    block_size: int,
    keep: slice,
    packing: Packing | None = None,
) -> Array:
    """The part of `pool` [H, slots, D] that a Selection selects: dense [B, H, S, D], with packed
    rows unpacked."""
    heads, _, dim = pool.shape
    if isinstance(blocks, slice):
        dense = pool[None, :, blocks]
    else:
        whole = pool.reshape(-1, block_size, dim)
        dense = whole[blocks.places(heads, len(whole) // heads)].flatten(2, 3)[:, :, keep]
    return packing.unpack(dense) if packing else dense


@partial(mx.compile, shapeless=True)  # one launch
def finite(x: Array) -> Array:
    """x, with 0 for what is not finite."""
    return mx.where(mx.abs(x) < mx.inf, x, 0)


@dataclass(slots=True)
class Attention:
    """The inputs of softmax(scale * q k^T) v over the pages of adjacent groups.

    q [T, heads, D]: the groups' rows; pools keys [kv_heads, slots, D] and values
    [kv_heads, slots, Dv], packed by `packings`; `sinks` [heads]: extra logits of the softmax
    without a value. Values that are not finite count as 0: a row that does not see them weighs them
    with 0, and 0 * NaN would reach it. `clean`: there are none.
    """

    q: Array
    keys: Array
    values: Array
    groups: Sequence[Group]
    scale: float
    window: int | None = None
    sinks: Array | None = None
    packings: PackingPair = (None, None)
    clean: bool = False


def paged_attention(a: Attention, attend: Any = None) -> Array:
    """[T, heads, Dv] in q's dtype. `attend`: in place of MLX's scaled_dot_product_attention."""
    attend = attend or mx.fast.scaled_dot_product_attention
    of_k, of_v = a.packings
    out = []
    first = a.groups[0].lo
    for group in a.groups:
        rows = a.q[group.lo - first : group.hi - first]
        blocks, mask, keep = group.select(a.window)
        values = gather(a.values, blocks, group.block_size, keep=keep, packing=of_v)
        o = attend(
            rows.reshape(-1, group.length, *rows.shape[1:]).swapaxes(1, 2),
            gather(a.keys, blocks, group.block_size, keep=keep, packing=of_k),
            values if a.clean else finite(values),
            scale=a.scale,
            mask=mask,
            sinks=a.sinks,
        )
        out.append(o.swapaxes(1, 2).flatten(0, 1))
    return mx.concatenate(out)


@dataclass(slots=True)
class Draws:
    """How each of R rows is sampled. A temperature is 0 (greedy) or at least COLDEST; the noise is
    keyed by (seed, position), uint32 each. `checked`: where logits are not finite, no token is
    sampled; else any may be, as for drafts."""

    temperatures: list[float]
    seeds: list[int]
    positions: list[int]
    masks: list[bytes]  # a bit for each allowed token; empty: all
    shift: Array | None = None  # int32 [R], added to the positions
    min_logits: Array | None = None  # float32 [R]: tokens with logits / T below are excluded
    checked: bool = True


def gumbel(seeds: Array, positions: Array, vocab: int) -> Array:
    """Standard Gumbel noise float32 [R, vocab], keyed by (seed, position) uint32 [R] each.

    Threefry is a counter-based generator: the noise of (seed, position, token) is the same wherever
    and whenever it is drawn. argmax(logits / T + noise) samples softmax(logits / T)
    (Gumbel-max)."""
    keys = mx.stack([seeds, positions], axis=1)
    noise: Array = mx.vmap(partial(mx.random.gumbel, (vocab,), mx.float32))(keys)
    return noise


def mask_rows(masks: Sequence[bytes], vocab: int) -> np.ndarray:
    """uint8 [R, bytes], 8 bytes at least, with a bit for each allowed token: all for an empty mask,
    none beyond a mask's end."""
    width = max(8, ceil(vocab / 8), *map(len, masks))
    packed = b"".join((mask or b"\xff" * width).ljust(width, b"\0") for mask in masks)
    rows = np.frombuffer(packed, np.uint8)
    return rows.reshape(len(masks), width)


def allow(x: Array, masks: Sequence[bytes]) -> Array:
    """x [R, vocab] with -inf for the tokens that the rows' masks exclude."""
    if not any(masks):
        return x
    vocab = x.shape[-1]
    bits = mask_rows(masks, vocab)
    allowed = np.unpackbits(bits, axis=1, count=vocab, bitorder="little")
    allowed = allowed.view(np.bool_)
    return mx.where(mx.array(allowed), x, -mx.inf)


def sample_accept(
    logits: Array,
    draws: Draws,
    inputs: Array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
) -> tuple[Array, Array | None]:
    """Sampled tokens int32 [R] of float logits [R, vocab]; the lowest of equal ones. NOT_FINITE for
    a row with an allowed logit that is NaN or +inf, and for one without a mask whose logits are all
    -inf.

    `drafts`, for each entry in the rows' order: the first index of its draft in `inputs` int32 [T],
    and its length. An entry has one row more than drafted tokens. The second result is then the
    number of accepted ones, int32 [entries].
    """
    x = logits
    drawing = any(draws.temperatures)
    if drawing or any(draws.masks):
        x = allow(x.astype(mx.float32), draws.masks)
    allowed = x
    if drawing:
        temperatures = mx.array(draws.temperatures)[:, None]
        hot = temperatures > 0
        drawn = x / mx.where(hot, temperatures, 1)
        if draws.min_logits is not None:
            drawn = mx.where(drawn < draws.min_logits[:, None], -mx.inf, drawn)
        positions = mx.array(draws.positions, mx.uint32)
        if draws.shift is not None:
            positions = positions + draws.shift.astype(mx.uint32)
        seeds = mx.array(draws.seeds, mx.uint32)
        drawn = drawn + gumbel(seeds, positions, x.shape[-1])
        x = mx.where(hot, drawn, x)
    tokens = mx.argmax(x, axis=-1).view(mx.int32)
    if draws.checked:
        masked = mx.array([len(mask) > 0 for mask in draws.masks])
        tokens = _or_not_finite(tokens, allowed.max(axis=-1), masked)
    if inputs is None or not drafts:
        return tokens, None
    return tokens, count_accepted(tokens, inputs, drafts)


@partial(mx.compile, shapeless=True)
def _or_not_finite(tokens: Array, best: Array, masked: Array) -> Array:
    """The tokens int32 [R] of rows whose highest logit `best` is finite, or -inf and `masked`."""
    fine = (best < mx.inf) & ((best > -mx.inf) | masked)
    return mx.where(fine, tokens, NOT_FINITE)


def count_accepted(tokens: Array, inputs: Array, drafts: Sequence[tuple[int, int]]) -> Array:
    """The number of accepted drafted tokens of each entry, see sample_accept: up to the first that
    is not the sample of the row before it. Exact at any temperature: only samples are emitted."""
    at_tokens, at_inputs, drafted = _compared(tuple(drafts))
    same = _equal(tokens[at_tokens], inputs[at_inputs], drafted)
    kept = mx.cumprod(same, axis=1)
    return kept.sum(axis=1)


@partial(mx.compile, shapeless=True)
def _equal(tokens: Array, inputs: Array, drafted: Array) -> Array:
    """int32: 1 where a drafted token is sampled."""
    same = drafted & (tokens == inputs) & (tokens != NOT_FINITE)
    return same.astype(mx.int32)


@lru_cache(maxsize=16)  # steps are often alike
def _compared(drafts: tuple[tuple[int, int], ...]) -> tuple[Array, Array, Array]:
    """[entries, longest draft] each: indices of the tokens and the inputs to compare, and whether
    there is a drafted token at all."""
    firsts, counts = np.array(drafts).T[:, :, None]
    ends = np.cumsum(1 + counts, axis=0)
    rows = ends - 1 - counts
    steps = np.arange(max(1, counts.max()))
    drafted = steps < counts
    at_tokens = np.where(drafted, rows + steps, 0)
    at_inputs = np.where(drafted, firsts + steps, 0)
    return mx.array(at_tokens), mx.array(at_inputs), mx.array(drafted)

"""What kernels and their references are given: pages, the groups of sequences that attend to them,
and how rows are sampled.

Pools are [kv_heads, slots, dim], so that a gathered block is contiguous within its head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.kernels.quantized_kv import Packing
from mlxspec.types import NULL_BLOCK


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

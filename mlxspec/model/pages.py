"""What one attention layer sees as its cache: pages of a pool, addressed by the step's view.

Rule: mlx-lm hands each layer its cache, so all that a step changes lies in one View that the pages
of all layers share; there are no globals. A handle has no array methods: a model that touches K/V
fails at its first start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxspec.kernels import Group, Packing
from mlxspec.kernels.reference import gather
from mlxspec.types import Tap, UnsupportedModel


@dataclass(slots=True)
class View:
    """The step as the layers see it.

    `blocks` are the sizes of the pools: under None for layers with full attention, under a window
    for those with a pool of their own; `held` is how many of these blocks have memory by now.
    `positions` [batch rows]; `slots` where K/V of each row go, [T] or a slice; `groups` partition
    the rows; `sampled` indexes the rows that reach lm_head (None: all); `taps` are hidden states
    that the forward hands out, into `tapped`. `kv_bits`: bits per value in the pools; 0: as
    computed.
    """

    block_size: int
    blocks: Mapping[int | None, int]
    positions: mx.array = field(default_factory=lambda: mx.zeros((0,), mx.int32))
    slots: dict[int | None, mx.array | slice] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    sampled: Any = None
    kv_bits: int = 0
    held: dict[int | None, int] = field(default_factory=dict)
    taps: Sequence[Tap] = ()
    tapped: dict[Tap, mx.array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = dict(self.blocks)

    def slots_of(self, blocks: Sequence[int]) -> mx.array:
        """int32 [len(blocks) * block_size]: the slots of whole blocks."""
        size = self.block_size
        return mx.array([block * size + i for block in blocks for i in range(size)], mx.int32)


class Pages:
    """One layer's K/V in the rows layout `[T, 1]`: written at the step's slots, and passed on to
    attention as this handle. Pools are made at the first write, when heads and dims are known."""

    __slots__ = ("keys", "packings", "pool", "values", "view", "window")

    def __init__(self, view: View, window: int | None) -> None:
        self.view, self.window = view, window
        self.pool = window if window in view.blocks else None
        self.keys: Any = None  # under these names, models make one cache wait for another
        self.values: Any = None
        self.packings: tuple[Packing | None, Packing | None] = (None, None)

    @property
    def offset(self) -> mx.array:
        return self.view.positions

    @property
    def dtype(self) -> mx.Dtype:
        """Asked for by models that pass K/V on."""
        return self.packings[0].dtype if self.packings[0] else self.pools()[0].dtype

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """None: attention reads the view. Raises UnsupportedModel for a window that this layer's
        cache does not keep: probes are too short to see the difference."""
        if window_size not in (None, self.window):
            raise UnsupportedModel(
                f"masks {window_size} tokens, but its cache keeps {self.window or 'all'}"
            )
        return None

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[Any, Any]:
        """k, v: [T, kv_heads, 1, D]."""
        self.write(k, v)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """K and V of the step in the view; models ask for them in layers that share these."""
        return self, self

    def write(self, k: mx.array, v: mx.array) -> None:
        """k, v: [B, kv_heads, L, D], rows B-major as in the view. Raises UnsupportedModel."""
        dim, dim_v, bits = k.shape[3], v.shape[3], self.view.kv_bits
        if not dim or not dim_v:  # some reads of such a pool would work, others end the process
            raise UnsupportedModel("a layer keeps keys without values, or the other way round")
        if self.keys is None and bits:
            self.packings = Packing(dim, k.dtype, bits), Packing(dim_v, v.dtype, bits)
        if v.dtype == mx.float16:
            # A masked slot still counts as 0 * v. Half precision overflows, and 0 * inf would reach
            # the sequence whose padding or block this slot becomes.
            v = mx.where(mx.isfinite(v), v, 0)
        rows = []
        for x, packing in zip((k, v), self.packings, strict=True):
            flat = x.squeeze(0) if len(x) == 1 else x.swapaxes(0, 1).flatten(1, 2)
            rows.append(packing.pack(flat) if packing else flat)
        if self.keys is None:
            slots = self.view.held[self.pool] * self.view.block_size
            self.keys, self.values = (mx.zeros((len(x), slots, x.shape[2]), x.dtype) for x in rows)
        self.put(self.view.slots[self.pool], *rows)

    def put(self, slots: mx.array | slice, k: mx.array, v: mx.array) -> None:
        """Write k, v [kv_heads, n, D], as the pools hold them, at `slots` [n], in place."""
        self.keys[:, slots] = k
        self.values[:, slots] = v

    def pools(self) -> tuple[mx.array, mx.array]:
        """K and V of every slot, [kv_heads, slots, D] each; packed, uint32 [kv_heads, slots,
        width]."""
        return self.keys, self.values

    def grow(self, blocks: int) -> None:
        """Grow the pools to so many blocks, keeping their content."""
        more = blocks * self.view.block_size - self.keys.shape[1]
        if more:
            grown = [mx.pad(pool, [(0, 0), (0, more), (0, 0)]) for pool in self.pools()]
            mx.eval(grown)
            self.keys, self.values = grown


class DensePages(Pages):
    """The gather layout `[B, L]`: the same pages, handed back as dense K/V for models that compute
    their own attention. One group at a time is in the view."""

    __slots__ = ()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Bool [B, 1, L, S], "causal" (unless an array is asked for) or None, for the gathered
        slots."""
        super().make_mask(N, return_array, window_size)
        mask, keep = self.view.groups[0].select(self.window)[1:]
        if isinstance(mask, str) and return_array:
            return mx.tri(N, keep.stop - keep.start, keep.stop - keep.start - N, dtype=mx.bool_)
        return mask

    def keys_and_values(self) -> tuple[Any, Any]:
        """Dense K and V [B, kv_heads, S, D] up to the step's rows."""
        group = self.view.groups[0]
        blocks, _, keep = group.select(self.window)
        of_k, of_v = self.packings
        keys = gather(self.keys, blocks, group.block_size, keep, of_k)
        values = gather(self.values, blocks, group.block_size, keep, of_v)
        return keys, values


def window_of(cache: Any) -> int | None:
    """The sliding window that mlx-lm's cache of this layer stands for. Raises UnsupportedModel for
    other memories."""
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and not cache.keep:
        return int(cache.max_size)
    raise UnsupportedModel(f"a layer keeps {type(cache).__name__}, which is not paged")


def placed(slots: list[int]) -> mx.array | slice:
    """What indexes a pool at `slots`: a slice where they follow each other, which MLX writes as one
    piece and with fewer operations."""
    row = slice(slots[0], slots[0] + len(slots))
    return row if slots == list(range(row.start, row.stop)) else mx.array(slots, mx.int32)

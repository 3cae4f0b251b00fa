"""What one attention layer sees as its cache: pages of a pool, addressed by the step's view.

Rule: mlx-lm hands each layer its cache, so all that a step changes lies in one View that the pages
of all layers share; there are no globals. A handle has no array methods: a model that touches K/V
fails at its first start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
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

    def take_taps(self) -> dict[Tap, mx.array]:
        """The hidden states [B, L, D] of the forward that was just built."""
        tapped, self.tapped = self.tapped, {}
        return tapped

    def slots_of(self, blocks: Sequence[int]) -> mx.array:
        """int32 [len(blocks) * block_size]: the slots of whole blocks."""
        firsts = np.array(blocks, np.int32)[:, None] * self.block_size
        return mx.array((firsts + np.arange(self.block_size, dtype=np.int32)).ravel())


class Pages:
    """One layer's K/V in the rows layout `[T, 1]`: written at the step's slots, and passed on to
    attention as this handle. Pools are made at the first write, when heads and dims are known."""

    __slots__ = ("keys", "packings", "pool", "values", "view", "window")

    def __init__(self, view: View, window: int | None) -> None:
        self.view, self.window = view, window
        self.pool = window if window in view.blocks else None
        self.keys: mx.array | None = None  # [kv_heads, slots, D]
        self.values: mx.array | None = None
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
        """K and V of the step in the view; later layers may share them."""
        return self, self

    def write(self, k: mx.array, v: mx.array) -> None:
        """k, v: [B, kv_heads, L, D], rows B-major as in the view. Raises UnsupportedModel."""
        if self.keys is None or self.values is None:
            if (
                not k.shape[3] * v.shape[3]
            ):  # some reads of such a pool would work, others end the process
                raise UnsupportedModel("a layer keeps keys without values, or the other way round")
            if bits := self.view.kv_bits:
                self.packings = (
                    Packing(k.shape[3], k.dtype, bits),
                    Packing(v.shape[3], v.dtype, bits),
                )
            self.keys, self.values = map(self._pool, (k, v), self.packings)
        # A masked slot still counts as 0 * v. Half precision overflows, and 0 * inf would reach
        # whoever's
        # padding or freed block this becomes.
        v = mx.where(mx.isfinite(v), v, 0) if v.dtype == mx.float16 else v
        rows = (
            p.pack(x) if p else x for p, x in zip(self.packings, (_rows(k), _rows(v)), strict=True)
        )
        self.put(self.view.slots[self.pool], *rows)

    def put(self, slots: mx.array | slice, k: mx.array, v: mx.array) -> None:
        """Write k, v [kv_heads, n, D], as the pools hold them, at `slots` [n], in place."""
        keys, values = self.pools()
        keys[:, slots] = k
        values[:, slots] = v

    def pools(self) -> tuple[mx.array, mx.array]:
        """K and V of every slot, [kv_heads, slots, D] each; packed, uint32 [kv_heads, slots,
        width]."""
        assert self.keys is not None and self.values is not None, "read before the first write"
        return self.keys, self.values

    def grow(self, blocks: int) -> None:
        """Grow the pools to so many blocks, keeping their content."""
        slots, grown = blocks * self.view.block_size, []
        if self.pools()[0].shape[1] == slots:
            return
        for pool in self.pools():
            more = mx.zeros((pool.shape[0], slots - pool.shape[1], pool.shape[2]), pool.dtype)
            grown.append(mx.concatenate([pool, more], axis=1))
        mx.eval(grown)
        self.keys, self.values = grown

    def _pool(self, x: mx.array, packing: Packing | None) -> mx.array:
        slots = self.view.held[self.pool] * self.view.block_size
        width, dtype = (packing.width, mx.uint32) if packing else (x.shape[3], x.dtype)
        return mx.zeros((x.shape[1], slots, width), dtype)


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
        group = self.view.groups[0]
        blocks, _, keep = group.select(self.window)
        k, v = (
            gather(pool, blocks, group.block_size, keep, packing)
            for pool, packing in zip(self.pools(), self.packings, strict=True)
        )
        return k, v


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


def _rows(x: mx.array) -> mx.array:
    """[B, H, L, D] -> [H, B * L, D]."""
    if x.shape[0] == 1:
        return x.squeeze(0)
    return x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, x.shape[3])

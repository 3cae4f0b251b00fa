"""What one attention layer sees as its cache: pages of a pool, addressed by the step's view.

Rule: mlx-lm hands each layer its cache, so everything that a step changes is in one View that the
pages of all layers share; there are no globals. A handle has no array methods: a model that touches
K/V fails at its first start.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.core import array as Array
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxspec.kernels.attention import Shape, kernel_alone
from mlxspec.kernels.inputs import Group, PackingPair, gather
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.reference import finite
from mlxspec.types import Tap, UnsupportedModel


@dataclass(slots=True)
class View:
    """The step as the layers see it.

    `num_blocks` are the sizes of the pools: under None for layers with full attention, under a
    window for those with a pool of their own; `allocated` is how many of these blocks have memory.
    `positions` [batch rows]; `slots` where K/V of each row go, [T] or a slice; `groups` partition
    the rows; `sampled` indexes the rows that reach lm_head (None: all); `taps` are hidden states
    that the forward hands out, into `tapped`. Slots before `first` are never seen. `dense`: K/V
    are handed back gathered, one group at a time. `kv_bits`: 8 or 4 bits per value in the pools;
    0: as computed. `last_keys` [B, kv_heads, L, D] are the K of the last layer that computed any:
    NaN in a row if anything before was not finite there. `invariant`: a row's bits must not depend
    on the forward's other rows. `recorded`: see model/invariant. `images`: the rows of images in
    the forward, ImageRows; None: there are none. `rope` int32 [3, rows]: positions of the rows by
    time, height and width; None: in one axis, `positions`. `beside`: for each Pages, K and V of
    rows that our kernel reads beside the pool, one for each sequence; None: they are written.
    """

    block_size: int
    num_blocks: Mapping[int | None, int]
    allocated: dict[int | None, int]
    dense: bool = False
    kv_bits: int = 0
    positions: Any = None
    slots: dict[int | None, Array | slice] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    sampled: Any = None
    taps: Collection[Tap] = ()
    tapped: dict[Tap, Array] = field(default_factory=dict)
    first: int = 0
    last_keys: Any = None
    invariant: bool = False
    invariant_by_kernel: bool = False  # attention, while invariant
    recorded: Any = None
    images: Any = None
    rope: Any = None
    beside: Any = None
    kernel_only: dict[Shape, bool] = field(default_factory=dict)  # whether it is all of attention

    def slots_of(self, blocks: Sequence[int]) -> Array:
        """int32 [len(blocks) * block_size]: the slots of whole blocks."""
        first = mx.array(list(blocks), mx.int32) * self.block_size
        slots = first[:, None] + mx.arange(self.block_size)
        return slots.flatten()


class Pages:
    """Our counterpart of an mlx-lm KV cache (`offset`, `make_mask`, `update_and_fetch`): one
    layer's K/V, written at the step's slots, and passed on to attention as this handle; in a dense
    view handed back as arrays, for models that compute their own attention. Its pools are allocated
    at the first write, when heads and dims are known.

    Attention may read slots that a row does not see, of padding or of a block's last owner, and
    weight their values with 0; but 0 * NaN is NaN. So values are finite where they are read: while
    `clean`, they were finite when written. A step whose attention our kernel computes writes them
    unchanged, as the kernel reads what is not finite as 0; then other readers, the prompts, must
    do so too.
    """

    def __init__(self, view: View, window: int | None) -> None:
        self.view = view
        self.window = window
        self.window_key = window if window in view.num_blocks else None  # of its pool in the view
        self.keys: Any = None  # under these names, models make one cache wait for another
        self.values: Any = None
        self.dtype: Any = None  # of K as computed; models that pass K/V on ask for it
        self.packings: PackingPair = (None, None)
        self.shape: Shape | None = None  # of attention's last call
        self.clean = True

    @property
    def offset(self) -> Any:
        return self.view.positions

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """None: attention reads the view. In a dense view bool [B, 1, L, S] for the gathered slots,
        "causal" (unless an array is requested) or None. Raises UnsupportedModel for a window that
        this layer's cache does not keep: probes are too short to show the difference."""
        if window_size not in (None, self.window):
            raise UnsupportedModel(
                f"masks {window_size} tokens, but its cache keeps {self.window or 'all'}",
            )
        if not self.view.dense:
            return None
        _, mask, keep = self.view.groups[0].select(self.window)
        if isinstance(mask, str) and return_array:
            slots = keep.stop - keep.start
            return mx.tri(N, slots, slots - N, dtype=mx.bool_)
        return mask

    def update_and_fetch(self, k: Array, v: Array) -> tuple[Any, Any]:
        """k, v: [T, kv_heads, 1, D]."""
        self.write(k, v)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """K and V for the step in the view, in a dense one [B, kv_heads, S, D] up to its rows;
        models ask for them in layers that share K and V."""
        if not self.view.dense:
            return self, self
        group = self.view.groups[0]
        blocks, _, keep = group.select(self.window)
        keys, values = [
            gather(pool, blocks, self.view.block_size, keep=keep, packing=packing)
            for pool, packing in zip(self.pools(), self.packings, strict=True)
        ]
        return keys, values

    def write(self, k: Array, v: Array) -> None:
        """k, v: [B, kv_heads, L, D], rows B-major as in the view. Raises UnsupportedModel."""
        if self.keys is None:
            self.dtype = k.dtype
            self.packings = self._packing(k), self._packing(v)
        k_packing, v_packing = self.packings
        self.view.last_keys = k
        if self.view.dense:
            k = _finite(k, k_packing)  # models may mask scores by adding to them: NaN stays NaN
        if self._kernel_only():
            if self.view.beside is not None:
                self.view.beside[self].append((k, v))
                return
            self.clean = False
        else:
            v = _finite(v, v_packing)
        k, v = map(_rows, (k, v), self.packings)
        if self.keys is None:
            self.keys, self.values = self._allocate(k), self._allocate(v)
        self.put(self.view.slots[self.window_key], k, v)

    def _kernel_only(self) -> bool:
        """Whether only our kernel reads what this step writes, in this step."""
        if self.view.kv_bits or not self.shape:
            return False
        kernel_only = self.view.kernel_only
        if self.shape not in kernel_only:
            kernel_only[self.shape] = kernel_alone(self.shape, self.view.groups)
        return kernel_only[self.shape]

    def _packing(self, x: Array) -> Packing | None:
        dim = x.shape[3]
        if not dim:  # some reads of such a pool would work, others end the process
            raise UnsupportedModel("a layer keeps keys without values, or the other way round")
        bits = self.view.kv_bits
        return Packing(dim, x.dtype, bits) if bits else None

    def _allocate(self, rows: Array) -> Array:
        """A pool of zeros for rows [kv_heads, n, width]."""
        slots = self.view.allocated[self.window_key] * self.view.block_size
        heads, _, width = rows.shape
        return mx.zeros((heads, slots, width), rows.dtype)

    def put(self, slots: Array | slice, k: Array, v: Array) -> None:
        """Write k, v [kv_heads, n, D], as the pools hold them, at `slots` [n], in place."""
        self.keys = _put(self.keys, slots, k)
        self.values = _put(self.values, slots, v)

    def pools(self) -> tuple[Array, Array]:
        """K and V of every slot, [kv_heads, slots, D] each; packed, uint32 [kv_heads, slots,
        width]."""
        return self.keys, self.values

    def grow(self, blocks: int) -> None:
        """Grow the pools to this number of blocks, keeping their content."""
        more = blocks * self.view.block_size - self.keys.shape[1]
        width = [(0, 0), (0, more), (0, 0)]
        grown = [mx.pad(pool, width) for pool in self.pools()]
        mx.eval(grown)  # both, before either is kept: a failed growth is tried again
        self.keys, self.values = grown


def flat_caches(caches: Iterable[Any]) -> list[Any]:
    """The layers' caches, with those inside a CacheList one by one."""
    return [inner for cache in caches for inner in getattr(cache, "caches", [cache])]


def arrays_in(tree: Any) -> list[Array]:
    """All arrays of a tree of lists and dicts."""
    leaves: Any = tree_flatten(tree)
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(array.nbytes for array in arrays_in(tree))


def pools_of(layers: Iterable[Pages]) -> list[Array]:
    """K and V of each layer in turn."""
    return [pool for pages in layers for pool in pages.pools()]


def _finite(x: Array, packing: Packing | None) -> Array:
    """x with 0 for what is not finite, so that it is finite in a pool."""
    return packing.bounded(x) if packing else finite(x)


def _rows(x: Array, packing: Packing | None) -> Array:
    """x [B, kv_heads, L, D] as a pool holds it: [kv_heads, B * L, width]."""
    x = x.swapaxes(0, 1).flatten(1, 2)
    if packing:
        return packing.pack(x)
    return x


def _put(pool: Array, slots: Array | slice, rows: Array) -> Array:
    if isinstance(slots, slice):
        pool[:, slots] = rows
        return pool
    # One launch. An index into two dimensions takes an index of the heads as well.
    at = mx.broadcast_to(slots[:, None], rows.shape)
    return mx.put_along_axis(pool, at, rows, axis=1)


def window_of(cache: Any) -> int | None:
    """The sliding window of a layer by mlx-lm's cache for it, None: full attention. Raises
    UnsupportedModel for other kinds of cache."""
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and not cache.keep:
        return int(cache.max_size)
    raise UnsupportedModel(f"a layer keeps {type(cache).__name__}, which is not paged")


def slot_index(slots: list[int]) -> Array | slice:
    """The index of `slots` in a pool: a slice if they are consecutive, which MLX writes in one
    piece and with fewer operations."""
    first = slots[0]
    last = first + len(slots)
    if slots == list(range(first, last)):
        return slice(first, last)
    return mx.array(slots, mx.int32)

"""The plan of a model's memory: weights, pools, states and snapshots.

Rule: no MLX. A model that does not fit is refused before a weight is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlxspec.cache.prefix import Window
from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.engine.budget import MAX_ROWS
from mlxspec.files import format_size
from mlxspec.types import MAX_DEPTH, CacheBytes, OutOfMemory

CACHE_SHARE = 0.5  # of the memory beside weights and headroom; the rest stays free for the user
CONTEXTS = 4  # full contexts that the KV pool holds at most
LEAST_CONTEXT = 8192  # tokens of one sequence that must fit, unless --context is lower
STATES = 2  # a step reads one recurrent state of a sequence and writes another
STATE_PART, MOST_SNAPSHOTS = 8, 1024  # snapshots: an eighth of the KV bytes, and a limit
SNAPSHOTS = 2  # for each running sequence, if memory allows
FEW = 4  # sequences whose states come before more KV than LEAST_CONTEXT
LEAST_STRIDE = 16  # blocks between two snapshots of a long prompt


class PoolLimits(NamedTuple):
    """One kind of cache: bytes of a unit, the fewest units that work, the most that are useful, and
    how many a few conversations need, which comes before long contexts."""

    unit: int
    least: int
    most: int
    few: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one model and its draft model. Block counts include the null block."""

    weights: int  # bytes
    cache_bytes: int  # of all pools, running states and snapshots
    blocks: int  # of the pool for full attention
    windows: dict[int, int]  # blocks of the pool of each sliding window, by its tokens
    sequences: int  # that may run at a time
    snapshots: int  # recurrent states kept for later prompts
    snapshot_stride: int  # blocks between the snapshots of a long prompt


@dataclass(frozen=True, slots=True)
class Room:
    """What a model may take under its settings: `free` bytes for weights, headroom and the caches
    of sequences of up to `context` tokens. An image of `uncut` rows at most is computed whole,
    beyond the prefill budget in a step without other prompts."""

    config: Config
    context: int
    free: int
    uncut: int = 0

    @property
    def part(self) -> float:
        """The part for caches of what weights and headroom leave."""
        return 1.0 if self.config.kv_blocks else CACHE_SHARE

    def for_caches(self, weights: int) -> int:
        """Bytes for caches beside `weights`."""
        return int((self.free - weights - memory.headroom()) * self.part)


def shortage(room: Room, weights: int, cache: CacheBytes) -> OutOfMemory | None:
    """The error if `weights` and the smallest caches do not fit."""
    pools = _pool_limits(room, cache)
    least = _bytes(pools, [pool.least for pool in pools])
    if least <= room.for_caches(weights):
        return None
    return _too_large(room, weights, int(least / room.part))


def make_plan(room: Room, weights: int, cache: CacheBytes) -> MemoryPlan:
    """Divide the room beside `weights`: first what a few conversations need, from half of what the
    smallest caches leave, then pools and states, each cut by the same part if needed.

    Windows that no context exceeds are in the pool for full attention. All models have equal parts
    of the memory for caches, which one sequence may exceed. Raises OutOfMemory."""
    if error := shortage(room, weights, cache):
        raise error
    config, context = room.config, room.context
    pools = _pool_limits(room, cache)
    budget = room.for_caches(weights)
    counts = [pool.least for pool in pools]
    least = _bytes(pools, counts)
    rest = max(0, budget // (1 + len(config.others)) - least)
    counts = _raised(pools, counts, [pool.few for pool in pools], rest=rest // 2)
    rest += least - _bytes(pools, counts)
    counts = _raised(pools, counts, [pool.most for pool in pools], rest=rest)
    cache_bytes = _bytes(pools, counts)
    blocks, *window_blocks, sequences, snapshots = counts
    # A snapshot is no larger than the KV between two; a context uses a quarter of them at most.
    by_size = -(-cache.state // pools[0].unit) if pools[0].unit else 0
    by_count = -(-context // (config.block_size * max(1, snapshots // 4)))
    stride = max(LEAST_STRIDE, by_size, by_count)
    windows = dict(zip(_windows(room, cache), window_blocks, strict=True))
    return MemoryPlan(
        weights=weights,
        cache_bytes=cache_bytes,
        blocks=blocks,
        windows=windows,
        sequences=sequences,
        snapshots=snapshots,
        snapshot_stride=stride,
    )


def _windows(room: Room, cache: CacheBytes) -> dict[int, int]:
    """Bytes of a token in the layers of each window that has a pool."""
    return {window: size for window, size in cache.windows if window < room.context}


def _raised(
    pools: Sequence[PoolLimits],
    counts: Sequence[int],
    tops: Sequence[int],
    rest: int,
) -> list[int]:
    """`counts` of units, each raised by the same part of the way to its top, for `rest` bytes."""
    missing = [max(0, top - n) for n, top in zip(counts, tops, strict=True)]
    wanted = max(1, _bytes(pools, missing))
    part = min(rest, wanted)
    return [
        n + (more * part // wanted if pool.unit else more)
        for pool, n, more in zip(pools, counts, missing, strict=True)
    ]


def _bytes(pools: Sequence[PoolLimits], counts: Sequence[int]) -> int:
    return sum(pool.unit * n for pool, n in zip(pools, counts, strict=True))


def _pool_limits(room: Room, cache: CacheBytes) -> list[PoolLimits]:
    """Limits of blocks for full attention, blocks of each window, running states, snapshots."""
    config, context = room.config, room.context
    beyond = sum(size for window, size in cache.windows if window >= context)
    token_bytes = cache.token + beyond
    state_bytes = cache.state
    size, sequences = config.block_size, config.max_sequences
    full, first = (-(-tokens // size) + 1 for tokens in (context, min(context, LEAST_CONTEXT)))
    most = config.kv_blocks or CONTEXTS * (full - 1) + 1
    pools = [PoolLimits(token_bytes * size, first, most)]
    chunk = max(room.uncut, config.prefill_budget or MAX_ROWS)
    for window, window_bytes in _windows(room, cache).items():
        one, every = (
            Window.min_blocks(window, size, sequences=n, chunk=chunk, depth=MAX_DEPTH)
            for n in (1, sequences)
        )
        # Twice what all sequences use at once: the rest keeps passed blocks for later prompts.
        pools.append(PoolLimits(window_bytes * size, min(one, full), min(2 * every, most)))
    by_size = token_bytes * size * most // STATE_PART // max(1, state_bytes)
    snapshots = max(SNAPSHOTS * sequences, min(by_size, MOST_SNAPSHOTS))
    few = min(FEW, sequences)
    pools.append(PoolLimits(STATES * state_bytes, 1, sequences, few=few))
    pools.append(PoolLimits(state_bytes, 0, snapshots, few=SNAPSHOTS * few))
    if config.kv_blocks:
        pools = [pool._replace(least=pool.most) for pool in pools]
    return pools


def _too_large(room: Room, weights: int, caches: int) -> OutOfMemory:
    """The error if weights and caches of at least so many bytes exceed what is free."""
    config = room.config
    fix, where = "close programs", f"free of {format_size(memory.total())}"
    if config.memory_gb:
        fix, where = "raise --memory-gb", "left of --memory-gb"
    if config.kv_blocks:
        fix += ", leave out --kv-blocks"
    if config.kv_bits != 4:
        fix += ", set --kv-bits 4"
    return OutOfMemory(
        f"the model does not fit: it needs {format_size(weights)} for weights,"
        f" {format_size(memory.headroom())} of headroom and {format_size(caches)} for caches, but"
        f" {format_size(room.free)} are {where}; {fix} or set a lower --context",
        need=weights + memory.headroom() + caches,
    )

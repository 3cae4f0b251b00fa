"""The memory that MLX holds.

Rule: the wired limit is never set, because macOS panics under it.
"""

import sys

import mlx.core as mx


def device_free() -> int:
    """Bytes left of the GPU's recommended working set; huge if the device recommends none."""
    info = mx.device_info()
    most = int(info.get("max_recommended_working_set_size", 1 << 62))
    return max(0, most - mx.get_active_memory())


def bound(size: int) -> None:
    """Limit MLX's cache of freed buffers to `size` bytes; a lower limit stays.

    Each prompt length leaves buffers of its own sizes: without a limit, 40 short requests to a
    model of 0.1 billion parameters left 242 MiB.
    """
    before = mx.set_cache_limit(size)
    mx.set_cache_limit(min(size, before))


def trim() -> None:
    """Free MLX's cache of buffers."""
    mx.clear_cache()


def held() -> tuple[int, int]:
    """Bytes in arrays, and in the cache of freed buffers."""
    return mx.get_active_memory(), mx.get_cache_memory()


def arrays() -> int:
    """The number of arrays that Python holds, and a few more: each one refers to its type.

    Walking all objects would be slow, and fails in a thread when a half-built tuple is visited.
    """
    return sys.getrefcount(mx.array)

"""The memory that MLX holds.

Rule: the wired limit is set only at the user's request, once, because macOS can panic with it
set.
"""

import ctypes
import sys

import mlx.core as mx


def working_set() -> int:
    """Bytes of the GPU's recommended working set; huge if the device recommends none."""
    return int(mx.device_info().get("max_recommended_working_set_size", 1 << 62))


def device_free() -> int:
    """Bytes left of the GPU's recommended working set."""
    return max(0, working_set() - mx.get_active_memory())


def wire(size: int) -> None:
    """Let MLX wire `size` bytes of arrays, at most the recommended working set. No effect before
    macOS 15."""
    mx.set_wired_limit(min(size, working_set()))


def bound(size: int) -> None:
    """Limit MLX's cache of freed buffers to `size` bytes; a lower limit stays.

    Each prompt length leaves buffers of its own sizes: without a limit, 40 short requests to a
    model of 0.1 billion parameters left 242 MiB.
    """
    before = mx.set_cache_limit(size)
    mx.set_cache_limit(min(size, before))


def trim() -> None:
    """Free MLX's cache of buffers. On Linux they are glibc's, which keeps free memory between live
    blocks until it is trimmed."""
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def held() -> tuple[int, int]:
    """Bytes in arrays, and in the cache of freed buffers."""
    return mx.get_active_memory(), mx.get_cache_memory()


def arrays() -> int:
    """The number of arrays that Python holds, and a few more: each one refers to its type.

    Walking all objects would be slow, and fails in a thread when a half-built tuple is visited.
    """
    return sys.getrefcount(mx.array)

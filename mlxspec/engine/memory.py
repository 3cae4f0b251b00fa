"""What memory there is, and how much of it the KV pool takes.

Rule: the pool is sized once, from what is free after the weights are loaded, and never grows.
"""

import re
import sys
from pathlib import Path

import mlx.core as mx

SHARE = 0.5  # of what is free; the rest is headroom for activations and for the user
CONTEXTS = 4  # full contexts that are enough: a coding agent keeps three or four sequences alive


def available() -> int:
    """Bytes that can be had without pushing anything out: MemAvailable on Linux; elsewhere what the device
    reports, less a quarter for the system and less what MLX holds."""
    if sys.platform == "linux":
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(found[1]) * 1024 if found else 0
    return max(0, int(mx.device_info()["memory_size"]) * 3 // 4 - mx.get_active_memory())


def kv_blocks(context: int, block_size: int, token_bytes: int, free: int) -> int:
    """Blocks of the pool, the null block included: enough for CONTEXTS full contexts, or what SHARE of
    `free` bytes holds."""
    wanted = CONTEXTS * -(-context // block_size)
    if token_bytes:
        wanted = min(wanted, int(free * SHARE) // (token_bytes * block_size))
    return wanted + 1

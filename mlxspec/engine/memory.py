"""What memory there is, and how much of it the KV pool takes.

Rule: the pool is sized once, from what is free after the weights are loaded, and never grows.
"""

import os
import re
import sys
from pathlib import Path

SHARE = 0.5  # of what is free; the rest is headroom for activations and for the user
CONTEXTS = 4  # full contexts that are enough: a coding agent keeps three or four sequences alive


CGROUP = Path("/sys/fs/cgroup")


def available(weights: int) -> int:
    """Bytes that can be had without pushing anything out, with `weights` bytes loaded already: MemAvailable
    on Linux; elsewhere three quarters of the machine less the weights, because its system takes the rest."""
    if sys.platform == "linux":
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return min(int(found[1]) * 1024 if found else 0, _container())
    return max(0, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4 - weights)


def _container() -> int:
    """Bytes left of this container's limit (cgroup v2), if it has one."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        return 1 << 62 if limit == "max" else int(limit) - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62


def kv_blocks(context: int, block_size: int, token_bytes: int, free: int) -> int:
    """Blocks of the pool, the null block included: enough for CONTEXTS full contexts, or what SHARE of
    `free` bytes holds."""
    wanted = CONTEXTS * -(-context // block_size)
    if token_bytes:
        wanted = min(wanted, int(free * SHARE) // (token_bytes * block_size))
    return wanted + 1

"""What MLX holds, and how it is kept from holding more.

Rule: reading and giving back are all that is done here. The wired limit is never set: macOS panics
under it.
"""

import logging
import math
import sys
from dataclasses import dataclass

import mlx.core as mx

log = logging.getLogger("mlxspec")

METALS = 499_000  # buffers that Metal lets a process have, where the device does not say
LEAK = 20  # the part of them that an idle engine may have gained before it is said


def device_free() -> int:
    """Bytes that the GPU may still take by the device's own advice; huge where it gives none."""
    most = int(mx.device_info().get("max_recommended_working_set_size", 1 << 62))
    return max(0, most - mx.get_active_memory())


def bound(size: int) -> None:
    """Let MLX keep at most `size` bytes of freed buffers for later steps. Every length of prompt
    leaves its own sizes there: without a limit 40 short requests to a model of 0.1 billion left 242
    MiB. A lower limit stands."""
    mx.set_cache_limit(min(size, mx.set_cache_limit(size)))


def trim() -> None:
    """Give back what is kept for later steps."""
    mx.clear_cache()


def held() -> tuple[int, int]:
    """Bytes in arrays, and in freed buffers that are kept."""
    return mx.get_active_memory(), mx.get_cache_memory()


def arrays() -> int:
    """How many arrays Python holds, and a few more: each holds a reference to its type. To look
    through all objects instead would be slow, and CPython fails in a thread whose half-built tuple
    is seen."""
    return sys.getrefcount(mx.array)


@dataclass(slots=True)
class Census:
    """Watches the arrays that Python holds, because Metal counts buffers and ends the process at
    some number of them. Arrays of graphs that are not evaluated and MLX's spare buffers are not
    among them, so `live` is a lower bound; what a request leaves behind does show. Engine thread
    only."""

    live: int = 0
    fewest: float = math.inf
    told: bool = False

    def take(self, idle: bool) -> None:
        """Count; say once that an idle engine holds ever more."""
        self.live = arrays()
        if not idle:
            return
        self.fewest = min(self.fewest, self.live)
        limit = int(mx.device_info().get("resource_limit", METALS))
        if self.live - self.fewest > limit // LEAK and not self.told:
            self.told = True
            log.warning(
                "an idle engine holds %d arrays, and held %d before; at %d Metal ends the process."
                " Please report it, and start the server again some time",
                self.live,
                self.fewest,
                limit,
            )

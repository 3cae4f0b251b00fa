"""Memory pressure: how short memory is, by the system's own level and by free memory.

Rule: no MLX and no thread of its own.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlxspec import log
from mlxspec.engine import memory
from mlxspec.files import format_size

NORMAL, WARN, CRITICAL = 0, 1, 2
LEVELS = ("normal", "short: caches do not grow", "very short: new requests are refused")
MACOS_LEVELS = {2: WARN, 4: CRITICAL}
POLL_S = 1.0
HOLD_S = 10  # seconds before the level falls
FREE_PART = 32  # free memory below this part of the machine is short, below half of it very short


def system_level() -> int:
    """macOS's own memory pressure level; NORMAL elsewhere."""
    found = memory.sysctl("kern.memorystatus_vm_pressure_level") if memory.DARWIN else 0
    return MACOS_LEVELS.get(found, NORMAL)


@dataclass(slots=True)
class MemoryMonitor:
    """The memory pressure level: the worse of the system's level and that of free memory. Any
    thread may poll; figures are read once a second.

    The level rises at once and falls when it was not reached for HOLD_S seconds.
    """

    clock: Callable[[], float] = time.monotonic
    level: int = NORMAL
    footprint: int = 0  # bytes of this process, for the metrics
    _read: float = -math.inf  # time of the last reading
    _since: float = -math.inf  # time at which the level was last reached

    def poll(self) -> int:
        """The level now."""
        now = self.clock()
        if now - self._read < POLL_S:
            return self.level
        self._read = now
        self.footprint = memory.footprint()
        free = memory.available()
        short = memory.total() // FREE_PART
        found = system_level()
        if free < short:
            found = max(found, CRITICAL if free < short // 2 else WARN)
        before = self.level
        if found >= self.level or now - self._since >= HOLD_S:
            self.level = found
            self._since = now
        if self.level != before:
            log.warning("memory is %s (%s free)", LEVELS[self.level], format_size(free))
        return self.level

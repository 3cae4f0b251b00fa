"""Memory pressure: how short memory is, by the system, by free memory and by this process's size.

Rule: no MLX and no thread of its own.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxspec.engine import memory
from mlxspec.files import format_size

log = logging.getLogger("mlxspec")

NORMAL, WARN, CRITICAL = 0, 1, 2
LEVELS = ("normal", "short: requests run one at a time", "very short: new requests are refused")
MACOS_LEVELS = {1: NORMAL, 2: WARN, 4: CRITICAL}
POLL_S = 1.0
HOLD_S = 10  # seconds before the level falls
FREE_PART = 32  # free memory below this part of the machine is short, below half of it very short


def system_level() -> int:
    """macOS's own memory pressure level; NORMAL elsewhere."""
    found = memory.sysctl("kern.memorystatus_vm_pressure_level") if memory.DARWIN else 0
    return MACOS_LEVELS.get(found, NORMAL)


@dataclass(slots=True)
class MemoryMonitor:
    """The memory pressure level of the process: the worst of the system's level, free memory and
    this process beyond its plan. Any thread may poll; figures are read once a second.

    The level rises at once and falls when it was not reached for HOLD_S seconds. `planned` are the
    bytes that this process may take.
    """

    planned: int = field(default_factory=lambda: memory.footprint() + memory.headroom())
    clock: Callable[[], float] = time.monotonic
    level: int = NORMAL
    footprint: int = 0  # bytes
    read: float = -math.inf  # time of the last reading
    _since: float = -math.inf  # time at which the level was last reached

    def reserve(self, size: int) -> None:
        """Plan for `size` more bytes, or fewer if negative."""
        self.planned += size

    def poll(self) -> int:
        """The level now."""
        now = self.clock()
        if now - self.read >= POLL_S:
            self.read = now
            self._update(now)
        return self.level

    def _update(self, now: float) -> None:
        self.footprint, before = memory.footprint(), self.level
        spare, short = memory.available(), memory.total() // FREE_PART
        found = max(system_level(), WARN if self.footprint > self.planned else NORMAL)
        if spare < short:
            found = max(found, CRITICAL if spare < short // 2 else WARN)
        if found >= self.level or now - self._since >= HOLD_S:
            self.level, self._since = found, now
        if self.level != before:
            log.warning(
                "memory is %s (%s free, this process holds %s of %s planned)",
                LEVELS[self.level],
                format_size(spare),
                format_size(self.footprint),
                format_size(self.planned),
            )

"""How short memory is: the system's own word, what is free, and what this process takes.

Rule: no thread and no MLX. Whoever has a moment looks, and figures are read once a second at most:
what they say lasts for seconds, and nothing could be done about it inside a step. The level rises
at once and falls after a while.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxspec.engine import memory

log = logging.getLogger("mlxspec")

NORMAL, WARN, CRITICAL = 0, 1, 2
NAMES = ("normal", "short: requests run one at a time", "very short: new requests are refused")
POLL_S = 1.0
HOLD_S = 10  # a level is left when it was not reached for so long
# percent of ten seconds in which some task waited for memory: short; in which all did: very
WAITING = 10.0
FLOOR = 32  # part of the machine's memory; less than that free is short, less than half of it very
MACOS = {1: NORMAL, 2: WARN, 4: CRITICAL}


def system() -> int:
    """The system's own judgement; NORMAL where it gives none."""
    if memory.DARWIN:
        return MACOS.get(memory.sysctl("kern.memorystatus_vm_pressure_level") or 1, NORMAL)
    stalls = re.findall(
        r"^(some|full) avg10=([\d.]+)", memory.text(memory.PROC / "pressure/memory"), re.M
    )
    waits = {kind: float(percent) for kind, percent in stalls}
    if waits.get("full", 0) > WAITING:
        return CRITICAL
    return WARN if waits.get("some", 0) > WAITING else NORMAL


@dataclass(slots=True)
class MemoryMonitor:
    """One for the process, looked at from any thread. `planned` bytes are what it means to take,
    pools and weights included, which `expect` adds."""

    planned: int = field(default_factory=lambda: memory.footprint() + memory.headroom())
    clock: Callable[[], float] = time.monotonic
    level: int = NORMAL
    footprint: int = 0  # bytes
    read: float = -math.inf  # when the figures were read
    _since: float = -math.inf  # when the level was last reached
    _worst: int = NORMAL  # since then
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, size: int) -> None:
        """So many bytes more are to be held from now on, or less."""
        with self._lock:
            self.planned += size

    def look(self) -> int:
        """The level now."""
        with self._lock:
            now = self.clock()
            if now - self.read >= POLL_S:
                self.read = now
                self._judge(now)
            return self.level

    def _judge(self, now: float) -> None:
        self.footprint, word = memory.footprint(), system()
        free, floor = memory.free(), memory.total() // FLOOR
        short = 0 if free is None else (free < floor) + (free < floor // 2)
        found = max(word, short, self.footprint > self.planned)
        before = self.level
        if found >= self.level:
            self.level, self._since, self._worst = found, now, NORMAL
        else:
            self._worst = max(self._worst, found)
            if now - self._since >= HOLD_S:
                self.level, self._since, self._worst = self._worst, now, NORMAL
        if self.level != before:
            log.warning(
                "memory is %s (the system says %d of 2, %s are free, this process holds %s of %s planned)",
                NAMES[self.level],
                word,
                "?" if free is None else memory.gib(free),
                memory.gib(self.footprint),
                memory.gib(self.planned),
            )

"""Memory: what the machine has, and how much pressure it is under.

Rule: no MLX. A figure that the system does not give is estimated conservatively.
"""

import ctypes
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxspec import log
from mlxspec.files import format_size

# Bytes. Steps of 2048 rows took 226 and 384 MiB on models of 0.1 and 0.5 billion parameters, fp32;
# what is on its way to and from the disk is limited to 256 MiB.
HEADROOM = 768 << 20
HEADROOM_PART = 16  # of the machine's memory, where that is more

DARWIN = sys.platform == "darwin"
LIBC: Any = ctypes.CDLL(None)  # on macOS libSystem, which includes libproc
PROC = Path("/proc")
RUSAGE_INFO_V4 = 4
FOOTPRINT = 9  # index of ri_phys_footprint in rusage_info, in words of 8 bytes
FREE_PAGES = ("vm.page_free_count", "vm.page_pageable_external_count", "vm.page_purgeable_count")

NORMAL, WARN, CRITICAL = 0, 1, 2
LEVELS = ("normal", "short: caches do not grow", "very short: new requests are refused")
MACOS_LEVELS = {2: WARN, 4: CRITICAL}
POLL_S = 1.0
HOLD_S = 10  # seconds before the level falls
FREE_PART = 32  # free memory below this part of the machine is short, below half of it very short


# ---- the machine


def sysctl(name: str) -> int:
    """A number from the macOS kernel, 4 or 8 bytes wide; 0 if it has none of that name."""
    value = ctypes.c_uint64(0)
    size = ctypes.byref(ctypes.c_size_t(8))
    LIBC.sysctlbyname(name.encode(), ctypes.byref(value), size, None, ctypes.c_size_t(0))
    return value.value


def total() -> int:
    """Bytes of memory of this machine."""
    size = sysctl("hw.memsize") if DARWIN else 0
    return size or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available() -> int:
    """Bytes that are available without swapping: on macOS free, file-backed and purgeable pages, on
    Linux MemAvailable. If unknown, three quarters of the machine minus this process."""
    if DARWIN:
        pages = sum(sysctl(name) for name in FREE_PAGES)
        size = sysctl("vm.pagesize") * pages
    else:
        size = _proc_table("meminfo").get("MemAvailable", 0)
    return size or max(0, total() * 3 // 4 - footprint())


def footprint() -> int:
    """Bytes that this process makes the machine hold; 0 if unknown.

    On macOS phys_footprint, which includes Metal's buffers; on Linux anonymous, shared and swapped
    pages.
    """
    if DARWIN:
        usage = (ctypes.c_uint64 * 64)()  # rusage_info_v4 has 37 words; later versions only append
        LIBC.proc_pid_rusage(os.getpid(), RUSAGE_INFO_V4, ctypes.byref(usage))
        return usage[FOOTPRINT]
    status = _proc_table("self/status")
    return sum(status.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))


def headroom() -> int:
    """Bytes kept free for a step's activations, MLX's buffer cache, disk buffers and the rest of
    the process."""
    return max(HEADROOM, total() // HEADROOM_PART)


def _proc_table(name: str) -> dict[str, int]:
    """The sizes in a file of /proc, in bytes."""
    rows = re.findall(r"^(\w+):\s+(\d+) kB", (PROC / name).read_text(), re.M)
    return {key: int(size) << 10 for key, size in rows}


# ---- pressure


def system_level() -> int:
    """macOS's own memory pressure level; NORMAL elsewhere."""
    level = sysctl("kern.memorystatus_vm_pressure_level") if DARWIN else 0
    return MACOS_LEVELS.get(level, NORMAL)


@dataclass(slots=True)
class MemoryMonitor:
    """The memory pressure level: the worse of the system's level and that of free memory, which
    alone is never CRITICAL on macOS. Any thread may poll; figures are read once a second.

    The level rises at once and falls when it was not reached for HOLD_S seconds.
    """

    clock: Callable[[], float] = time.monotonic
    others: Callable[[], int] = lambda: NORMAL  # the level of other processes
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
        self.footprint = footprint()
        free = available()
        short = total() // FREE_PART
        level = max(system_level(), self.others())
        if free < short:
            # A healthy Mac has few free pages, as it compresses: there macOS's level decides.
            very = free < short // 2 and not DARWIN
            level = max(level, CRITICAL if very else WARN)
        before = self.level
        if level >= self.level or now - self._since >= HOLD_S:
            self.level = level
            self._since = now
        if self.level != before:
            log.warning("memory is %s (%s free)", LEVELS[self.level], format_size(free))
        return self.level

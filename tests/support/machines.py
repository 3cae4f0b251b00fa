"""Macs and Linux machines as the memory's figures show them."""

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxspec.engine import memory
from mlxspec.engine.memory import MemoryMonitor

GIB = 1 << 30


class Libc:
    """macOS's calls with their C signatures: they fill the caller's buffers, and no byte beyond."""

    def __init__(
        self, numbers: dict[str, tuple[int, int]], words: dict[int, int] | None = None
    ) -> None:
        self.numbers, self.words = (
            numbers,
            words or {},
        )  # name -> (value, bytes wide); word -> value

    def sysctlbyname(
        self, name: bytes, old: Any, size: Any, new: None, new_size: ctypes.c_size_t
    ) -> int:
        assert new is None and new_size.value == 0
        if name.decode() not in self.numbers:
            return -1
        value, wide = self.numbers[name.decode()]
        assert size._obj.value >= wide
        ctypes.memmove(old, value.to_bytes(wide, sys.byteorder), wide)
        size._obj.value = wide
        return 0

    def proc_pid_rusage(self, pid: int, flavor: int, buffer: Any) -> int:
        if flavor != 4 or not self.words:
            return -1
        usage = bytearray(296)  # sizeof(struct rusage_info_v4)
        for word, value in self.words.items():
            usage[8 * word : 8 * word + 8] = value.to_bytes(8, sys.byteorder)
        assert ctypes.sizeof(buffer._obj) >= len(usage)
        ctypes.memmove(buffer, bytes(usage), len(usage))
        return 0


MAC = {
    "hw.memsize": (16 * GIB, 8),
    "vm.pagesize": (16384, 4),
    "vm.page_free_count": (1000, 4),
    "vm.page_pageable_external_count": (20000, 4),
    "vm.page_purgeable_count": (300, 4),
    "vm.page_speculative_count": (500, 4),  # among the pageable external ones
    "kern.memorystatus_vm_pressure_level": (1, 4),
}


def on_mac(monkeypatch: pytest.MonkeyPatch, libc: Any) -> None:
    monkeypatch.setattr(memory, "DARWIN", True)
    monkeypatch.setattr(memory, "LIBC", libc)


def on_linux(monkeypatch: pytest.MonkeyPatch, root: Path, **files: str) -> None:
    """`files` are /proc's, their slashes written as two underscores."""
    monkeypatch.setattr(memory, "DARWIN", False)
    monkeypatch.setattr(memory, "PROC", root)
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


class FixedMonitor(MemoryMonitor):
    """A monitor whose level a test sets."""

    def poll(self) -> int:
        return self.level

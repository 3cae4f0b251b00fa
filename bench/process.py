"""What a process and those it started use: memory, its peak, and time on a CPU.

Rule: only the system is asked, /proc or ps, so a server is measured as it ships.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PS = ("ps", "-axo", "pid=,ppid=,rss=,time=")
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory in bytes; `peak` is 0 where the system does not keep it (macOS). CPU seconds since the
    start."""

    rss: int
    peak: int
    cpu: float


def usage(pid: int) -> Usage:
    """Of a process and all below it; those that have ended since count as nothing."""
    look = _proc if sys.platform == "linux" else _ps
    found = look()
    wanted, some = {pid}, True
    while some:
        some = {p for p, (parent, _) in found.items() if parent in wanted} - wanted
        wanted |= some
    parts = [found[p][1] for p in wanted if p in found]
    return Usage(sum(p.rss for p in parts), sum(p.peak for p in parts), sum(p.cpu for p in parts))


def _proc() -> dict[int, tuple[int, Usage]]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            after = (
                (entry / "stat").read_text().rpartition(")")[2].split()
            )  # a name may hold spaces
        except OSError:
            continue
        sizes = {
            key: int(kb) << 10
            for key, kb in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.M)
        }
        cpu = (int(after[11]) + int(after[12])) / TICK
        found[int(entry.name)] = (
            int(after[1]),
            Usage(sizes.get("VmRSS", 0), sizes.get("VmHWM", 0), cpu),
        )
    return found


def _ps() -> dict[int, tuple[int, Usage]]:
    lines = subprocess.run(
        PS, capture_output=True, text=True, check=True, timeout=10
    ).stdout.splitlines()
    return dict(map(parsed, lines))


def parsed(line: str) -> tuple[int, tuple[int, Usage]]:
    """A line of PS: pid, parent, kilobytes, [[days-]hours:]minutes:seconds."""
    pid, parent, kilobytes, time = line.split()
    days, _, clock = time.rpartition("-")
    seconds = 86400.0 * int(days or 0)
    for n, part in enumerate(reversed(clock.split(":"))):
        seconds += float(part) * 60**n
    return int(pid), (int(parent), Usage(int(kilobytes) << 10, 0, seconds))

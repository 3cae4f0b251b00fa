"""What memory there is, what this process takes of it, and how much of it a model's caches get.

Rule: the pool's size is decided once, before a weight is read. A figure that the system does not
give is guessed with care and the log says so; only what does not fit raises.
"""

import ctypes
import logging
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlxspec.cache.prefix import Window
from mlxspec.types import MAX_DEPTH, OutOfMemory, UnsupportedModel, UserError

log = logging.getLogger("mlxspec")

SHARE = 0.5  # of what weights and headroom leave; the rest is the user's
CONTEXTS = 4  # full contexts that are enough: a coding agent keeps three or four sequences alive
LIVE = 2  # a step holds the states that it read beside those that it leaves
STATE_PART, MOST_SNAPSHOTS = 8, 1024  # of the K/V's bytes, for states; and how many at most
SNAPSHOTS = 2  # states kept for later prompts, for each sequence that may run
# tokens of one sequence, below which a model is no use to an agent unless told by --context
LEAST = 8192
HEADROOM = (
    512 << 20
)  # bytes: steps of 2048 rows took 226 and 384 MiB on models of 0.1 and 0.5 billion, fp32
HEADROOM_PART = 16  # of the machine's memory, where that is more
FOUR_BIT = (
    4.5 / 8
)  # bytes of a parameter: 4 bits, and 16-bit scale and bias for 64 of them together
NO_LIMIT = 1 << 62

DARWIN = sys.platform == "darwin"
LIBC: Any = ctypes.CDLL(None)  # on macOS all of libSystem, libproc included
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
RUSAGE_INFO_V4 = 4
FOOTPRINT = (
    9  # word of rusage_info: a uuid of 16 bytes, then 64-bit words, the eighth is ri_phys_footprint
)
EASY_PAGES = ("vm.page_free_count", "vm.page_pageable_external_count", "vm.page_purgeable_count")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a model keeps of what it has read: of one token over its layers with full
    attention, of one token over the layers of each `(window in tokens, bytes)`, and of one
    sequence's recurrent state."""

    token_bytes: int
    windows: tuple[tuple[int, int], ...] = ()
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of the pool of full attention and of each window's, null blocks included; how many
    sequences' states may live at once; bytes for snapshots of states beside those."""

    blocks: int
    window_blocks: tuple[int, ...] = ()
    sequences: int = 0
    snapshot_bytes: int = 0


def sysctl(name: str) -> int | None:
    """A number of macOS's kernel, 4 or 8 bytes wide; None where it has none of that name."""
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
    try:
        wrong = LIBC.sysctlbyname(
            name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (AttributeError, OSError):
        return None
    return None if wrong else value.value


def text(path: Path) -> str:
    """A file of the kernel's; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def total() -> int:
    """Bytes of memory of this machine, or of this container where it has a limit (cgroup v2)."""
    found = sysctl("hw.memsize") if DARWIN else _kib("meminfo").get("MemTotal")
    return min(found or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _container()[0])


def free() -> int | None:
    """Bytes that can be had without swapping: on macOS free, file-backed and purgeable pages, on
    Linux MemAvailable, and what is left of a container's limit. None: the system does not say."""
    if DARWIN:
        pages, size = [sysctl(name) for name in EASY_PAGES], sysctl("vm.pagesize")
        known = [n for n in pages if n is not None]
        found = sum(known) * size if size and len(known) == len(pages) else None
    else:
        found = _kib("meminfo").get("MemAvailable")
    return None if found is None else min(found, _container()[1])


def available() -> int:
    """`free`, or where that is unknown three quarters of the machine less what this process
    holds."""
    if (found := free()) is not None:
        return max(0, found)
    _unknown(
        "how much memory is free", "three quarters of the machine are assumed; --memory-gb sets it"
    )
    return max(0, total() * 3 // 4 - footprint())


def footprint() -> int:
    """Bytes that this process makes the machine hold: phys_footprint on macOS, which counts Metal's
    buffers and is what the system itself judges by; anonymous, shared and swapped pages on Linux.
    0: unknown."""
    found = 0
    if DARWIN:
        usage = (ctypes.c_uint64 * 64)()  # rusage_info_v4 has 37; later ones only add
        try:
            if not LIBC.proc_pid_rusage(os.getpid(), RUSAGE_INFO_V4, ctypes.byref(usage)):
                found = usage[FOOTPRINT]
        except (AttributeError, OSError):
            pass
    else:
        status = _kib("self/status")
        found = sum(status.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))
    if not found:
        _unknown("how much memory this process holds", "it is not watched")
    return found


def headroom() -> int:
    """Bytes kept free of weights and pools: a step's activations, MLX's spare buffers, the rest of
    us."""
    return max(HEADROOM, total() // HEADROOM_PART)


def sizes(
    needs: Needs,
    context: int,
    block_size: int,
    max_sequences: int,
    chunk: int,
    free: int,
    share: float = SHARE,
) -> Sizes:
    """What a model's caches get of `free` bytes: CONTEXTS full contexts, `max_sequences` windows
    and states, two snapshots for each, where `share` of `free` holds that; else everything is cut
    by the same part, but never below one sequence of min(`context`, LEAST) tokens read `chunk` at a
    time. Raises UnsupportedModel where that is too much. Never takes more than its share."""
    parts = _parts(needs, context, block_size, max_sequences, chunk)
    budget = max(0, int(free * share))
    least = sum(size * low for size, low, _ in parts)
    if (rest := budget - least) < 0:
        slot, low, _ = parts[0]
        tokens = ((rest // slot + low - 1) * block_size) if slot else 0
        raise UnsupportedModel(
            f"the cache of one sequence of {min(context, LEAST)} tokens takes {gib(least)}, and {gib(budget)}"
            " may be its" + (f"; --context {tokens} fits" if tokens > 1 else "")
        )
    more = sum(size * (high - low) for size, low, high in parts)
    blocks, *windows, live, spare = (
        low + ((high - low) * rest // more if size and more > rest else high - low)
        for size, low, high in parts
    )
    for (window, _), n in zip(needs.windows, windows, strict=True):  # so that none is ever short
        one, two = (Window.min_blocks(window, block_size, k, chunk, MAX_DEPTH) for k in (1, 2))
        live = min(live, max(1, 1 + (n - one) // (two - one)))
    return Sizes(blocks, tuple(windows), live, spare * needs.state_bytes)


def room(
    weights: int, needs: Needs, context: int, block_size: int, chunk: int, free: int, given: int = 0
) -> int:
    """Bytes that weights and headroom leave of `free`, which may be what the user has `given`.
    Raises OutOfMemory, with what is needed and what would fit, where SHARE of that does not hold
    the caches of one sequence."""
    left, why = free - weights - headroom(), ""
    if left >= 0:
        try:
            sizes(needs, context, block_size, 1, chunk, left)
            return left
        except UserError as error:
            why = f" A part of {SHARE} of what is left is for the KV cache: {error}."
    one = sum(size * low for size, low, _ in _parts(needs, context, block_size, 1, chunk))
    billions = (free - headroom() - one / SHARE) / FOUR_BIT / 1e9
    have = (
        f"{gib(free)} are left of --memory-gb"
        if given
        else f"{gib(free)} are free of {gib(total())}"
    )
    mend = (
        "Raise --memory-gb" if given else "Close something, or give what it may take by --memory-gb"
    )
    raise OutOfMemory(
        f"the model does not fit: {gib(weights)} of weights and {gib(headroom())} of headroom, but"
        f" {have}.{why}"
        + (
            f" A 4-bit model of less than {billions:.1f} billion parameters fits."
            if billions > 0.1
            else ""
        )
        + f" {mend}{'; --kv-bits makes the cache smaller' if why else ''}",
        need=weights + headroom() + int(one / SHARE),
    )


def _parts(
    needs: Needs, context: int, block_size: int, max_sequences: int, chunk: int
) -> list[tuple[int, int, int]]:
    """(bytes of one, the fewest, the most that are of use): full blocks, each window's, states,
    snapshots."""
    whole = _blocks(context, block_size)
    most = CONTEXTS * (whole - 1) + 1
    parts = [(needs.token_bytes * block_size, _blocks(min(context, LEAST), block_size), most)]
    for window, size in needs.windows:
        low, high = _window(window, block_size, max_sequences, chunk)
        parts.append((size * block_size, min(low, whole), min(high, most)))
    live, spare = LIVE * needs.state_bytes, _snapshots(needs, most, block_size, max_sequences)
    return [*parts, (live, 1, max_sequences), (needs.state_bytes, 0, spare)]


def _snapshots(needs: Needs, blocks: int, block_size: int, max_sequences: int) -> int:
    """States for later prompts: as many as a part of the K/V's bytes holds, but a few for each
    sequence."""
    part = needs.token_bytes * block_size * blocks // STATE_PART
    return max(SNAPSHOTS * max_sequences, min(part // max(1, needs.state_bytes), MOST_SNAPSHOTS))


def _window(window: int, block_size: int, max_sequences: int, chunk: int) -> tuple[int, int]:
    """Blocks with which one sequence is never short, and with which none is and as much again stays
    known."""
    one, all_of = (
        Window.min_blocks(window, block_size, n, chunk, MAX_DEPTH) for n in (1, max_sequences)
    )
    return one, 2 * all_of


def fixed(needs: Needs, blocks: int, block_size: int, max_sequences: int, chunk: int) -> Sizes:
    """The sizes where somebody has said how many blocks there are to be."""
    windows = [
        min(blocks, _window(w, block_size, max_sequences, chunk)[1]) for w, _ in needs.windows
    ]
    spare = _snapshots(needs, blocks, block_size, max_sequences)
    return Sizes(blocks, tuple(windows), max_sequences, spare * needs.state_bytes)


def taken(needs: Needs, sizes: Sizes, block_size: int) -> int:
    """Bytes of all that."""
    blocks = needs.token_bytes * sizes.blocks
    blocks += sum(size * n for (_, size), n in zip(needs.windows, sizes.window_blocks, strict=True))
    return blocks * block_size + LIVE * needs.state_bytes * sizes.sequences + sizes.snapshot_bytes


def gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def _blocks(tokens: int, block_size: int) -> int:
    """Blocks for so many tokens, and the null block."""
    return -(-tokens // block_size) + 1


def _kib(name: str) -> dict[str, int]:
    """The sizes in one of /proc's tables, in bytes."""
    return {k: int(v) << 10 for k, v in re.findall(r"^(\w+):\s+(\d+) kB", text(PROC / name), re.M)}


def _container() -> tuple[int, int]:
    """This container's limit (cgroup v2) and what is left of it: what was read of files and not
    used since goes as soon as memory is asked for."""
    limit, used = text(CGROUP / "memory.max").strip(), text(CGROUP / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return NO_LIMIT, NO_LIMIT
    idle = re.search(r"^inactive_file (\d+)$", text(CGROUP / "memory.stat"), re.M)
    return int(limit), int(limit) - int(used) + (int(idle[1]) if idle else 0)


@cache
def _unknown(what: str, instead: str) -> None:
    """Said once."""
    log.warning("the system does not say %s; %s", what, instead)

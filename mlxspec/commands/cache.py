"""What `mlxspec cache` shows of the prompt cache on disk, and how it is emptied.

Rule: it looks at the directory only, so it works with a server running and without; what it shows
of a file is what that says of itself, which only the server verifies.
"""

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxspec.cache.runfile import keys_of, label, listing, open_lock
from mlxspec.files import format_size
from mlxspec.types import UserError

PATIENCE = 10.0  # seconds to wait for a server that writes just now


@dataclass(slots=True)
class Held:
    """What is there of one model. `blocks` counts keys, so state snapshots too; `used` is unix
    time."""

    fingerprint: str
    model: str = ""
    runs: int = 0
    blocks: int = 0
    bytes: int = 0
    damaged: int = 0
    used: float = 0.0


def survey(root: Path) -> list[Held]:
    """Every model's share, the last used first. Raises UserError if `root` cannot be read."""
    found: dict[str, Held] = {}
    try:
        for name, status in listing(root):
            held = found.setdefault(name.partition("/")[0], Held(name.partition("/")[0]))
            held.bytes += status.st_size
            held.used = max(held.used, status.st_mtime)
            meta = None
            with suppress(OSError):  # evicted meanwhile
                meta = None if name.endswith(".tmp") else label(root / name)
            held.runs += meta is not None
            held.damaged += meta is None
            if meta is not None:
                held.blocks += len(keys_of(meta))
                held.model = held.model or meta.get("model", "")
    except OSError as error:
        raise UserError(
            f"{root}: {error.strerror}; name the directory that the server uses: --cache-dir"
        ) from error
    return sorted(found.values(), key=lambda held: -held.used)


def show(root: Path, console: Console) -> None:
    """A line per model."""
    found = survey(root)
    if not found:
        return console.print(Text(f"nothing is cached in {root}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("model", "fingerprint", "runs", "blocks", "bytes", "last used"):
        right = column in ("runs", "blocks", "bytes")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for held in found:
        model = "".join(c if c.isprintable() else "?" for c in held.model[:80]) or "?"  # unverified
        runs = f"{held.runs}" + f" + {held.damaged} damaged" * bool(held.damaged)
        used = datetime.fromtimestamp(held.used).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            Text(model), held.fingerprint[:8], runs, f"{held.blocks}", format_size(held.bytes), used
        )
    console.print(table)


def totals(root: Path, most: int, console: Console) -> None:
    """All models together, and the limit of `most` bytes."""
    found = survey(root)
    total = sum(held.bytes for held in found)
    limit = format_size(most) if most else "off (cache_gb is 0)"
    rows = {
        "directory": str(root),
        "models": f"{len(found)}",
        "runs": f"{sum(held.runs for held in found)}",
        "blocks": f"{sum(held.blocks for held in found)}",
        "damaged": f"{sum(held.damaged for held in found)}",
        "bytes": format_size(total),
        "limit": limit,
    }
    for name, value in rows.items():
        console.print(Text(f"{name:9}  {value}"), soft_wrap=True)


def clear(root: Path) -> tuple[int, int]:
    """Delete every run: how many files and bytes that were. A server that has them open finds
    misses. Raises UserError if it cannot be done."""
    files = freed = 0
    if not survey(root):
        return 0, 0
    try:
        fd = open_lock(root)
        try:
            _lock(fd)
            os.ftruncate(fd, 0)  # so that every server looks again before it writes
            for name, status in list(listing(root)):
                (root / name).unlink(missing_ok=True)
                files, freed = files + 1, freed + status.st_size
                with suppress(OSError):  # not empty yet
                    (root / name).parent.rmdir()
        finally:
            os.close(fd)
    except OSError as error:
        raise UserError(
            f"{root}: {error.strerror or error}; {files} files were deleted before that"
        ) from error
    return files, freed


def _lock(fd: int) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise OSError(
                    0, f"a server has been writing for {PATIENCE:.0f} s; stop it first"
                ) from None
            time.sleep(0.02)

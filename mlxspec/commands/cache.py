"""`mlxspec cache`: shows the prompt cache on disk, and empties it.

Rule: it works on the directory alone, with a server running or without.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxspec.cache.disk import read_label, stored_files
from mlxspec.files import format_size, lock
from mlxspec.types import UserError


@dataclass(slots=True)
class ModelUsage:
    """What is cached of one model, by the labels of its files, which are not verified. `blocks`
    counts recurrent states too; `used` is unix time."""

    fingerprint: str
    model: str = "?"
    files: int = 0
    blocks: int = 0
    bytes: int = 0
    damaged: int = 0
    used: float = 0.0


def survey(root: Path) -> list[ModelUsage]:
    """Every model's share, the last used first. Raises UserError."""
    found: dict[str, ModelUsage] = {}
    try:
        for path, status in stored_files(root):
            fingerprint = path.parent.name
            usage = found.setdefault(fingerprint, ModelUsage(fingerprint))
            usage.bytes += status.st_size
            usage.used = max(usage.used, status.st_mtime)
            try:
                with path.open("rb") as file:
                    label = read_label(file)
            except (FileNotFoundError, ValueError):
                usage.damaged += 1
                continue
            usage.model = label.model
            usage.files += 1
            usage.blocks += len(label.run_keys())
    except OSError as error:
        raise UserError(
            f"{root}: {error.strerror}; set --cache-dir to the directory that the server uses"
        ) from error
    return sorted(found.values(), key=lambda usage: -usage.used)


def show(root: Path, console: Console) -> None:
    """Print a line per model."""
    found = survey(root)
    if not found:
        console.print(Text(f"nothing is cached in {root}"), soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("model", "fingerprint", "files", "blocks", "damaged", "bytes", "last used"):
        table.add_column(column, overflow="fold")
    for usage in found:
        name = "".join(c if c.isprintable() else "?" for c in usage.model[:80])
        used = datetime.fromtimestamp(usage.used).strftime("%Y-%m-%d %H:%M")
        counts = map(str, (usage.files, usage.blocks, usage.damaged))
        table.add_row(Text(name), usage.fingerprint[:8], *counts, format_size(usage.bytes), used)
    console.print(table)


def totals(root: Path, limit: int, console: Console) -> None:
    """Print the sums over all models, and the limit in bytes."""
    found = survey(root)
    rows = {
        "directory": root,
        "models": len(found),
        "files": sum(usage.files for usage in found),
        "blocks": sum(usage.blocks for usage in found),
        "damaged": sum(usage.damaged for usage in found),
        "bytes": format_size(sum(usage.bytes for usage in found)),
        "limit": format_size(limit) if limit else "off (cache_gb is 0)",
    }
    for name, value in rows.items():
        console.print(Text(f"{name:9}  {value}"), soft_wrap=True)


def clear(root: Path) -> tuple[int, int]:
    """Delete all files; how many files and bytes they were. A running server just misses them.
    Raises UserError."""
    if not survey(root):
        return 0, 0
    files = freed = 0
    try:
        with lock(root / "lock"):
            for path, status in list(stored_files(root)):
                path.unlink(missing_ok=True)
                files, freed = files + 1, freed + status.st_size
                with suppress(OSError):  # not empty yet
                    path.parent.rmdir()
    except OSError as error:
        raise UserError(f"{root}: {error.strerror} after {files} files were deleted") from error
    return files, freed

"""`mlxspec cache`: shows the prefix cache on disk, and empties it.

Rule: it works on the directory, whether a server runs or not.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mlxspec.cache.disk import read_label, stored_files
from mlxspec.commands.table import print_table
from mlxspec.config import Config
from mlxspec.files import format_size, lock
from mlxspec.model.hub import prompts_of


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
    """Every model's share, the last used first. Raises OSError."""
    found: dict[str, ModelUsage] = {}
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
    return sorted(found.values(), key=lambda usage: -usage.used)


def show(config: Config) -> None:
    """Print a line per model."""
    root = prompts_of(config)
    rows = []
    for usage in survey(root):
        used = datetime.fromtimestamp(usage.used).strftime("%Y-%m-%d %H:%M")
        counts = (usage.files, usage.blocks, usage.damaged, format_size(usage.bytes))
        rows.append((usage.model[:80], usage.fingerprint[:8], *counts, used))
    if rows:
        columns = ("model", "fingerprint", "files", "blocks", "damaged", "bytes", "last used")
        print_table(columns, rows)
    else:
        print(f"nothing is cached in {root}")


def totals(config: Config) -> None:
    """Print the sums over all models, and the limit."""
    root = prompts_of(config)
    found = survey(root)
    print(f"directory  {root}")
    print(f"models     {len(found)}")
    print(f"files      {sum(usage.files for usage in found)}")
    print(f"blocks     {sum(usage.blocks for usage in found)}")
    print(f"damaged    {sum(usage.damaged for usage in found)}")
    print(f"bytes      {format_size(sum(usage.bytes for usage in found))}")
    limit = format_size(config.disk_bytes) if config.disk_bytes else "off"
    print(f"limit      {limit}")


def clear(root: Path) -> None:
    """Delete all files, and print how many they were. A running server just misses them.
    Raises OSError."""
    files = freed = 0
    with lock(root / "lock"):
        for path, status in list(stored_files(root)):
            path.unlink(missing_ok=True)
            files += 1
            freed += status.st_size
            with suppress(OSError):  # not empty yet
                path.parent.rmdir()
    print(f"{format_size(freed)} freed; files deleted: {files}")

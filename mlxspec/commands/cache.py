"""`mlxspec cache`: shows and deletes the prefix cache on disk and recorded answers.

Rule: it works on the directory, whether or not a server runs.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mlxspec.cache.disk import read_label, stored_files
from mlxspec.commands.table import print_table
from mlxspec.commands.terminal_input import HISTORY
from mlxspec.config import Config
from mlxspec.files import format_size, lock
from mlxspec.model.hub import STORED, cache_of, prompts_of

ANSWERS = f"answers/{STORED}*.jsonl"


@dataclass
class ModelUsage:
    """The cache of one model, by the labels of its files, which are not verified. `blocks` counts
    recurrent states too; `used` is unix time."""

    fingerprint: str
    model: str = "?"
    files: int = 0
    blocks: int = 0
    bytes: int = 0
    damaged: int = 0
    used: float = 0.0


def survey(root: Path) -> list[ModelUsage]:
    """The usage of each model, most recently used first. Raises OSError."""
    usages: dict[str, ModelUsage] = {}
    for path, status in stored_files(root):
        fingerprint = path.parent.name
        usage = usages.setdefault(fingerprint, ModelUsage(fingerprint))
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
    return sorted(usages.values(), key=lambda usage: -usage.used)


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
    usages = survey(root)
    print(f"directory  {root}")
    print(f"models     {len(usages)}")
    print(f"files      {sum(usage.files for usage in usages)}")
    print(f"blocks     {sum(usage.blocks for usage in usages)}")
    print(f"damaged    {sum(usage.damaged for usage in usages)}")
    print(f"bytes      {format_size(sum(usage.bytes for usage in usages))}")
    limit = format_size(config.disk_bytes) if config.disk_bytes else "off"
    print(f"limit      {limit}")
    recorded = sum(path.stat().st_size for path in cache_of(config).glob(ANSWERS))
    print(f"recorded   {format_size(recorded)}")


def clear(cache: Path) -> None:
    """Delete all files and print how many. A running server just misses them. Raises OSError."""
    files = freed = 0
    prompts = cache / "prompts"
    with lock(prompts / "lock"), lock(cache / "answers/lock"), ExitStack() as trainings:
        paths = [path for path, _ in stored_files(prompts)] + list(cache.glob(ANSWERS))
        paths += cache.glob(HISTORY)
        for work in cache.glob(f"training/{STORED}"):
            if trainings.enter_context(lock(work.with_name(f"{work.name}.lock"), wait=False)):
                paths += work.iterdir()
        for path in paths:
            with suppress(OSError):  # evicted meanwhile, or a folder that is not empty yet
                freed += path.lstat().st_size
                path.unlink()
                files += 1
                path.parent.rmdir()
    print(f"{format_size(freed)} freed; files deleted: {files}")

"""The models on this disk: their names and sizes, whether they are complete, and downloads.

Rule: listing downloads nothing and reads no weights beyond their headers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from mlxspec import blas
from mlxspec.commands.table import print_table
from mlxspec.config import Config
from mlxspec.files import format_size, weight_bytes, weight_files


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model by the name that `serve` takes, or a head, which only --draft takes. Without a path
    it is not downloaded, and `bytes` is the size of the download."""

    name: str
    kind: str  # "model" or "head"
    path: Path | None
    bytes: int


def local_models(config: Config) -> list[LocalModel]:
    """The models of the settings, the built-in model, and those in Hugging Face's cache."""
    from mlxspec.model.cards import cards, target_of
    from mlxspec.resolve import models_of, on_disk
    from mlxspec.speculate.heads.files import find_head

    known, found = cards(), []
    for name in dict.fromkeys((*models_of(config), *known, *_cached_repos())):
        path = on_disk(name, config)
        size = 0
        if path:
            size = weight_bytes(path)
        elif name in known:
            size = known[name].source.bytes
        head = find_head(path).standalone if path else target_of(name)
        found.append(LocalModel(name, "head" if head else "model", path, size))
    return found


def _cached_repos() -> Iterator[str]:
    """Repositories in Hugging Face's cache that look like models in mlx-lm's format."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        return
    for repo in repos:
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        weights = any(fnmatch(name, "model*.safetensors") for name in names)
        if repo.repo_type == "model" and "/" in repo.repo_id and "config.json" in names and weights:
            yield repo.repo_id


def damage(path: Path) -> list[str]:
    """What is wrong with the weights in a model's directory: unreadable or cut off."""
    from safetensors import SafetensorError, safe_open

    found = []
    for file in weight_files(path):
        try:
            with safe_open(file, "numpy"):
                pass
        except (OSError, SafetensorError) as error:
            found.append(f"{file}: {error}")
    return found


def pull(config: Config) -> None:
    """Download and convert the model and its draft model, as `serve` would. Raises UserError."""
    blas.load()
    from mlxspec.resolve import resolve_model

    model = resolve_model(config)
    for one in (model, model.draft):
        if one:
            print(f"{one.name} is in {one.path}, {format_size(weight_bytes(one.path))}")


def show(found: Sequence[LocalModel], as_json: bool) -> None:
    """Print a line per model, or all as JSON."""
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2, default=str))
        return
    rows = []
    for one in found:
        path = "not downloaded"
        if one.path:
            path = str(one.path).replace(str(Path.home()), "~")
        rows.append((one.name, one.kind, format_size(one.bytes), path))
    print_table(("name", "kind", "size", "path"), rows)

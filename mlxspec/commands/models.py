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
from mlxspec.files import format_size, weight_bytes
from mlxspec.service.status import Model


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model by the name that `serve` takes. Without a path it is not downloaded, and `bytes` is
    the size of the download."""

    name: str
    path: Path | None
    bytes: int


def local_models(config: Config) -> list[LocalModel]:
    """The models of the settings, the built-in ones, and those in Hugging Face's cache."""
    from mlxspec.model.cards import cards
    from mlxspec.resolve import models_of, on_disk

    known, found = cards(), []
    for name in dict.fromkeys((*models_of(config), *known, *_cached_repos())):
        path = on_disk(name, config)
        size = weight_bytes(path) if path else 0
        if not path and name in known:
            size = known[name].source.bytes
        found.append(LocalModel(name, path, size))
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
    for file in sorted(path.glob("model*.safetensors")):
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


def show(found: Sequence[LocalModel], served: Sequence[Model], as_json: bool) -> None:
    """Print the models on disk, then those that only the server knows."""
    rows = {one.name: asdict(one) for one in found}
    for model in served:
        row = rows.setdefault(model.name, asdict(LocalModel(model.name, None, model.bytes)))
        row["state"] = f"served, {model.state}"
    for row in rows.values():
        row.setdefault("state", "on disk" if row["path"] else "not downloaded")
    if as_json:
        print(json.dumps(list(rows.values()), indent=2, default=str))
        return
    lines = []
    for row in rows.values():
        path = str(row["path"] or "").replace(str(Path.home()), "~")
        lines.append((row["name"], format_size(row["bytes"]), row["state"], path))
    print_table(("name", "size", "state", "path"), lines)

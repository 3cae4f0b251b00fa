"""The models on this disk: their names and sizes, whether they are complete, and downloads.

Rule: listing downloads nothing and reads no weights beyond their headers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxspec import blas
from mlxspec.config import Config
from mlxspec.files import format_size
from mlxspec.service.status import Model, print_table

MAX_HEADER = 100 << 20  # bytes that safetensors allows


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model by the name that `serve` takes. Without a path it is not downloaded, and `bytes` is
    the size of the download."""

    name: str
    path: Path | None
    bytes: int


def local_models(config: Config) -> list[LocalModel]:
    """The models of the settings, the built-in ones, and those in Hugging Face's cache."""
    from mlxspec.model.hub import DEFAULT, cards
    from mlxspec.resolve import models_of, on_disk

    known, found = cards(), []
    configured = (model or DEFAULT for model, _ in models_of(config))
    for name in dict.fromkeys((*configured, *known, *_cached_repos())):
        path = on_disk(name, config)
        if path:
            size = weight_bytes(path)
        else:
            size = known[name].source.bytes if name in known else 0
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
        weights = any(n.startswith("model") and n.endswith(".safetensors") for n in names)
        if repo.repo_type == "model" and "config.json" in names and weights and "/" in repo.repo_id:
            yield repo.repo_id


def weight_bytes(path: Path) -> int:
    """The size of the weights in a model's directory."""
    return sum(file.stat().st_size for file in path.glob("model*.safetensors") if file.exists())


def damage(path: Path) -> list[str]:
    """What is wrong with the weights in a model's directory: unreadable or cut off."""
    found = []
    for file in sorted(path.glob("model*.safetensors")):
        try:
            expected, actual = _expected_bytes(file), file.stat().st_size
            if expected != actual:
                found.append(f"{file} has {actual} bytes, but its header says {expected}")
        except OSError as error:
            found.append(f"{file}: {error.strerror}")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            found.append(f"{file} is not a safetensors file")
    return found


def _expected_bytes(file: Path) -> int:
    """The size of a safetensors file by its header. Raises many things if it has none."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError(length)
        header = json.loads(opened.read(length))
    ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def pull(config: Config) -> list[LocalModel]:
    """Download and convert the model and its draft model, as `serve` would. Raises UserError."""
    blas.load()
    from mlxspec.resolve import resolve_model

    model = resolve_model(config)
    found = [(model.name, model.path)]
    if model.draft:
        found.append((model.draft.name, model.draft.path))
    return [LocalModel(name, path, weight_bytes(path)) for name, path in found]


def show(found: Sequence[LocalModel], served: Sequence[Model], as_json: bool) -> None:
    """Print the models on disk, then those that only the server knows."""
    states = {one.name: f"served, {one.state}" for one in served}
    names = ("name", "bytes", "state", "path")
    rows = []
    for one in found:
        state = states.pop(one.name, "on disk" if one.path else "not downloaded")
        rows.append((one.name, one.bytes, state, str(one.path or "")))
    rows += [(m.name, m.bytes, states[m.name], "") for m in served if m.name in states]
    if as_json:
        return print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
    home = str(Path.home())
    lines = [
        (name, format_size(n), state, path.replace(home, "~")) for name, n, state, path in rows
    ]
    print_table(("name", "size", "state", "path"), lines)

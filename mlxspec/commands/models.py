"""Models on this disk: which there are, how large, whether they are whole; and fetching one.

Rule: looking fetches nothing and reads no weights beyond their headers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxspec import blas
from mlxspec.config import Config
from mlxspec.files import format_size
from mlxspec.service.status import Model, table

HEADER = 100 << 20  # bytes, the most that safetensors admits


@dataclass(frozen=True, slots=True)
class Kept:
    """A model by the name that `serve` takes; `path` is None if it would have to be fetched,
    `bytes` are then those of the download."""

    name: str
    path: Path | None
    bytes: int


def stock(config: Config) -> list[Kept]:
    """The settings' own models, the embedded ones, and what the hub's cache holds for mlx-lm."""
    from mlxspec.model.hub import DEFAULT, cards
    from mlxspec.resolve import models_of, on_disk

    known, found = cards(), []
    own = (model or DEFAULT for model, _ in models_of(config))
    for name in dict.fromkeys((*own, *known, *_hub())):
        path = on_disk(name, config)
        fetch = known[name].source.bytes if name in known else 0
        found.append(Kept(name, path, weight(path) if path else fetch))
    return found


def _hub() -> Iterator[str]:
    """Of the hub's cache, what looks like a model in mlx-lm's format."""
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


def weight(path: Path) -> int:
    """Bytes of the weights in a model's directory."""
    return sum(file.stat().st_size for file in path.glob("model*.safetensors") if file.exists())


def flaws(path: Path) -> list[str]:
    """Why a model's directory cannot be served: weights that cannot be read, or were cut off."""
    found = []
    for file in sorted(path.glob("model*.safetensors")):
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length)) if length <= HEADER else {}
            ends = [e["data_offsets"][1] for name, e in header.items() if name != "__metadata__"]
            wanted, there = 8 + length + max(ends, default=0), file.stat().st_size
            if wanted != there:
                found.append(f"{file} has {there} bytes, by its own header {wanted}")
        except OSError as error:
            found.append(f"{file}: {error.strerror}")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            found.append(f"{file} is no safetensors file")
    return found


def pull(config: Config) -> list[Kept]:
    """Fetch and convert what `serve` would: the model, and the one that drafts for it. Raises
    UserError."""
    blas.load()
    from mlxspec.resolve import resolve_model

    chosen = resolve_model(config)
    return [Kept(one.name, one.path, weight(one.path)) for one in (chosen, chosen.draft) if one]


def show(found: Sequence[Kept], served: Sequence[Model], as_json: bool) -> None:
    """On stdout, with those that the server has, whatever it calls them."""
    states = {one.name: one for one in served}
    rows = [
        (k.name, k.bytes, _state(k, states.pop(k.name, None)), str(k.path or "")) for k in found
    ]
    rows += [(m.name, m.bytes, f"served, {m.state}", "") for m in states.values()]
    if as_json:
        heads = ("name", "bytes", "state", "path")
        return print(json.dumps([dict(zip(heads, row, strict=True)) for row in rows], indent=2))
    home = str(Path.home())
    lines = [
        (name, format_size(count), state, path.replace(home, "~"))
        for name, count, state, path in rows
    ]
    table(("name", "size", "state", "path"), lines)


def _state(one: Kept, served: Model | None) -> str:
    if served:
        return f"served, {served.state}"
    return "on disk" if one.path else "not fetched"

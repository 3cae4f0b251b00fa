"""The models on this disk: their names and sizes, whether they are complete, and downloads.

Rule: listing downloads nothing and reads no weights except their headers.
"""

import json
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

from mlxspec import __version__, blas
from mlxspec.commands.options import AsJson, Model
from mlxspec.commands.table import print_table
from mlxspec.config import Config, load
from mlxspec.files import format_size, read_json, weight_bytes, weight_files, write_atomic
from mlxspec.types import UnsupportedModel, UserError

TOOLS_FILE = "tools.json"  # in the cache directory
MAX_CACHED = 200  # versions of tokenizers' files in it


@dataclass(frozen=True)
class LocalModel:
    """A model by the name that `serve` takes, or a head, which only --draft takes. Without a path
    it is not downloaded, and `bytes` is the size of the download. `fits`: whether it can be loaded
    here, by the sizes of its files; `tools`: how its calls are read; `head`: what drafts for it;
    `sees`: whether it takes images."""

    name: str
    kind: str  # "model" or "head"
    path: Path | None
    bytes: int
    fits: str = ""
    tools: str = ""
    head: str = ""
    sees: bool = False


def local_models(config: Config) -> list[LocalModel]:
    """The models of the settings, the built-in model, and those that mlx-lm can load in the folders
    of other programs."""
    from mlxspec.load.drafting import NONE
    from mlxspec.load.resolve import draft_of, models_of, on_disk
    from mlxspec.model.cards import cards, target_of
    from mlxspec.model.hub import cache_of, installed
    from mlxspec.model.layout import has_code
    from mlxspec.model.vision import has_tower
    from mlxspec.speculate.heads.files import find_head

    catalog, local, downloaded = cards(), [], installed()
    for name in dict.fromkeys((*models_of(config), *catalog, *sorted(downloaded))):
        try:
            path = downloaded.get(name) or on_disk(name, config)
        except UnsupportedModel:  # of the settings
            local.append(LocalModel(name, "model", None, 0, fits="incomplete"))
            continue
        if not path:
            size = catalog[name].source.bytes if name in catalog else 0
            local.append(LocalModel(name, "head" if target_of(name) else "model", None, size))
            continue
        head, size = find_head(path), weight_bytes(path)
        if head.standalone:
            local.append(LocalModel(name, "head", path, size))
        elif name not in downloaded or has_code(head.config):
            fits, tools, drafts = _fits(config, path, size), "", ""
            if fits != "incomplete":
                tools = _cached_tools(path, cache_of(config) / TOOLS_FILE)
            if config.speculate and config.draft != NONE:
                drafts = draft_of(name, path, replace(config, draft="")) or head.kind
            sees = config.vision and has_tower(path, head.config)
            local.append(LocalModel(name, "model", path, size, fits, tools, drafts, sees=sees))
    return local


def _fits(config: Config, path: Path, size: int) -> str:
    """Whether a model is complete and fits into memory."""
    from mlxspec.load.loader import room
    from mlxspec.model.hub import resolve

    try:
        resolve(str(path), path, False)
    except UnsupportedModel:
        return "incomplete"
    if damage(path):
        return "incomplete"
    return "yes" if size <= room(config) else "no"


def tools_of(path: Path) -> str:
    """How the calls of a model are read and forced. Loading its tokenizer takes a second."""
    from mlxspec.text.chat import load_tokenizer
    from mlxspec.text.proof import call_support

    try:
        return call_support(load_tokenizer(path))
    except UserError as error:
        return str(error)


def _cached_tools(path: Path, file: Path) -> str:
    """The same, from a file that caches it for each version of a tokenizer's files."""
    digest = blake2b(__version__.encode(), digest_size=16)
    for part in sorted((*path.glob("*token*"), *path.glob("chat_template*"))):
        digest.update(part.read_bytes())
    cached, key = read_json(file), digest.hexdigest()
    if key not in cached:
        cached = dict([*cached.items(), (key, tools_of(path))][-MAX_CACHED:])
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(cached).encode())
    return str(cached[key])


def damage(path: Path) -> list[str]:
    """The unreadable or truncated weight files in a model's directory, with the reason."""
    from safetensors import SafetensorError, safe_open

    flaws = []
    for file in weight_files(path):
        try:
            with safe_open(file, "numpy"):
                pass
        except (OSError, SafetensorError) as error:
            flaws.append(f"{file}: {error}")
    return flaws


def pull(model: Model = None) -> None:
    """Download and convert a model without serving it."""
    blas.load()
    from mlxspec.load.resolve import resolve_model

    resolved = resolve_model(load({"model": model}))
    for one in (resolved, resolved.draft):
        if one:
            print(f"{one.name} is in {one.path}, {format_size(weight_bytes(one.path))}")


def models(as_json: AsJson = False) -> None:
    """List the models on this disk, and those that can be downloaded by name."""
    local = local_models(load({}))
    if as_json:
        print(json.dumps([asdict(one) for one in local], indent=2, default=str))
        return
    rows = []
    for one in local:
        path = str(one.path or "not downloaded").replace(str(Path.home()), "~")
        rows.append(
            (
                one.name,
                one.kind,
                format_size(one.bytes),
                one.fits,
                "yes" if one.sees else "",
                one.tools,
                one.head,
                path,
            ),
        )
    print_table(("name", "kind", "size", "fits", "images", "tools", "head", "path"), rows)

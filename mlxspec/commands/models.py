"""The models on this disk: their names and sizes, whether they are complete, and downloads.

Rule: listing downloads nothing and reads no weights except their headers.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from mlxspec import __version__, blas
from mlxspec.commands.options import (
    AsJson,
    FreeText,
    KnownName,
    Model,
    log_to_stderr,
    names_on_disk,
)
from mlxspec.commands.plain_output import note
from mlxspec.commands.table import print_table
from mlxspec.config import Config, data_dir, load_config
from mlxspec.files import format_size, read_json, weight_bytes, weight_files, write_atomic
from mlxspec.profiles import profiles_of
from mlxspec.types import UnsupportedModel, UserError, line_of

WIDE = 160  # columns of a terminal that shows everything
PUBLISHER = "mlx-community"
FOUND = 20  # models that a search shows
TOOLS_FILE = "tools.json"  # in the cache directory
MAX_CACHED = 200  # versions of tokenizers' files in it


@dataclass(frozen=True)
class LocalModel:
    """A model by the name that `serve` takes, or a head, which only --draft takes. Without a path
    it is not downloaded, and `bytes` is the size of the download. `fits`: whether it can be loaded
    here, by the sizes of its files; `tools`: how its calls are read; `head`: what drafts for it;
    `sees`: whether it takes images. A profile of a model of the settings has only `defaults`."""

    name: str
    kind: str  # "model", "head" or "profile"
    path: Path | None
    bytes: int
    fits: str = ""
    tools: str = ""
    head: str = ""
    sees: bool = False
    defaults: str = ""


def local_models(config: Config) -> list[LocalModel]:
    """The models of the settings, the built-in model, and those that mlx-lm can load in the folders
    of other programs."""
    from mlxspec.load.drafting import NONE
    from mlxspec.load.resolve import draft_of, models_of, on_disk, served_names
    from mlxspec.model.cards import cards, target_of
    from mlxspec.model.checkpoint import has_code
    from mlxspec.model.hub import cache_of, installed
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
    for profile in profiles_of(config.profiles, served_names(config)).values():
        local.append(LocalModel(profile.name, "profile", None, 0, defaults=str(profile)))
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


def suggested(config: Config) -> list[LocalModel]:
    """The models of the README's table, as if none was downloaded."""
    from mlxspec.load.loader import room

    limit = room(config)
    return [
        LocalModel(name, "model", None, size, fits="yes" if size <= limit else "no")
        for name, size in read_json(data_dir("models") / "suggested.json").items()
    ]


def pull(model: Model = None) -> None:
    """Download and convert a model without serving it."""
    log_to_stderr("info")
    blas.load()
    from mlxspec.load.resolve import resolve_model

    resolved = resolve_model(load_config({"model": model}))
    for one in (resolved, resolved.draft):
        if one:
            print(f"{one.name} is in {one.path}, {format_size(weight_bytes(one.path))}")


def rm(
    model: Annotated[
        KnownName,
        typer.Argument(
            parser=KnownName,
            metavar="MODEL",
            help="A downloaded model, by the name that mlxspec models shows.",
            autocompletion=names_on_disk,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", metavar="", help="Do not ask.")] = False,
) -> None:
    """Delete a downloaded model from this disk. Its measurements and trained heads stay.

    Other programs that use Hugging Face's cache have to download it again.
    """
    from mlxspec.model.hub import cache_of, downloaded, remove

    folders = downloaded(model, cache_of(load_config({})))
    if not yes:
        typer.confirm(f"Delete {model}?", abort=True)
    print(f"{format_size(remove(folders))} freed")


def search(
    text: Annotated[
        FreeText,
        typer.Argument(parser=FreeText, metavar="TEXT", help="A part of the name."),
    ],
) -> None:
    """Find models of mlx-community on Hugging Face, the most downloaded first."""
    from huggingface_hub import HfApi

    try:
        found = list(HfApi().list_models(author=PUBLISHER, search=text, limit=FOUND))
    except Exception as error:  # the hub's client lets its HTTP library's own errors through
        raise UserError(f"the hub cannot be searched: {line_of(error)}") from error
    print_table(("name", "downloads"), [(one.id, f"{one.downloads or 0:,}") for one in found])


def models(as_json: AsJson = False) -> None:
    """List the models on this disk, and those that can be downloaded by name."""
    config = load_config({})
    local = local_models(config)
    known = {one.name for one in local}
    local += [one for one in suggested(config) if one.name not in known]
    if as_json:
        print(json.dumps([asdict(one) for one in local], indent=2, default=str))
        return
    if sys.stdout.isatty() and get_terminal_size().columns < WIDE:
        _print_narrow(local)
        return
    rows = []
    for one in local:
        path = one.defaults or str(one.path or "not downloaded").replace(str(Path.home()), "~")
        rows.append(
            (
                one.name,
                one.kind,
                "" if one.defaults else format_size(one.bytes),
                one.fits,
                "yes" if one.sees else "",
                one.tools,
                one.head,
                path,
            ),
        )
    print_table(("name", "kind", "size", "fits", "images", "tools", "head", "path"), rows)


def _print_narrow(local: Sequence[LocalModel]) -> None:
    """The same for a terminal of 80 columns: a line a model, without heads."""
    rows: list[tuple[str, ...]] = []
    for one in local:
        if one.kind == "profile":
            rows.append((one.name, "profile", "", "", "", "", ""))
        elif one.kind == "model":
            facts = [one.path, one.sees, one.tools, one.head]
            here, *others = ["yes" if fact else "" for fact in facts]
            rows.append((one.name, format_size(one.bytes), here, one.fits, *others))
    print_table(("name", "size", "here", "fits", "images", "tools", "head"), rows)
    note(f"with {WIDE} columns, or --json: paths, heads, and how tools are called")

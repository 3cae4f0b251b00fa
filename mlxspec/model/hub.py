"""From a model's name to its directory: a built-in model, a directory, or a Hugging Face id.

Rule: a directory is checked for completeness before anything is loaded from it. Nothing here
imports mlx before a model has to be converted.
"""

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path

from pydantic import BaseModel, ValidationError

from mlxspec import log
from mlxspec.config import BUILT_IN, Config, data_dir
from mlxspec.files import WEIGHT_FILES, default_cache_dir, format_size, read_json
from mlxspec.model.cards import Mode, cards, target_of
from mlxspec.types import Json, UnsupportedModel, line_of

# Where other programs keep models in mlx-lm's format: NAME or PUBLISHER/NAME in each.
FOLDERS = (
    "~/.lmstudio/models",
    "~/.cache/lm-studio/models",
    "~/.omlx/models",
    "~/.swama/models",
    "~/MLXModels",  # Osaurus
)
MAX_INSTALLED = 5000  # models that are looked at in each place
HUB_FILES = (*WEIGHT_FILES, "*.json", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja")
# Fields that only a head's config.json has.
HEAD_FIELDS = {"speculators_model_type", "dflash_config", "markov_rank", "draft_vocab_size"}
STORED = "*-" + "[0-9a-f]" * 8  # matches the names that `storage_name` returns
NAMED = r"[\w.-]*\d[\w.-]*"  # matches a repository's name, without its owner
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class Index(BaseModel):
    """model.safetensors.index.json: the weight file of each tensor."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model directory, and the name to serve it under."""

    path: Path
    name: str


def cache_of(config: Config) -> Path:
    """The configured cache directory, or the platform's."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()


def prompts_of(config: Config) -> Path:
    """The directory of the prefix cache."""
    return cache_of(config) / "prompts"


def storage_name(name: str, path: Path) -> str:
    """The name of a model's files in the cache directory: the model's name, for people, and a hash
    of its directory in 8 hex digits, which alone identifies it."""
    digest = blake2b(os.fsencode(path.resolve()), digest_size=4).hexdigest()
    return f"{name.replace('/', '--')}-{digest}"


def learned_head(model: Resolved, cache_dir: Path) -> Path | None:
    """The directory of the head that was trained here for a model, under any name, else of the
    built-in model's head; None if there is none."""
    folders = list((cache_dir / "heads").glob(f"*{storage_name('', model.path)}"))
    folders.append(data_dir("models") / "heads" / model.name.replace("/", "--"))
    return next((path for path in folders if (path / "config.json").is_file()), None)


def installed() -> dict[str, Path]:
    """The models and heads in Hugging Face's cache and in FOLDERS, complete or not, by hub id or
    name; of equal names the first."""
    from huggingface_hub import constants

    paths = {}
    for repo in islice(Path(constants.HF_HUB_CACHE).glob("models--*"), MAX_INSTALLED):
        name = repo.name[8:].replace("--", "/", 1)
        if path := _cached(name):
            paths[name] = path
    for folder, depth in product(FOLDERS, ("*", "*/*")):
        root = Path(folder).expanduser()
        for file in islice(root.glob(f"{depth}/config.json"), MAX_INSTALLED):
            paths.setdefault(str(file.parent.relative_to(root)), file.parent)
    return paths


def resolve(name: str, cache_dir: Path, metal: bool, draft: bool = False) -> Resolved:
    """The model called `name`, downloaded if it is missing; "" is the built-in default. The last
    part of an installed model's id is enough. `draft`: it may be a head, which has no tokenizer.

    Raises UnsupportedModel with the reason and the fix.
    """
    built_in = cards()
    name = name or BUILT_IN
    if name in built_in:
        from mlxspec.model.embedded import embedded

        return Resolved(embedded(name, built_in[name], cache_dir, mode=_mode(metal)), name)
    file = os.path.expanduser(name)  # os.path accepts any text, Path raises for some
    if os.path.isdir(file):
        path = Path(file).resolve()
        return _checked(path, path.name, draft)
    if os.path.isfile(file):
        raise UnsupportedModel(
            f"{name} is a file; give the directory that holds it, in mlx-lm's format",
        )
    if _is_hub_id(name):
        if not draft:  # before gigabytes are downloaded
            _refuse_head(name, {})
        local = installed().get(name)
        if local and not _cached(name):
            with suppress(UnsupportedModel):  # it may be there in part, or in another format
                return _checked(local, name, draft)
        return _checked(_download(name), name, draft)
    models = installed()
    full_names = [model for model in models if Path(model).name == name]
    if len(full_names) > 1:
        raise UnsupportedModel(f"{name!r} may be any of {full_names}; give the whole name")
    for full_name in full_names:
        return _checked(models[full_name], full_name, draft)
    guess = f"; did you mean mlx-community/{name}?" if re.fullmatch(NAMED, name) else ""
    raise UnsupportedModel(
        f"no model {name!r}: it is neither a directory, nor a hub id such as mlx-community/NAME,"
        f" nor one of `mlxspec models` ({', '.join(built_in)}){guess}",
    )


def name_of(name: str) -> str:
    """The name under which `resolve` would return the model, if it is there."""
    name = name or BUILT_IN
    if name in cards():
        return name
    if os.path.isdir(file := os.path.expanduser(name)):
        return Path(file).resolve().name
    if _is_hub_id(name):
        return name
    return next((model for model in installed() if Path(model).name == name), name)


def find_local(name: str, cache_dir: Path, metal: bool, draft: bool = False) -> Path | None:
    """The directory of a model, or with `draft` a head, if `resolve` would not download it, else
    None.

    Raises UnsupportedModel.
    """
    name = name or BUILT_IN
    if name in cards():
        path = cache_dir / "models" / f"{name}-{_mode(metal)}"
        return path if path.is_dir() else None
    if os.path.exists(os.path.expanduser(name)) or not _is_hub_id(name):
        return resolve(name, cache_dir, metal, draft=draft).path
    return installed().get(name)


def folder_name(name: str) -> str:
    """The name of a repository's folder in the hub's cache."""
    return f"models--{name.replace('/', '--')}"


def hub_folder(name: str) -> Path:
    """The folder of a repository in the hub's cache, whether or not it is there."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / folder_name(name)


def bytes_here(name: str) -> int:
    """Bytes on this disk of a repository's files, whole or in part."""
    count = 0
    for file in hub_folder(name).glob("blobs/*"):
        with suppress(OSError):  # a file that is complete gets another name
            count += file.stat().st_size
    return count


def download_bytes(name: str) -> int:
    """The size of the files that a download takes, which is asked of the hub. Raises
    UnsupportedModel."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

    try:
        info = HfApi().model_info(name, timeout=HF_HUB_ETAG_TIMEOUT, files_metadata=True)
    except Exception as error:  # the hub's client lets its HTTP library's own errors through
        raise _not_downloaded(name, error) from error
    wanted = [
        file
        for file in getattr(info, "siblings", None) or ()
        if any(fnmatch(file.rfilename, pattern) for pattern in HUB_FILES)
    ]
    return sum(file.size or 0 for file in wanted)


def _cached(name: str) -> Path | None:
    """The directory of a repository in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _mode(metal: bool) -> Mode:
    return "4bit" if metal else "fp32"


def _is_hub_id(name: str) -> bool:
    owner, _, repository = name.partition("/")
    return bool(owner.strip("~.") and repository) and "/" not in repository


def _checked(path: Path, name: str, draft: bool) -> Resolved:
    """A model's directory, or with `draft` a head's, that is complete. Raises UnsupportedModel."""
    needed, weights = _shards(path), "*.safetensors"
    files = {file.name for file in path.iterdir() if file.is_file()}
    if not draft:
        _refuse_head(name, read_json(path / "config.json"))
        needed.add("config.json")
        weights = "model*.safetensors"
    missing = sorted(needed - files)
    if not any(path.glob(weights)):
        missing.append("model*.safetensors")
    if files.isdisjoint(TOKENIZERS) and not draft:
        missing.append("tokenizer.json or tokenizer.model")
    if missing:
        other = "convert one of another format with `mlx_lm.convert`"
        if draft:
            other += ", a head's .pt file as docs/heads.md says"
        names = ", ".join(name[:99] for name in missing[:5])
        raise UnsupportedModel(
            f"{path} is not a complete mlx-lm model: {len(missing)} missing ({names}); complete its"
            f" download, or {other}",
        )
    return Resolved(path, name)


def _refuse_head(name: str, config: Json) -> None:
    """Raises UnsupportedModel for a head, which is not a model, by its name or config.json."""
    target = target_of(name)
    kind = str(config.get("model_type", ""))
    if target or kind.endswith(("_mtp", "_assistant")) or not HEAD_FIELDS.isdisjoint(config):
        target = target or "the model that it was made for"
        raise UnsupportedModel(
            f"{name} is a head, which drafts for a model and cannot answer alone: serve"
            f" {target} and give this as --draft",
        )


def _shards(path: Path) -> set[str]:
    """The weight files that the model's index lists."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return set(Index.model_validate_json(index.read_bytes()).weight_map.values())
    except ValidationError as error:
        raise UnsupportedModel(f"{index} is not an index of weight files; download it") from error


def downloaded(name: str, cache_dir: Path) -> list[Path]:
    """The folders of a downloaded model, by its hub id or the last part of it, or of the built-in
    one. Raises UnsupportedModel where it is not there or is another program's."""
    if name in cards():
        folders = list((cache_dir / "models").glob(f"{name}-*"))
    else:
        found = sorted(full for full in installed() if name in (full, Path(full).name))
        if len(found) > 1:
            raise UnsupportedModel(f"{name!r} may be any of {found}; give the whole name")
        name = "".join(found) or name
        # A download that was stopped has no snapshot, so it is not among those installed.
        folder = hub_folder(name)
        folders = [folder] if _is_hub_id(name) and folder.is_dir() else []
        if found and not folders:
            raise UnsupportedModel(
                f"{installed()[name]} is another program's; delete it there",
            )
    if not folders:
        raise UnsupportedModel(f"{name} is not on this disk; mlxspec models lists what is")
    return folders


def remove(folders: list[Path]) -> int:
    """Delete a downloaded model and return its bytes. Raises OSError."""
    freed = 0
    for folder in folders:
        freed += sum(f.stat().st_size for f in folder.rglob("*") if not f.is_symlink())
        shutil.rmtree(folder)
    return freed


def _check_disk(name: str, size: int) -> None:
    """Say how much is downloaded. Raises UnsupportedModel where the disk has no room for it."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UnsupportedModel(
            f"{name} has {format_size(size)}, and {format_size(free)} are free on the disk of"
            f" {folder}; delete something, such as a model by mlxspec rm",
        )
    log.info("downloading %s: %s", name, format_size(size))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    cached = _cached(name)
    try:  # snapshot_download waits for this answer without limit
        size = download_bytes(name)
    except UnsupportedModel:
        if cached:
            return cached
        raise
    if not cached:
        _check_disk(name, size)
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # likewise
        raise _not_downloaded(name, error) from error


def _not_downloaded(name: str, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} is not on this machine and cannot be downloaded: {line_of(error)}. Check the"
        " name and the network; if the hub says that it is gated, accept its terms there and"
        " run `hf auth login`; or give a directory",
    )

"""From the name that a user gives to a directory that mlx-lm loads: a card, a directory, or a hub
id.

Rule: what is fetched is pinned and checked; a model appears in the cache whole or not at all. No
mlx until something is converted.
"""

import json
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlxspec.config import Config, data_dir
from mlxspec.model.fetch import Source, embedded
from mlxspec.types import UnsupportedModel

DEFAULT = "smollm2-135m-instruct"
HUB_FILES = ("*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja")


class Card(BaseModel):
    """One file of models/; its README explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    license: str
    context: int = Field(gt=0)
    layout: Literal["rows", "gather", "solo"]
    tested: tuple[str, ...] = ()
    draft: str = ""
    sampling: dict[str, float] = {}
    source: Source


@dataclass(frozen=True, slots=True)
class Resolved:
    """A directory with config.json, weights and tokenizer, the name to serve it under, and the
    model that its card wants to draft for it, if any."""

    path: Path
    name: str
    draft: str = ""


def default_cache_dir() -> Path:
    """The user's cache directory, by the platform's custom."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/mlxspec"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxspec"


def cache_of(config: Config) -> Path:
    """The cache directory that the settings name, or the platform's."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()


def prompts_of(config: Config) -> Path:
    """Where in it the prompt cache lies."""
    return cache_of(config) / "prompts"


def cards() -> dict[str, Card]:
    """Every card by name. Raises UnsupportedModel naming the file and the field that is wrong."""
    found = {}
    for file in sorted(data_dir("models").glob("*.toml")):
        try:
            found[file.stem] = Card.model_validate(tomllib.loads(file.read_text("utf-8")))
        except ValidationError as error:
            wrong = [(".".join(map(str, e["loc"])), e["msg"], e["input"]) for e in error.errors()]
            said = "; ".join(f"{field}: {why}, not {given!r:.80}" for field, why, given in wrong)
            raise UnsupportedModel(
                f"{file}: {said}; models/README.md explains the fields"
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise UnsupportedModel(f"{file}: {error}") from error
    return found


def resolve(name: str, cache_dir: Path, metal: bool) -> Resolved:
    """The model that `name` means; "" is the embedded default. Fetches and converts what is not
    there yet, with progress on stderr. Raises UnsupportedModel with what is wrong and what to
    do."""
    known = cards()
    if not name or name in known:
        name = name or DEFAULT
        card = known[name]
        path = embedded(name, card.source, cache_dir, "4bit" if metal else "fp32", card.sampling)
        return Resolved(path, name, card.draft)
    file = os.path.expanduser(name)  # this and isdir take any text; Path's raise on some
    if os.path.isdir(file):
        return Resolved(_checked(Path(file).resolve()), Path(file).resolve().name)
    if os.path.isfile(file):
        raise UnsupportedModel(
            f"{name} is a file; give the directory in mlx-lm's format that holds it"
        )
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/")):
        return Resolved(_checked(_hub(name)), name)
    raise UnsupportedModel(
        f"no model {name!r}: it is neither a directory, nor a hub id such as mlx-community/NAME, nor one of"
        f" the embedded models ({', '.join(known)})"
    )


def held(name: str, cache_dir: Path, metal: bool) -> Path | None:
    """Where `resolve` would find it, None where it would have to fetch it. Raises UnsupportedModel
    as that does."""
    if (name or DEFAULT) in cards():
        path = cache_dir / "models" / f"{name or DEFAULT}-{'4bit' if metal else 'fp32'}"
        return path if path.is_dir() else None
    if not os.path.exists(os.path.expanduser(name)) and name.count("/") == 1:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(
                snapshot_download(name, allow_patterns=list(HUB_FILES), local_files_only=True)
            )
        except (LocalEntryNotFoundError, HFValidationError):
            return None
    return resolve(name, cache_dir, metal).path


def _checked(path: Path) -> Path:
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any(path.glob("model*.safetensors")):
        missing.append("model*.safetensors")
    missing += _shards(path)
    if not any(
        (path / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        missing.append("tokenizer.json or tokenizer.model")
    if missing:
        if len(missing) > 5:
            missing[4:] = [f"{len(missing) - 4} more files"]
        hint = "; convert it with `mlx_lm.convert`" if any(path.glob("*.gguf")) else ""
        raise UnsupportedModel(
            f"{path} is not a model in mlx-lm's format: {', '.join(missing)} is missing{hint}"
        )
    return path


def _shards(path: Path) -> list[str]:
    """The weight files that the model's own index names and that are not there."""
    index = path / "model.safetensors.index.json"
    try:
        named = {str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UnsupportedModel(
            f"{index} is not an index of weight files: {error!r}; fetch it again"
        ) from error
    return sorted(
        name[:99] for name in named - {file.name for file in path.iterdir() if file.is_file()}
    )


def _hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except GatedRepoError as error:
        raise UnsupportedModel(
            f"{name} is gated: accept its terms on the hub, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UnsupportedModel(
            f"the hub has no model {name}, or it is private: check the name"
        ) from error
    except HFValidationError as error:
        raise UnsupportedModel(f"{name!r} is not a hub id: {error}") from error
    except Exception as error:  # the hub's client lets its HTTP library's own errors through
        why = str(error).partition("\n")[0] or type(error).__name__
        raise UnsupportedModel(
            f"{name} is not on this machine and cannot be fetched from the hub: {why}. Check the network, or"
            " serve a model directory: mlxspec serve PATH"
        ) from error

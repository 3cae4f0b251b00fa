"""The cards of built-in models: the files of models/, whose README explains the fields."""

import tomllib
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from mlxspec.config import data_dir
from mlxspec.types import Json, UnsupportedModel, line_of

Mode = Literal["fp32", "4bit"]
C = TypeVar("C", bound=BaseModel)
HEADS = "heads/*.toml"
STRICT = ConfigDict(extra="forbid", frozen=True)


class WheelFile(BaseModel):
    """One file inside a pinned pure Python wheel of the package index."""

    model_config = STRICT

    package: str
    version: str
    member: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(gt=0)


class Card(BaseModel):
    """One built-in model: a file of models/, whose README explains the fields."""

    model_config = STRICT

    title: str
    license: str
    source: WheelFile
    files: dict[str, Json]


class Head(BaseModel):
    """A trained head that was published for a model."""

    model_config = STRICT

    id: str
    kind: Literal["mtp", "dflash", "dspark", "eagle3", "peagle", "assistant", "medusa"]


class HeadCard(BaseModel):
    """The heads of a target: a file of models/heads. `targets` are hub ids of the same model."""

    model_config = STRICT

    targets: list[str]
    heads: list[Head]


def head_of(model: str) -> str:
    """The hub id of the sidecar for a model whose own files hold no head, by the model's hub id or
    the name of a copy; "" if no card has one. Raises UnsupportedModel."""
    for card in _read(HEADS, HeadCard).values():
        if any(_is_named(model, target) for target in card.targets):
            return next((head.id for head in card.heads if head.kind == "mtp"), "")
    return ""


def target_of(head: str) -> str:
    """A model for which a head was published; "" if no card has it. Raises UnsupportedModel."""
    for card in _read(HEADS, HeadCard).values():
        if any(_is_named(head, published.id) for published in card.heads):
            return card.targets[0]
    return ""


def _is_named(name: str, hub_id: str) -> bool:
    """Whether a name is this hub id, that of a copy, or its directory's in the hub's cache."""
    return name in (hub_id, hub_id.partition("/")[2], f"models--{hub_id.replace('/', '--')}")


def _read(pattern: str, kind: type[C]) -> dict[str, C]:
    """The cards in these files of models/, by name. Raises UnsupportedModel."""
    cards_by_name = {}
    for file in sorted(data_dir("models").glob(pattern)):
        try:
            cards_by_name[file.stem] = kind.model_validate(tomllib.loads(file.read_text("utf-8")))
        except ValueError as error:
            raise UnsupportedModel(
                f"{file}: {line_of(error)}; models/README.md explains the fields",
            ) from error
    return cards_by_name


def cards() -> dict[str, Card]:
    """The built-in models by name. Raises UnsupportedModel."""
    return _read("*.toml", Card)

"""The cards of built-in models: the files of models/, whose README explains the fields."""

import tomllib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlxspec.config import data_dir
from mlxspec.types import UnsupportedModel, line_of

Mode = Literal["fp32", "4bit"]
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
    draft: str = ""
    source: WheelFile
    files: dict[str, dict[str, Any]]


def cards() -> dict[str, Card]:
    """The built-in models by name. Raises UnsupportedModel."""
    found = {}
    for file in sorted(data_dir("models").glob("*.toml")):
        try:
            found[file.stem] = Card.model_validate(tomllib.loads(file.read_text("utf-8")))
        except ValueError as error:
            raise UnsupportedModel(
                f"{file}: {line_of(error)}; models/README.md explains the fields"
            ) from error
    return found

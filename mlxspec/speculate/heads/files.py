"""Finds a trained head in a directory by its tensors, in any packaging: a directory of its own
(sidecar), a model's shards, a file beside them.

Rule: a head is proven by its tensors alone, not by what config.json promises. They stay on disk
until a head is built from them.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.files import read_json
from mlxspec.model.checkpoint import flat
from mlxspec.types import Json, UnsupportedModel, line_of

BESIDE = ("mtp.safetensors", "mtp/weights.safetensors")
BESIDE_PREFIX = "beside."  # of the names of tensors in these files
# By kind, a tensor that only such heads have, and another beside it, if a model may have a tensor
# of the first name.
MARKS = (
    ("mtp", "pre_fc_norm_hidden.weight", ""),
    ("nextn", "eh_proj.weight", ""),
    ("eagle3", "layers.0.hidden_norm.weight", "fc.weight"),
    ("eagle3", "midlayer.hidden_norm.weight", "fc.weight"),
    ("block", "hidden_norm.weight", "fc.weight"),
    ("medusa", "0.0.linear.weight", "0.0.linear.bias"),
    ("assistant", "post_projection.weight", "pre_projection.weight"),
)


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The tensors of a head by their names in its module, lazy; `kind` is the loader's, "" where
    there is no head. `standalone`: there is no model beside it. `error`: why a file cannot be read;
    then config.json tells whether it is a head's."""

    path: Path
    config: Json
    standalone: bool = False
    kind: str = ""
    tensors: dict[str, mx.array] = field(default_factory=dict)
    error: UnsupportedModel | None = None

    @property
    def promised(self) -> bool:
        """Whether a model's config.json promises an MTP head."""
        config = flat(self.config)
        layers = config.get("mtp_num_hidden_layers") or config.get("num_nextn_predict_layers")
        return bool(layers) and not _is_sidecar(self.config)


def find_head(path: Path) -> HeadFiles:
    """The head in a directory, if there is one."""
    config = read_json(path / "config.json")
    none = HeadFiles(path, config)
    tensors: dict[str, mx.array] = {}
    file = path
    try:
        beside = {path / name for name in (*BESIDE, _mtp_file(config))}
        for file in sorted({*path.glob("*.safetensors"), *filter(Path.is_file, beside)}):
            arrays: Any = mx.load(str(file))
            within = BESIDE_PREFIX if file in beside else ""
            tensors |= {within + name: array for name, array in arrays.items()}
    except (OSError, RuntimeError, ValueError) as error:
        why = UnsupportedModel(f"{file} cannot be read: {line_of(error)}; download it again")
        return replace(none, standalone=_is_sidecar(config), error=why)
    for kind, mark, other in MARKS:
        ends = [name.removesuffix(mark) for name in tensors if f".{name}".endswith(f".{mark}")]
        if prefixes := [prefix for prefix in ends if prefix + (other or mark) in tensors]:
            prefix = min(prefixes)  # in a file beside, else the first of several layers
            within = "" if prefix == "model." else prefix  # a sidecar's lm_head lies outside
            inner = {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(within)}
            return replace(none, standalone=len(inner) == len(tensors), kind=kind, tensors=inner)
    return none


def find_draft(path: Path, target: Path) -> HeadFiles:
    """What --draft names, for the model in `target`: if it is the same model, unconverted for
    example, only its head is wanted."""
    files = find_head(path)
    if files.kind and _sizes(files.config) == _sizes(read_json(target / "config.json")):
        return replace(files, standalone=True)
    return files


def _sizes(config: Json) -> list[Any]:
    """Sizes that are equal in all precisions of a model."""
    return [flat(config).get(name) for name in ("hidden_size", "num_hidden_layers")]


def _is_sidecar(config: Json) -> bool:
    return str(config.get("model_type", "")).endswith(("_mtp", "_assistant"))


def _mtp_file(config: Json) -> str:
    """The file that a model's config.json names for its head. Raises ValueError."""
    extra = config.get("mlx_lm_extra_tensors")
    file = extra.get("mtp_file") if isinstance(extra, dict) else None
    name = str(file or BESIDE[0])
    if {"", ".."} & set(name.split("/")):
        raise ValueError(f"config.json has mtp_file = {name!r}, which is not beside it")
    return name

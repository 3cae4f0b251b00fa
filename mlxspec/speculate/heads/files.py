"""Finds a trained head in a directory by the tensors that are there, in any packaging: a directory
of its own (sidecar), in a model's shards, in a file beside them.

Rule: what config.json promises proves nothing; only tensors do. They stay on disk until a head is
built from them.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.files import read_json
from mlxspec.model.layout import flat
from mlxspec.types import Json, UnsupportedModel, line_of

BESIDE = ("mtp.safetensors", "mtp/weights.safetensors")
OF_FILE = "beside."  # goes before the names of what lies in these
# By kind, a tensor that only such heads have, and what lies beside it, where a model may have one
# of the same name.
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
    """What a directory holds of a head."""
    config = read_json(path / "config.json")
    none = HeadFiles(path, config)
    found: dict[str, mx.array] = {}
    file = path
    try:
        beside = {path / name for name in (*BESIDE, _named(config))}
        for file in sorted({*path.glob("*.safetensors"), *filter(Path.is_file, beside)}):
            tensors: Any = mx.load(str(file))
            within = OF_FILE if file in beside else ""
            found |= {within + name: array for name, array in tensors.items()}
    except (OSError, RuntimeError, ValueError) as error:
        why = UnsupportedModel(f"{file} cannot be read: {line_of(error)}; download it again")
        return replace(none, standalone=_is_sidecar(config), error=why)
    for kind, mark, other in MARKS:
        ends = [name.removesuffix(mark) for name in found if f".{name}".endswith(f".{mark}")]
        if prefixes := [prefix for prefix in ends if prefix + (other or mark) in found]:
            prefix = min(prefixes)  # in a file beside, else the first of several layers
            within = "" if prefix == "model." else prefix  # a sidecar's lm_head lies outside
            own = {n.removeprefix(prefix): a for n, a in found.items() if n.startswith(within)}
            return replace(none, standalone=len(own) == len(found), kind=kind, tensors=own)
    return none


def find_draft(path: Path, target: Path) -> HeadFiles:
    """What --draft names, for the model in `target`: of the same model, unconverted for example,
    only its head is wanted."""
    found = find_head(path)
    if found.kind and _sizes(found.config) == _sizes(read_json(target / "config.json")):
        return replace(found, standalone=True)
    return found


def _sizes(config: Json) -> list[Any]:
    """What is equal in all precisions of a model."""
    return [flat(config).get(name) for name in ("hidden_size", "num_hidden_layers")]


def _is_sidecar(config: Json) -> bool:
    return str(config.get("model_type", "")).endswith(("_mtp", "_assistant"))


def _named(config: Json) -> str:
    """The file of its head that a model's config.json names. Raises ValueError."""
    extra = config.get("mlx_lm_extra_tensors")
    named = extra.get("mtp_file") if isinstance(extra, dict) else None
    name = str(named or BESIDE[0])
    if {"", ".."} & set(name.split("/")):
        raise ValueError(f"config.json has mtp_file = {name!r}, which is not beside it")
    return name

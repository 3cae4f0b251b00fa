"""Finds a trained head in a directory by the tensors that are there, in any packaging: a directory
of its own (sidecar), in a model's shards, in a file beside them.

Rule: what config.json promises proves nothing; only tensors do. They stay on disk until a head is
built from them.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.types import UnsupportedModel, line_of

BESIDE = ("mtp.safetensors", "mtp/weights.safetensors")
# A tensor that only heads of this kind have.
MARKS = {
    "pre_fc_norm_hidden.weight": "mtp",
    "eh_proj.weight": "nextn",
    "layers.0.hidden_norm.weight": "eagle3",
    "midlayer.hidden_norm.weight": "eagle3",
    "hidden_norm.weight": "block",
}


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The tensors of a head by their names in its module, lazy; `kind` is the loader's. `alone`:
    there is no model beside it."""

    kind: str
    path: Path
    tensors: dict[str, mx.array]
    config: dict[str, Any]
    alone: bool


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory; {} where there is none that can be read."""
    try:
        return dict(json.loads((path / "config.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def find_head(path: Path) -> HeadFiles | None:
    """The head in a directory, None if there is none. Raises UnsupportedModel for a damaged
    file."""
    beside = {path / name for name in (*BESIDE, _named(path))}
    found: dict[str, mx.array] = {}
    for file in sorted({*path.glob("*.safetensors"), *filter(Path.is_file, beside)}):
        try:
            tensors = dict(mx.load(str(file)))  # type: ignore[arg-type]
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModel(
                f"{file} cannot be read: {line_of(error)}; download it again"
            ) from error
        if file in beside and (head := _head_in(path, tensors)):
            return replace(head, alone=not any(path.glob("model*.safetensors")))
        found |= tensors
    return _head_in(path, found)


def _head_in(path: Path, found: dict[str, mx.array]) -> HeadFiles | None:
    for mark, kind in MARKS.items():
        if prefixes := [name.removesuffix(mark) for name in found if name.endswith(mark)]:
            prefix = min(prefixes)  # the first of several layers
            within = "" if prefix == "model." else prefix  # a sidecar's lm_head lies outside
            own = {n.removeprefix(prefix): a for n, a in found.items() if n.startswith(within)}
            return HeadFiles(kind, path, own, read_config(path), len(own) == len(found))
    return None


def is_head(path: Path) -> bool:
    """Whether a directory holds a head and no model. Where a file is damaged, config.json tells:
    the loader reports the damage."""
    try:
        head = find_head(path)
        return head is not None and head.alone
    except UnsupportedModel:
        return _is_sidecar(read_config(path))


def promised(path: Path) -> int:
    """How many MTP layers a model's config.json promises; 0 for a head's own directory."""
    config = read_config(path)
    if _is_sidecar(config):
        return 0
    inner = config.get("text_config")
    config = config | (inner if isinstance(inner, dict) else {})
    layers = config.get("mtp_num_hidden_layers") or config.get("num_nextn_predict_layers") or 0
    return layers if isinstance(layers, int) else 0


def _is_sidecar(config: dict[str, Any]) -> bool:
    return str(config.get("model_type", "")).endswith("_mtp")


def _named(path: Path) -> str:
    """The file of its head that a model's config.json names."""
    extra = read_config(path).get("mlx_lm_extra_tensors")
    named = extra.get("mtp_file") if isinstance(extra, dict) else None
    return named if isinstance(named, str) and named else BESIDE[0]

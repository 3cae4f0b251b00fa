"""A tiny model saved as mlx-lm reads it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec.config import Config
from tests.support import tiny
from tests.support.drafters import random_head


def save(path: Path, kind: str = "llama", **change: Any) -> None:
    m = tiny.model(kind, **change)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(m.parameters())))
    (path / "config.json").write_text(json.dumps(tiny.config(kind, **change)))


settings = partial(Config, cache_gb=0)


def both(root: Path, kind: str) -> tuple[Path, Path]:
    """A model's directory and its head's."""
    target, head = root / "target", root / "head"
    target.mkdir()
    head.mkdir()
    save(target, kind)
    weights = dict(tree_flatten(random_head(tiny.model(kind)).module.parameters()))
    mx.save_safetensors(str(head / "model.safetensors"), weights)
    (head / "config.json").write_text(json.dumps({"model_type": f"{kind}_mtp"}))
    return target, head

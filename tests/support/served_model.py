"""A tiny model saved with a tokenizer, as a server reads it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support import tiny
from tests.tiny_tokenizer import save_tokenizer


def save(path: Path, **changed: Any) -> Path:
    """A model directory."""
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path)
    config = {"model_type": "llama", **tiny.CONFIGS["llama"], **changed}
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(tiny.model("llama").parameters()))
    )
    return path

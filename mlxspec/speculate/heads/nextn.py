"""The multi-token-prediction head of DeepSeek-V3 and GLM: one extra decoder layer ("layer N")
that follows the target's own in the checkpoint.

It computes the same as Qwen's head; only the names differ. It was trained on the hidden state after
the final norm, so a chain continues from its own output after shared_head.norm.
"""

from typing import Any

import mlx.core as mx
from mlx.nn import Module

from mlxspec.model.trunk import decoder_layers
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.heads.mtp import build
from mlxspec.types import UnsupportedModel

# Modules outside the decoder layer, in checkpoints and sidecars, and their names in our module.
OUTER_MODULES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head_norm": "norm",
    "shared_head.head": "lm_head",
    "lm_head": "lm_head",
    "embed_tokens": "embed_tokens",
}


def load_nextn(files: HeadFiles, target: Module) -> HeadModel:
    """The head of `files` for a loaded target. Raises UnsupportedModel."""
    owner: Any = getattr(target, "language_model", target)
    layers = decoder_layers(target)
    make: Any = type(layers[-1])
    if hasattr(owner, "make_cache"):  # an index, a window or a state
        raise UnsupportedModel(
            f"the head in {files.path} cannot be used: such layers keep more than keys and values",
        )
    layer = make(owner.args, len(layers))
    return build(files, _sanitized(files.tensors, owner), [layer], args=owner.args, target=target)


def _sanitized(tensors: dict[str, mx.array], owner: Any) -> dict[str, mx.array]:
    """The tensors in mlx-lm's form and under our names. They pass for the model's first layer,
    because mlx-lm drops layers after the last."""
    first = "model.layers.0."
    as_first = {first + name.removeprefix("mtp_block."): array for name, array in tensors.items()}
    sanitized = {}
    for name, array in owner.sanitize(as_first).items():
        inner = name.removeprefix(first)
        module, _, kind = inner.rpartition(".")
        ours = OUTER_MODULES.get(module)
        sanitized[f"{ours}.{kind}" if ours else f"layers.0.{inner}"] = array
    return sanitized

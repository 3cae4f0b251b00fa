"""Loads a head's tensors into its module."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.model.trunk import embedding_and_lm_head
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.types import Tap, UnsupportedModel, line_of

MODES = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}  # without biases: (group, bits)


def load_tensors(
    files: HeadFiles,
    module: nn.Module,
    tensors: dict[str, mx.array],
) -> None:
    """Load all of a module's tensors, lazily. Raises UnsupportedModel where some are missing, too
    many or of another shape."""
    try:
        _quantize(module, tensors)
        module.load_weights(list(tensors.items()))
    except (KeyError, ValueError) as error:
        raise UnsupportedModel(
            f"the head in {files.path} does not fit the model: {line_of(error)}"
        ) from error
    module.eval()


def add_ends(
    module: nn.Module,
    tensors: dict[str, mx.array],
    vocab: int,
    size: int,
) -> None:
    """Give a module the embedding and the lm_head that its tensors hold."""
    if "embed_tokens.weight" in tensors:
        module.embed_tokens = nn.Embedding(vocab, size)
    if "lm_head.weight" in tensors:
        module.lm_head = nn.Linear(size, vocab, bias=False)


def ends_of(module: nn.Module, target: nn.Module) -> tuple[Any, Any]:
    """The embedding and the lm_head that a head drafts with: its own, or the target's."""
    embed, lm_head = embedding_and_lm_head(target)
    return module.get("embed_tokens", embed), module.get("lm_head", lm_head)


def check_taps(
    files: HeadFiles,
    taps: Sequence[Tap],
    layers: int,
) -> None:
    """Refuse a head that reads layers which the model does not have."""
    if not all(0 <= tap < layers for tap in taps):
        raise UnsupportedModel(
            f"the head in {files.path} reads layers {list(taps)}, this model has {layers}"
        )


def _quantize(module: nn.Module, tensors: dict[str, mx.array]) -> None:
    """Quantize the layers that the files hold quantized, each with its own bits and group size,
    which the shapes of its tensors tell."""

    def how(path: str, layer: nn.Module) -> Any:
        scales = tensors.get(f"{path}.scales")
        if scales is None or not hasattr(layer, "to_quantized"):
            return False
        width = layer.weight.shape[-1]
        group = width // scales.shape[-1]
        bits = tensors[f"{path}.weight"].shape[-1] * 32 // width
        mode = "affine" if f"{path}.biases" in tensors else MODES[group, bits]
        return {"group_size": group, "bits": bits, "mode": mode}

    nn.quantize(module, class_predicate=how)

"""Fills a head's module from the tensors of its files, as they were quantized."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.types import UnsupportedModel

MODES = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}  # without biases: (group, bits)


def fill(module: nn.Module, tensors: dict[str, mx.array], files: HeadFiles) -> None:
    """Give the module its weights, which stay on disk. Raises UnsupportedModel."""
    _quantize(module, tensors)
    try:
        module.load_weights(list(tensors.items()))
    except ValueError as error:
        raise UnsupportedModel(
            f"the head in {files.path} does not fit the model: {str(error).splitlines()[0]}"
        ) from error
    module.eval()


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

"""Vision towers: from an image's patches to rows of the text model's embeddings.

Rule: a tower is read from the files of the text model, in any packaging, and used where one of ours
knows the family; a file that does not fit it leaves the model without eyes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.core import array as Array
from mlx.utils import tree_flatten

from mlxspec.files import tensor_names, weight_files
from mlxspec.model.vision import gemma, pixtral, qwen
from mlxspec.types import Json, UnsupportedModel, line_of

FAMILIES: dict[str, Any] = {
    "mistral3": pixtral.Vision,
    "pixtral": pixtral.Vision,
    "qwen3_5": qwen.Vision,
    "qwen3_5_moe": qwen.Vision,
    "qwen3_vl": qwen.Vision,
    "qwen3_vl_moe": qwen.Vision,
    "gemma4": gemma.Vision,
}
PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "visual.",
)
PATCH_WEIGHTS = ("patch_conv.weight", "patch_embed.proj.weight")


def load_vision(path: Path, config: Json) -> nn.Module | None:
    """The tower of a model directory; its weights stay on disk until they are needed. None for a
    family that none is known of. Raises UnsupportedModel for files that do not fit."""
    try:
        return _load(path, config)
    except UnsupportedModel:
        raise
    except Exception as error:  # a config may hold anything
        raise UnsupportedModel(f"its config.json has no known tower: {line_of(error)}") from error


def _load(path: Path, config: Json) -> nn.Module | None:
    if not _is_known(config):
        return None
    weights: dict[str, Array] = {}
    for file in weight_files(path):
        arrays: Any = mx.load(str(file))
        weights |= {name: array for name, array in arrays.items() if _is_vision(name)}
    return build(config, weights)


def has_tower(path: Path, config: Json) -> bool:
    """Whether a model directory holds a tower of a known family; what it needs is not checked."""
    return _is_known(config) and any(map(_is_vision, tensor_names(path)))


def _is_known(config: Json) -> bool:
    """Whether a config.json names a tower of a known family."""
    return config.get("model_type") in FAMILIES and bool(config.get("vision_config"))


def _is_vision(name: str) -> bool:
    return name.removeprefix("model.").startswith(PARTS)


def build(config: Json, weights: Mapping[str, Array]) -> nn.Module:
    """A tower with weights of any packaging. Raises UnsupportedModel."""
    vision: nn.Module = FAMILIES[config["model_type"]](config)
    named = {_name(name, vision): array for name, array in weights.items() if _is_vision(name)}
    for name, array in named.items():
        if name.endswith(PATCH_WEIGHTS):
            named[name] = flat_patches(array, config["vision_config"].get("num_channels", 3))
    quantization = config.get("quantization") or {}
    if any(name.endswith(".scales") for name in named):

        def quantized(path: str, module: nn.Module) -> bool | dict[str, Any]:
            known = f"{path}.scales" in named and hasattr(module, "to_quantized")
            return known and (own.get(path) or True)

        own = {_name(path, vision): options for path, options in quantization.items()}
        options = {key: own[key] for key in ("group_size", "bits", "mode") if key in own}
        nn.quantize(vision, **options, class_predicate=quantized)
    wanted: Any = tree_flatten(vision.parameters())
    for name, array in wanted:
        if name not in named or named[name].shape != array.shape:
            got = named[name].shape if name in named else "nothing"
            why = f"{name} is {got}, not {array.shape}; give the original checkpoint"
            raise UnsupportedModel(f"the vision tower cannot be read: {why}")
    vision.load_weights([(name, named[name]) for name, _ in wanted])
    return vision


def _name(name: str, vision: nn.Module) -> str:
    """The name of a weight, or of what has some, in our modules."""
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    return name.replace("vision_tower.", "visual.", 1) if "visual" in vision else name


def flat_patches(weight: Array, channels: int) -> Array:
    """[out, patch * patch * channels] of a convolution over patches: torch's, with channels before
    frames and pixels, or MLX's. An image is all frames of a patch, so these are added."""
    if weight.ndim == 2:
        return weight
    if weight.shape[-1] != channels or weight.shape[1] == channels:
        weight = weight.moveaxis(1, -1)
    if weight.ndim == 5:
        weight = weight.sum(1)
    return weight.flatten(1)

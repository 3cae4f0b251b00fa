"""mlx-lm's decoder layers for a head's own config.json."""

import importlib

from mlx.nn import Module

from mlxspec.types import Json, UnsupportedModel, line_of

KINDS = ("llama", "qwen3")  # model_type


def decoder_layer(config: Json) -> Module:
    """A layer with random weights. Raises UnsupportedModel."""
    kind = str(config.get("model_type"))
    if kind not in KINDS:
        raise UnsupportedModel(f"the head's layers are of type {kind!r}; known: {', '.join(KINDS)}")
    if rope := config.get("rope_parameters"):  # mlx-lm's llama knows only the older names
        config = config | rope | {"rope_scaling": rope}
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    try:
        args = module.ModelArgs.from_dict(config)
        layer: Module = module.TransformerBlock(args)
    except (TypeError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"the head's config.json is incomplete: {line_of(error)}") from error
    return layer

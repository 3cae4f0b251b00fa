"""Loads a head's tensors into its module."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array

from mlxspec.model.trunk import embedding_and_lm_head
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.types import Json, Tap, UnsupportedModel, line_of

MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # one setting's names
IGNORED: tuple[str, ...] = ("t2d", "d2t", "verifier_")
MODES = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}  # without biases: (group, bits)


def flat_config(config: Json) -> Json:
    """The settings of a head and of its layers, which the speculators format separates, in one."""
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        return config | {"model_type": "llama"}
    return inner | {name: value for name, value in config.items() if name != "model_type"}


def load_tensors(files: HeadFiles, module: nn.Module, tensors: dict[str, Array]) -> None:
    """Load all of a module's tensors, lazily. Raises UnsupportedModel where some are missing, too
    many or of another shape."""
    try:
        _quantize(module, tensors)
        module.load_weights(list(tensors.items()))
    except (KeyError, ValueError) as error:
        raise UnsupportedModel(
            f"the head in {files.path} does not fit the model: {line_of(error)}",
        ) from error
    module.eval()


def load_module(
    files: HeadFiles,
    module: nn.Module,
    tensors: dict[str, Array],
    size: int,
    target: nn.Module,
    ignored: tuple[str, ...] = (),
) -> tuple[Any, Any, "Vocabulary"]:
    """As `load_tensors`, in the target's precision, with an embedding and an lm_head if the tensors
    hold them, and without tensors whose names begin as `ignored` ones do. Returns the embedding and
    lm_head that the head drafts with, its own or the target's, and the vocabulary of its logits.
    `size` is that of its hidden states. Raises UnsupportedModel, for a head of other tokens too."""
    embed, lm_head = embedding_and_lm_head(target)
    dtype = embed(mx.array([0])).dtype  # two in one product would convert the weights every time
    tensors = {
        n: x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x
        for n, x in tensors.items()
        if not n.startswith((*IGNORED, *ignored))
    }
    if "embed_tokens.weight" in tensors:
        module.embed_tokens = nn.Embedding(len(tensors["embed_tokens.weight"]), size)
    if "lm_head.weight" in tensors:
        module.lm_head = nn.Linear(size, len(tensors["lm_head.weight"]), bias=False)
    load_tensors(files, module, tensors)
    lm_head = module.get("lm_head", lm_head)
    _, vocab = sizes_of(target)
    rows = lm_head(mx.zeros((1, size))).shape[-1]
    offsets = files.tensors.get("d2t")
    ids = mx.arange(rows) + (0 if offsets is None else offsets.astype(mx.int32))
    vocab_sizes = [rows if offsets is None else vocab]
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.QuantizedEmbedding):
            vocab_sizes.append(len(part.weight))
    # MLX does not check indices.
    if min(vocab_sizes) < vocab or ids.min() < 0 or ids.max() >= vocab:
        raise UnsupportedModel(
            f"the head in {files.path} is for a model of more or fewer than {vocab} tokens",
        )
    vocabulary = Vocabulary(None if offsets is None else ids, vocab)
    return module.get("embed_tokens", embed), lm_head, vocabulary


def sizes_of(target: nn.Module) -> tuple[int, int]:
    """A model's hidden size, and the number of its logits. Raises UnsupportedModel."""
    embed, lm_head = embedding_and_lm_head(target)
    example = embed(mx.array([0]))
    return example.shape[-1], lm_head(example).shape[-1]


def check_taps(files: HeadFiles, taps: Sequence[Tap], layers: int) -> None:
    """Refuse a head that reads layers which the model does not have."""
    if not all(0 <= tap < layers for tap in taps):
        raise UnsupportedModel(
            f"the head in {files.path} reads layers {list(taps)}, this model has {layers}",
        )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Makes logits [n, size] of those for the tokens `ids`, int32; others are never drafted. None:
    they are for all tokens."""

    ids: Array | None
    size: int

    def __call__(self, logits: Array) -> Array:
        if self.ids is None:
            return logits
        wide = mx.full((len(logits), self.size), -mx.inf, logits.dtype)
        wide[:, self.ids] = logits
        return wide


def mask_of(files: HeadFiles, config: Json, embed: Any) -> int:
    """The token in the place of those that are not drafted yet. Raises UnsupportedModel."""
    mask = next((config[name] for name in MASKS if config.get(name) is not None), None)
    if not isinstance(mask, int) or not 0 <= mask < len(embed.weight):
        raise UnsupportedModel(
            f"the head in {files.path} has mask_token_id = {mask}, not a token of this model:"
            " take its config.json from the same revision as its tensors",
        )
    return mask


def _quantize(module: nn.Module, tensors: dict[str, Array]) -> None:
    """Quantize the layers that the files hold quantized, each with the bits and group size that the
    shapes of its tensors show."""

    def quantization(path: str, layer: nn.Module) -> Any:
        scales = tensors.get(f"{path}.scales")
        if scales is None or not hasattr(layer, "to_quantized"):
            return False
        width = layer.weight.shape[-1]
        group = width // scales.shape[-1]
        bits = tensors[f"{path}.weight"].shape[-1] * 32 // width
        mode = "affine" if f"{path}.biases" in tensors else MODES[group, bits]
        return {"group_size": group, "bits": bits, "mode": mode}

    nn.quantize(module, class_predicate=quantization)

"""EAGLE-3 (arXiv 2503.01840): one layer over a token's embedding and a hidden state: fused from
three of the target's layers or, for a drafted token, the head's own output.

Reads the speculators format and the authors' own. Drafts may come from a reduced vocabulary.
P-EAGLE (arXiv 2602.01469) puts a learned vector in the place of missing hidden states.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array

from mlxspec.model.layers import decoder_layer
from mlxspec.model.trunk import decoder_layers
from mlxspec.speculate.heads.chained import ChainedPass, ParallelPass
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.heads.tensors import (
    check_taps,
    flat_config,
    load_module,
    mask_of,
    sizes_of,
)
from mlxspec.types import Json, Tap

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class FirstLayer(nn.Module):
    """A decoder layer whose attention sees [embedding, hidden state], 2 * D wide."""

    def __init__(self, layer: Any, size: int, eps: float, norm_before_residual: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm_before_residual = norm_before_residual
        for name, part in layer.items():
            self[name] = part
        self.hidden_norm = nn.RMSNorm(size, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = self.self_attn[name]
            wide = nn.Linear(2 * size, narrow.weight.shape[0], bias="bias" in narrow)
            self.self_attn[name] = wide

    def __call__(self, embedded: Array, hidden: Array, mask: Any, cache: Any) -> Any:
        """[B, L, D] of embedded and hidden [B, L, D]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        x = residual + self.self_attn(x, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """The head's modules under their published names. It reads `taps` of the target's hidden
    states, of `width` each."""

    def __init__(self, config: Json, taps: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        layers: list[Any] = [decoder_layer(config) for _ in range(config["num_hidden_layers"])]
        residual = bool(config.get("norm_before_residual"))
        self.layers = [
            FirstLayer(layers[0], size, eps, norm_before_residual=residual),
            *layers[1:],
        ]
        self.fc = nn.Linear(taps * width, size, bias=False)
        if config.get("norm_before_fc"):
            self.input_norm = nn.RMSNorm(taps * width, eps)
        if config.get("fc_norm"):
            self.fc_norm = [nn.RMSNorm(width, eps) for _ in range(taps)]
        self.norm = nn.RMSNorm(size, eps)
        self.norm_output = bool(config.get("norm_output"))

    def prepare(self, taps: Array) -> Any:
        """[T, D] of the target's hidden states side by side, [T, taps * width]."""
        if "input_norm" in self:
            taps = self.input_norm(taps)
        if "fc_norm" in self:
            parts = mx.split(taps, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            taps = mx.concatenate(normed, axis=-1)
        return self.fc(taps)

    def __call__(self, embedded: Array, hidden: Array, caches: Any) -> Any:
        """[B, L, D] of embedded and hidden [B, L, D]."""
        mask = caches[0].make_mask(embedded.shape[1], return_array=True, window_size=None)
        x = self.layers[0](embedded, hidden, mask, caches[0])
        for layer, cache in zip(self.layers[1:], caches[1:], strict=True):
            x = layer(x, mask, cache)
        return self.norm(x) if self.norm_output else x

    def normed(self, out: Array) -> Any:
        """The input of lm_head from the head's output [n, D]."""
        return out if self.norm_output else self.norm(out)


def load_eagle(files: HeadFiles, target: nn.Module) -> HeadModel:
    """The head of `files` for a loaded target. Raises UnsupportedModel and KeyError."""
    config = flat_config(files.config)
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in files.tensors.items()}
    width, _ = sizes_of(target)
    layers = len(decoder_layers(target))
    taps = _taps(config, layers)
    check_taps(files, taps, layers)
    size = config["hidden_size"]
    module = Eagle3(config, len(taps), width)
    parallel = "mask_hidden" in tensors
    if parallel:
        module.mask_hidden = tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    own_embedding = config.get("embed_requires_grad", parallel) or size != width
    ignored = () if own_embedding else ("embed_tokens.",)
    embed, lm_head, vocabulary = load_module(
        files, module, tensors, size=size, target=target, ignored=ignored
    )
    if parallel:
        module.mask = mask_of(files, config, embed)

    def logits(out: Array) -> Array:
        return vocabulary(lm_head(module.normed(out)))

    return HeadModel(
        "peagle" if parallel else "eagle3",
        ParallelPass if parallel else ChainedPass,
        module,
        embed=embed,
        lm_head=logits,
        width=len(taps) * width,
        taps=taps,
        prepare=module.prepare,
        kv_layers=len(module.layers),
    )


def _taps(config: Json, layers: int) -> tuple[Tap, ...]:
    """The taps of the configured ids: id i stands for the hidden state before layer i."""
    eagle = config.get("eagle_config") or {}
    ids = config.get(AUX_LAYERS) or eagle.get(AUX_LAYERS) or (2, layers // 2, layers - 3)
    return tuple(i - 1 for i in ids)

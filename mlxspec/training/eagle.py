"""A new EAGLE-3 head (arXiv 2503.01840), in the speculators format, and its drafts of a batch.

It starts as a copy of the target's last layer, which reads the hidden state before that layer: from
random weights it would need many times as many answers.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.model.layers import decoder_layer
from mlxspec.model.trunk import decoder_layers
from mlxspec.speculate.heads.eagle import AUX_LAYERS
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.training.target import Batch, Target
from mlxspec.types import Json, UnsupportedModel

CHAIN = 4  # tokens of a draft that is trained on
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "rope_traditional")
START = 0.02  # standard deviation of weights that start at random


def new_head(target: Target, vocabulary: Sequence[int]) -> HeadFiles:
    """An untrained head that drafts the tokens `vocabulary`."""
    size, config = target.width, _config(target, len(vocabulary))
    layer = _last_layer(target, config["transformer_layer_config"])
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"self_attn.{part}.weight"
        layer[name] = mx.pad(layer[name], [(0, 0), (size, 0)])  # the embedding has no effect yet
    layer["hidden_norm.weight"] = layer["input_layernorm.weight"]
    layer["input_layernorm.weight"] = mx.ones(size)
    norm = _weight(target.trunk.get("norm", {}))
    ids = mx.array(list(vocabulary))
    lm_head = _weight(target.lm_head, ids)
    if lm_head is None:
        raise UnsupportedModel("no head can be trained: the model's lm_head has no weight")
    tensors = {f"layers.0.{name}": array for name, array in layer.items()} | {
        "fc.weight": mx.pad(mx.eye(size), [(0, 0), (2 * size, 0)]),  # the last hidden state
        "norm.weight": mx.ones(size) if norm is None else norm,
        "lm_head.weight": lm_head,
        "d2t": (ids - mx.arange(len(ids))).astype(mx.int64),
        "t2d": mx.zeros((target.vocab,), mx.int32).at[ids].add(1).astype(mx.bool_),
    }
    return HeadFiles(Path(os.devnull), config, tensors=tensors)


def _config(target: Target, drafted: int) -> Json:
    """config.json of a head that drafts `drafted` different tokens: a layer like the target's,
    described as a llama's. It reads hidden states before three layers and passes on the last."""
    base, size, layers = (
        target.config,
        target.width,
        len(decoder_layers(target.model)),
    )
    heads = base.get("num_attention_heads") or max(1, size // 64)
    width = base.get("intermediate_size")
    width = width if isinstance(width, int) else 3 * size  # else one for each layer
    layer = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": size,
        "vocab_size": target.vocab,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": base.get("num_key_value_heads") or heads,
        "head_dim": base.get("head_dim") or size // heads,
        "intermediate_size": min(width, 4 * size),
        "rms_norm_eps": base.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": base.get("max_position_embeddings") or 8192,
        **{name: base[name] for name in ROPE if base.get(name) is not None},
    }
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": drafted,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": CHAIN - 1}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": base.get("architectures"),
            },
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        AUX_LAYERS: [2, layers // 2, layers - 1],
    }


def _last_layer(target: Target, config: Json) -> dict[str, mx.array]:
    """Weights for a decoder layer with this config, by their names in it: those of the target's
    last layer where they have the same shape, else random ones."""
    last: Any = decoder_layers(target.model)[-1]
    modules = dict(last.named_modules())
    weights: dict[str, mx.array] = {}
    leaves: Any = tree_flatten(decoder_layer(config).parameters())
    for name, leaf in leaves:
        weight = _weight(modules.get(name.removesuffix(".weight"), {}))
        if weight is not None and weight.shape == leaf.shape:
            weights[name] = weight
        elif leaf.ndim == 1:
            weights[name] = mx.ones(leaf.shape)
        else:
            key = mx.random.key(len(weights))
            weights[name] = mx.random.normal(leaf.shape, scale=START, key=key)
    return weights


def _weight(module: Any, rows: Any = slice(None)) -> Any:
    """The factors that a module multiplies with, None without a weight: a norm's including what
    it adds to its weight, `rows` of a matrix, dequantized."""
    weight = module.get("weight")
    if weight is None:
        return None
    if weight.ndim == 1:
        signs = 1.0 - 2 * (mx.arange(len(weight)) % 2)  # which every kind of norm leaves unchanged
        return signs * module(signs[None])[0]
    kind: Any = nn.QuantizedEmbedding if "scales" in module else nn.Embedding
    return kind.__call__(module, rows)  # a Linear stores its weight alike


class Unrolled:
    """Replaces a layer's cache while a chain is trained (EAGLE-3's training-time test): row t of
    step s, at position t + s, sees the rows of the first step up to its own, and of later steps
    only those of its own chain."""

    def __init__(self) -> None:
        self.steps: list[tuple[mx.array, mx.array]] = []

    @property
    def offset(self) -> int:
        return len(self.steps)

    def update_and_fetch(
        self,
        k: mx.array,
        v: mx.array,
    ) -> tuple[mx.array, mx.array]:
        self.steps.append((k, v))
        keys = mx.concatenate([k for k, _ in self.steps], axis=2)
        return keys, mx.concatenate([v for _, v in self.steps], axis=2)

    def make_mask(
        self,
        rows: int,
        **options: Any,
    ) -> mx.array:
        """bool [rows, rows of all steps so far]."""
        chain = mx.eye(rows).astype(mx.bool_)
        return mx.concatenate([mx.tri(rows).astype(mx.bool_)] + [chain] * self.offset, axis=1)


def eagle_drafts(
    head: HeadModel,
    batch: Batch,
) -> Iterator[tuple[mx.array, mx.array]]:
    """For each token of a chain the logits [B, n, draft vocabulary] and the positions [n] whose
    next token they predict; row t drafts after token t + 1 of the batch."""
    module = head.module
    caches = [Unrolled() for _ in module.layers]
    rows = batch.tokens.shape[1] - CHAIN
    hidden = head.prepare(batch.taps[:, :rows])
    for step in range(CHAIN):
        positions = mx.arange(rows) + step + 1
        hidden = module(head.embed(batch.tokens[:, positions]), hidden, caches)
        yield module.lm_head(module.normed(hidden)), positions

"""A new EAGLE-3 head (arXiv 2503.01840), in the speculators format, and what it drafts of a batch.

It starts as the target's last layer, which reads the hidden state before that layer: from random
weights it would need many times as many answers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlxspec.speculate.heads.eagle import AUX_LAYERS
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.training.target import Batch, Target
from mlxspec.types import Json

CHAIN = 4  # tokens of a draft that is trained on


def eagle_config(
    target: Target,
    vocabulary: Sequence[int],
) -> Json:
    """config.json of a head that drafts the tokens `vocabulary`."""
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(vocabulary),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": target.layer_config() | {"num_hidden_layers": 1},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": CHAIN - 1}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": target.config.get("architectures"),
            },
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        AUX_LAYERS: target.read_layers,
    }


def eagle_tensors(
    target: Target,
    config: Json,
) -> dict[str, mx.array]:
    """Its weights before training, without lm_head."""
    warm = target.last_layer(config["transformer_layer_config"])
    for name in ("q_proj", "k_proj", "v_proj"):
        narrow = warm[f"self_attn.{name}.weight"]
        warm[f"self_attn.{name}.weight"] = mx.concatenate([mx.zeros_like(narrow), narrow], axis=1)
    norm = warm["input_layernorm.weight"]
    warm |= {"hidden_norm.weight": norm, "input_layernorm.weight": mx.ones_like(norm)}
    return target.head_tensors() | {f"layers.0.{name}": array for name, array in warm.items()}


class Unrolled:
    """In the place of a layer's cache while a chain is trained (EAGLE-3's training-time test): row
    t of step s, at position t + s, sees the rows of the first step up to its own, and of the later
    ones only its own chain's."""

    def __init__(self) -> None:
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.offset = 0

    def update_and_fetch(
        self,
        k: mx.array,
        v: mx.array,
    ) -> tuple[mx.array, mx.array]:
        self.keys.append(k)
        self.values.append(v)
        return mx.concatenate(self.keys, axis=2), mx.concatenate(self.values, axis=2)

    def make_mask(
        self,
        rows: int,
        **options: Any,
    ) -> mx.array:
        """bool [rows, rows of all steps so far]."""
        own = mx.eye(rows).astype(mx.bool_)
        return mx.concatenate([mx.tri(rows).astype(mx.bool_)] + [own] * self.offset, axis=1)


def eagle_drafts(
    head: HeadModel,
    batch: Batch,
) -> Iterator[tuple[mx.array, mx.array]]:
    """For each token of a chain the logits [B, n, draft vocabulary] and the positions [n] whose
    next token they are of; row t drafts behind the token t + 1 of the batch."""
    module = head.module
    caches = [Unrolled() for _ in module.layers]
    rows = batch.tokens.shape[1] - CHAIN
    hidden = head.prepare(batch.taps[:, :rows])
    for step in range(CHAIN):
        for cache in caches:
            cache.offset = step
        positions = mx.arange(rows) + step + 1
        hidden = module(head.embed(batch.tokens[:, positions]), hidden, caches)
        yield module.lm_head(module.normed(hidden)), positions

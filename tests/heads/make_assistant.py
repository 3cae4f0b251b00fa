"""Trains a tiny Gemma 4 and its assistant of tests/heads/data, the latter with mlx-vlm's module."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text

from tests.heads import assistant, kinds
from tests.heads.make_more import drafter
from tests.heads.training import CHAIN, ENDS, MODEL, Batches, soft_cross_entropy, train

WINDOW = 24
SLIDING, FULL = assistant.SLIDING, assistant.FULL
ROPE = {
    FULL: dict(partial_rotary_factor=0.25, rope_theta=1e4, rope_type="proportional"),
    SLIDING: dict(rope_theta=1e4, rope_type="default"),
}
TARGET = MODEL | dict(
    model_type="gemma4_text",
    num_hidden_layers=6,
    num_kv_shared_layers=1,
    layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    intermediate_size=128,
    num_key_value_heads=1,
    global_head_dim=32,
    hidden_size_per_layer_input=0,
    use_double_wide_mlp=False,
    sliding_window=WINDOW,
    rope_parameters=ROPE,
    final_logit_softcapping=30.0,
    tie_word_embeddings=True,
)


def make_target() -> Any:
    return gemma4_text.Model(gemma4_text.ModelArgs.from_dict(TARGET))


def target_config() -> dict[str, Any]:
    return TARGET | ENDS | dict(architectures=["Gemma4ForCausalLM"])


def read(target: Any, x: mx.array) -> tuple[mx.array, dict[str, Any], mx.array]:
    """The target's hidden states, K and V of the last layer of each type, and its distributions."""
    kept = {}
    inner = target.model
    h, made = inner.embed_tokens(x) * inner.embed_scale, []
    for layer, before in zip(inner.layers, inner.previous_kvs, strict=True):
        mask: Any = sliding(x.shape[1], WINDOW) if layer.layer_type == SLIDING else "causal"
        shared = made[before] if before < len(made) else None
        h, kv, _ = layer(h, mask, None, shared_kv=shared, offset=0)
        made.append(kv)
        kept[layer.layer_type] = [mx.stop_gradient(each) for each in kv]
    hidden = mx.stop_gradient(inner.norm(h))
    logits = gemma4_text.logit_softcap(30.0, inner.embed_tokens.as_linear(hidden))
    return hidden, kept, mx.stop_gradient(mx.softmax(logits, -1))


def sliding(rows: int, window: int) -> mx.array:
    """Bool [rows, rows]: the last `window` of those up to each row's own."""
    back = mx.arange(rows)[:, None] - mx.arange(rows)
    return (back >= 0) & (back < window)


def train_assistant(target: Any, data: Batches, steps: int, r: random.Random) -> Any:
    """Each step of the chain sees what the first one saw of the target."""
    head = drafter(assistant.config_of(target))

    def loss(x: mx.array) -> mx.array:
        hidden, kv, teacher = read(target, x)
        rows, total = x.shape[1] - CHAIN, 0.0
        masks = {FULL: sliding(x.shape[1], x.shape[1]), SLIDING: sliding(x.shape[1], WINDOW - 1)}
        h = hidden[:, :rows]
        for s in range(CHAIN):
            embedded = target.model.embed_tokens(x[:, 1 + s : 1 + s + rows])
            both = mx.concatenate([embedded * target.model.embed_scale, h], -1)
            out = head.pre_projection(both)
            for layer in head.model.layers:
                mask = masks[layer.layer_type][:rows]
                out, _, _ = layer(out, mask, shared_kv=kv[layer.layer_type], offset=0)
            out = head.model.norm(out)
            h = head.post_projection(out)
            right = teacher[:, 1 + s : 1 + s + rows]
            logits = head.model.embed_tokens.as_linear(out)
            total += 0.8**s * soft_cross_entropy(right, logits).mean()
        return total

    train("assistant", head, loss, data, steps)
    return head


def write_assistant(out: Path, head: Any, ids: np.ndarray) -> None:
    """In bfloat16, as published."""
    tensors = {name: x.astype(mx.bfloat16) for name, x in tree_flatten(head.parameters())}
    kinds.save_head(out / "assistant", tensors, assistant.config_of(make_target()))

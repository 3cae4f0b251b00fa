"""Trains the tiny hybrid target and its MTP head of tests/heads/data."""

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

from tests.heads import packagings
from tests.heads.training import CHAIN, ENDS, MODEL, Batches, Unroll, soft_cross_entropy, train

LAYERS, EVERY = 4, 2  # decoder layers; each second one has full attention
TEXT_CONFIG = MODEL | dict(
    model_type="qwen3_5_text",
    num_hidden_layers=LAYERS,
    full_attention_interval=EVERY,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        mrope_section=[2, 1, 1],
    ),
)


def make_target() -> Any:
    text = json.loads(json.dumps(TEXT_CONFIG))
    return qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text))


class MTP(nn.Module):
    """Qwen3.5's head, written apart from mlxspec's own."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.norm = nn.RMSNorm(size, eps)
        self.layers = [qwen3_5.DecoderLayer(args, args.full_attention_interval - 1)]

    def __call__(self, embedded: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.layers[0](self.fc(mx.concatenate(parts, -1)), mask, cache))


def train_mtp(target: Any, data: Batches, steps: int, r: random.Random) -> nn.Module:
    """Each step of the chain takes the head's own output for the hidden state."""
    text = target.language_model
    head = MTP(text.args)

    def loss(x: mx.array) -> mx.array:
        hidden = mx.stop_gradient(text.model(x))
        teacher = mx.stop_gradient(mx.softmax(text.lm_head(hidden), -1))
        rows, unroll, total = x.shape[1] - CHAIN, Unroll(), 0.0
        h = hidden[:, :rows]
        for s in range(CHAIN):
            unroll.offset = s
            embedded = text.model.embed_tokens(x[:, 1 + s : 1 + s + rows])
            h = head(embedded, h, unroll.mask(rows), unroll)
            right = teacher[:, 1 + s : 1 + s + rows]
            total += 0.8**s * soft_cross_entropy(right, text.lm_head(h)).mean()
        return total

    train("MTP", head, loss, data, steps)
    return head


def target_config() -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention"]
    text = TEXT_CONFIG | ENDS
    text |= dict(hidden_act="silu", attention_bias=False, attn_output_gate=True)
    text |= dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    text |= dict(layer_types=[kinds[(i + 1) % EVERY == 0] for i in range(LAYERS)])
    config = dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5")
    return config | dict(text_config=text, tie_word_embeddings=False) | ENDS


def write_mtp(out: Path, head: nn.Module, ids: np.ndarray) -> None:
    config = packagings.sidecar_config(target_config()["text_config"])
    tensors = dict(tree_flatten(head.parameters()))
    packagings.write_sidecar(out / "sidecar", tensors, config, out)

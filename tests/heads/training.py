"""What trainings of tiny targets and heads have in common. All is fp32 and synthetic."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402

from tests.heads.language import END, VOCAB  # noqa: E402

ENDS: dict[str, Any] = dict(eos_token_id=END, pad_token_id=0, dtype="float32")
MODEL: dict[str, Any] = dict(  # what all tiny models and heads have in common
    hidden_size=64,
    intermediate_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
RATE = 3e-3
CHAIN = 3  # passes of a head that are trained together

Batches = Iterator[mx.array]


def batches(ids: np.ndarray, r: random.Random, rows: int, length: int) -> Batches:
    while True:
        at = [r.randrange(len(ids) - length) for _ in range(rows)]
        yield mx.array(np.stack([ids[a : a + length] for a in at]))


def train(
    name: str, module: nn.Module, loss: Callable[[mx.array], mx.array], data: Batches, steps: int
) -> None:
    """AdamW, a short warm-up, a cosine down to a twentieth."""
    warm_up = optim.linear_schedule(0.0, RATE, 25)
    decay = optim.cosine_decay(RATE, steps - 25, RATE / 20)
    schedule = optim.join_schedules([warm_up, decay], [25])
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.01)
    step = nn.value_and_grad(module.train(), loss)
    began, seen = time.time(), []
    for i in range(1, steps + 1):
        value, gradients = step(next(data))
        optimizer.update(module, optim.clip_grad_norm(gradients, 1.0)[0])
        mx.eval(value, module.parameters(), optimizer.state)
        seen.append(value.item())
        if i % 50 == 0:
            seconds = time.time() - began
            print(f"{name}: step {i}, loss {np.mean(seen[-20:]):.3f}, {seconds:.0f} s", flush=True)
    module.eval()


def soft_cross_entropy(teacher: mx.array, logits: mx.array) -> mx.array:
    """Of a head's logits against the target's own distribution; both [..., vocabulary]."""
    return -(teacher * (logits - mx.logsumexp(logits, axis=-1, keepdims=True))).sum(-1)


def train_target(target: Any, data: Batches, steps: int) -> None:
    """To guess the next token; no steps if it is trained. What reads it later changes nothing."""

    def loss(x: mx.array) -> mx.array:
        return nn.losses.cross_entropy(target(x[:, :-1]), x[:, 1:], reduction="mean")

    if steps:
        train("target", target, loss, data, steps)
    target.freeze()
    target.eval()


class Unroll:
    """In the place of a KV cache while a chain is trained: step s sees the true rows up to its own,
    and of the chain's steps before it only those of its own row. Row t of step s is at position
    t + s."""

    def __init__(self) -> None:
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys.append(keys)
        self.values.append(values)
        return mx.concatenate(self.keys, 2), mx.concatenate(self.values, 2)

    def mask(self, rows: int) -> mx.array:
        own = [mx.eye(rows).astype(mx.bool_)] * self.offset
        return mx.concatenate([mx.tril(mx.ones((rows, rows), mx.bool_)), *own], 1)

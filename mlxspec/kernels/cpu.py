"""Products and attention of few rows on a CPU, where drafts and small batches otherwise cost more
than their arithmetic.

Rule: everything else is left to MLX. The sizes are those that were fast with OpenBLAS (NOTES.md):
it packs all weights for each product of several rows, except for a transposed one of up to 3, and
is fastest with 16.
"""

from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array

TRANSPOSED, FULL = 3, 16  # rows of a product
MOST_ROWS = 16  # of a sequence in attention: with more it gains nothing


def in_use() -> bool:
    return mx.default_device() == mx.cpu


def is_few(x: Array) -> bool:
    """Whether x [..., K] is multiplied here: BLAS computes float32 only."""
    return 1 < prod(x.shape[:-1]) < FULL and x.dtype == mx.float32 and in_use()


def multiply(x: Array, weight: Array) -> Array:
    """Few rows x [..., K] times the transposed weight [N, K]: [..., N]."""
    *batch, k = x.shape
    rows = x.reshape(-1, k)
    count = len(rows)
    if count <= TRANSPOSED:
        y = (weight @ rows.T).T
    else:
        y = (mx.pad(rows, [(0, FULL - count), (0, 0)]) @ weight.T)[:count]
    return y.reshape(*batch, -1)


def transposed(layer: Any, x: Array) -> Any:
    """x [..., K] times a dense layer's weights, as columns: their order of summing depends less on
    their number."""
    y = (layer.weight @ x.reshape(-1, x.shape[-1]).T).T
    y = y.reshape(*x.shape[:-1], -1)
    return y + layer.bias if "bias" in layer else y


class CpuLinear(nn.Linear):
    def __call__(self, x: Array) -> Any:
        if not is_few(x):
            return super().__call__(x)
        y = multiply(x, self.weight)
        return y + self.bias if "bias" in self else y


class CpuEmbedding(nn.Embedding):
    def as_linear(self, x: Array) -> Any:
        if not is_few(x):
            return super().as_linear(x)  # type: ignore[no-untyped-call]
        return multiply(x, self.weight)


CLASSES: dict[Any, Any] = {nn.Linear: CpuLinear, nn.Embedding: CpuEmbedding}


def install(model: nn.Module) -> None:
    """Have a model's layers use `multiply` on a CPU. Idempotent. Not for a target that is split
    over ranks: MLX waited forever for one that was killed while it computed."""
    if not in_use():
        return
    for layer in model.modules():
        if type(layer) in CLASSES:
            layer.__class__ = CLASSES[type(layer)]


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    mask: Array | str | None,
    sinks: Array | None,
) -> Array:
    """mx.fast.scaled_dot_product_attention: softmax(scale * q k^T) v, [B, heads, L, Dv] of q
    [B, heads, L, D], k [B, kv_heads, S, D] and v [B, kv_heads, S, Dv]; `mask`: "causal", or bool
    [B, 1, L, S]. For few rows on a CPU the heads of q that share K and V are rows of one product;
    MLX reads K and V again for each head."""
    batch, heads, length, dim = q.shape
    if length > MOST_ROWS or sinks is not None or not in_use():
        return mx.fast.scaled_dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            mask=mask,
            sinks=sinks,
        )
    kv_heads, slots = k.shape[1:3]
    rows = (q * scale).reshape(batch, kv_heads, -1, dim)
    scores = rows @ k.swapaxes(2, 3)
    if mask is not None:
        if isinstance(mask, str):
            mask = mx.tri(length, slots, slots - length, dtype=mx.bool_)[None, None]
        masked = scores.reshape(batch, kv_heads, -1, length, slots)
        masked = mx.where(mask[:, None], masked, mx.finfo(masked.dtype).min)
        scores = masked.reshape(scores.shape)
    out = mx.softmax(scores, axis=-1, precise=True) @ v
    return out.reshape(batch, heads, length, -1)

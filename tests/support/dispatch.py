"""A model of how MLX on Metal chooses kernels by the number of rows, for a CPU.

Rule: it follows MLX 0.32's source, named beside each limit, and knows nothing of mlxspec. A kernel
is a number of parts in which it sums, each rounded to 16 bits: other kernels give other bits, as on
a GPU, and a row's bits depend on the kernel alone. Paths are below mlx/.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxspec.kernels import cpu, reference

ONE, WIDE, WIDER, TILES, SPLIT = 1, 2, 4, 8, 16  # parts of a sum, by kernel


@dataclass(frozen=True)
class Chip:
    name: str
    limit: int  # rows from which a quantized product splits K: backend/metal/quantized.cpp:85
    wide: bool  # qmv_wide and gemv_wide: quantized.cpp:1762, matmul.cpp:1351

    def quantized(self, rows: int, mode: str) -> int:
        if rows == 1 and mode == "affine":
            return ONE
        if rows < self.limit:
            return WIDE if self.wide or mode != "affine" else ONE
        return SPLIT if rows > 64 else TILES if rows % 2 else SPLIT + 1  # quantized.cpp:1139

    def dense(self, rows: int) -> int:
        if rows == 1:
            return ONE
        if rows > 128:  # split K before that, for 2048 x 2048: matmul.cpp:913
            return SPLIT
        if not self.wide:
            return TILES
        return WIDE if rows <= 5 else WIDER if rows <= 15 else TILES

    def experts(self, rows: int, count: int, is_sorted: bool) -> int:  # quantized.cpp:1905
        return TILES if is_sorted and rows >= 16 and rows >= 4 * count else ONE

    def attention(self, rows: int, slots: int) -> int:  # scaled_dot_product_attention.cpp:483
        if rows > 32:
            return TILES
        return ONE if slots < 64 else WIDE if rows < 8 else WIDER


CHIPS = {
    "M1": Chip("M1", 10, wide=False),
    "M2": Chip("M2", 6, wide=False),
    "M3": Chip("M3", 13, wide=True),
    "M4": Chip("M4", 13, wide=True),
    "M5": Chip("M5", 17, wide=True),
}


def _product(x: mx.array, weight: mx.array, parts: int) -> mx.array:
    """x [..., K] times weight [N, K] transposed, in so many parts."""
    step = max(1, x.shape[-1] // parts)
    y = None
    for at in range(0, x.shape[-1], step):
        part = x[..., at : at + step] @ weight[..., at : at + step].swapaxes(-1, -2)
        y = part if y is None else y + part
    return y


def _weights(layer: nn.Module) -> mx.array:
    found = getattr(layer, "_dense", None)
    if found is None:
        dense = mx.dequantize(
            layer.weight,
            layer.scales,
            layer.get("biases"),
            layer.group_size,
            layer.bits,
            mode=layer.mode,
        )
        found = dense.astype(mx.bfloat16)
        object.__setattr__(layer, "_dense", found)  # no parameter
    return found


@contextmanager
def on(chip: Chip) -> Iterator[None]:
    """MLX's layers and attention as on this chip."""

    def rows_of(x: mx.array) -> int:
        return x.size // x.shape[-1]

    def linear(layer, x):
        if not x.size:
            return x @ layer.weight.T
        y = _product(x, layer.weight, chip.dense(rows_of(x)))
        return y + layer.bias if "bias" in layer else y

    def quantized(layer, x):
        weight = _weights(layer)
        if not x.size:
            return x @ weight.T
        y = _product(x, weight, chip.quantized(rows_of(x), layer.mode))
        return y + layer.bias if "bias" in layer else y

    def experts(weight):
        def call(layer, x, indices, sorted_indices=False):
            own = weight(layer)
            parts = chip.experts(indices.size, len(own), sorted_indices)
            step = max(1, x.shape[-1] // parts)
            y = None
            for at in range(0, x.shape[-1], step):
                part = own[indices][..., at : at + step].swapaxes(-1, -2)
                part = x[..., at : at + step] @ part
                y = part if y is None else y + part
            return y + mx.expand_dims(layer["bias"][indices], -2) if "bias" in layer else y

        return call

    def attend(q, k, v, scale, mask, sinks):
        rows = q.shape[2] * q.shape[1] // k.shape[1]
        parts = chip.attention(rows, k.shape[2])
        k, v = [mx.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v)]
        scores = (q.astype(mx.float32)[..., None, :] * k.astype(mx.float32)[:, :, None]).sum(-1)
        scores = scores * scale
        if isinstance(mask, str):
            length, slots = scores.shape[2:]
            mask = mx.tri(length, slots, slots - length, dtype=mx.bool_)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = mx.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + mx.exp(sinks[:, None, None] - top)
        weights = (weights / total).astype(mx.bfloat16)
        step = max(1, -(-k.shape[2] // parts))
        out = mx.zeros((*q.shape[:3], v.shape[3]), mx.bfloat16)
        for at in range(0, k.shape[2], step):
            out = out + weights[..., at : at + step] @ v[:, :, at : at + step]
        return out.astype(q.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "__call__", linear)
        patch.setattr(nn.Embedding, "as_linear", linear)
        patch.setattr(nn.QuantizedLinear, "__call__", quantized)
        patch.setattr(nn.QuantizedEmbedding, "as_linear", quantized)
        patch.setattr(SwitchLinear, "__call__", experts(lambda layer: layer.weight))
        patch.setattr(QuantizedSwitchLinear, "__call__", experts(_weights))
        patch.setattr(cpu, "attention", attend)
        patch.setattr(reference.mx.fast, "scaled_dot_product_attention", attend, raising=False)
        yield

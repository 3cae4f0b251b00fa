"""The specification of the kernels for products of few rows, quantized or not, and of experts."""

from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.core import array as Array


@dataclass(slots=True)
class Weights:
    """A layer's weights: as they are, float [N, K]; or as from mx.quantize, uint32
    [N, K * bits / 32], with scales and, in the mode "affine", biases [N, K / group_size]. A
    quantized layer itself has these too."""

    weight: Array
    scales: Array | None = None
    biases: Array | None = None
    group_size: int = 1
    bits: int = 16
    mode: str = "affine"


def small_qmm(x: Array, weights: Weights) -> Array:
    """x dequantized(w)^T, float32 [M, N] of x [M, K] float: weights, products and sums in fp32.

    A kernel rounds it once to x's dtype, and its row must not depend on M, to the bit. Rows are
    multiplied one by one, as if each had an expert: several an M5 may multiply in TF32.
    """
    one = replace(weights, weight=weights.weight[None])
    one.scales = None if weights.scales is None else weights.scales[None]
    one.biases = None if weights.biases is None else weights.biases[None]
    return small_qmm_experts(x, one, mx.zeros(len(x), mx.uint32))


def small_qmm_experts(x: Array, weights: Weights, chosen: Array, *_: int) -> Array:
    """float32 [R, N]: for each choice of an expert, uint32 `chosen` [R], the product of its row of
    x [R or a divisor, K] with that one of the weights [E, N, ...], as small_qmm. Choices that share
    a row are neighbours."""
    rows = mx.repeat(x.astype(mx.float32), len(chosen) // len(x), axis=0)[:, None]
    scales, biases = weights.scales, weights.biases
    if scales is None:
        parts = []
        for at in range(0, weights.weight.shape[1], 128):
            w = weights.weight[:, at : at + 128].astype(mx.float32).swapaxes(-1, -2)
            parts.append(mx.gather_mm(rows, w, rhs_indices=chosen))
            mx.eval(parts)  # all of them in fp32 at once would take too much memory
        return mx.concatenate(parts, axis=-1)[:, 0]
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    y = mx.gather_qmm(
        rows,
        weights.weight,
        scales,
        biases,
        rhs_indices=chosen,
        group_size=weights.group_size,
        bits=weights.bits,
        mode=weights.mode,
    )
    return y[:, 0]

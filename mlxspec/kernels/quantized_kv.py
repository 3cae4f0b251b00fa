"""Quantized K and V: rows of 8 or 4 bits in a pool of uint32.

Rule: a row depends on one token's K or V alone, not on the batch, the chunk or the block. Values,
scales and biases of a row lie together, so that a quantized pool is one array as well.
"""

from dataclasses import dataclass
from functools import partial

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.types import UnsupportedModel

GROUPS = (64, 32)  # the first that divides a head is used


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of a row: `dim` values of `bits` each, then the groups' scales, then their biases
    in `dtype`."""

    dim: int
    dtype: mx.Dtype
    bits: int

    @property
    def group(self) -> int:
        """Values that share a scale and a bias. Raises UnsupportedModel if none divides `dim`."""
        for group in GROUPS:
            if self.dim % group == 0:
                return group
        raise UnsupportedModel(
            f"kv_bits = {self.bits} takes {GROUPS[-1]} values at a time, and a head of K or V has"
            f" {self.dim}; give 0",
        )

    @property
    def words(self) -> int:
        """Words of the values alone."""
        return self.dim * self.bits // 32

    @property
    def width(self) -> int:
        """Words of a row."""
        scales = self.dim // self.group
        return self.words + 2 * scales * self.dtype.size // 4

    def bounded(self, x: Array) -> Array:
        """x limited to what `pack` keeps finite: 0 for what is not, and values clipped so that
        the range of a group fits `dtype`. float16, where that would clip real values, is left to
        `pack`."""
        half = mx.finfo(self.dtype).max / 2
        return _clipped(x, mx.inf if self.dtype == mx.float16 else half)

    def pack(self, x: Array) -> Array:
        """[..., dim] -> uint32 [..., width]. Finite values stay finite after `unpack`, even where
        float16 overflows."""
        values, scales, biases = mx.quantize(x, self.group, self.bits)
        if self.dtype == mx.float16:  # the scale of values far apart overflows
            back = mx.dequantize(values, scales, biases, self.group, self.bits)
            finite = mx.isfinite(back.reshape(*scales.shape, self.group))
            fine = finite.all(axis=-1)
            scales = mx.where(fine, scales, 0)
            biases = mx.where(fine, biases, 0)
        tail = mx.concatenate([scales, biases], -1)
        return mx.concatenate([values, tail.view(mx.uint32)], -1)

    def unpack(self, rows: Array, compute: mx.Dtype | None = None) -> Array:
        """uint32 [..., width] -> [..., dim], computed in `dtype` or `compute`."""
        values, tail = mx.split(rows, [self.words], axis=-1)
        dtype = compute or self.dtype
        scales, biases = mx.split(tail.view(self.dtype).astype(dtype), 2, axis=-1)
        return mx.dequantize(values, scales, biases, self.group, self.bits)

    def exact(self, rows: Array) -> Array:
        """`unpack` in fp32, each value rounded once to `dtype`: what a kernel is compared with."""
        values = self.unpack(rows, mx.float32)
        return values.astype(self.dtype).astype(mx.float32)


@partial(mx.compile, shapeless=True)
def _clipped(x: Array, limit: float) -> Array:
    return mx.clip(mx.where(mx.abs(x) < mx.inf, x, 0), -limit, limit)

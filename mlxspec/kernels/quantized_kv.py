"""K and V in 8 or 4 bits: how the rows of a quantized pool are written and read.

Rule: a row is a function of one token's K or V alone, so neither batch nor chunk nor block changes
it; and it is one run of words, so that a quantized pool is one array too: written in place, copied,
evaluated like any.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlxspec.types import UnsupportedModel

GROUPS = (64, 32)  # values that share a scale and a bias: the first that divides a head


@dataclass(frozen=True, slots=True)
class Packing:
    """How `dim` values of `dtype` lie in a row: `bits` each, then the groups' scales, then their
    biases."""

    dim: int
    dtype: mx.Dtype
    bits: int

    @property
    def group(self) -> int:
        """Raises UnsupportedModel where no group divides the head."""
        for group in GROUPS:
            if self.dim % group == 0:
                return group
        raise UnsupportedModel(
            f"kv_bits = {self.bits} takes {GROUPS[-1]} values at a time, and a head's K or V has {self.dim};"
            " give 0"
        )

    @property
    def words(self) -> int:
        """Of the values alone."""
        return self.dim * self.bits // 32

    @property
    def width(self) -> int:
        """Words of a row."""
        return self.words + 2 * (self.dim // self.group) * self.dtype.size // 4

    def pack(self, x: mx.array) -> mx.array:
        """[..., dim] -> uint32 [..., width]. Half precision may overflow, what comes back is
        finite."""
        values, scales, biases = mx.quantize(x, self.group, self.bits)
        if self.dtype == mx.float16:  # finite values that lie far enough apart come back as inf
            fine = mx.isfinite(self.round(x).reshape(*scales.shape, self.group)).all(axis=-1)
            scales, biases = mx.where(fine, scales, 0), mx.where(fine, biases, 0)
        return mx.concatenate([values, mx.concatenate([scales, biases], -1).view(mx.uint32)], -1)

    def unpack(self, rows: mx.array) -> mx.array:
        """uint32 [..., width] -> [..., dim]."""
        scales, biases = mx.split(rows[..., self.words :].view(self.dtype), 2, axis=-1)
        return mx.dequantize(rows[..., : self.words], scales, biases, self.group, self.bits)

    def exact(self, rows: mx.array) -> mx.array:
        """As `unpack`, each value rounded once, in fp32."""
        scales, biases = mx.split(
            rows[..., self.words :].view(self.dtype).astype(mx.float32), 2, axis=-1
        )
        wide = mx.dequantize(rows[..., : self.words], scales, biases, self.group, self.bits)
        return wide.astype(self.dtype).astype(mx.float32)

    def round(self, x: mx.array) -> mx.array:
        """[..., dim] as it comes back: what `pack` and `unpack` must equal, but for overflows."""
        return mx.dequantize(
            *mx.quantize(x, self.group, self.bits), group_size=self.group, bits=self.bits
        )

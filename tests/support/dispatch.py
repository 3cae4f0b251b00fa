"""A model of MLX on Metal for a CPU: products whose bits depend on the kernel that MLX would take.

Rule: tests/support/metal_rules.py chooses the kernels. A kernel is a number of parts in which a
product is summed, and a row's bits depend on the kernel alone. Parts are rounded to 16 bits, so that
any mix of kernels shows at once; or, as on a GPU, to fp32 and their sum once, so that it shows in
one value of some thousand. A product with weights stands for one of a model WIDER times as wide;
strides are those of MLX's arrays on the CPU, where views are made by the same code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import ssm

from mlxspec.kernels import cpu
from tests.support.metal_rules import CHIPS, Chip, Matrix, reduced

__all__ = ["CHIPS", "on"]

WIDER = 32
LANES = 2  # sums of a part, where its values are fp32
MATMUL, SUM, OF_ARRAY, SSM_ATTN = mx.matmul, mx.sum, mx.array.sum, ssm.ssm_attn
_weights: dict[int, tuple[mx.array, mx.array]] = {}  # by id: quantized, and dequantized


def in_parts(x: mx.array, weight: mx.array, parts: int) -> mx.array:
    """x [..., K] times weight [..., K, N] in so many parts."""
    k = x.shape[-1]
    cuts = sorted({i * k // parts for i in range(parts + 1)})
    a, b = x.astype(mx.bfloat16), weight.astype(mx.bfloat16)
    y = None
    for low, high in pairwise(cuts):
        part = MATMUL(a[..., low:high], b[..., low:high, :])
        y = part if y is None else y + part
    return y.astype(mx.float32 if mx.float32 in (x.dtype, weight.dtype) else x.dtype)


def in_lanes(x: mx.array, weight: mx.array, parts: int) -> mx.array:
    """As in_parts with sums in fp32 that are rounded once; each of a part's lanes is exact."""
    k = x.shape[-1]
    count = min(k, parts * LANES)
    cuts = [i * k // count for i in range(count + 1)]
    with mx.stream(mx.cpu):
        a, b = x.astype(mx.float64), weight.astype(mx.float64)
        lanes = [MATMUL(a[..., i:j], b[..., i:j, :]).astype(mx.float32) for i, j in pairwise(cuts)]
        y = reduce(mx.add, lanes)
    return y.astype(mx.float32 if mx.float32 in (x.dtype, weight.dtype) else x.dtype)


def matrix(x: mx.array, batch: tuple[int, ...]) -> Matrix:
    """As MLX lays it out, broadcast to this batch shape."""
    seen = memoryview(mx.broadcast_to(x, (*batch, *x.shape[-2:])))
    return Matrix(seen.shape, tuple(each // seen.itemsize for each in seen.strides))


def wider(m: Matrix, *axes: int) -> Matrix:
    """A matrix whose axes are WIDER times as long, but for those of one."""
    shape = list(m.shape)
    for axis in axes:
        shape[axis] *= WIDER if shape[axis] > 1 else 1
    strides = [each if each <= 1 else each * WIDER for each in m.strides]
    return Matrix(tuple(shape), tuple(strides))


def dequantized(weight: mx.array, scales: mx.array, biases: Any, how: dict[str, Any]) -> mx.array:
    held, dense = _weights.get(id(weight), (None, None))
    if held is not weight:
        dense = mx.dequantize(weight, scales, biases, **how).astype(mx.bfloat16).swapaxes(-1, -2)
        _weights[id(weight)] = weight, dense
    return dense


class Metal:
    """MLX's functions as on a chip."""

    def __init__(self, chip: Chip, in_parts: Any) -> None:
        self.chip = chip
        self.in_parts = in_parts

    def matmul(self, a: mx.array, b: mx.array, **_: Any) -> mx.array:
        if not a.size or min(a.ndim, b.ndim) < 2:
            return MATMUL(a, b)
        if b.ndim == 2:  # mlx/ops.cpp:3509 flattens
            *batch, k = a.shape
            rows = a.reshape(-1, k)
            of_a, of_b = matrix(rows, ()), matrix(b, ())
            parts = self.chip.dense(wider(of_a, 1), wider(of_b, 0, 1), a.dtype != mx.float32)
            return self.in_parts(rows, b, parts).reshape(*batch, -1)
        batch = mx.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        parts = self.chip.dense(matrix(a, batch), matrix(b, batch), a.dtype != mx.float32)
        return self.in_parts(a, b, parts)

    def addmm(self, c: mx.array, a: mx.array, b: mx.array, **_: Any) -> mx.array:
        return self.matmul(a, b) + c

    def quantized(self, x, weight, scales, biases=None, transpose=True, **how) -> mx.array:
        assert transpose
        dense = dequantized(weight, scales, biases, how)
        if not x.size:
            return MATMUL(x, dense)
        flat = weight.ndim == 2 and memoryview(x).c_contiguous  # quantized.cpp:1799
        rows = x.size // x.shape[-1] if flat else x.shape[-2]
        parts = self.chip.quantized(
            rows,
            dense.shape[-1] * WIDER,
            dense.shape[-2] * WIDER,
            mode=how.get("mode", "affine"),
            bits=how["bits"],
            group=how["group_size"],
            batch=x.size // x.shape[-1] // rows,
            halves=x.dtype != mx.float32,
        )
        return self.in_parts(x, dense, parts)

    def gather_mm(self, x, weight, rhs_indices, sorted_indices=False, **_) -> mx.array:
        parts = self.chip.experts(rhs_indices.size, len(weight), sorted_indices, False)
        return self.in_parts(x, weight[rhs_indices], parts)

    def gather_qmm(
        self, x, weight, scales, biases=None, rhs_indices=None, sorted_indices=False, **how
    ) -> mx.array:
        how = {name: how[name] for name in ("bits", "group_size", "mode") if name in how}
        dense = dequantized(weight, scales, biases, how)
        parts = self.chip.experts(rhs_indices.size, len(dense), sorted_indices, True)
        return self.in_parts(x, dense[rhs_indices], parts)

    def attend(self, q, k, v, scale, mask=None, sinks=None, **_) -> mx.array:
        rows = q.shape[2] * q.shape[1] // k.shape[1]
        parts = self.chip.attention(rows, k.shape[2])
        k, v = [mx.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v)]
        scores = OF_ARRAY(q.astype(mx.float32)[..., None, :] * k.astype(mx.float32)[:, :, None], -1)
        scores = scores * scale
        if isinstance(mask, str):
            length, slots = scores.shape[2:]
            mask = mx.tri(length, slots, slots - length, dtype=mx.bool_)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = mx.exp(scores - top)
        total = OF_ARRAY(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + mx.exp(sinks[:, None, None] - top)
        return self.in_parts(weights / total, v, parts).astype(q.dtype)


def sum_of(x: mx.array, axis: Any = None, keepdims: bool = False, **_: Any) -> mx.array:
    if not isinstance(axis, int) or not mx.issubdtype(x.dtype, mx.floating):
        return SUM(x, axis, keepdims)
    whole = SUM(x, axis, keepdims)
    axis %= x.ndim
    turns = reduced(x.shape, axis, whole.size)
    if turns == 1:
        return whole
    parts = mx.split(x, [x.shape[axis] * i // turns for i in range(1, turns)], axis=axis)
    first, *others = [SUM(part, axis, keepdims).astype(mx.bfloat16) for part in parts]
    for other in others:
        first = first + other
    return first.astype(x.dtype)


def recurrence(x, A_log, B, C, D, dt, dt_bias, state=None, limit=(0.001, 100.0), *rest, **named):
    """One row with a state before it goes by a kernel of its own, other rows by products:
    mlx_lm/models/ssm.py, ssm_update."""
    if x.shape[1] > 1 or state is None:
        return SSM_ATTN(x, A_log, B, C, D, dt, dt_bias, state, limit, *rest, **named)
    dt = ssm.compute_dt(dt, dt_bias, limit)[:, 0]
    repeats = x.shape[2] // B.shape[2]
    b, c = (mx.repeat(each[:, 0], repeats, axis=1)[:, :, None] for each in (B, C))
    decay = mx.exp(-mx.exp(A_log.astype(mx.float32)) * dt)[..., None, None]
    state = (decay * state + (dt[..., None] * x[:, 0])[..., None] * b).astype(state.dtype)
    y = SUM(state * c, -1) + D[:, None] * x[:, 0]
    return y.astype(x.dtype)[:, None], state


@contextmanager
def on(chip: Chip, rounded_once: bool = False) -> Iterator[None]:
    """MLX's functions as on this chip. `rounded_once`: with sums in fp32."""
    metal = Metal(chip, in_lanes if rounded_once else in_parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "matmul", metal.matmul)
        patch.setattr(mx.array, "__matmul__", lambda a, b: metal.matmul(a, b))
        patch.setattr(mx, "addmm", metal.addmm)
        patch.setattr(mx, "quantized_matmul", metal.quantized)
        patch.setattr(mx, "gather_mm", metal.gather_mm)
        patch.setattr(mx, "gather_qmm", metal.gather_qmm)
        patch.setattr(mx.fast, "scaled_dot_product_attention", metal.attend)
        patch.setattr(mx, "sum", sum_of)
        patch.setattr(mx.array, "sum", lambda x, *args, **named: sum_of(x, *args, **named))
        patch.setattr(ssm, "ssm_attn", recurrence)
        patch.setattr(cpu, "in_use", lambda: False)
        yield

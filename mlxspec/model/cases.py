"""What of a model kernels could do: a case for each kernel and shape.

Rule: shapes and dtypes are asked for, never values, so a model whose weights are still on the disk will do.
"""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module

from mlxspec.kernels import metal, reference
from mlxspec.kernels.proven import Case


def cases_of(model: Module) -> list[Case]:
    """Each case once. For a model as it was loaded, before a runner grafts its trunk. Whoever writes a kernel
    adds its cases here."""
    found = [*_small_qmm(model)]
    return list({case.name: case for case in found}.values())


def _small_qmm(model: Module) -> list[Case]:
    layers = [m for _, m in model.named_modules() if isinstance(m, nn.QuantizedLinear)]
    shapes = {
        (m.weight.shape[0], m.scales.shape[1] * m.group_size, m.bits, m.group_size, m.scales.dtype)
        for m in layers
        if m.bits in (4, 8) and getattr(m, "mode", "affine") == "affine" and "bias" not in m
    }
    return [_case(*shape) for shape in sorted(shapes, key=str)]


def _case(n: int, k: int, bits: int, group: int, dtype: mx.Dtype) -> Case:
    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        keys = mx.random.split(mx.random.key(seed), 4)
        w = mx.random.randint(0, 1 << 31, (n, k * bits // 32), mx.uint32, keys[0])
        scales = (mx.random.uniform(0.5, 1.5, (n, k // group), key=keys[1]) / (k**0.5 * 2**bits)).astype(
            dtype
        )
        x = mx.random.normal((metal.ROWS, k), key=keys[2])[:rows].astype(dtype)
        return x, w, scales, -scales * 2 ** (bits - 1)

    how: dict[str, Any] = {"group_size": group, "bits": bits}
    return Case(
        kernel="small_qmm",
        shape=f"{n}x{k} of {bits} bits, group {group}, {str(dtype).rpartition('.')[2]}",
        rows=(1, 2, 4, 8, 16),
        inputs=inputs,
        stock=partial(mx.quantized_matmul, transpose=True, **how),
        reference=partial(reference.small_qmm, **how),
        ways={way: partial(metal.small_qmm, **how, matrix=way == "matrix") for way in ("plain", "matrix")},
        tolerance=0.02 if dtype != mx.float32 else 1e-4,
        nested=True,
    )

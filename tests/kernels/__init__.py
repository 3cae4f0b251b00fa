from typing import Any

import mlx.core as mx
import pytest

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# Of a test that asks the simulator for bytes, or for a CPU's exact sums: it does not run on a GPU.
on_simulator = pytest.mark.parametrize("device", ["simulator"], indirect=True)

GATHER_MM = mx.gather_mm


def gather_mm(x: mx.array, weights: mx.array, **how: Any) -> mx.array:
    """MLX's, which knows no 16 bits on a CPU."""
    return GATHER_MM(x.astype(mx.float32), weights.astype(mx.float32), **how).astype(x.dtype)

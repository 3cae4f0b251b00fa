import mlx.core as mx
import pytest

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# Of a test that asks the simulator for bytes, or for a CPU's exact sums: it does not run on a GPU.
on_simulator = pytest.mark.parametrize("device", ["simulator"], indirect=True)

"""What MLX holds."""

import mlx.core as mx

from mlxspec.model import meter


def test_arrays_are_counted() -> None:
    before = meter.arrays()
    held = [mx.zeros((1,)) for _ in range(50)]
    assert meter.arrays() == before + 50
    held.clear()
    assert meter.arrays() == before

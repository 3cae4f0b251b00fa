"""What a step writes its K and V at."""

import mlx.core as mx
import pytest

from mlxspec.model.pages import slot_index


@pytest.mark.parametrize("slots", [[5], [3, 4, 5], [0, 0], [3, 5], [5, 4], [1, 2, 4]])
def test_slots_that_follow_each_other_are_one_piece(slots: list[int]) -> None:
    """Either way each row lands where it is to; of several at one slot, as of padding, one
    stays."""
    pool, rows = mx.zeros((2, 8, 3)), mx.random.normal((2, len(slots), 3))
    found = slot_index(slots)
    assert isinstance(found, slice) == (
        slots == sorted(set(slots)) and slots[-1] - slots[0] < len(slots)
    )
    pool[:, found] = rows
    for slot in range(8):
        here = [rows[:, i] for i, at in enumerate(slots) if at == slot] or [mx.zeros((2, 3))]
        assert any(mx.array_equal(pool[:, slot], row) for row in here)

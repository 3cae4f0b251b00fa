"""Copies KV blocks and recurrent states to host arrays and back, for the prefix cache on disk.

Rule: the same bits come back. An array's name holds its index and dtype, so that arrays of another
model or version are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxspec.kernels.metal import dtype_name
from mlxspec.model.runner import Runner, pools_of

Arrays = dict[str, np.ndarray]


@dataclass(slots=True)
class Transfer:
    """For the pools of one runner; a group is the index of a pool. Engine thread only."""

    runner: Runner

    def export(
        self,
        group: int,
        blocks: Sequence[int],
    ) -> list[mx.array]:
        """Start copying the K and V of these blocks: [heads, len(blocks) * block_size, D] for each
        of the group's layers."""
        copies = self.runner.read_blocks(group, blocks)
        mx.async_eval(copies)
        return copies

    def host(self, exported: Sequence[mx.array]) -> Arrays:
        """The arrays of `export`, or of a recurrent state, on the host, as bytes [..., D]."""
        arrays = {}
        for i, array in enumerate(exported):
            name = _name(i, array.dtype)
            arrays[name] = np.array(array.view(mx.uint8), order="C")
        return arrays

    def place(
        self,
        group: int,
        blocks: Sequence[int],
        arrays: Arrays,
        which: Sequence[int],
    ) -> bool:
        """Write blocks number `which` of an export into `blocks`; False where it does not fit."""
        self.runner.grow()
        source = np.array(self.runner.view.slots_of(which))
        rows = []
        for i, pool in enumerate(self._pools(group)):
            array = arrays.get(_name(i, pool.dtype))
            if array is None:
                return False
            made = mx.array(array[:, source]).view(pool.dtype)
            if made.shape[::2] != pool.shape[::2]:
                return False
            rows.append(made)
        self.runner.write_blocks(group, blocks, rows)
        mx.async_eval(self._pools(group))
        return True

    def place_state(self, arrays: Arrays) -> tuple[mx.array, ...] | None:
        """A recurrent state; None where it is not one of this model."""
        state = []
        for i, (shape, dtype) in enumerate(self.runner.states.forms):
            array = arrays.get(_name(i, dtype))
            if array is None:
                return None
            made = mx.array(array).view(dtype)
            if made.shape != shape:
                return None
            state.append(made)
        return tuple(state)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in all layers of the group."""
        allocated = list(self.runner.view.allocated.values())[group]
        return sum(pool.nbytes for pool in self._pools(group)) // allocated

    def _pools(self, group: int) -> list[mx.array]:
        return pools_of(self.runner.pages_of(group))


def _name(i: int, dtype: mx.Dtype) -> str:
    return f"{i}:{dtype_name(dtype)}"

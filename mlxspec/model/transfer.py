"""Copies KV blocks and recurrent states to host arrays and back, for the prefix cache on disk.

Rule: the same bits come back. The fingerprint of a file names the model and all that its arrays'
shapes and dtypes depend on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.model.runner import Runner, pools_of
from mlxspec.types import STATE

Arrays = dict[str, np.ndarray]


@dataclass(slots=True)
class Transfer:
    """For the pools of one runner; a group is the index of a pool. Engine thread only."""

    runner: Runner
    _count: int = field(init=False)  # arrays of a block at first

    def __post_init__(self) -> None:
        self._count = len(self._pools(0))

    @property
    def mirror(self) -> Any:
        """Of rank 0, if there are several."""
        return self.runner.mirror

    @property
    def complete(self) -> bool:
        """Whether blocks hold all that they did at first: not after a head has failed."""
        return len(self._pools(0)) >= self._count

    def export(self, group: int, contents: Mapping[bytes, Any]) -> Sequence[mx.array]:
        """Start copying the K and V of blocks, by key on disk: [heads, blocks * block_size, D] for
        each of the group's layers. Of the group STATE it is one recurrent state."""
        if self.mirror:
            self.mirror.save(group, contents)
        if group == STATE:
            return next(iter(contents.values()))
        copies = self.runner.read_blocks(group, list(contents.values()))
        mx.async_eval(copies)
        return copies

    def host(self, exported: Sequence[mx.array]) -> Arrays:
        """The arrays of `export`, or of a recurrent state, on the host, as bytes [..., D]."""
        return {
            str(i): np.array(array.view(mx.uint8), order="C") for i, array in enumerate(exported)
        }

    def place(
        self, group: int, blocks: Sequence[int], arrays: Arrays, which: Sequence[int]
    ) -> None:
        """Write blocks number `which` of an export into `blocks`. Raises KeyError if an array is
        missing, before anything is written."""
        self.runner.grow()
        source = np.array(self.runner.view.slots_of(which))
        rows = [
            mx.array(arrays[str(i)][:, source]).view(pool.dtype)
            for i, pool in enumerate(self._pools(group))
        ]
        self.runner.write_blocks(group, blocks, rows)
        if self.mirror:
            self.mirror.place(group, blocks, which)
        mx.async_eval(self._pools(group))

    def place_state(self, arrays: Arrays) -> list[mx.array]:
        """A recurrent state. Raises KeyError if an array is missing."""
        dtypes = enumerate(self.runner.states.dtypes)
        state = [mx.array(arrays[str(i)]).view(dtype) for i, dtype in dtypes]
        return self.mirror.place_state(state) if self.mirror else state

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in all layers of the group."""
        allocated = list(self.runner.view.allocated.values())[group]
        return sum(pool.nbytes for pool in self._pools(group)) // allocated

    def _pools(self, group: int) -> list[mx.array]:
        return pools_of(self.runner.pages_of(group))

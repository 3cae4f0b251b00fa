"""What pools and states hold, as host arrays and back: for what outlives the process.

Rule: bits in, the same bits out. The names of the host arrays say what they were, so that what was
written by another model or version is seen not to fit instead of being believed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.model.runner import Runner

Arrays = dict[str, np.ndarray]


@dataclass(slots=True)
class Transfer:
    """Of one runner's pools. Engine thread only."""

    runner: Runner

    def export(self, group: int, blocks: Sequence[int]) -> list[mx.array]:
        """Copies [heads, len(blocks) * block_size, D] of the K and V of each of the group's layers,
        begun."""
        slots = self.runner.view.slots_of(blocks)
        copies = [pool[:, slots] for pool in self._pools(group)]
        mx.async_eval(copies)
        return copies

    def export_state(self, state: Sequence[mx.array]) -> list[mx.array]:
        return list(state)

    def host(self, exported: Sequence[mx.array]) -> Arrays:
        return {f"{i}:{_word(a.dtype)}": np.array(_plain(a)) for i, a in enumerate(exported)}

    def place(
        self, group: int, blocks: Sequence[int], arrays: Arrays, which: Sequence[int]
    ) -> bool:
        """Write blocks number `which` of an export at `blocks`, in place. False where it does not
        fit; then nothing is written."""
        self.runner.grow()
        size = self.runner.view.block_size
        pools = self._pools(group)
        found = list(arrays.items())
        if len(found) != len(pools) or any(
            name != f"{i}:{_word(pool.dtype)}"
            or (array.ndim, array.shape[0], array.shape[-1]) != (3, pool.shape[0], pool.shape[2])
            or array.shape[1] % size
            or array.shape[1] <= max(which, default=0) * size
            for i, ((name, array), pool) in enumerate(zip(found, pools, strict=True))
        ):
            return False
        source = np.array(self.runner.view.slots_of(which))
        rows = [
            _back(array[:, source], pool.dtype)
            for (_, array), pool in zip(found, pools, strict=True)
        ]
        slots = self.runner.view.slots_of(blocks)
        for n, pages in enumerate(self._pages(group)):
            pages.put(slots, rows[2 * n], rows[2 * n + 1])
        mx.async_eval(self._pools(group))
        return True

    def place_state(self, arrays: Arrays) -> tuple[mx.array, ...] | None:
        """None where it is not the state of this model."""
        forms, found = self.runner.states.forms, []
        if len(arrays) != len(forms):
            return None
        for i, ((name, array), (shape, dtype)) in enumerate(
            zip(arrays.items(), forms, strict=True)
        ):
            if name != f"{i}:{_word(dtype)}" or array.shape != shape:
                return None
            found.append(_back(array, dtype))
        return tuple(found)

    def block_bytes(self, group: int) -> int:
        """Of one block in all layers of the group."""
        held = list(self.runner.view.held.values())[group]
        return sum(pool.nbytes for pool in self._pools(group)) // held

    def _pages(self, group: int) -> list[Any]:
        key = list(self.runner.view.blocks)[group]
        return [pages for pages in self.runner.pages() if pages.pool == key]

    def _pools(self, group: int) -> list[mx.array]:
        return [pool for pages in self._pages(group) for pool in pages.pools()]


def _word(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _plain(a: mx.array) -> mx.array:
    """numpy knows no bfloat16: the same bits as integers."""
    return a.view(mx.uint16) if a.dtype == mx.bfloat16 else a


def _back(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    made = mx.array(array)
    return made.view(dtype) if dtype == mx.bfloat16 else made

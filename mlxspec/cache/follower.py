"""Another rank's prefix cache on disk, which saves and reads what rank 0's does.

Rule: rank 0's index counts. Where this one lacks a run, rank 0 hears so and computes it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from mlxspec.cache.disk import DiskCache, Run
from mlxspec.cache.offload import MAX_WAIT_S


@dataclass(slots=True)
class DiskFollower:
    """Copies between `disk` and this rank's pools; `transfer` is its model.transfer.Transfer."""

    disk: DiskCache
    transfer: Any
    _read: "Future[Run | None] | None" = None
    _arrays: dict[str, Any] = field(default_factory=dict)  # of the run that was read

    def save(self, group: int, contents: Mapping[bytes, Any]) -> None:
        """Save blocks of a group, or a recurrent state, by key on disk."""
        exported = self.transfer.export(group, contents)
        self.disk.save(Run(tuple(contents), self.transfer.host(exported)))

    def read(self, key: bytes) -> None:
        """Start to read the run with this last key."""
        files = self.disk.touch([key])
        self._read = self.disk.read(files[0]) if files else None

    def keys(self) -> Sequence[bytes]:
        """Of the run that was read; none if it was a miss or takes too long."""
        if self._read and wait([self._read], MAX_WAIT_S).done and (run := self._read.result()):
            self._arrays = run.arrays
            return run.keys
        return ()

    def place(self, blocks: Sequence[int], group: int, which: Sequence[int]) -> None:
        """Write blocks number `which` of the run into `blocks`."""
        self.transfer.place(group, blocks, self._arrays, which)

    def state(self) -> Any:
        """The recurrent state that was read."""
        return self.transfer.place_state(self._arrays)

    def close(self, seconds: float) -> None:
        """Finish writing, for at most so many seconds."""
        self.disk.close(seconds)

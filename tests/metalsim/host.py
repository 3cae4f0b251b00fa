"""MLX's host side on Metal: which command buffer holds which arrays, and what is copied for that.

The rules are those of MLX 0.32, read in its source. A launch's inputs are held until its command
buffer is done (backend/metal/eval.cpp). A buffer is committed after MAX_OPS + 1 launches
(`needs_commit` in backend/metal/device.cpp) and at the end of an eval. With more than AHEAD buffers
of the first kind not done, the host waits for the oldest (transforms.cpp). An update is in place
only if nothing holds the array, else all of it is copied. The limit in MB of a buffer, which makes
buffers shorter for large weights, is left out.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from bench.graph import Launch

AHEAD = 10  # MAX_ACTIVE_TASKS
MAX_OPS = {"base and Pro": 40, "Max and Ultra": 50}  # by the chip; MLX_MAX_OPS_PER_BUFFER overrides


@dataclass(slots=True)
class CommandBuffer:
    held: set[int] = field(default_factory=set)
    launches: int = 0
    counted: bool = False  # as a task that the host may wait for
    step: int = 0


@dataclass(slots=True)
class Host:
    """A host whose GPU is the bottleneck: it is done with a buffer only when the host waits."""

    max_ops: int
    copies: int = 0
    waits: int = 0
    _open: CommandBuffer = field(default_factory=CommandBuffer)
    _committed: deque[CommandBuffer] = field(default_factory=deque)
    _data: dict[int, int] = field(default_factory=dict)  # of an array that was copied: its new one

    def launch(self, launch: Launch) -> None:
        held = {self._data.get(each, each) for each in launch.reads}
        if launch.updates is not None:
            now = self._data.get(launch.updates, launch.updates)
            if any(now in each.held for each in (*self._committed, self._open)):
                self.copies += 1
                held.add(now)
                self._data[launch.updates] = -self.copies
        self._open.held |= held
        self._open.launches += 1
        if self._open.launches > self.max_ops:
            self._commit(counted=True)
        if sum(each.counted for each in self._committed) > AHEAD:
            self._commit(counted=False)
            self.waits += 1
            while not self._committed.popleft().counted:
                pass

    def _commit(self, counted: bool) -> None:
        self._open.counted = counted
        self._committed.append(self._open)
        self._open = CommandBuffer(step=self._open.step)

    def steps(self, launches: Sequence[Launch], count: int, ends: Collection[int] = ()) -> None:
        """So many equal steps, each submitted before the one in front of it is read. `ends`: after
        how many launches a part of it is submitted."""
        for step in range(count):
            self._open.step = step
            for n, launch in enumerate(launches, 1):
                self.launch(launch)
                if n in ends:
                    self._commit(counted=False)
            self._commit(counted=False)
            while self._committed and self._committed[0].step < step:
                self._committed.popleft()

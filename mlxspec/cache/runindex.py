"""Which runs are on disk, which wait to be written, and in what order they will go.

Rule: memory only. A key is known as long as one file or one waiting run holds it. Not thread-safe:
Disk's lock guards it.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlxspec.cache.runfile import Run

STEP = 1000  # ns by which a chain's next run counts as used earlier


@dataclass(slots=True)
class File:
    """`used` is the file's mtime in unix ns. Another model's file, or a damaged one, has no
    keys."""

    size: int
    used: int
    keys: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Waiting:
    """A run of `size` bytes to come, and its file's head."""

    run: Run
    head: bytes
    size: int
    used: int


class Index:
    """Names are "folder/name", relative to the root. A file and a waiting run may have the same
    one: then the run is about to replace the file."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.waiting: dict[str, Waiting] = {}  # in the order of writing
        self.touched: set[str] = set()  # whose mtime on disk is behind
        self.bytes = self.waiting_bytes = self._last = 0
        self._where: dict[bytes, tuple[str, ...]] = {}
        self._oldest: deque[tuple[int, str]] = (
            deque()
        )  # in eviction order, as it was when last sorted

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def names(self, keys: Iterable[bytes]) -> list[str]:
        """Where those keys are that are known, each name once, in the order of the keys."""
        return list(dict.fromkeys(self._where[key][-1] for key in keys if key in self._where))

    def on_disk(self, keys: Iterable[bytes]) -> bool:
        """Whether files alone hold all of the keys."""
        wanted = set(keys)
        for name in {name for key in wanted for name in self._where.get(key, ())}:
            wanted -= set(self.files[name].keys) if name in self.files else set()
        return not wanted

    def now(self, runs: int = 1) -> int:
        """Unix ns, later than ever before by so many runs: a clock that is set back makes nothing
        old."""
        self._last = max(time.time_ns(), self._last + STEP * (runs + 1))
        return self._last

    def touch(self, names: Sequence[str]) -> None:
        """These were used now, the first last."""
        stamp = self.now(len(names))
        for name in names:
            stamp -= STEP
            for held in (self.files.get(name), self.waiting.get(name)):
                if held is not None:
                    held.used = stamp
        self.touched.update(names)

    def add(self, name: str, file: File) -> None:
        """It is on disk, in place of what was."""
        self.forget(name)
        self.files[name] = file
        self.bytes += file.size
        self._link(name, file.keys)

    def forget(self, name: str) -> None:
        """It is not on disk, or to be deleted."""
        file = self.files.pop(name, None)
        if file is not None:
            self.bytes -= file.size
            self._unlink(name, file.keys)
            if name in self.waiting:
                self._link(name, self.waiting[name].run.keys)

    def enqueue(self, name: str, waiting: Waiting) -> None:
        self.waiting[name] = waiting
        self.waiting_bytes += waiting.size
        self._link(name, waiting.run.keys)

    def settle(self, name: str) -> None:
        """It waits no more."""
        waiting = self.waiting.pop(name)
        self.waiting_bytes -= waiting.size
        self._unlink(name, waiting.run.keys)
        if name in self.files:
            self._link(name, self.files[name].keys)

    def replace(self, found: dict[str, File]) -> None:
        """This is what is on disk."""
        for name in self.files.keys() - found.keys():
            self.forget(name)
        for name, file in found.items():
            if name in self.files:
                file.used = max(file.used, self.files[name].used)
            self.add(name, file)

    def evict(self, most: int) -> list[str]:
        """Forgets the least recently used files until `most` bytes are left; which ones."""
        gone = []
        while self.files and self.bytes > most:
            if not self._oldest:
                self._oldest.extend(sorted((file.used, name) for name, file in self.files.items()))
            used, name = self._oldest.popleft()
            if name in self.files and self.files[name].used == used:  # else it was used since
                self.forget(name)
                gone.append(name)
        return gone

    def check(self) -> None:
        """Assert every invariant."""
        held: dict[bytes, set[str]] = {}
        for name, keys in [
            *((name, file.keys) for name, file in self.files.items()),
            *((name, waiting.run.keys) for name, waiting in self.waiting.items()),
        ]:
            for key in keys:
                held.setdefault(key, set()).add(name)
        assert {key: set(names) for key, names in self._where.items()} == held, (
            "keys and names differ"
        )
        assert all(len(set(names)) == len(names) for names in self._where.values()), (
            "a name stands twice"
        )
        assert self.bytes == sum(file.size for file in self.files.values()), "bytes are off"
        assert self.waiting_bytes == sum(x.size for x in self.waiting.values()), (
            "waiting bytes are off"
        )

    def _link(self, name: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            known = self._where.get(key, ())
            self._where[key] = known if name in known else (*known, name)

    def _unlink(self, name: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._where[key] = tuple(x for x in self._where.get(key, ()) if x != name)
            if not self._where[key]:
                del self._where[key]

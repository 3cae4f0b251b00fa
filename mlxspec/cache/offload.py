"""Offloads the prefix cache to disk: saves the blocks and states of finished prompts, and restores
what a waiting prompt can reuse before it is admitted.

Rule: only a prompt that gains by it waits for the disk. What is restored enters the pools as cached
content and is found there by the ordinary prefix match; what is not is computed.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlxspec.cache.disk import DiskCache, Run
from mlxspec.cache.prefix import KVCacheManager, PrefixMatch
from mlxspec.types import Sequence as Seq

log = logging.getLogger("mlxspec")

RUN_BLOCKS, RUN_BYTES = 16, 1 << 24  # of a file, at most; one block at least
MIN_GAIN = 4  # blocks that a restore must add to what memory has
MAX_READS = 8  # files that are read or wait to be placed
MAX_WAIT_S = 5.0  # without anything from the disk; then the prompt is computed
MAX_CHAINS = 64  # that wait to be saved; the oldest is given up
MAX_BACKLOG = 64 << 20  # bytes queued for the disk, beyond which nothing more is exported
POLL_S = 0.01
STATE = -1  # stands where else the number of a pool does


@dataclass(slots=True)
class Restore:
    """What the disk has of a waiting prompt whose leading blocks have these `keys`.

    `places`: key on disk -> (pool or STATE, index in the chain)."""

    keys: list[bytes]
    places: dict[bytes, tuple[int, int]]
    files: deque[Path]  # that are not being read yet
    reads: deque["Future[Run | None]"] = field(default_factory=deque)
    since: float = field(default_factory=time.monotonic)  # when something came last


@dataclass(slots=True)
class KVOffloader:
    """Between `disk` and one model's `cache`; `transfer` is its model.transfer.Transfer.

    Engine thread only. If anything fails, the disk is not used until the next start."""

    disk: DiskCache
    cache: KVCacheManager
    transfer: Any
    broken: bool = False
    _chains: deque[Iterator[Any]] = field(default_factory=lambda: deque(maxlen=MAX_CHAINS))
    _exported: Any = None  # (keys, arrays on their way to the host)
    # Waiting sequences that were looked up; None: nothing (more) comes from the disk.
    _restores: dict[Seq, Restore | None] = field(default_factory=dict)

    def poll(self) -> bool:
        """Place a run that was read, hand another to the writer and export the next; False where
        nothing of that can be done now."""
        if self.broken:
            return False
        try:
            restored = self._restore_next()
            return self._save_next() or restored
        except Exception:
            log.exception("the prompt cache on disk failed; it is not used until the next start")
            self.broken, self._exported = True, None
            self._chains.clear()
            self._restores.clear()
            return False

    def close(self, seconds: float) -> None:
        """Save what waits, for at most so many seconds."""
        end = time.monotonic() + seconds
        while self.saving and time.monotonic() < end:
            if not self.poll():
                time.sleep(POLL_S)
        self.disk.close(max(0.0, end - time.monotonic()))

    # ---- saving

    def save(self, seq: Seq) -> None:
        """Save the sequence's cached blocks, and states: a later prompt may continue here."""
        if seq.keys and not self.broken:
            self._chains.append(self._runs(tuple(seq.keys)))

    @property
    def saving(self) -> bool:
        return bool(self._chains or self._exported)

    def _save_next(self) -> bool:
        if self._exported:
            keys, arrays = self._exported
            self._exported = None
            self.disk.save(Run(keys, self.transfer.host(arrays)))
        while self._chains and self.disk.queued < MAX_BACKLOG:
            self._exported = next(self._chains[0], None)
            if self._exported:
                return True
            self._chains.popleft()
        return False

    def _runs(self, keys: tuple[bytes, ...]) -> Iterator[Any]:
        """What the disk lacks of a chain, as (keys on disk, exported arrays), each exported when it
        is asked for. The blocks of windows count from the end: the same prompt leaves a token."""
        for group, window in enumerate(self.cache.layers):
            fitting = RUN_BYTES // max(1, self.transfer.block_bytes(group))
            size = max(1, min(RUN_BLOCKS, fitting))
            known = window.pool.by_key
            for start in range(self._first(group, len(keys) - 1), len(keys), size):
                run = [
                    key
                    for key in keys[start : start + size]
                    if key in known and _disk_key(key, group) not in self.disk
                ]
                if run:
                    arrays = self.transfer.export(group, [known[key] for key in run])
                    yield tuple(_disk_key(key, group) for key in run), arrays
        states = self.cache.states
        if states is not None:
            for key in keys:
                state, name = states.peek((key, ())), _disk_key(key, STATE)
                if state is not None and name not in self.disk:
                    yield (name,), state
        self.disk.touch(keys)

    def _first(self, group: int, blocks: int) -> int:
        """The first block of this group that a prompt needs which continues after `blocks`."""
        if group == STATE:
            return blocks - 1
        return self.cache.layers[group].first(blocks * self.cache.pool.block_size)

    # ---- restoring

    def restoring(self, seq: Seq) -> bool:
        """Whether the disk is still bringing what a waiting sequence can reuse."""
        return self._restores.get(seq) is not None

    def start_restore(self, seq: Seq, match: PrefixMatch) -> bool:
        """Whether a sequence that could start with `match` should wait, as the disk has more that
        it can reuse. Looks once for each."""
        if self.broken or seq in self._restores:
            return False
        self._restores[seq] = self._plan(seq, match)
        return self.restoring(seq)

    def cancel(self, seq: Seq) -> None:
        """The sequence starts or has ended."""
        restore = self._restores.pop(seq, None)
        for read in restore.reads if restore else ():
            read.cancel()

    def _give_up(self, seq: Seq) -> None:
        self.cancel(seq)
        self._restores[seq] = None

    def _has(self, group: int, key: bytes) -> bool:
        return self._in_memory(group, key) or _disk_key(key, group) in self.disk

    def _in_memory(self, group: int, key: bytes) -> bool:
        if group == STATE:
            states = self.cache.states
            return states is None or states.peek((key, ())) is not None
        return key in self.cache.pools[group].by_key

    def _plan(self, seq: Seq, match: PrefixMatch) -> Restore | None:
        """The longest prefix that memory and disk have together, if it is worth a wait."""
        pool = self.cache.pool
        most = min((len(seq.tokens) - 1) // pool.block_size, len(pool.free_blocks))
        chain = pool.chain(seq.tokens[: most * pool.block_size])
        keys = list(takewhile(lambda key: self._has(0, key), chain))
        others = [STATE, *range(1, len(self.cache.layers))]
        has = {group: [self._has(group, key) for key in keys] for group in others}
        for n in range(len(keys), match.length // pool.block_size + MIN_GAIN - 1, -1):
            if all(all(has[group][self._first(group, n) : n]) for group in others):
                return self._restore(keys[:n])
        return None

    def _restore(self, keys: list[bytes]) -> Restore | None:
        places = {}
        for group in reversed([*range(len(self.cache.layers)), STATE]):
            first = self._first(group, len(keys))
            for i, key in enumerate(keys[first:], first):
                if not self._in_memory(group, key):
                    places[_disk_key(key, group)] = (group, i)
        for group, pool in enumerate(self.cache.pools):
            first = self._first(group, len(keys))
            known = [pool.by_key[key] for key in keys[first:] if key in pool.by_key]
            pool.share(known)  # used now: what is restored must not evict it
            pool.free(known)
        self.disk.touch(places)
        files = deque(self.disk.files(places))
        return Restore(keys, places, files) if files else None

    def _restore_next(self) -> bool:
        """Place the next run that was read, the prompts taking turns."""
        waiting = [(seq, restore) for seq, restore in self._restores.items() if restore]
        reading = sum(len(restore.reads) for _, restore in waiting)
        for seq, restore in waiting:
            while restore.files and reading < MAX_READS:
                restore.reads.append(self.disk.read(restore.files.popleft()))
                reading += 1
            if restore.reads and restore.reads[0].done():
                run = restore.reads.popleft().result()
                restore.since = time.monotonic()
                self._restores[seq] = self._restores.pop(seq)
                placed = run is not None and self._place(seq, restore, run)
                if not placed or not (restore.files or restore.reads):
                    self._give_up(seq)
                return True
            if time.monotonic() - restore.since > MAX_WAIT_S:
                self._give_up(seq)
                return True
        return False

    def _place(self, seq: Seq, restore: Restore, run: Run) -> bool:
        """Make a run's content cached in the pools; False where it has no room or does not fit."""
        places = [
            (n, *restore.places[key]) for n, key in enumerate(run.keys) if key in restore.places
        ]
        group, last = places[0][1], places[0][2]
        if group == STATE:
            state = self.transfer.place_state(run.arrays)
            if self.cache.states is not None and state is not None:
                self.cache.states.put((restore.keys[last], ()), state)
            return state is not None
        pool = self.cache.pools[group]
        found = {n: i for n, _, i in places if restore.keys[i] not in pool.by_key}
        blocks = pool.allocate(len(found))
        if blocks is None:
            return False
        try:
            fits: bool = self.transfer.place(group, blocks, run.arrays, list(found))
            for block, i in zip(blocks, found.values(), strict=True) if fits else ():
                tokens = seq.tokens[i * pool.block_size : (i + 1) * pool.block_size]
                pool.cache(block, pool.parent(restore.keys, i), tuple(tokens), restore.keys[i])
        finally:
            pool.free(blocks)
        return fits


def _disk_key(key: bytes, group: int) -> bytes:
    """The key on disk of a pool's block, or of the state after that block."""
    return key if group == 0 else blake2b(key, digest_size=16, person=str(group).encode()).digest()

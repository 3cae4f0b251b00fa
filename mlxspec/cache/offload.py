"""Offloads the prefix cache to disk: saves the blocks and states of finished prompts, and restores
what a waiting prompt can reuse before it is admitted.

Rule: only a prompt that gains by it waits for the disk. What is restored enters the pools as cached
content and is found there by the ordinary prefix match; what is not is computed.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from mlxspec.cache.disk import DiskCache, Run
from mlxspec.cache.prefix import Keys, KVCacheManager, PrefixMatch
from mlxspec.types import NULL_BLOCK, Seq

log = logging.getLogger("mlxspec")

RUN_BLOCKS, RUN_BYTES = 16, 1 << 24  # of a file, at most; one block at least
MIN_GAIN = 4  # blocks that a restore must add to what memory has
MAX_READS = 8  # files that are read or wait to be placed
MAX_WAIT_S = 5.0  # without anything from the disk; then the prompt is computed
MAX_CHAINS = 64  # that wait to be saved; the oldest is given up
MAX_BACKLOG = 64 << 20  # bytes queued for the disk, beyond which nothing more is exported
POLL_S = 0.01
STATE = -1  # stands where else the number of a pool does

Place = tuple[int, int]  # pool or STATE, index in a chain of blocks
Places = dict[bytes, Place]  # by key on disk
Job = Iterator[bool]  # goes on with each poll: whether that did something


@dataclass(slots=True)
class KVOffloader:
    """Between `disk` and one model's `cache`; `transfer` is its model.transfer.Transfer.

    Chains are saved one after the other, prompts restored one after the other. Engine thread only.
    If anything fails, the disk is not used until the next start."""

    disk: DiskCache
    cache: KVCacheManager
    transfer: Any
    broken: bool = False
    _saves: deque[Job] = field(default_factory=lambda: deque(maxlen=MAX_CHAINS))
    # By waiting sequence that was looked up; None: nothing (more) comes from the disk.
    _restores: dict[Seq, Job | None] = field(default_factory=dict)

    @property
    def saving(self) -> bool:
        return bool(self._saves)

    def poll(self) -> bool:
        """Place a run that was read, and hand another to the writer; False where nothing of that
        can be done now."""
        if self.broken:
            return False
        try:
            restored = self._restore_next()
            return self._save_next() or restored
        except Exception:
            log.exception("the prompt cache on disk failed; it is not used until the next start")
            self.broken = True
            self._saves.clear()
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
            self._saves.append(self._save(seq.keys.copy()))

    def _save_next(self) -> bool:
        while self._saves and self.disk.queued < MAX_BACKLOG:
            if next(self._saves[0], False):
                return True
            self._saves.popleft()
        return False

    def _save(self, keys: Keys) -> Job:
        """Hand what the disk lacks of a chain to its writer. The blocks of windows count from the
        end: the same prompt leaves a token."""
        for number, window in enumerate(self.cache.layers):
            bytes_each = max(1, self.transfer.block_bytes(number))  # 0: all layers are recurrent
            size = max(1, min(RUN_BLOCKS, RUN_BYTES // bytes_each))
            first = window.first((len(keys) - 1) * self.cache.block_size)
            for start in range(first, len(keys), size):
                blocks = self._unsaved(number, keys[start : start + size])
                if blocks:
                    exported = self.transfer.export(number, list(blocks.values()))
                    yield True  # the device copies them meanwhile
                    arrays = self.transfer.host(exported)
                    self.disk.save(Run(tuple(blocks), arrays))
        for name, state in self._unsaved(STATE, keys).items():
            self.disk.save(Run((name,), self.transfer.host(state)))
            yield True
        self.disk.touch(keys)

    def _unsaved(self, number: int, keys: Keys) -> dict[bytes, Any]:
        """What memory has and the disk lacks, by key on disk: blocks of a pool, or states."""
        found = {}
        for key in keys:
            name = _disk_key(key, number)
            content = self._in_memory(number, key)
            if content is not None and name not in self.disk:
                found[name] = content
        return found

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
        self._restores.pop(seq, None)

    def _in_memory(self, number: int, key: bytes) -> Any:
        """The block with this key, or the state behind it; None where there is none."""
        if number != STATE:
            return self.cache.pools[number].by_key.get(key)
        states = self.cache.states
        return None if states is None else states.peek((key, ()))

    def _has(self, number: int, key: bytes) -> bool:
        if self._in_memory(number, key) is not None:
            return True
        return _disk_key(key, number) in self.disk

    def _needed(self, n: int) -> Iterator[Place]:
        """All that a prompt needs which continues after `n` blocks; what few prefixes have comes
        first."""
        if self.cache.states is not None:
            yield STATE, n - 1
        windows = list(enumerate(self.cache.layers))
        for number, window in reversed(windows):
            for i in range(window.first(n * self.cache.block_size), n):
                yield number, i

    def _plan(self, seq: Seq, match: PrefixMatch) -> Job | None:
        """Restore the longest prefix that memory and disk have together, if it is worth a wait."""
        size = self.cache.block_size
        most = min(len(seq.tokens) - 1, len(self.cache.pool.free_blocks) * size)
        keys: list[bytes] = []
        for key in self.cache.pool.chain(seq.tokens[:most]):
            if not self._has(0, key):
                break
            keys.append(key)
        least = match.length // size + MIN_GAIN
        for n in range(len(keys), least - 1, -1):
            if all(self._has(number, keys[i]) for number, i in self._needed(n)):
                return self._start(seq, keys[:n])
        return None

    def _start(self, seq: Seq, keys: list[bytes]) -> Job | None:
        places: Places = {}
        for number, i in self._needed(len(keys)):
            if self._in_memory(number, keys[i]) is None:
                places[_disk_key(keys[i], number)] = number, i
        for pool in self.cache.pools:  # used now: what is restored must not evict it
            known = [pool.by_key.get(key, NULL_BLOCK) for key in keys]
            pool.share(known)
            pool.free(known)
        self.disk.touch(places)
        return self._restore(seq, keys, places) if places else None

    def _restore(self, seq: Seq, keys: list[bytes], places: Places) -> Job:
        """Read the files that hold `places`, and make their content cached in the pools. Ends early
        where the disk takes too long, or something is lost or has no room."""
        files = deque(self.disk.files(places))
        reads: deque[Any] = deque()
        try:
            while files or reads:
                while files and len(reads) < MAX_READS:
                    reads.append(self.disk.read(files.popleft()))
                since = time.monotonic()
                while not reads[0].done():
                    if time.monotonic() - since > MAX_WAIT_S:
                        return
                    yield False
                run = reads.popleft().result()
                if run is None or not self._place(seq, keys, places, run):
                    return
                yield True
        finally:
            for read in reads:
                read.cancel()

    def _restore_next(self) -> bool:
        """Go on with the prompt that has waited longest."""
        for seq, job in self._restores.items():
            if job is not None:
                progress = next(job, None)
                if progress is None:
                    self._restores[seq] = None
                return progress is not False
        return False

    def _place(self, seq: Seq, keys: list[bytes], places: Places, run: Run) -> bool:
        """Enter a run into its pool or the states; False where it has no room or does not fit."""
        found = [places[name] for name in run.keys if name in places]
        if not found:
            return False
        number, last = found[-1]
        if number == STATE:
            state = self.transfer.place_state(run.arrays)
            if self.cache.states is not None and state is not None:
                self.cache.states.put((keys[last], ()), state)
            return state is not None
        pool = self.cache.pools[number]
        blocks = pool.allocate(len(found))
        if blocks is None:
            return False
        try:
            which = [n for n, name in enumerate(run.keys) if name in places]
            if not self.transfer.place(number, blocks, run.arrays, which):
                return False
            for block, (_, i) in zip(blocks, found, strict=True):
                start = i * pool.block_size
                tokens = tuple(seq.tokens[start : start + pool.block_size])
                pool.cache(block, pool.parent(keys, i), tokens, keys[i])
        finally:
            pool.free(blocks)  # one whose key is cached already is blank again
        return True


def _disk_key(key: bytes, number: int) -> bytes:
    """The key on disk of a pool's block, or of the state after that block."""
    if number == 0:
        return key
    return blake2b(key, digest_size=16, person=str(number).encode()).digest()

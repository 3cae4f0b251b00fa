"""Offloads the prefix cache to disk: saves the blocks and states of finished prompts, and restores
what a waiting prompt can reuse before it is admitted.

Rule: only a prompt that gains by it waits for the disk. Restored blocks enter the pools as cached
content, where the ordinary prefix match finds them; the rest is computed.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from mlxspec import log
from mlxspec.cache.disk import DiskCache, Run
from mlxspec.cache.prefix import Hashes, KVCacheManager, PrefixMatch
from mlxspec.sequences import Seq
from mlxspec.types import NULL_BLOCK, STATE

RUN_BLOCKS, RUN_BYTES = 16, 1 << 24  # of a file, at most; one block at least
MIN_GAIN = 4  # blocks that a restore must add to what memory has
MAX_WAIT_S = 5.0  # for one file; then the prompt is computed
MAX_CHAINS = 64  # waiting to be saved; the oldest is dropped first
MAX_BACKLOG = 64 << 20  # bytes queued for the disk, beyond which nothing more is exported
POLL_S = 0.01
BUSY_POLLS = 16  # polls to one save: an answer waits for the copy to the host

Location = tuple[int, int]  # pool or STATE, index in a chain of blocks
Locations = dict[bytes, Location]  # by key on disk
Job = Iterator[bool]  # advances with each poll; yields whether that did something


@dataclass(slots=True)
class KVOffloader:
    """Copies between `disk` and one model's `cache`; `runner` is its model.runner.Runner.

    Saves one chain and restores one prompt at a time. Engine thread only.
    If anything fails, the disk is not used until the next start."""

    disk: DiskCache
    cache: KVCacheManager
    runner: Any
    broken: bool = False
    _polls: int = 0
    _saves: deque[Job] = field(default_factory=lambda: deque(maxlen=MAX_CHAINS))
    # By waiting sequence, once looked up; None: nothing (more) to restore.
    _restores: dict[Seq, Job | None] = field(default_factory=dict)

    @property
    def saving(self) -> bool:
        return bool(self._saves)

    def poll(self, busy: bool = False) -> bool:
        """Put a run that was read into the pools, and hand another to the writer, less often if
        the engine is `busy`; False if neither can be done now."""
        if self.broken:
            return False
        self._polls += 1
        try:
            restored = self._restore_next()
            if busy and self._polls % BUSY_POLLS:
                return restored
            return self._save_next() or restored
        except Exception:
            log.exception("the prefix cache on disk failed; it is not used until the next start")
            self.broken = True
            self._saves.clear()
            self._restores.clear()
            return False

    def close(self, seconds: float) -> None:
        """Save what is queued, for at most `seconds`."""
        end = time.monotonic() + seconds
        while self.saving and time.monotonic() < end:
            if not self.poll():
                time.sleep(POLL_S)
        self.disk.close(max(0.0, end - time.monotonic()))

    # ---- saving

    def save(self, seq: Seq) -> None:
        """Queue the sequence's cached blocks and states: a later prompt may continue here."""
        if seq.block_hashes and not self.broken:
            self._saves.append(self._save(seq.block_hashes.copy()))

    def forget(self, hashes: Hashes) -> None:
        """Delete these blocks and the states after them. Drops the save in progress, which may
        be of them; one that is not is saved later."""
        if not hashes:
            return
        if self._saves:
            self._saves.popleft()
        numbers = (*range(len(self.cache.pools)), STATE)
        self.disk.remove([_disk_key(key, number) for key in hashes for number in numbers])

    def _save_next(self) -> bool:
        while self._saves and self.disk.queued < MAX_BACKLOG:
            if next(self._saves[0], False):
                return True
            self._saves.popleft()
        return False

    def _save(self, hashes: Hashes) -> Job:
        """Hand the part of a chain that the disk lacks to its writer. Of a window it is what
        the last block sees: the same prompt has a token left to compute."""
        position = (len(hashes) - 1) * self.cache.block_size
        firsts = [(n, group.first(position)) for n, group in enumerate(self.cache.groups)]
        for number, first in (*firsts, (STATE, 0)):
            size = 1  # a file holds one state
            if number != STATE:
                bytes_each = max(1, self.runner.block_bytes(number))  # 0: no K/V of its own
                size = max(1, min(RUN_BLOCKS, RUN_BYTES // bytes_each))
            for start in range(first, len(hashes), size):
                contents = self._unsaved(number, hashes[start : start + size])
                if contents:
                    exported = self.runner.export(number, contents)
                    yield True  # the device copies them meanwhile
                    self.write(contents, exported)
        self.disk.touch(hashes)

    def write(self, contents: Mapping[bytes, Any], exported: Any) -> None:
        """Hand exported content, by key on disk, to the writer."""
        self.disk.save(Run(tuple(contents), self.runner.host(exported)))

    def _unsaved(self, number: int, hashes: Hashes) -> dict[bytes, Any]:
        """Blocks of a pool, or states, that memory has and the disk lacks, by key on disk."""
        contents: dict[bytes, Any] = {}
        if not self.runner.complete:  # the next start would miss a head's arrays
            return contents
        for key in hashes:
            name = _disk_key(key, number)
            content = self._in_memory(number, key)
            if content is not None and name not in self.disk:
                contents[name] = content
        return contents

    def _in_memory(self, number: int, key: bytes) -> Any:
        """The block with this hash, or the state after it; None where there is none."""
        if number != STATE:
            return self.cache.pools[number].by_key.get(key)
        states = self.cache.states
        return None if states is None else states.snapshots.get((key, ()))

    # ---- restoring

    def restoring(self, seq: Seq) -> bool:
        """Whether blocks of a waiting sequence are still being restored."""
        return self._restores.get(seq) is not None

    def start_restore(self, seq: Seq, match: PrefixMatch) -> bool:
        """Whether a sequence that could start with `match` should wait, as the disk has more that
        it can reuse. Looks up each sequence once."""
        if self.broken or seq in self._restores:
            return False
        least = match.length // self.cache.block_size + MIN_GAIN
        hashes = self._restorable(seq, least)
        self._restores[seq] = self._restore(seq, hashes) if hashes else None
        return bool(hashes)

    def cancel(self, seq: Seq) -> None:
        """Stop restoring: the sequence starts or has ended."""
        self._restores.pop(seq, None)

    def _restorable(self, seq: Seq, least: int) -> Hashes:
        """The longest prefix of at least `least` blocks that memory and disk have together."""
        pool = self.cache.pool
        most = min(len(seq.tokens) - 1, len(pool.free_blocks) * pool.block_size)
        hashes = []
        for key in pool.chain(seq.tokens[:most], chunked=self.cache.chunked(seq)):
            if not self._has(0, key):
                break
            hashes.append(key)
        for n in range(len(hashes), least - 1, -1):
            if all(self._has(number, hashes[i]) for number, i in self._needed(n)):
                return hashes[:n]
        return ()

    def _needed(self, n: int) -> Iterator[Location]:
        """All that a prompt needs to continue after `n` blocks; what few prefixes have comes
        first."""
        if self.cache.states is not None:
            yield STATE, n - 1
        groups = list(enumerate(self.cache.groups))
        for number, group in reversed(groups):
            for i in range(group.first(n * self.cache.block_size), n):
                yield number, i

    def _has(self, number: int, key: bytes) -> bool:
        in_memory = self._in_memory(number, key) is not None
        return in_memory or _disk_key(key, number) in self.disk

    def _restore(self, seq: Seq, hashes: Hashes) -> Job:
        """Read the files with the part of a prefix that memory lacks, and put it into the pools.
        Ends early where the disk takes too long, a file is lost or there is no room."""
        for pool in self.cache.pools:  # used now: restored blocks must not evict them
            cached = [pool.by_key.get(key, NULL_BLOCK) for key in hashes]
            pool.share(cached)
            pool.free(cached)
        lacking: Locations = {}
        for number, i in self._needed(len(hashes)):
            if self._in_memory(number, hashes[i]) is None:
                lacking[_disk_key(hashes[i], number)] = number, i
        files = self.disk.touch(lacking)
        for n, file in enumerate(files):
            read = self.disk.read(file)
            self.runner.start_read(bytes.fromhex(file.stem))
            until = time.monotonic() + MAX_WAIT_S
            try:
                while not read.done():
                    if time.monotonic() > until:
                        return
                    yield False
            finally:
                read.cancel()
            run = read.result()
            if run and not self.runner.all_read(run.keys, MAX_WAIT_S):
                for path in files[n:]:  # all ranks save them again
                    self.disk.discard(path)
                return
            try:
                if run is None or not self._enter(seq, hashes, lacking, run=run):
                    return
            except KeyError:  # a run that lacks an array
                self.disk.discard(file)
                return
            yield True

    def _restore_next(self) -> bool:
        """Continue with the prompt that has waited longest."""
        for seq, job in self._restores.items():
            if job is not None:
                progress = next(job, None)
                if progress is None:
                    self._restores[seq] = None
                return progress is not False
        return False

    def _enter(self, seq: Seq, hashes: Hashes, lacking: Locations, run: Run) -> bool:
        """Put a run into its pool or the states; False if there is no room."""
        locations = {n: lacking[name] for n, name in enumerate(run.keys) if name in lacking}
        if not locations:
            return False
        number, first = next(iter(locations.values()))
        if number == STATE:
            assert self.cache.states is not None
            self.cache.states.put(
                (hashes[first], ()), self.runner.place(STATE, (), run.arrays, which=())
            )
            return True
        pool = self.cache.pools[number]
        blocks = pool.allocate(len(locations))
        if blocks is None:
            return False
        try:
            self.runner.place(number, blocks, run.arrays, list(locations))
            for block, (_, i) in zip(blocks, locations.values(), strict=True):
                start = i * pool.block_size
                tokens = tuple(seq.tokens[start : start + pool.block_size])
                parent = pool.parent(hashes, i, self.cache.chunked(seq))
                pool.cache(block, parent, tokens, key=hashes[i])
        finally:
            pool.free(blocks)  # one whose hash is cached already has no content
        return True


def _disk_key(key: bytes, number: int) -> bytes:
    """The key on disk of a pool's block, or of the state after that block."""
    if number == 0:
        return key
    return blake2b(key, digest_size=16, person=str(number).encode()).digest()

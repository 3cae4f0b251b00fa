"""Between the prefix cache and the disk: what a chain left behind goes there run by run, and what a
waiting prompt can reuse of it comes back before the prompt starts.

Rule: nothing waits for the disk but the prompt that gains by it. What comes back is entered into
the pools as known content and found there like any other; what does not come is computed.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from mlxspec.cache.disk import Disk, Fetch
from mlxspec.cache.prefix import KVCacheManager, PrefixMatch
from mlxspec.cache.runfile import Run
from mlxspec.types import Sequence as Seq

log = logging.getLogger("mlxspec")

RUN, RUN_BYTES = (
    16,
    1 << 24,
)  # of a file, at most: blocks, and bytes if more than one block has them
GAIN = 4  # blocks that a fetch must spare
PORTION = 1 << 26  # bytes that are asked for at a time
WAIT_S = 5.0  # without anything from the disk, after which a prompt is computed
CHAINS = 64  # that wait to be saved; the oldest is given up
REST = 0.01  # seconds between two looks at a writer that is behind
ROOM = 1 << 26  # bytes that wait for the writer, beyond which no more is handed to it

Arrays = dict[str, np.ndarray]


class Memory(Protocol):
    """Where the pools' content lies: the runner."""

    def export(self, group: int, blocks: Sequence[int]) -> Any:
        """The content of blocks, submitted to be copied."""

    def host(self, exported: Any) -> Arrays:
        """What `export` or `export_state` began, read."""

    def place(
        self, group: int, blocks: Sequence[int], arrays: Arrays, which: Sequence[int]
    ) -> bool:
        """Write blocks number `which` of what `export` gave. False where that does not fit."""

    def export_state(self, state: Any) -> Any: ...

    def place_state(self, arrays: Arrays) -> Any:
        """The state, or None where that does not fit."""

    def block_bytes(self, group: int) -> int: ...


@dataclass(slots=True)
class Landing:
    """What one prompt is to get: `names` are the files' keys -> (group, index in the chain), -1:
    the state. `left` keys are not asked for yet, `asked` ones were, and what `fetch` brought waits
    in `runs`."""

    keys: list[bytes]
    tokens: list[int]
    names: dict[bytes, tuple[int, int]]
    left: list[bytes]
    asked: list[bytes] = field(default_factory=list)
    fetch: Fetch | None = None  # its bytes count as under way while it is held
    runs: deque[Run] | None = None
    came: set[bytes] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)  # when something came last
    over: bool = False


@dataclass(slots=True)
class Tier:
    """`groups` and `memory` are one model's. Engine thread only. Whatever fails in here costs what
    would have been saved, and no more: the tier is not used again until the next start."""

    disk: Disk
    groups: KVCacheManager
    memory: Memory
    broken: bool = False
    _chains: deque[Iterator[tuple[tuple[bytes, ...], Any]]] = field(default_factory=lambda: deque())
    _leaving: tuple[tuple[bytes, ...], Any] | None = None  # a run on its way to the host
    _landings: dict[Seq, Landing] = field(default_factory=dict)
    _asked: set[Seq] = field(default_factory=set)  # waiting, and looked for once

    def _safely(self, work: Callable[..., bool], *args: Any) -> bool:
        if not self.broken:
            try:
                return work(*args)
            except Exception:
                log.exception(
                    "the prompt cache on disk failed; it is not used until the next start"
                )
                self.broken, self._leaving = True, None
                self._chains.clear()
                self._landings.clear()
        return False

    # ---- out
    # ------------------------------------------------------------------------------------------

    def note(self, seq: Seq) -> None:
        """The sequence's chain has grown to a point from which a later prompt may go on: save
        it."""
        if seq.keys and not self.broken:
            if len(self._chains) >= CHAINS:
                self._chains.popleft()
            self._chains.append(self._runs(tuple(seq.keys)))

    def keeps(self, group: int, key: bytes) -> bool:
        """Whether a block of this group can be had again."""
        return not self.broken and _name(key, group) in self.disk

    @property
    def saving(self) -> bool:
        return bool(self._chains or self._leaving)

    def turn(self) -> bool:
        """Enter one run that has come, hand one on to the writer and begin the next. False where
        nothing of that can be done now."""
        landed, left = self._safely(self._land), self._safely(self._leave)
        return landed or left

    def _leave(self) -> bool:
        if self._leaving is not None:
            keys, exported = self._leaving
            self._leaving = None
            self.disk.save(Run(keys, self.memory.host(exported), {}))
        while self._chains and self.disk.stats().waiting < ROOM:
            if (found := next(self._chains[0], None)) is not None:
                self._leaving = found
                return True
            self._chains.popleft()
        return False

    def close(self, seconds: float) -> None:
        """Save what waits, in so many seconds at most; what does not get there will be computed
        again."""
        end = time.monotonic() + seconds
        while self.saving and time.monotonic() < end:
            if not self.turn():
                time.sleep(REST)
        self.disk.close(max(0.0, end - time.monotonic()))

    def _runs(self, keys: tuple[bytes, ...]) -> Iterator[tuple[tuple[bytes, ...], Any]]:
        """What is not on disk of a chain: files' keys and exported content, begun when it is asked
        for."""
        for group, pool in enumerate(self.groups.pools):
            first = self._first(
                group, len(keys) - 1
            )  # the same prompt again leaves a token to compute
            run: list[bytes] = []
            most = max(1, min(RUN, RUN_BYTES // max(1, self.memory.block_bytes(group))))
            for key in [*keys[first:], None]:
                if key is not None and key in pool.by_key and _name(key, group) not in self.disk:
                    run.append(key)
                    if len(run) < most:
                        continue
                if run:
                    held = self.memory.export(group, [pool.by_key[k] for k in run])
                    yield tuple(_name(k, group) for k in run), held
                run = []
        states = self.groups.states
        for key in keys:
            state = states.peek((key, ())) if states is not None else None
            if state is not None and _name(key, None) not in self.disk:
                yield (_name(key, None),), self.memory.export_state(state)
        self.disk.touch(_name(key, 0) for key in keys)

    def _first(self, group: int, blocks: int) -> int:
        """The first block that somebody who goes on behind `blocks` blocks needs in this group."""
        return (
            self.groups.windows[group - 1].first(blocks * self.groups.pool.block_size)
            if group
            else 0
        )

    # ---- in
    # -------------------------------------------------------------------------------------------

    def waits(self, seq: Seq) -> bool:
        """Whether the disk is still bringing what the sequence can reuse."""
        if (landing := self._landings.get(seq)) is None:
            return False
        if landing.over:
            del self._landings[seq]
        return not landing.over

    def seeks(self, seq: Seq, hit: PrefixMatch) -> bool:
        """Whether a sequence that could start now with `hit` should wait, because the disk has more
        that it can reuse. Looks once for each."""
        return self._safely(self._seek, seq, hit)

    def _seek(self, seq: Seq, hit: PrefixMatch) -> bool:
        if seq in self._asked:
            return False
        self._asked.add(seq)
        if (landing := self._plan(seq, hit)) is not None:
            self._landings[seq] = landing
        return landing is not None

    def forget(self, seq: Seq) -> None:
        """It starts, or has gone."""
        self._landings.pop(seq, None)
        self._asked.discard(seq)

    def _plan(self, seq: Seq, hit: PrefixMatch) -> Landing | None:
        groups, size = self.groups, self.groups.pool.block_size
        keys = list(groups.pool.chain(seq.tokens))
        names = [[_name(key, group) for key in keys] for group in range(len(groups.pools))]
        have = [
            [key in pool.by_key or name in self.disk for key, name in zip(keys, own, strict=True)]
            for pool, own in zip(groups.pools, names, strict=True)
        ]
        most = next((i for i, there in enumerate(have[0]) if not there), len(keys))
        most = min(most, (len(seq.tokens) - 1) // size, len(groups.pool.free_blocks))
        least = hit.length // size + GAIN
        for n in range(most, least - 1, -1):
            if not all(all(own[self._first(g, n) : n]) for g, own in enumerate(have)):
                continue
            wanted: dict[bytes, tuple[int, int]] = {}
            if groups.states is not None and groups.states.peek((keys[n - 1], ())) is None:
                if (state := _name(keys[n - 1], None)) not in self.disk:
                    continue
                wanted[state] = -1, n - 1
            for g in reversed(range(len(groups.pools))):
                for i in range(self._first(g, n), n):
                    if keys[i] not in groups.pools[g].by_key:
                        wanted[names[g][i]] = g, i
            for g, pool in enumerate(
                groups.pools
            ):  # what is known already must not make room for the rest
                known = [pool.by_key[k] for k in keys[self._first(g, n) : n] if k in pool.by_key]
                pool.share(known)
                pool.free(known)
            return (
                Landing(keys[:n], seq.tokens[: n * size], wanted, list(wanted)) if wanted else None
            )
        return None

    def _land(self) -> bool:
        """Get on with one landing, the one that has waited for its turn longest."""
        for seq, landing in list(self._landings.items()):
            if not landing.over and self._proceed(landing):
                self._landings[seq] = self._landings.pop(seq)
                return True
        return False

    def _proceed(self, landing: Landing) -> bool:
        """Enter one run, or see that no more will come. False where there is nothing but to
        wait."""
        if landing.fetch is None and landing.left:
            n = max(1, PORTION // max(1, self.memory.block_bytes(0)))
            landing.asked, landing.left = landing.left[:n], landing.left[n:]
            if (fetch := self.disk.fetch(landing.asked)) is not None:
                landing.fetch, landing.came = fetch, set()
            elif any(key in self.disk for key in landing.asked):  # too much is under way
                landing.left = landing.asked + landing.left
            else:
                landing.left = []
        if landing.fetch is not None and landing.fetch.ready.is_set():
            if landing.runs is None:
                landing.runs = deque(landing.fetch.runs)
            if landing.runs:
                run = landing.runs.popleft()
                landing.came.update(run.keys)
                landing.since = time.monotonic()
                landing.over = not self._enter(landing, run)
                return True
            cut = [key for key in landing.asked if key not in landing.came and key in self.disk]
            landing.left = cut + landing.left if landing.came else []
            landing.fetch = landing.runs = None
        late = time.monotonic() - landing.since > WAIT_S
        landing.over = late or (landing.fetch is None and not landing.left)
        return landing.over

    def _enter(self, landing: Landing, run: Run) -> bool:
        """Make a run's content known in the pools; False where it has no room or does not fit."""
        size, states = self.groups.pool.block_size, self.groups.states
        places = [
            (n, *landing.names[key]) for n, key in enumerate(run.keys) if key in landing.names
        ]
        group = places[0][1] if places else 0
        if group < 0:
            state = self.memory.place_state(run.arrays)
            if states is not None and state is not None:
                states.put((landing.keys[places[0][2]], ()), state)
            return state is not None
        pool = self.groups.pools[group]
        places = [p for p in places if landing.keys[p[2]] not in pool.by_key]
        blocks = pool.allocate(len(places))
        if blocks is None:
            return False
        try:
            fits = self.memory.place(group, blocks, run.arrays, [n for n, _, _ in places])
            for block, (_, _, i) in zip(blocks, places, strict=True):
                if fits:
                    pool.cache(
                        block,
                        landing.keys[i],
                        pool.parent(landing.keys, i),
                        tuple(landing.tokens[i * size : (i + 1) * size]),
                    )
        finally:
            pool.free(blocks)
        return fits


def _name(key: bytes, group: int | None) -> bytes:
    """A file's key for a block of a group, or for the state behind that block."""
    return key if group == 0 else blake2b(key, digest_size=16, person=repr(group).encode()).digest()

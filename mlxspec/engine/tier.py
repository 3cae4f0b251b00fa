"""Between the prefix cache and the disk: what a chain left behind goes there run by run, and what a waiting
prompt can reuse of it comes back before the prompt starts.

Rule: nothing waits for the disk but the prompt that gains by it. What comes back is entered into the pools as
known content and found there like any other; what does not come is computed.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from mlxspec.engine.blocks import chain
from mlxspec.engine.disk import Disk, Fetch
from mlxspec.engine.groups import Groups
from mlxspec.engine.runfile import Run
from mlxspec.types import Sequence as Seq

RUN = 16  # blocks of a file
GAIN = 4  # blocks that a fetch must spare
PORTION = 64  # blocks that are asked for at a time
CHAINS = 64  # that wait to be saved; the oldest is given up
REST = 0.01  # seconds between two looks at a writer that is behind
ROOM = 1 << 27  # bytes that wait for the writer, beyond which no more is handed to it

Arrays = dict[str, np.ndarray]


class Memory(Protocol):
    """Where the pools' content lies: the runner."""

    def export(self, group: int, blocks: Sequence[int]) -> Any:
        """The content of blocks, submitted to be copied."""

    def host(self, exported: Any) -> Arrays:
        """What `export` or `export_state` began, read."""

    def place(self, group: int, blocks: Sequence[int], arrays: Arrays, which: Sequence[int]) -> bool:
        """Write blocks number `which` of what `export` gave. False where that does not fit."""

    def export_state(self, state: Any) -> Any: ...

    def place_state(self, arrays: Arrays) -> Any:
        """The state, or None where that does not fit."""


@dataclass(slots=True)
class Landing:
    """What one prompt is to get: `names` are the files' keys -> (group, index in the chain), None for the
    state; `left` keys are not asked for yet."""

    keys: list[bytes]
    tokens: list[int]
    names: dict[bytes, tuple[int, int]]
    left: list[bytes]
    fetch: Fetch | None = None
    runs: list[Run] = field(default_factory=list)


@dataclass(slots=True)
class Tier:
    """`groups` and `memory` are one model's. Engine thread only."""

    disk: Disk
    groups: Groups
    memory: Memory
    _chains: deque[Iterator[tuple[tuple[bytes, ...], Any]]] = field(default_factory=lambda: deque())
    _leaving: tuple[tuple[bytes, ...], Any] | None = None  # a run on its way to the host
    _landings: dict[Seq, Landing] = field(default_factory=dict)
    _asked: set[Seq] = field(default_factory=set)  # waiting, and looked for once

    # ---- out ------------------------------------------------------------------------------------------

    def note(self, seq: Seq) -> None:
        """The sequence's chain has grown to a point from which a later prompt may go on: save it."""
        if seq.keys:
            if len(self._chains) >= CHAINS:
                self._chains.popleft()
            self._chains.append(self._runs(tuple(seq.keys)))

    @property
    def saving(self) -> bool:
        return bool(self._chains or self._leaving)

    @property
    def landing(self) -> bool:
        return bool(self._landings)

    def turn(self) -> bool:
        """Hand one run on to the writer and begin the next. False where there is nothing to do now."""
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
        """Save what waits, in so many seconds at most; what does not get there will be computed again."""
        end = time.monotonic() + seconds
        while self.saving and time.monotonic() < end:
            if not self.turn():
                time.sleep(REST)
        self.disk.close(max(0.0, end - time.monotonic()))

    def _runs(self, keys: tuple[bytes, ...]) -> Iterator[tuple[tuple[bytes, ...], Any]]:
        """What is not on disk of a chain: files' keys and exported content, begun when it is asked for."""
        for group, pool in enumerate(self.groups.pools):
            first = self._first(group, len(keys) - 1)  # the same prompt again leaves a token to compute
            run: list[bytes] = []
            for key in [*keys[first:], None]:
                if key is not None and key in pool.index and _name(key, group) not in self.disk:
                    run.append(key)
                    if len(run) < RUN:
                        continue
                if held := [pool.index[k] for k in run if k in pool.index]:
                    if len(held) == len(run):
                        yield tuple(_name(k, group) for k in run), self.memory.export(group, held)
                run = []
        states = self.groups.states
        for key in keys:
            state = states.peek((key, ())) if states is not None else None
            if state is not None and _name(key, None) not in self.disk:
                yield (_name(key, None),), self.memory.export_state(state)
        self.disk.touch(_name(key, 0) for key in keys)

    def _first(self, group: int, blocks: int) -> int:
        """The first block that somebody who goes on behind `blocks` blocks needs in this group."""
        return self.groups.windows[group - 1].first(blocks * self.groups.pool.block_size) if group else 0

    # ---- in -------------------------------------------------------------------------------------------

    def holds(self, seq: Seq) -> bool:
        """Whether a waiting sequence should wait on, because the disk is bringing what it can reuse."""
        landing = self._landings.get(seq)
        if landing is None:
            landing = self._plan(seq)
            if landing is None:
                return False
            self._landings[seq] = landing
        if self._land(landing):
            return True
        del self._landings[seq]
        return False

    def forget(self, seq: Seq) -> None:
        """It starts, or has gone."""
        self._landings.pop(seq, None)
        self._asked.discard(seq)

    def _plan(self, seq: Seq) -> Landing | None:
        groups, size = self.groups, self.groups.pool.block_size
        if seq in self._asked:
            return None
        self._asked.add(seq)
        keys = chain(groups.pool.root, seq.tokens, size)
        names = [[_name(key, group) for key in keys] for group in range(len(groups.pools))]
        have = [
            [key in pool.index or name in self.disk for key, name in zip(keys, own, strict=True)]
            for pool, own in zip(groups.pools, names, strict=True)
        ]
        most = next((i for i, there in enumerate(have[0]) if not there), len(keys))
        most = min(most, (len(seq.tokens) - 1) // size, len(groups.pool.free))
        least = groups.match(seq.tokens).length // size + GAIN
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
                    if keys[i] not in groups.pools[g].index:
                        wanted[names[g][i]] = g, i
            for g, pool in enumerate(groups.pools):  # what is known already must not make room for the rest
                known = [pool.index[k] for k in keys[self._first(g, n) : n] if k in pool.index]
                pool.share(known)
                pool.drop(known)
            return Landing(keys[:n], seq.tokens[: n * size], wanted, list(wanted)) if wanted else None
        return None

    def _land(self, landing: Landing) -> bool:
        """Enter one run that has come; False once there is nothing more to come."""
        if landing.fetch is None and landing.left:
            asked, landing.left = landing.left[:PORTION], landing.left[PORTION:]
            landing.fetch = self.disk.fetch(asked)
            if landing.fetch is None:  # gone, or too much is under way
                landing.left = []
        if landing.fetch is not None and landing.fetch.ready and not landing.runs:
            landing.runs, landing.fetch = list(reversed(landing.fetch.runs)), None
        if landing.runs and not self._enter(landing, landing.runs.pop()):
            return False
        return bool(landing.runs or landing.fetch is not None or landing.left)

    def _enter(self, landing: Landing, run: Run) -> bool:
        """Make a run's content known in the pools; False where it has no room or does not fit."""
        size, states = self.groups.pool.block_size, self.groups.states
        places = [(n, *landing.names[key]) for n, key in enumerate(run.keys) if key in landing.names]
        group = places[0][1] if places else 0
        if group < 0:
            state = self.memory.place_state(run.arrays)
            if states is not None and state is not None:
                states.put((landing.keys[places[0][2]], ()), state)
            return state is not None
        pool = self.groups.pools[group]
        places = [p for p in places if landing.keys[p[2]] not in pool.index]
        blocks = pool.alloc(len(places))
        if blocks is None:
            return False
        fits = self.memory.place(group, blocks, run.arrays, [n for n, _, _ in places])
        for block, (_, _, i) in zip(blocks, places, strict=True):
            if fits:
                pool.name(block, landing.keys, i, tuple(landing.tokens[i * size : (i + 1) * size]))
        pool.drop(blocks)
        return fits


def _name(key: bytes, group: int | None) -> bytes:
    """A file's key for a block of a group, or for the state behind that block."""
    return key if group == 0 else blake2b(key, digest_size=16, person=repr(group).encode()).digest()

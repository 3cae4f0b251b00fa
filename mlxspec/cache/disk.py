"""The disk tier: runs of KV blocks and state snapshots that outlive the process, as files under one
root.

Rule: it may cost a recomputation, never an answer. What is read was verified; what fails is a miss,
logged once; the engine's thread never waits; the files never pass the limit. Processes that share a
root write in turn, and who follows another looks again.
"""

import fcntl
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mlxspec.cache.runfile import (
    FOLDER,
    Run,
    encode,
    keys_of,
    label,
    listing,
    open_lock,
    pieces,
    put,
    read,
)
from mlxspec.cache.runindex import File, Index, Waiting

log = logging.getLogger("mlxspec")

RATE = 64 << 20  # bytes a second to write
BURST = 4.0  # seconds' worth that may be written at once
PENDING = 128 << 20  # bytes that may wait to be written
READING = 128 << 20  # bytes of fetches that somebody holds
FETCHES = 64  # that may wait to be read
REST = 60.0  # seconds without writing after a write has failed


@dataclass(slots=True)
class DiskStats:
    """`files` and `bytes` are on disk now, of all models; `waiting` bytes are not yet. The others
    only grow: bytes `written` and `read`; runs that were `hits`, `damaged`, not written
    (`dropped`), or `evicted`."""

    files: int = 0
    bytes: int = 0
    waiting: int = 0
    written: int = 0
    read: int = 0
    hits: int = 0
    damaged: int = 0
    dropped: int = 0
    evicted: int = 0


class Fetch:
    """What `Disk.fetch` will bring: `runs`, verified, in the order of the keys, complete once
    `ready` is set. Its bytes count as under way while anybody holds it; to let go of it is to
    cancel it."""

    __slots__ = ("__weakref__", "_bytes", "_freed", "ready", "runs")

    def __init__(self, size: int, freed: deque[int]) -> None:
        self.runs: list[Run] = []
        self.ready = threading.Event()
        self._bytes, self._freed = size, freed

    def __del__(self) -> None:
        self._freed.append(self._bytes)  # on any thread, at any moment: so no lock


@dataclass(slots=True)
class Bucket:
    """Lets `rate` bytes a second through, `burst` at once; what is larger goes alone and is paid
    after."""

    rate: float
    burst: float
    level: float
    at: float

    def delay(self, size: int, now: float) -> float:
        """Seconds to wait before asking again; 0.0: take them."""
        self.level, self.at = min(self.burst, self.level + (now - self.at) * self.rate), now
        short = min(size, self.burst) - self.level
        if short > 0:
            return max(short / self.rate, 1e-3)  # never so little that a clock does not show it
        self.level -= size
        return 0.0


class Disk:
    """`<root>/<fingerprint>/<last key in hex>.safetensors`; the limit holds over all fingerprints
    under `root`, and the least recently used file goes first. `model` is its name, for people.
    Construction looks at names and heads. Then one thread writes and another reads, so that no read
    waits for the slow writes. Methods are for any thread; only `flush` and `close` wait. `now` and
    `pause(seconds)` clock the writes."""

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        limit_bytes: int,
        *,
        model: str = "",
        rate: float = RATE,
        pending: int = PENDING,
        reading: int = READING,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        if not FOLDER.fullmatch(fingerprint):
            raise ValueError(f"fingerprint = {fingerprint!r}: give 8 to 64 hex digits")
        self._root, self._own, self._model = root, fingerprint, model
        self._token = os.urandom(16).hex().encode()  # in the lock's file: who wrote last
        self._limit = limit_bytes - len(self._token)
        self._pending, self._most, self._now = pending, reading, now
        self._over = threading.Event()
        self._pause = pause or self._over.wait
        self._bucket = Bucket(rate, BURST * rate, BURST * rate, now())
        self._lock = threading.Condition()  # of all below; held for memory only, never during I/O
        self._index = Index()
        self._asked: deque[tuple[weakref.ref[Fetch], list[str]]] = deque()
        self._freed: deque[int] = deque()
        self._reading = 0  # bytes of fetches that somebody holds, and `_freed`
        self._retry = -1.0  # when to write again after a failure
        self._busy, self._closing, self._stale, self._told = True, False, True, False
        self._count = DiskStats()
        with self._guarded("cannot be read"):
            self._scan(alone=False)
        self._writer = threading.Thread(target=self._write, name="disk writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="disk reader", daemon=True)
        self._writer.start()
        self._reader.start()

    # ---- any thread
    # -----------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._index  # one look-up, which needs no lock

    def save(self, run: Run) -> bool:
        """Have a run written; False if all of it is known already, too much waits, or writing
        failed of late. Raises ValueError for what no file can hold."""
        if run.keys and all(key in self._index for key in run.keys):
            return False
        head = encode(run, self._own, self._model)
        size = len(head) + sum(array.nbytes for array in run.arrays.values())
        # of two such runs the newer is the longer
        name = f"{self._own}/{run.keys[-1].hex()}.safetensors"
        with self._lock:
            full = self._index.waiting_bytes + size > self._pending or size > self._limit
            if full or name in self._index.waiting or self._closing or self._now() < self._retry:
                self._count.dropped += 1
                return False
            self._index.enqueue(name, Waiting(run, head, size, self._index.now()))
            self._lock.notify_all()
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were of use, the first most of all: so a chain's head outlives its tail. For hits
        that need no fetch, and for a chain that a `save` has lengthened."""
        with self._lock:
            self._index.touch(self._index.names(keys))
            self._lock.notify_all()

    def fetch(self, keys: Iterable[bytes]) -> Fetch | None:
        """Have the runs read that hold these keys, as many from the front as there is room for.
        None: nothing of it is here, or too much is under way."""
        with self._lock:
            while self._freed:
                self._reading -= self._freed.popleft()
            chosen: list[str] = []
            total = 0
            for name in self._index.names(keys):
                held = self._index.waiting.get(name) or self._index.files[name]
                if self._reading + total + held.size > self._most:
                    break
                chosen.append(name)
                total += held.size
            if not chosen or self._closing or len(self._asked) >= FETCHES:
                return None
            self._reading += total
            fetch = Fetch(total, self._freed)
            self._asked.append((weakref.ref(fetch), chosen))
            self._index.touch(chosen)
            self._lock.notify_all()
        return fetch

    def stats(self) -> DiskStats:
        with self._lock:
            now = self._index
            return replace(
                self._count, files=len(now.files), bytes=now.bytes, waiting=now.waiting_bytes
            )

    def flush(self, timeout: float) -> bool:
        """Wait until all that was saved and touched is on disk or was dropped; False: it took too
        long."""
        with self._lock:
            return self._lock.wait_for(
                lambda: not (self._index.waiting or self._index.touched or self._busy), timeout
            )

    def close(self, timeout: float) -> bool:
        """Write what waits, at full speed, for `timeout` seconds at most; the rest is dropped.
        True: nothing was. Fetches under way end as misses. Safe to call twice."""
        end = time.monotonic() + timeout
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._over.set()
        self._writer.join(timeout)
        with self._lock:
            dropped = self._drop_waiting()
        self._reader.join(max(0.0, end - time.monotonic()))
        return not dropped and not self._writer.is_alive()

    def _drop_waiting(self) -> int:
        names = list(self._index.waiting)
        for name in names:
            self._index.settle(name)
        self._count.dropped += len(names)
        return len(names)

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Nothing that goes wrong with a disk may end a thread: it is logged, the first time as a
        warning."""
        try:
            yield
        except Exception as error:
            level = logging.DEBUG if self._told else logging.WARNING
            log.log(level, "prompt cache: %s %s: %s", self._root, what, error)
            self._told = True

    # ---- the writer's thread
    # ----------------------------------------------------------------------------

    def _write(self) -> None:
        with self._guarded("cannot be tidied"):
            if self._root.is_dir():
                os.chmod(self._root, self._root.stat().st_mode & 0o700)  # it holds what users wrote
                with self._alone():
                    self._evict(0)
        while True:
            with self._lock:
                self._busy = False
                self._lock.notify_all()
                self._lock.wait_for(
                    lambda: self._index.waiting or self._index.touched or self._closing
                )
                name, waiting = next(iter(self._index.waiting.items()), ("", None))
                if waiting is None and not self._index.touched:
                    return
                self._busy = True
                files = self._index.files
                stamps = [(x, files[x].used) for x in self._index.touched if x in files]
                self._index.touched.clear()
            for touched, used in stamps:
                with suppress(OSError):  # gone meanwhile
                    os.utime(self._root / touched, ns=(used, used))
            if waiting is not None:
                self._next(name, waiting)

    def _next(self, name: str, waiting: Waiting) -> None:
        while (delay := self._bucket.delay(waiting.size, self._now())) and not self._closing:
            self._pause(delay)
        stored = False
        with self._guarded(
            f"cannot be written; now and whenever that happens, nothing is for {REST:.0f} s"
        ):
            self._store(name, waiting)
            stored = True
        if not stored:
            with self._lock:
                self._drop_waiting()
                self._retry = self._now() + REST

    def _store(self, name: str, waiting: Waiting) -> None:
        with self._alone():
            with self._lock:
                if self._index.waiting.get(name) is not waiting:
                    return  # closed
                if self._index.on_disk(waiting.run.keys):  # another process was first
                    return self._index.settle(name)
            self._evict(waiting.size)
            (self._root / self._own).mkdir(mode=0o700, exist_ok=True)
            used = waiting.used
            put(self._root / name, pieces(waiting.run, waiting.head), used)
            with self._lock:
                self._count.written += waiting.size
                if self._index.waiting.get(name) is waiting:
                    self._index.settle(name)
                self._index.add(name, File(waiting.size, waiting.used, waiting.run.keys))
                self._index.touched |= {name} if waiting.used != used else set()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process writes or evicts meanwhile. If another did since, what is there is
        looked at anew. The lock goes with the process, however that ends."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = open_lock(self._root)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if self._stale or os.pread(fd, 64, 0) != self._token:
                self._scan(alone=True)
                os.ftruncate(fd, 0)
                os.pwrite(fd, self._token, 0)
                self._stale = False
            yield
        except BaseException:
            self._stale = True
            raise
        finally:
            os.close(fd)

    def _scan(self, alone: bool) -> None:
        found: dict[str, File] = {}
        for name, status in listing(self._root):
            if name.endswith(".tmp"):
                if alone:  # else its writer may be alive
                    (self._root / name).unlink(missing_ok=True)
                continue
            known = self._index.files.get(name)
            same = known is not None and known.size == status.st_size
            keys = known.keys if known is not None and same else self._keys(name)
            found[name] = File(status.st_size, min(status.st_mtime_ns, time.time_ns()), keys)
        with self._lock:
            self._index.replace(found)

    def _keys(self, name: str) -> tuple[bytes, ...]:
        """The keys that a file of ours claims to hold; none if it claims what cannot be."""
        meta = None
        if name.startswith(self._own + "/"):
            with suppress(OSError):
                meta = label(self._root / name)
        keys = keys_of(meta) if meta and meta.get("fingerprint") == self._own else ()
        return keys if keys and name.endswith(f"/{keys[-1].hex()}.safetensors") else ()

    def _evict(self, size: int) -> None:
        """Make room for `size` bytes."""
        with self._lock:
            gone = self._index.evict(self._limit - size)
            self._count.evicted += len(gone)
        for path in [self._root / name for name in gone]:
            path.unlink(missing_ok=True)
            if path.parent.name != self._own:
                with suppress(OSError):  # not empty yet
                    path.parent.rmdir()

    # ---- the reader's thread
    # ----------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._asked or self._closing)
                if not self._asked:
                    return
                asked = self._asked.popleft()
            self._answer(*asked)  # in a frame of its own, so that none here keeps its runs

    def _answer(self, asked: weakref.ref[Fetch], names: list[str]) -> None:
        runs = []
        for name in names:
            if asked() is not None and not self._closing and (run := self._load(name)) is not None:
                runs.append(run)
        if (fetch := asked()) is not None:
            fetch.runs = runs
            fetch.ready.set()

    def _load(self, name: str) -> Run | None:
        with self._lock:
            waiting, file = self._index.waiting.get(name), self._index.files.get(name)
            self._count.hits += waiting is not None
        if waiting is not None or file is None:
            return waiting.run if waiting else None
        run, gone = None, True
        with self._guarded("cannot be read"), suppress(FileNotFoundError):
            run = read(self._root / name, self._own, file.size)
            gone = False
        with self._lock:
            if run is not None and run.keys == file.keys:
                self._count.hits += 1
                self._count.read += file.size
                return run
            self._count.damaged += not gone
            if same := self._index.files.get(name) is file:  # else it was replaced meanwhile
                self._index.forget(name)
        if same and not gone:
            with suppress(OSError):
                (self._root / name).unlink()
        return None

"""The disk tier: what comes back is what was saved; whatever happens to the files is a miss; bounds
hold."""

import errno
import fcntl
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxspec.cache import runindex
from mlxspec.cache.disk import BURST, FETCHES, REST, Bucket, Disk
from mlxspec.cache.runfile import LABEL, Run, keys_of, label, listing, read
from tests.cache.diskwriter import MODEL, key, run_of, total, watched
from tests.cache.test_runfile import same

OTHER = "fedcba9876543210"
ROOMY = 1 << 30
WAIT = 30.0

Opener = Callable[..., Disk]


def run(*keys: int, size: int = 1000) -> Run:
    return Run(
        tuple(map(key, keys)), {"x": np.full(size, keys[-1] % 256, np.uint8)}, {"n": str(len(keys))}
    )


def keys(*numbers: int) -> list[bytes]:
    return [key(i) for i in numbers]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Opens the cache of a directory, and closes it after the test."""
    disks = []

    def open_(limit: int = ROOMY, folder: str = "prompts", model: str = MODEL, **more: Any) -> Disk:
        disks.append(Disk(tmp_path / folder, model, limit, **({"rate": 1e12} | more)))
        return disks[-1]

    yield open_
    for disk in disks:
        disk.close(WAIT)
        disk._index.check()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


def got(disk: Disk, *numbers: int) -> list[Run]:
    fetch = disk.fetch(keys(*numbers))
    if fetch is None:
        return []
    assert fetch.ready.wait(WAIT)
    return fetch.runs


def saved(disk: Disk, *runs: Run) -> Disk:
    for one in runs:
        assert disk.save(one)
    assert disk.flush(WAIT)
    return disk


def path_of(root: Path, number: int) -> Path:
    return root / MODEL / f"{key(number).hex()}.safetensors"


class Held:
    """A writer's pause that lasts until it is let go."""

    def __init__(self) -> None:
        self.waits, self.go = threading.Event(), threading.Event()

    def __call__(self, seconds: float) -> None:
        self.waits.set()
        assert self.go.wait(WAIT)


# ---- there and back
# ----------------------------------------------------------------------------------------


def test_what_was_saved_comes_back_after_a_restart(opened: Opener) -> None:
    disk = saved(opened(model=MODEL), *map(run_of, range(5)))
    assert [same(a, run_of(b)) for a, b in zip(got(disk, 3, 1), (3, 1), strict=True)] == [
        True,
        True,
    ]
    assert disk.close(WAIT)
    disk = opened()
    assert all(key(i) in disk for i in range(5)) and key(9) not in disk
    assert [same(a, run_of(b)) for a, b in zip(got(disk, *range(5)), range(5), strict=True)] == [
        True
    ] * 5
    stats = disk.stats()
    assert (stats.files, stats.hits, stats.written, stats.read) == (5, 5, 0, stats.bytes)


def test_a_run_is_fetched_once_whichever_of_its_keys_are_asked_for(opened: Opener) -> None:
    disk = saved(opened(), run(1, 2, 3), run(4, 5))
    assert [x.keys[-1] for x in got(disk, 2, 3, 9, 5)] == keys(3, 5)
    assert disk.fetch(keys(9)) is None and disk.fetch([]) is None


def test_what_waits_to_be_written_is_there_already(opened: Opener) -> None:
    pause = Held()
    disk = opened(rate=1000.0, pause=pause)
    assert disk.save(run(1, size=5000)) and disk.flush(WAIT)  # the burst, and more
    assert disk.save(run(2))
    assert pause.waits.wait(WAIT) and key(2) in disk and disk.stats().files == 1
    assert same(got(disk, 2)[0], run(2))  # a read does not wait for a write
    assert not disk.save(run(2))
    pause.go.set()
    disk._bucket.rate = 1e12
    assert disk.flush(WAIT) and disk.stats().files == 2


def test_a_longer_run_with_the_same_end_takes_the_place_of_a_shorter_one(
    opened: Opener, root: Path
) -> None:
    disk = saved(saved(opened(), run(3)), run(1, 2, 3))
    assert len(list(listing(root))) == 1 and disk.stats().bytes == path_of(root, 3).stat().st_size
    assert not disk.save(run(2, 3))
    for each in (disk, opened()):
        assert [x.keys for x in got(each, 1)] == [run(1, 2, 3).keys]


def test_only_the_owner_may_look(opened: Opener, root: Path) -> None:
    root.mkdir()
    root.chmod(0o755)
    saved(opened(), run(1))
    modes = {
        path.relative_to(root).parts[-1]: path.stat().st_mode & 0o777 for path in root.rglob("*")
    }
    assert root.stat().st_mode & 0o777 == 0o700 and modes.pop(MODEL) == 0o700
    assert set(modes.values()) == {0o600} and "lock" in modes


# ---- misses
# ------------------------------------------------------------------------------------------------


def test_a_changed_file_is_a_miss_is_forgotten_and_goes(opened: Opener, root: Path) -> None:
    rng = random.Random(1)
    disk, size = saved(opened(), *(run(i) for i in range(60))), path_of(root, 0).stat().st_size
    for i in range(60):
        content = bytearray(path_of(root, i).read_bytes())
        at = rng.randrange(8 * size)
        content[at // 8] ^= 1 << at % 8
        path_of(root, i).write_bytes(content if i % 2 else content[: at // 8])
    again = opened()  # which reads the heads of what is damaged
    assert got(disk, *range(0, 60, 3)) == [] and disk.stats().damaged == 20
    assert not any(key(i) in disk or path_of(root, i).exists() for i in range(0, 60, 3))
    assert got(again, *range(60)) == [] and again.stats().damaged <= 40
    assert not any(key(i) in again for i in range(60))
    saved(disk, run(0))
    assert same(got(disk, 0)[0], run(0))


def test_a_file_under_anothers_name_is_a_miss(opened: Opener, root: Path) -> None:
    disk = saved(opened(), run(1), run(2))
    shutil.copyfile(path_of(root, 1), path_of(root, 2))
    assert got(disk, 2) == [] and len(got(disk, 1)) == 1
    shutil.copyfile(path_of(root, 1), path_of(root, 2))
    assert key(2) not in opened()
    (root / OTHER).mkdir()
    shutil.copyfile(path_of(root, 1), root / OTHER / path_of(root, 1).name)
    assert key(1) not in opened(model=OTHER)


def test_what_is_gone_is_left_out(opened: Opener, root: Path) -> None:
    disk = saved(opened(), run(1), run(2), run(3))
    path_of(root, 2).unlink()
    assert [x.keys for x in got(disk, 1, 2, 3)] == [run(1).keys, run(3).keys]
    assert key(2) not in disk and disk.stats().damaged == 0
    shutil.rmtree(root)
    assert got(disk, 1, 3) == [] and disk.stats().bytes == 0
    saved(disk, run(1))
    assert len(got(disk, 1)) == 1


# ---- bounds
# ------------------------------------------------------------------------------------------------


def test_the_limit_holds_at_every_moment(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("write", "replace", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name), lambda: seen.append(total(root))))
    disk = opened(20_000)
    rng = random.Random(1)
    for i in range(100):
        disk.save(run(i, size=rng.randrange(8000)))
        assert disk.flush(WAIT)
    assert 12_000 < max(seen) <= 20_000 and disk.stats().evicted > 50
    assert disk.stats().bytes == total(root) - 32  # the lock's file
    assert not disk.save(run(200, size=20_000)) and disk.stats().dropped == 1


def test_a_smaller_limit_holds_from_the_next_start(opened: Opener, root: Path) -> None:
    saved(opened(), *(run(i) for i in range(20))).close(WAIT)
    disk = opened(10_000)
    assert disk.flush(WAIT) and 8000 < total(root) <= 10_000
    assert [key(i) in disk for i in (0, 19)] == [False, True]
    disk.close(WAIT)
    disk = opened(0)
    assert disk.flush(WAIT) and list(listing(root)) == [] and not disk.save(run(1))


def test_the_least_recently_used_goes_first_also_after_a_restart(opened: Opener) -> None:
    size = 1500
    disk = saved(opened(), *(run(i, size=size) for i in range(5)))
    assert len(got(disk, 0)) == 1
    disk.touch(keys(1))
    assert disk.flush(WAIT) and disk.close(WAIT)
    disk = saved(opened(5 * 2000), run(5, size=size), run(6, size=size))
    assert [i for i in range(7) if key(i) in disk] == [0, 1, 4, 5, 6][-5:]


def test_a_clock_that_is_set_back_makes_nothing_old(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = saved(opened(5 * 2000), *(run(i, size=1500) for i in range(4)))
    monkeypatch.setattr(runindex.time, "time_ns", lambda: 1_000_000)
    saved(disk, run(4, size=1500), run(5, size=1500), run(6, size=1500))
    assert [i for i in range(7) if key(i) in disk] == [2, 3, 4, 5, 6]


def test_a_file_of_the_future_counts_as_used_now(opened: Opener, root: Path) -> None:
    disk = saved(opened(), run(0, size=1500))
    assert disk.close(WAIT)
    ((name, _),) = listing(root)
    os.utime(root / name, (4e9, 4e9))
    disk = opened(5 * 2000)
    assert disk.flush(WAIT)
    saved(disk, *(run(i, size=1500) for i in range(1, 6)))
    assert [i for i in range(6) if key(i) in disk] == [1, 2, 3, 4, 5]


def test_a_chains_head_outlives_its_tail(opened: Opener) -> None:
    disk = saved(opened(), *(run(i) for i in range(6)))
    assert len(got(disk, 0, 1, 2)) == 3
    disk.touch(keys(3, 4, 5))
    assert disk.close(WAIT)
    disk = opened(1400 * 4)
    assert disk.flush(WAIT)
    assert [i for i in range(6) if key(i) in disk] == [0, 3, 4, 5]


def test_old_models_make_room(opened: Opener, root: Path) -> None:
    old = saved(opened(model=OTHER), *(run(i) for i in range(5)))
    old.close(WAIT)
    disk = saved(opened(1400 * 6), *(run(i) for i in range(3)))
    assert key(0) in disk and len(list(listing(root))) == 6
    saved(disk, *(run(i) for i in range(3, 6)))
    assert all(key(i) in disk for i in range(6)) and not (root / OTHER).exists()


def test_the_queue_is_bounded(opened: Opener) -> None:
    pause = Held()
    disk = opened(rate=1.0, pause=pause, pending=10_000)
    assert [disk.save(run(i)) for i in range(20)] == [True] * 7 + [False] * 13
    stats = disk.stats()
    assert (stats.dropped, stats.files) == (13, 0) and 8000 < stats.waiting <= 10_000
    pause.go.set()
    assert disk.close(WAIT) and disk.stats().files == 7


def test_what_is_under_way_is_bounded_in_bytes_until_it_is_let_go(opened: Opener) -> None:
    disk = saved(opened(reading=5000), *(run(i) for i in range(5)), run(9, size=6000))
    fetch = disk.fetch(keys(*range(5)))
    assert (
        fetch
        and fetch.ready.wait(WAIT)
        and [x.keys for x in fetch.runs] == [run(i).keys for i in range(3)]
    )
    assert disk.fetch(keys(4)) is None
    del fetch
    assert len(got(disk, 4)) == 1 and got(disk, 9) == []


def test_fetches_that_wait_are_bounded_and_end_with_who_asked(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, go, reads = saved(opened(), run(1)), threading.Event(), []

    def slow(*args: Any) -> Run | None:
        reads.append(args)
        assert go.wait(WAIT)
        return read(*args)

    monkeypatch.setattr("mlxspec.commands.cache.disk.read", slow)
    first = disk.fetch(keys(1))
    while not reads:
        time.sleep(0)
    waiting = [disk.fetch(keys(1)) for _ in range(FETCHES)]
    assert first and all(waiting) and disk.fetch(keys(1)) is None
    last = waiting.pop()
    waiting.clear()
    go.set()
    assert last and last.ready.wait(WAIT) and len(last.runs) == 1 and len(reads) == 2


def test_the_rate_holds_and_a_burst_is_let_through(opened: Opener) -> None:
    clock, written, disk = [100.0], [], None

    def pause(seconds: float) -> None:
        assert seconds > 0 and disk
        written.append((clock[0], disk.stats().written))
        clock[0] += seconds

    disk = opened(rate=1000.0, pending=ROOMY, now=lambda: clock[0], pause=pause)
    with disk._lock:
        assert all([disk.save(run(i, size=700)) for i in range(40)])
    assert disk.flush(WAIT)
    total = disk.stats().written
    assert 30_000 < total and clock[0] - 100 == pytest.approx(total / 1000 - BURST, abs=1.5)
    assert written[0][0] == 100.0 and written[0][1] > 1000 * BURST / 2
    assert all(sent <= 1000 * (BURST + at - 100) + 1e-6 for at, sent in written)


def test_the_bucket() -> None:
    bucket = Bucket(10.0, 20.0, 20.0, 0.0)
    assert (
        bucket.delay(15, 0.0) == 0 and bucket.delay(10, 0.0) == 0.5 and bucket.delay(10, 0.5) == 0
    )
    assert (
        bucket.delay(20, 99.0) == 0 and bucket.delay(20, 99.0) == 2.0
    )  # no more than a burst is saved up
    assert (
        bucket.delay(100, 101.0) == 0 and bucket.delay(1, 101.0) == 8.1
    )  # too large for any burst: later


# ---- a disk that fails
# -------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]


def test_a_full_disk_costs_the_runs_and_a_rest(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    disk, write, full = saved(opened(now=lambda: clock[0]), run(1)), os.write, [True]

    def half(fd: int, data: memoryview) -> int:
        if full[0] and len(data) == 1000:
            write(fd, data[:500])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", half)
    with disk._lock:
        assert disk.save(run(2)) and disk.save(run(3))
    assert disk.flush(WAIT)
    assert key(2) not in disk and key(3) not in disk and disk.stats().dropped == 2
    assert [path.name for path in (root / MODEL).iterdir()] == [path_of(root, 1).name]
    assert not disk.save(run(2)) and len(got(disk, 1)) == 1
    clock[0] += REST
    assert disk.save(run(2)) and disk.flush(WAIT) and key(2) not in disk
    clock[0] += REST
    full[0] = False
    saved(disk, run(2))
    assert len(got(disk, 2)) == 1
    assert (
        len(warnings(caplog)) == 1
        and "No space left" in warnings(caplog)[0]
        and str(root) in caplog.text
    )


def test_a_file_in_place_of_the_directory(
    opened: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.write_text("mine")
    disk = opened()
    assert disk.save(run(1)) and disk.flush(WAIT) and key(1) not in disk and not disk.save(run(1))
    assert root.read_text() == "mine" and len(warnings(caplog)) == 1


def test_the_directory_goes_while_it_is_used(
    opened: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = saved(opened(), run(1))
    shutil.rmtree(root)
    saved(disk, run(2))
    assert key(1) not in disk and len(got(disk, 2)) == 1 and warnings(caplog) == []


def test_a_directory_that_cannot_be_written_still_gives_hits(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(opened(), run(1)).close(WAIT)
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EROFS, "Read-only file system")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    disk = opened()
    assert disk.save(run(2)) and disk.flush(WAIT)
    assert len(got(disk, 1)) == 1 and key(2) not in disk and len(warnings(caplog)) == 1


@pytest.mark.skipif(os.getuid() == 0, reason="root may do everything")
def test_a_directory_without_permissions(
    opened: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.mkdir()
    root.chmod(0)
    disk = opened()
    assert (
        disk.save(run(1)) and disk.flush(WAIT) and key(1) not in disk and len(warnings(caplog)) == 1
    )
    root.chmod(0o700)


def test_a_read_that_fails_is_a_miss(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = saved(opened(), run(1), run(2))
    monkeypatch.setattr(
        "mlxspec.commands.cache.disk.read",
        lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")),
    )
    assert got(disk, 1) == [] and key(1) not in disk and path_of(root, 1).exists()
    monkeypatch.undo()
    assert len(got(disk, 2)) == 1 and len(warnings(caplog)) == 1


def test_closing_gives_up_in_time(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, go, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        stuck.set()
        assert go.wait(WAIT)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    disk = opened()
    assert disk.save(run(1)) and stuck.wait(WAIT) and disk.save(run(2))
    assert not disk.close(0.01)
    assert not disk.save(run(3)) and disk.fetch(keys(1)) is None and disk.stats().waiting == 0
    go.set()
    disk._writer.join(WAIT)
    assert not disk._writer.is_alive() and not disk._reader.is_alive()
    assert [i for i in range(4) if key(i) in opened()] == [1]  # what was being written was finished


def test_closing_ends_fetches_as_misses(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, began, go = saved(opened(), run(1), run(2)), threading.Event(), threading.Event()

    def slow(*args: Any) -> Run | None:
        began.set()
        assert go.wait(WAIT)
        return read(*args)

    monkeypatch.setattr("mlxspec.commands.cache.disk.read", slow)
    first, second = disk.fetch(keys(1, 2)), disk.fetch(keys(2))
    assert first and second and began.wait(WAIT)
    disk.close(0)
    go.set()
    assert (
        first.ready.wait(WAIT)
        and second.ready.wait(WAIT)
        and (len(first.runs), second.runs) == (1, [])
    )


def test_a_fingerprint_is_hex(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'\.\./oops'"):
        Disk(tmp_path, "../oops", ROOMY)


# ---- several processes
# -------------------------------------------------------------------------------------


def test_leftovers_go_but_not_those_of_a_process_that_writes(opened: Opener, root: Path) -> None:
    saved(opened(), run(1)).close(WAIT)
    left = root / MODEL / f".{'0' * 32}.tmp"
    left.write_bytes(b"half")
    with (root / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        disk = opened()
        assert (
            not disk.flush(0) and len(got(disk, 1)) == 1 and left.exists()
        )  # a start does not wait either
    assert disk.flush(WAIT) and not left.exists()


def test_two_servers_learn_of_each_others_runs_when_they_write(opened: Opener, root: Path) -> None:
    one, two = opened(1400 * 4), opened(1400 * 4)
    saved(one, run(1))
    saved(two, run(2))
    assert key(1) in two and key(2) not in one and len(got(two, 1)) == 1
    saved(one, run(3), run(4))
    assert [i for i in range(1, 5) if key(i) in one] == [1, 2, 3, 4]
    saved(two, run(5))  # makes room among all of them
    assert key(2) not in two and key(1) in two and len(list(listing(root))) == 4
    assert got(one, 2) == [] and len(got(one, 3)) == 1
    assert (
        one.save(run(5))
        and one.flush(WAIT)
        and key(5) in one
        and one.stats().written == two.stats().written * 1.5
    )


class Writers:
    """Processes that write; see diskwriter."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.cache.diskwriter"]
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, what: object) -> int:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    found = Writers()
    with found.process:
        yield found
        found.process.communicate()


def check_all(root: Path, limit: int) -> int:
    """Opens the cache as a start would; every run it knows is whole, and its only. How many there
    are."""
    assert total(root) <= limit
    disk = Disk(root, MODEL, limit)
    assert disk.flush(WAIT)
    names = {name for name, _ in listing(root)}
    assert names == set(disk._index.files)  # no leftovers
    numbers = [int(name[-44:-12], 16) for name in names]
    for found in got(disk, *numbers):
        assert same(found, run_of(int.from_bytes(found.keys[-1], "big")))
    stats = disk.stats()
    assert (stats.hits, stats.damaged) == (len(names), 0) and disk.close(WAIT)
    return len(names)


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(rounds: int, writers: Writers, root: Path) -> None:
    rng, limit, kept, left = random.Random(rounds), 1 << 20, 0, 0
    for i in range(rounds):
        pid = writers.ask({"root": str(root), "limit": limit, "start": 10_000 * i})
        time.sleep(rng.uniform(0, 0.08))  # the random moment
        os.kill(pid, signal.SIGKILL)
        assert writers.ask(pid) == -9
        left += sum(name.endswith(".tmp") for name, _ in listing(root))
        kept = max(kept, check_all(root, limit))
    assert kept > 0 and left > 0  # some had written, some were writing


def test_kill_9_at_every_call_that_changes_the_disk(
    writers: Writers, root: Path, tmp_path: Path
) -> None:
    limit, die, status, before = 100_000, 0, -9, tmp_path / "before"
    assert (
        writers.ask(writers.ask({"root": str(before), "limit": limit, "start": 40, "runs": 4})) == 0
    )
    while status == -9:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)
        status = writers.ask(
            writers.ask({"root": str(root), "limit": limit, "start": 50, "runs": 2, "die": die})
        )
        assert check_all(root, limit) > 1
        die += 1
    assert status == 0 and die > 20


def test_two_processes_keep_one_limit(writers: Writers, root: Path) -> None:
    for limit in (1 << 22, 300_000):
        pids = [
            writers.ask({"root": str(root), "limit": limit, "start": 1000 * i, "runs": 60})
            for i in (1, 2)
        ]
        assert [writers.ask(pid) for pid in pids] == [0, 0]
        count = check_all(root, limit)
        assert count == 120 if limit > 300_000 else 3 < count < 60


# ---- any order of things
# -----------------------------------------------------------------------------------


class Model(RuleBasedStateMachine):
    """Against a dict: what comes back was saved so, and all of it does until something is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "fsync", lambda fd: None)  # no crash here, so no need
        self.root = Path(os.environ["TMPDIR_OF_TEST"]) / f"{random.getrandbits(64):x}"
        self.saved: dict[bytes, Run] = {}  # by last key
        self.lost = False
        self.limit = 20_000
        self.disk = Disk(self.root, MODEL, self.limit, rate=1e12)

    def teardown(self) -> None:
        assert self.disk.close(WAIT)
        self.patch.undo()
        shutil.rmtree(self.root, ignore_errors=True)

    @rule(first=st.integers(0, 12), count=st.integers(1, 4), size=st.integers(0, 4000))
    def save(self, first: int, count: int, size: int) -> None:
        one = run(*range(first, first + count), size=size)
        known = all(x in self.disk for x in one.keys)
        waits = f"{MODEL}/{one.keys[-1].hex()}.safetensors" in self.disk._index.waiting
        if self.disk.save(one):
            assert not known
            self.saved[one.keys[-1]] = one
        else:
            assert known or waits

    @rule(numbers=st.lists(st.integers(0, 16), unique=True))
    def fetch(self, numbers: list[int]) -> None:
        asked = [x for x in keys(*numbers) if x in self.disk]
        found = got(self.disk, *numbers)
        assert all(set(x.keys) & set(asked) for x in found)
        brought = {x for one in found for x in one.keys}
        self.lost |= self.disk.stats().evicted > 0
        assert self.lost or brought.issuperset(asked)
        for one in found:
            assert same(one, self.saved[one.keys[-1]])

    @rule(numbers=st.lists(st.integers(0, 16)))
    def touch(self, numbers: list[int]) -> None:
        self.disk.touch(keys(*numbers))

    @rule(limit=st.sampled_from([5_000, 20_000, 1 << 20]))
    def restart(self, limit: int) -> None:
        assert self.disk.close(WAIT)
        self.lost |= self.disk.stats().evicted > 0
        self.limit = limit
        self.disk = Disk(self.root, MODEL, limit, rate=1e12)

    @rule(which=st.integers(0, 16), at=st.integers(0, 40_000))
    def damage(self, which: int, at: int) -> None:
        assert self.disk.flush(WAIT)
        path = path_of(self.root, which)
        if path.exists():
            content = bytearray(path.read_bytes())
            content[at // 8 % len(content)] ^= 1 << at % 8
            path.write_bytes(content)
            self.lost = True

    @rule()
    def settle(self) -> None:
        assert self.disk.flush(WAIT)
        assert total(self.root) <= self.limit
        assert {name for name, _ in listing(self.root)} == set(self.disk._index.files)
        for name, _ in listing(self.root):
            told = label(self.root / name)
            assert told is None or self.lost or all(x in self.disk for x in keys_of(told))

    @invariant()
    def checked(self) -> None:
        with self.disk._lock:
            self.disk._index.check()


def test_any_order_of_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR_OF_TEST", str(tmp_path))
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Model, settings=settings(max_examples=40, stateful_step_count=25))


def test_a_start_reads_one_head_of_each_file_of_its_model(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(opened(), *(run(i, size=1 << 17) for i in range(20))).close(WAIT)
    shutil.copytree(root / MODEL, root / OTHER)
    reads: list[int] = []
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, most: reads.append(most) or real(fd, most))
    disk = opened()
    assert disk.flush(WAIT) and all(key(i) in disk for i in range(20)) and disk.stats().files == 40
    assert reads == [LABEL] * 20

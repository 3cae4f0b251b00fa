"""The prompt cache on disk: what comes back is what was saved; whatever happens to the files is a
miss; limits hold."""

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from mlxspec.cache import disk as disk_module
from mlxspec.cache.disk import (
    DiskCache,
    Run,
    decode,
    encode,
    fingerprint,
    read_label,
    stored_files,
)
from mlxspec.files import lock
from tests.cache.diskwriter import MODEL, key, run_of, total

OTHER = "fedcba9876543210"
ROOMY = 1 << 30
MAX_QUEUED = 1 << 22  # in the test of it
WAIT = 30.0

Opener = Callable[..., DiskCache]


def run(*keys: int, size: int = 1000) -> Run:
    return Run(tuple(map(key, keys)), {"x": np.full(size, keys[-1] % 256, np.uint8)})


def keys(*numbers: int) -> list[bytes]:
    return [key(i) for i in numbers]


def same(a: Run | None, b: Run) -> bool:
    """Bit for bit."""
    return (
        a is not None
        and a.keys == b.keys
        and a.arrays.keys() == b.arrays.keys()
        and all(
            (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
            for x, y in ((a.arrays[name], b.arrays[name]) for name in a.arrays)
        )
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


@pytest.fixture
def opened(root: Path) -> Iterator[Opener]:
    """Opens the cache of a directory, and closes it after the test."""
    disks = []

    def open_(limit: int = ROOMY, model: str = MODEL) -> DiskCache:
        disks.append(DiskCache(root, model, limit, "tiny"))
        return disks[-1]

    yield open_
    for disk in disks:
        disk._writer.shutdown()
        disk._reader.shutdown()
        check(disk)


def check(disk: DiskCache) -> None:
    held = {(key, path) for path, keys in disk._keys.items() for key in keys}
    assert set(disk._paths.items()) <= held, "the index holds a key of no file"


def got(disk: DiskCache, *numbers: int) -> list[Run]:
    reads = [disk.read(path) for path in disk.files(keys(*numbers))]
    return [found for read in reads if (found := read.result(WAIT)) is not None]


def saved(disk: DiskCache, *runs: Run) -> DiskCache:
    for one in runs:
        assert disk.save(one)
    assert disk.flush(WAIT)
    return disk


def known(disk: DiskCache, numbers: range) -> list[int]:
    return [i for i in numbers if key(i) in disk]


def path_of(root: Path, number: int) -> Path:
    return root / MODEL / f"{key(number).hex()}.safetensors"


# ---- one file


def arrays() -> st.SearchStrategy[dict[str, np.ndarray]]:
    dtypes = st.sampled_from(["?", "u1", "u2", "u4", "i4", "i8", "f2", "f4", "f8", "c8"])
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    one = dtypes.flatmap(lambda d: hnp.arrays(d, shapes))
    names = st.text(max_size=5).filter(lambda x: x != "__metadata__")
    return st.dictionaries(names, one, max_size=4)


@given(arrays(), st.lists(st.binary(min_size=16, max_size=16), min_size=1), st.text(max_size=9))
def test_any_run_comes_back(some: dict[str, np.ndarray], keys: list[bytes], model: str) -> None:
    one = Run(tuple(keys), some)
    data = encode(one, MODEL, model)
    assert same(decode(data, MODEL), one) and decode(data, OTHER) is None
    label = read_label(BytesIO(data))
    assert (label.run_keys(), label.model, label.fingerprint) == (one.keys, model, MODEL)


def test_others_can_read_a_file(tmp_path: Path) -> None:
    one = Run((key(1),), {"k": np.arange(6, dtype=np.float16).reshape(2, 3)})
    (tmp_path / "run.safetensors").write_bytes(encode(one, MODEL, "tiny"))
    found = mx.load(str(tmp_path / "run.safetensors"))
    assert found["k"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_flipped_bit_or_a_truncation_is_a_miss() -> None:
    one = Run((key(1),), {"x": np.arange(5, dtype=np.float16)})
    content = encode(one, MODEL, "tiny")
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        found = decode(bytes(changed), MODEL)
        assert found is None or same(found, one)  # a header that says the same in another way
    for size in range(len(content)):
        assert decode(content[:size], MODEL) is None
    assert decode(content + b"\0", MODEL) is None


@pytest.mark.parametrize("label", ["[]", "{}", '{"keys":1}', "[" * 60_000, "1", '{"keys":"00"}'])
def test_a_file_that_holds_something_else_is_a_miss(label: str) -> None:
    data = b'{"__metadata__":%s}' % label.encode()
    for content in (data, len(data).to_bytes(8, "little") + data, b"\xff" * 8 + data):
        assert decode(content, MODEL) is None
        with pytest.raises(ValueError):
            read_label(BytesIO(content))


# ---- there and back


def test_what_was_saved_comes_back_after_a_restart(opened: Opener) -> None:
    disk = saved(opened(), *map(run_of, range(5)))
    assert all(same(a, run_of(b)) for a, b in zip(got(disk, 3, 1), (3, 1), strict=True))
    assert disk.close(WAIT)
    disk = opened()
    assert known(disk, range(9)) == list(range(5))
    assert all(same(a, run_of(i)) for i, a in enumerate(got(disk, *range(5))))
    assert disk.flush(WAIT)  # the directory is counted beside what is read
    stats = disk.stats
    assert (stats["disk_runs_found"], stats["disk_runs_damaged"], stats["disk_written_bytes"]) == (
        5,
        0,
        0,
    ) and stats["disk_read_bytes"] == stats["disk_bytes"]


@pytest.mark.parametrize("what", ["a link that leads nowhere", "a pipe", "a directory"])
def test_a_file_that_cannot_be_opened_hides_no_other(opened: Opener, root: Path, what: str) -> None:
    disk = saved(opened(), *map(run_of, range(5)))
    assert disk.close(WAIT)
    folder = next(path for path in root.rglob("*.safetensors")).parent
    odd = folder / f"{'f' * 32}.safetensors"
    if what == "a pipe":
        os.mkfifo(odd)
    elif what == "a directory":
        odd.mkdir()
    else:
        odd.symlink_to(folder / "nothing")
    disk = opened()
    assert known(disk, range(9)) == list(range(5))
    assert all(same(a, run_of(i)) for i, a in enumerate(got(disk, *range(5))))


def test_a_run_is_read_once_whichever_of_its_keys_are_asked_for(opened: Opener) -> None:
    disk = saved(opened(), run(1, 2, 3), run(4, 5))
    assert [x.keys[-1] for x in got(disk, 2, 3, 9, 5)] == keys(3, 5)
    assert disk.files(keys(9)) == []


def test_a_longer_run_with_the_same_end_replaces_a_shorter_one(opened: Opener, root: Path) -> None:
    disk = saved(saved(opened(), run(3)), run(1, 2, 3))
    assert len(list(stored_files(root))) == 1
    for each in (disk, opened()):
        assert [x.keys for x in got(each, 1)] == [run(1, 2, 3).keys]


def test_only_the_owner_may_look(opened: Opener, root: Path) -> None:
    saved(opened(), run(1))
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / MODEL).stat().st_mode & 0o777 == 0o700


# ---- misses


def test_a_changed_file_is_a_miss_and_is_deleted(opened: Opener, root: Path) -> None:
    rng = random.Random(1)
    disk, size = saved(opened(), *(run(i) for i in range(60))), path_of(root, 0).stat().st_size
    for i in range(60):
        content = bytearray(path_of(root, i).read_bytes())
        at = size - 1 - rng.randrange(1000)
        content[at] ^= 1
        path_of(root, i).write_bytes(content if i % 2 else content[: rng.randrange(size)])
    again = opened()  # which reads the heads of what is damaged
    assert got(disk, *range(0, 60, 3)) == []
    assert not any(key(i) in disk or path_of(root, i).exists() for i in range(0, 60, 3))
    assert got(again, *range(60)) == [] and list(stored_files(root)) == []
    assert disk.stats["disk_runs_damaged"] + again.stats["disk_runs_damaged"] == 60
    saved(disk, run(0))
    assert same(got(disk, 0)[0], run(0))


def test_a_file_under_another_name_is_a_miss(opened: Opener, root: Path) -> None:
    disk = saved(opened(), run(1), run(2))
    shutil.copyfile(path_of(root, 1), path_of(root, 2))
    assert got(disk, 2) == [] and len(got(disk, 1)) == 1
    (root / OTHER).mkdir()
    shutil.copyfile(path_of(root, 1), root / OTHER / path_of(root, 1).name)
    assert got(opened(model=OTHER), 1) == []


def test_a_missing_file_is_a_miss(opened: Opener, root: Path) -> None:
    disk = saved(opened(), run(1), run(2), run(3))
    path_of(root, 2).unlink()
    assert [x.keys for x in got(disk, 1, 2, 3)] == [run(1).keys, run(3).keys]
    assert key(2) not in disk and disk.stats["disk_runs_damaged"] == 0
    shutil.rmtree(root)
    assert got(disk, 1, 3) == []
    saved(disk, run(1))
    assert len(got(disk, 1)) == 1


# ---- limits


def test_the_limit_holds_at_every_moment(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, replace = [], os.replace

    def watched(*args: Any) -> None:
        seen.append(total(root))
        replace(*args)

    monkeypatch.setattr(os, "replace", watched)
    disk = opened(20_000)
    rng = random.Random(1)
    for i in range(100):
        disk.save(run(i, size=rng.randrange(8000)))
        assert disk.flush(WAIT)
    assert 12_000 < max(seen) <= 20_000 and disk.stats["disk_bytes"] == total(root)
    saved(disk, run(200, size=20_000))
    assert key(200) not in disk and disk.stats["disk_bytes"] == total(root)


def test_a_smaller_limit_holds_from_the_next_start(opened: Opener, root: Path) -> None:
    saved(opened(), *(run(i) for i in range(20))).close(WAIT)
    disk = opened(10_000)
    assert disk.flush(WAIT) and 8000 < total(root) <= 10_000
    assert known(disk, range(20)) == list(range(20))[-len(list(stored_files(root))) :]


def test_the_least_recently_used_goes_first_also_after_a_restart(opened: Opener) -> None:
    disk = saved(opened(), *(run(i, size=1500) for i in range(5)))
    disk.touch(keys(0))
    disk.touch(keys(1))
    assert disk.flush(WAIT) and disk.close(WAIT)
    disk = saved(opened(5 * 2000), run(5, size=1500), run(6, size=1500))
    assert known(disk, range(7)) == [0, 1, 4, 5, 6]


def test_the_head_of_a_chain_outlives_its_tail(opened: Opener) -> None:
    disk = saved(opened(), *(run(i) for i in range(6)))
    disk.touch(keys(0, 1, 2))
    disk.touch(keys(3, 4, 5))
    assert disk.close(WAIT)
    disk = opened(1400 * 4)
    assert disk.flush(WAIT) and known(disk, range(6)) == [0, 3, 4, 5]


def test_old_models_make_room(opened: Opener, root: Path) -> None:
    saved(opened(model=OTHER), *(run(i) for i in range(5))).close(WAIT)
    disk = saved(opened(1400 * 6), *(run(i) for i in range(3)))
    assert key(0) in disk and len(list(stored_files(root))) == 6
    saved(disk, *(run(i) for i in range(3, 6)))
    assert known(disk, range(6)) == list(range(6)) and not list((root / OTHER).iterdir())


def test_two_models_keep_one_limit(opened: Opener, root: Path) -> None:
    one, two = opened(1400 * 6), opened(1400 * 6, OTHER)
    for i in range(10):
        saved(one, run(i))
        saved(two, run(i))
        assert total(root) <= 1400 * 6
    assert got(one, 0) == [] and len(got(one, 9)) == len(got(two, 9)) == 1


def test_the_write_queue_is_bounded_and_nobody_waits_for_it(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "MAX_QUEUED", MAX_QUEUED)
    disk = opened()
    with lock(root / "lock"):  # another process writes
        big = [run(i, size=MAX_QUEUED // 4) for i in range(5)]
        assert [disk.save(one) for one in big] == [True] * 4 + [False]
        for _ in range(1 << 9):
            disk.touch(keys(0))
        assert disk.queued <= MAX_QUEUED and not disk.flush(0)
    assert disk.flush(WAIT) and disk.queued == 0


# ---- a disk that fails


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]


def test_a_full_disk_costs_the_run(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = saved(opened(), run(1))

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_module, "write_atomic", full)
    assert disk.save(run(2)) and disk.save(run(3)) and disk.flush(WAIT)
    assert known(disk, range(4)) == [1] and len(got(disk, 1)) == 1
    assert len(warnings(caplog)) == 1 and str(root) in caplog.text
    monkeypatch.undo()
    saved(disk, run(2))
    assert len(got(disk, 2)) == 1


def test_a_file_in_place_of_the_directory(
    opened: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.write_text("mine")
    disk = opened()
    assert disk.save(run(1)) and disk.flush(WAIT) and disk.queued == 0
    assert root.read_text() == "mine" and len(warnings(caplog)) == 1


def test_a_read_that_fails_is_a_miss(
    opened: Opener, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = saved(opened(), run(1), run(2))

    def broken(path: Path) -> bytes:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        assert got(disk, 1) == [] and key(1) not in disk
    assert path_of(root, 1).exists() and len(got(disk, 2)) == 1 and len(warnings(caplog)) == 1


def test_closing_gives_up_in_time(opened: Opener, root: Path) -> None:
    disk = opened()
    with lock(root / "lock"):
        assert disk.save(run(1)) and disk.save(run(2)) and not disk.close(0.01)
    disk._writer.shutdown()
    assert len(list(stored_files(root))) <= 1, "only the write that was in progress may end"


# ---- processes that are killed, and that share a directory


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
    """Opens the cache as a start would: every file is whole, known, and nothing else is there. How
    many there are."""
    assert total(root) <= limit
    disk = DiskCache(root, MODEL, limit)
    assert disk.flush(WAIT)
    paths = {path for path, _ in stored_files(root)}
    assert paths == set(disk._keys) and all(path.suffix == ".safetensors" for path in paths)
    for found in got(disk, *(int(path.stem, 16) for path in paths)):
        assert same(found, run_of(int.from_bytes(found.keys[-1], "big")))
    stats = disk.stats
    assert (stats["disk_runs_found"], stats["disk_runs_damaged"]) == (len(paths), 0) and disk.close(
        WAIT
    )
    return len(paths)


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(rounds: int, writers: Writers, root: Path) -> None:
    rng, limit, kept = random.Random(rounds), 1 << 20, 0
    for i in range(rounds):
        pid = writers.ask({"root": str(root), "limit": limit, "start": 10_000 * i})
        while not i and not list(root.rglob("*.safetensors")):
            time.sleep(0.01)  # the first one writes, however busy this machine is
        time.sleep(rng.uniform(0, 0.08))  # the random moment
        os.kill(pid, signal.SIGKILL)
        assert writers.ask(pid) == -9
        kept = max(kept, check_all(root, limit))
    assert kept > 0


def test_kill_9_at_every_change_of_the_directory(
    writers: Writers, root: Path, tmp_path: Path
) -> None:
    limit, die, status, left, before = 100_000, 0, -9, 0, tmp_path / "before"
    first = {"root": str(before), "limit": limit, "start": 40, "runs": 4}
    assert writers.ask(writers.ask(first)) == 0
    while status == -9:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)
        again = {"root": str(root), "limit": limit, "start": 50, "runs": 2, "die": die}
        status = writers.ask(writers.ask(again))
        left += sum(path.suffix != ".safetensors" for path, _ in stored_files(root))
        assert check_all(root, limit) > 1
        die += 1
    assert status == 0 and die > 10 and left > 0


def test_two_processes_keep_one_limit(writers: Writers, root: Path) -> None:
    for limit in (1 << 22, 300_000):
        asked = {"root": str(root), "limit": limit, "runs": 60}
        pids = [writers.ask({**asked, "start": 1000 * i}) for i in (1, 2)]
        assert [writers.ask(pid) for pid in pids] == [0, 0]
        count = check_all(root, limit)
        assert count == 120 if limit > 300_000 else 3 < count < 60


# ---- any order of things


class Model(RuleBasedStateMachine):
    """Against a dict: what comes back was saved so, and all of it does until something is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(os.environ["TMPDIR_OF_TEST"]) / f"{random.getrandbits(64):x}"
        self.saved: dict[bytes, Run] = {}  # by last key
        self.lost = False
        self.limit = 20_000
        self.disk = DiskCache(self.root, MODEL, self.limit)

    def teardown(self) -> None:
        assert self.disk.close(WAIT)
        shutil.rmtree(self.root, ignore_errors=True)

    @rule(first=st.integers(0, 12), count=st.integers(1, 4), size=st.integers(0, 4000))
    def save(self, first: int, count: int, size: int) -> None:
        one = run(*range(first, first + count), size=size)
        if not all(x in self.disk for x in one.keys):
            assert self.disk.save(one)
            self.saved[one.keys[-1]] = one

    @rule(numbers=st.lists(st.integers(0, 16), unique=True))
    def read(self, numbers: list[int]) -> None:
        assert self.disk.flush(WAIT)
        asked = [x for x in keys(*numbers) if x in self.disk]
        found = got(self.disk, *numbers)
        assert all(set(x.keys) & set(asked) for x in found)
        brought = {x for one in found for x in one.keys}
        assert self.lost or brought.issuperset(asked)
        for one in found:
            assert same(one, self.saved[one.keys[-1]])

    @rule(numbers=st.lists(st.integers(0, 16)))
    def touch(self, numbers: list[int]) -> None:
        self.disk.touch(keys(*numbers))

    @rule(limit=st.sampled_from([5_000, 20_000, 1 << 20]))
    def restart(self, limit: int) -> None:
        assert self.disk.close(WAIT)
        self.limit = limit
        self.disk = DiskCache(self.root, MODEL, limit)

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
        paths = {path for path, _ in stored_files(self.root)}
        assert paths == set(self.disk._keys)
        assert (
            self.disk.stats["disk_bytes"] == sum(path.stat().st_size for path in paths) or self.lost
        )

    @invariant()
    def checked(self) -> None:
        assert self.disk.flush(WAIT)
        check(self.disk)


def test_any_order_of_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR_OF_TEST", str(tmp_path))
    run_state_machine_as_test(Model, settings=settings(max_examples=40, stateful_step_count=25))


# ---- which model


def test_the_fingerprint_follows_all_that_counts(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"

    def now(**about: str) -> str:
        return fingerprint(tmp_path, {"layout": "rows", **about})

    def write(content: bytes, mtime: int = 1) -> None:
        weights.write_bytes(content)
        os.utime(weights, ns=(mtime, mtime))

    (tmp_path / "config.json").write_text("{}")
    content = bytes(range(256)) * 4096
    write(content)
    seen = [now()]
    assert now() == seen[0] and len(seen[0]) == 32

    def changed() -> bool:
        seen.append(now())
        return len(set(seen)) == len(seen)

    seen += [now(kv_bits="8"), now(layout="gather")]
    for at in (0, 100, len(content) - 1):
        write(content[:at] + b"!" + content[at + 1 :])
        assert changed()
    write(content + b"!")
    assert changed()
    write(content, mtime=2)
    assert changed()
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert changed()
    (tmp_path / "code.py").write_text("x = 1")
    assert changed()
    weights.rename(tmp_path / "model-1.safetensors")
    assert changed()
    (tmp_path / "README.md").write_text("said, not computed with")
    assert now() == seen[-1]
    with (tmp_path / "model-2.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte, all hole: only samples are read
    assert changed()

"""A process that writes to a prompt cache until it is killed.

It imports little, then forks a writer for each line of JSON on stdin and answers with its pid; a
line with a pid waits for that one and answers with its exit status, -9 where it was killed.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from mlxspec.cache.disk import DiskCache, Run

MODEL = "0123456789abcdef"
OVER_LIMIT = 3  # exit status
# What changes a disk, as the interpreter reports it; os.replace is a rename.
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.utime", "fcntl.flock"}


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def run_of(i: int) -> Run:
    """The one content of key `i`: a few hundred bytes to 40 KB. Its other key is in no other."""
    rng = np.random.default_rng(i)
    arrays = {
        "k": rng.normal(size=(int(rng.integers(0, 5000)),)),
        "v": rng.integers(0, 9, (2, 3), np.uint16),
    }
    return Run((key(i + (1 << 64)), key(i)), arrays)


def total(root: Path) -> int:
    """Bytes of all files, whatever they are."""
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())


def die_at(which: int, root: str) -> None:
    """Be killed before the n-th change of the directory."""
    left = itertools.count(which, -1)

    def hook(event: str, args: tuple[object, ...]) -> None:
        ours = event == "fcntl.flock" or any(str(arg).startswith(root) for arg in args)
        if event in EVENTS and ours and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def write(
    root: str, limit: int, start: int, runs: int | None = None, die: int | None = None
) -> None:
    """`runs` runs from `start` on, or endlessly; the limit is checked while nobody else can write,
    after each write."""
    replace = os.replace

    def checked(*args: str) -> None:
        replace(*args)
        if total(Path(root)) > limit:
            os._exit(OVER_LIMIT)

    os.replace = checked  # type: ignore[assignment]
    if die is not None:
        die_at(die, root)
    disk = DiskCache(Path(root), MODEL, limit)
    for i in itertools.count(start) if runs is None else range(start, start + runs):
        disk.save(run_of(i))
        if runs is not None or disk.queued > 1 << 16:
            assert disk.flush(60)
    assert disk.close(60)


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            write(**asked)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()

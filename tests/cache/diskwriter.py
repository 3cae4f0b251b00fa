"""A process that writes to a prompt cache until it is killed, for the tests of the disk tier.

It imports numpy and the disk tier alone, then forks a writer for each line of JSON on stdin and
answers with its pid; a line with a pid waits for that one and answers with its exit status, -9
where it was killed.
"""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlxspec.cache.disk import Disk
from mlxspec.cache.runfile import Run

MODEL = "0123456789abcdef"
OVER = 3  # exit status: the files have passed the limit


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def run_of(i: int) -> Run:
    """The one content of key `i`; a few hundred bytes to 40 KB. Its other key belongs to nothing
    else."""
    rng = np.random.default_rng(i)
    arrays = {
        "k": rng.normal(size=(int(rng.integers(0, 5000)),)),
        "v": rng.integers(0, 9, (2, 3), np.uint16),
    }
    return Run((key(i + (1 << 64)), key(i)), arrays, {"i": str(i)})


def total(root: Path) -> int:
    """Bytes of all files, whatever they are."""
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())


def watched(call: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    def watching(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        after()
        return result

    return watching


CALLS = (
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "fsync",
    "utime",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
)


def die_at(which: int) -> None:
    """Be killed at the n-th of the calls that change a disk; in the middle of it, if it is a
    write."""
    left = itertools.count(which, -1)

    def replaced(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any, **kwargs: Any) -> Any:
            if next(left) == 0:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return dying

    for name in CALLS:
        setattr(os, name, replaced(name, getattr(os, name)))


def write(
    root: str, limit: int, start: int, runs: int | None = None, die: int | None = None
) -> None:
    """`runs` runs from `start` on, or endlessly; the limit is checked after each call that adds
    bytes, while no other process can write."""

    def check() -> None:
        if total(Path(root)) > limit:
            os._exit(OVER)

    for name in ("write", "replace"):
        setattr(os, name, watched(getattr(os, name), check))
    if die is not None:
        die_at(die)
    disk = Disk(Path(root), MODEL, limit, rate=1e12)
    for i in itertools.count(start) if runs is None else range(start, start + runs):
        disk.save(run_of(i))
        if runs is not None or disk.stats().waiting > 1 << 16:
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

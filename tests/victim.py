"""A process to kill: an engine that answers, with the disk tier on, until something ends it.

Rule: every line it prints is one answer, whole or not at all; what it was asked is a function of a seed.
`python -m tests.victim ROOT` forks a fresh engine for each line "kind seed" that it reads, and says its pid.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from mlxspec import blas

blas.load()

from mlxspec.engine.disk import Disk  # noqa: E402  after BLAS
from mlxspec.engine.tier import Tier  # noqa: E402
from mlxspec.model.transfer import Transfer  # noqa: E402
from tests import tiny  # noqa: E402

BLOCK = 8
STARTS = 6  # conversations that come again and again
LAYOUTS = {"qwen3_next": "rect"}


def prompts(seed: int) -> Iterator[list[int]]:
    """Endless: the start of one of a few conversations, gone on with in one of a few ways."""
    rng = random.Random(seed)
    while True:
        of = random.Random(rng.randrange(STARTS))
        shared = [of.randrange(tiny.VOCAB) for _ in range(of.randint(30, 90))]
        yield [*shared, *range(rng.randrange(4))]


def live(root: Path, kind: str, seed: int) -> None:
    e = tiny.engine(tiny.model(kind), layout=LAYOUTS.get(kind, "rows"), block=BLOCK, blocks=40)
    e.add(tiny.request("warm", range(3), 2))
    tiny.run(e)
    disk = Disk(root, "c0ffee00", 1 << 20)
    e.tier = e.scheduler.tier = Tier(disk, e.scheduler.groups, Transfer(e.runner))
    for i, prompt in enumerate(prompts(seed)):
        e.add(tiny.request(f"r{i}", prompt, 10))
        outputs = []
        while e.scheduler.waiting or e.scheduler.running:
            outputs += e.step()
        answer = {"prompt": prompt, "tokens": tiny.tokens(outputs, f"r{i}"), "cached": outputs[-1].cached}
        answer["read"] = disk.stats().hits
        os.write(1, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    for line in sys.stdin:
        kind, seed = line.split()
        if (pid := os.fork()) == 0:
            live(Path(sys.argv[1]), kind, int(seed))
        os.write(1, f"{pid}\n".encode())
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")

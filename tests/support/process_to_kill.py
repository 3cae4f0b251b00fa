"""A process to kill: an engine, started as a server starts it, that answers until something ends
it.

Rule: every line it prints is one answer, whole or not at all; what it was asked is a function of a
seed. `python -m tests.support.process_to_kill ROOT` forks a fresh engine for each line "kind seed" that it reads,
and says its pid.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mlxspec import blas

blas.load()

from mlxspec.config import Config  # noqa: E402  after BLAS
from mlxspec.load.loader import load_engine  # noqa: E402
from tests.support import tiny  # noqa: E402

SLOW_S = 0.02  # before every rename, so that a kill often falls into a write

BLOCK = 8
STARTS = 60  # conversations that come again and again, more than the directory holds


def prompts(seed: int) -> Iterator[list[int]]:
    """Endless: the start of one of a few conversations, gone on with in one of a few ways."""
    rng = random.Random(seed)
    while True:
        of = random.Random(rng.randrange(STARTS))
        shared = [of.randrange(tiny.VOCAB) for _ in range(of.randint(30, 90))]
        yield [*shared, *range(rng.randrange(4))]


def live(root: Path, kind: str, seed: int) -> None:
    replace = os.replace

    def slowly(*args: str) -> None:
        time.sleep(SLOW_S)
        replace(*args)

    os.replace = slowly
    config = Config(
        speculate=False,
        cache_dir=str(root),
        cache_gb=2**-10,
        block_size=BLOCK,
        kv_blocks=40,
        context=256,
    )
    e, _ = load_engine(root / kind, kind, config)
    for i, prompt in enumerate(prompts(seed)):
        e.add(tiny.request(f"r{i}", prompt, 10))
        outputs = []
        while e.scheduler.waiting or e.scheduler.running:
            outputs += e.step()
        answer = {
            "prompt": prompt,
            "tokens": tiny.tokens(outputs, f"r{i}"),
            "cached": outputs[-1].cached,
        }
        answer["read"] = e.offloader.disk.stats["disk_runs_found"]
        os.write(1, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    for line in sys.stdin:
        kind, seed = line.split()
        if (pid := os.fork()) == 0:
            live(Path(sys.argv[1]), kind, int(seed))
        os.write(1, f"{pid}\n".encode())
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")

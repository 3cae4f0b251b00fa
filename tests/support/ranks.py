"""Ranks to test: `python -m tests.support.ranks` in each of several processes that a ring connects.

Rule: rank 0 runs tests of test_lossless as they are, over engines whose runner tells its plans to
the other ranks. The truth stays plain decoding by mlx-lm on one rank.
"""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any
from zlib import crc32

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from mlxspec.config import Config  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.load import drafting, loader, server_models  # noqa: E402
from mlxspec.load.resolve import ResolvedModel  # noqa: E402
from mlxspec.model.checkpoint import parameter_bytes  # noqa: E402
from mlxspec.model.mirror import Follower, runner_type  # noqa: E402
from mlxspec.model.parallel import ProcessGroup, RankLost, join, split  # noqa: E402
from mlxspec.types import OutOfMemory, UnsupportedModel, UserError  # noqa: E402
from tests import test_lossless  # noqa: E402
from tests.support import architectures, tiny  # noqa: E402

MORE_HEADS = {"num_key_value_heads": 4, "linear_num_key_heads": 4}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Group:
    """Processes that are ranks, started here; rank 0 reads calls."""

    def __init__(self, size: int) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
        for each in sockets:
            each.close()
        self.file = tempfile.NamedTemporaryFile("w", suffix=".json")
        json.dump(hosts, self.file)
        self.file.flush()
        self.processes = [self._start(rank) for rank in range(size)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": self.file.name},
        )

    def call(self, name: str, *args: Any) -> Any:
        """What a function of this module or a test of test_lossless returns on rank 0."""
        first = self.processes[0]
        assert first.stdin and first.stdout
        print(json.dumps([name, args]), file=first.stdin, flush=True)
        while not (line := first.stdout.readline()).startswith("{"):
            assert line, f"rank 0 ended with status {first.wait()}"
        answer = json.loads(line)
        assert not answer["failed"], answer["failed"]
        return answer["result"]

    def close(self) -> None:
        for each in self.processes:
            each.stdin.close()
            each.stdout.close()
        for each in self.processes:
            each.wait(20)
        self.file.close()


@functools.cache
def model(kind: str) -> Any:
    """A tiny model's part for this rank."""
    made = tiny.model(kind)
    split(made, mx.distributed.init())
    mx.eval(made.parameters())
    made.kind = kind
    return made


def load_all(ranks: ProcessGroup, kind: str) -> Any:
    """All ranks: load their parts, for which each waits for the others; this one's."""
    if ranks.rank == 0:
        ranks.call("", "load_all", kind)
        ranks.flush()
    return model(kind)


def lead(ranks: ProcessGroup) -> None:
    """Rank 0: answer calls until there are no more."""
    build = tiny.engine

    def engine(m: Any, proposer: Any = None, **options: Any) -> Engine:
        ranks.call("", "load", m.kind, options)
        ranks.flush()
        made = build(m, **options)
        if proposer:
            made.proposer = proposer
        return made

    tiny.engine = engine
    tiny.Runner = runner_type(ranks, "")
    test_lossless.model = functools.partial(load_all, ranks)
    for line in sys.stdin:
        name, args = json.loads(line)
        answer: dict[str, Any] = {"failed": "", "result": None}
        try:
            if name in CALLS:
                answer["result"] = CALLS[name](ranks, *args)
            else:
                getattr(test_lossless, name)(*args)
        except Exception:
            answer["failed"] = traceback.format_exc()
        print(json.dumps(answer), flush=True)
    ranks.end()


def follow(ranks: ProcessGroup) -> None:
    follower = None
    while not ranks.ended:
        for _, what, *args in ranks.receive(0):
            if what == "load":
                kind, options = args
                follower = Follower(tiny.engine(model(kind), **options), ranks)
            elif what in CALLS:
                CALLS[what](ranks, *args)
            elif what != "end":
                assert follower
                follower.call(what, *args)


def logits(ranks: ProcessGroup, kind: str) -> dict[str, Any]:
    """All ranks: checksums of their logits, bytes of their weights; and on rank 0 how far its
    logits are from those of the whole model."""
    if ranks.rank == 0:
        ranks.call("", "logits", kind)
        ranks.flush()
    found = np.array(model(kind)(mx.array([PROMPT])))
    whole = tiny.model(kind)
    expected = np.array(whole(mx.array([PROMPT])))
    return {
        "checksums": ranks.gather(crc32(found.tobytes())),
        "bytes": ranks.gather(parameter_bytes(model(kind))),
        "whole": parameter_bytes(whole),
        "off": float(np.abs(found - expected).max()),
    }


def overlap(ranks: ProcessGroup, kind: str, layout: str, sequences: int, n: int) -> dict[str, Any]:
    """Of plain decoding: messages and bytes for each step, and whether each step after the first
    was told before the one in front of it was read."""
    e = tiny.engine(load_all(ranks, kind), layout=layout, budget=64)
    events: list[tuple[str, int]] = []
    e.trace = lambda event, step: events.append((event, step))
    for i in range(sequences):
        e.add(tiny.request(f"r{i}", [i + 1, 2, 3], n))
    told_bytes: list[int] = []
    gather = mx.distributed.all_gather

    def counting(row: mx.array, **options: Any) -> mx.array:
        if row.dtype == mx.int32:  # not a model's logits
            told_bytes.append(row.nbytes)
        return gather(row, **options)

    mx.distributed.all_gather = counting
    began = time.perf_counter()
    tiny.run(e)
    mx.distributed.all_gather = gather
    steps = e.counters["steps"]
    told = {step: at for at, (event, step) in enumerate(events) if event == "submit"}
    read = {step: at for at, (event, step) in enumerate(events) if event == "read"}
    return {
        "steps": steps,
        "seconds": time.perf_counter() - began,
        "messages": len(told_bytes),
        "bytes": sum(told_bytes),
        "overlapping": sum(told[step + 1] < read[step] for step in range(1, steps)),
    }


def load_and_fail(ranks: ProcessGroup, path: str, cache: str, how: str) -> str:
    """All ranks load a model, which fails on one of them: what rank 0 raises then."""
    chosen = ResolvedModel("m", Path(path), None, Config(cache_dir=cache, speculate=False))
    models = {"m": chosen}
    if ranks.rank == 0:
        ranks.call("", "load_and_fail", path, cache, how)
        ranks.flush()
        if how == "no memory":
            drafting.shortage = no_memory
    elif how == "another model":
        models = {"other": chosen}
    elif how == "killed at layouts":
        loader.find_layout = killed
    elif how != "no memory":
        loader.load_weights = functools.partial(read_half, how)
    try:
        server_models.load_follower(models, "m", ranks) if ranks.rank else chosen.load(0, ranks)
    except RankLost as error:
        if ranks.rank:
            os._exit(3)
        return f"lost: {error}"
    except UserError as error:
        return f"refused: {error}"
    raise AssertionError("the model was loaded")


def read_half(how: str, model: Any, heard: Any) -> None:
    arrays = [array for _, array in tree_flatten(model.parameters())]
    mx.eval(arrays[: len(arrays) // 2])
    if how == "killed":
        killed()
    raise UnsupportedModel("the weights cannot be read") from RuntimeError("damaged")


def killed(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def no_memory(*_: Any) -> OutOfMemory:
    return OutOfMemory("it needs more", 1)


CALLS = {"load_all": load_all, "logits": logits, "overlap": overlap, "load_and_fail": load_and_fail}

if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    own = join(1)
    if own.size > 2:
        for each in tiny.CONFIGS.values():
            each.update(MORE_HEADS)
        architectures.SIZES.update(MORE_HEADS)
    follow(own) if own.rank else lead(own)

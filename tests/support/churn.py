"""Churn of the engine: random arrivals, cancels, lengths, evictions and swaps of models, for as long
as one likes. tests/soak.py does this to the whole server.

Rule: every answer is that of a quiet run; what the process holds at the end is what it held after a
while. `python -m tests.support.churn [MINUTES]` prints what it saw.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS

from mlxspec.config import Config  # noqa: E402
from mlxspec.engine import memory  # noqa: E402
from mlxspec.engine.manager import ModelManager, ModelSlot  # noqa: E402
from mlxspec.engine.worker import EngineThread  # noqa: E402
from mlxspec.load.loader import load_engine  # noqa: E402
from mlxspec.model import meter  # noqa: E402
from mlxspec.types import BACKGROUND, ModelInfo, Request, Sampling  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.checkpoints import save  # noqa: E402

KINDS = ["qwen3", "gemma3_text", "qwen3_next"]  # everything, windows, states
BESIDE = 2  # models that fit beside each other
ASKS = 240  # different requests
CALM = 0.25  # part of the time after which nothing may grow
SAMPLE_S = 1.0


@dataclass
class Seen:
    """`sizes` are (seconds, RSS in bytes, live arrays, MLX's bytes) over time."""

    sizes: list[tuple[float, int, int, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def most(self, what: int, first: float, last: float) -> int:
        """The largest of a column between two parts of the time."""
        end = self.sizes[-1][0]
        return max(row[what] for row in self.sizes if first * end <= row[0] <= last * end)


def asks() -> list[tuple[str, Request]]:
    """Requests whose prompts share their starts, each for one of the models."""
    rng = random.Random(2)
    starts = [[rng.randrange(tiny.VOCAB) for _ in range(100)] for _ in range(6)]
    found = []
    for i in range(ASKS):
        cut = rng.randint(1, 100)
        rest = (rng.randrange(tiny.VOCAB) for _ in range(rng.randint(0, 20)))
        prompt = (*rng.choice(starts)[:cut], *rest)
        sampling = Sampling(temperature=rng.choice([0.0, 0.8]), seed=i)
        n = rng.choice([1, 1, 1, 2])
        kind, most = rng.choice(KINDS), rng.randint(1, 40)
        priority = rng.choice([0, 0, BACKGROUND, -5])
        found.append((kind, Request(f"a{i}", prompt, most, sampling, n=n, priority=priority)))
    return found


def quiet(all_of: list[tuple[str, Request]]) -> dict[tuple[str, int], list[int]]:
    """What mlx-lm says to each of them, alone."""
    plain = {kind: tiny.Plain(tiny.model(kind)) for kind in KINDS}
    return {
        (r.id, i): plain[kind](r.prompt, r.max_tokens, r.sampling.temperature, r.sampling.seed, i)
        for kind, r in all_of
        for i in range(r.n)
    }


def fleet(root: Path) -> ModelManager:
    members = []
    for kind in KINDS:
        (root / kind).mkdir()
        save(root / kind, kind)
        config = Config(
            block_size=8, kv_blocks=60, context=256, max_sequences=5, cache_dir=str(root),
            cache_gb=2**-9,
        )  # fmt: skip
        members.append(ModelSlot(partial(load_engine, root / kind, kind, config), info(kind)))
    made = ModelManager(members)

    def memory_check(slot: ModelSlot, staying: int) -> str:
        beside = sum(m.engine is not None and m not in made._leaving for m in members)
        return "" if beside < BESIDE else "there is no room for another"

    made.memory_check = memory_check
    return made


def info(kind: str) -> ModelInfo:
    return ModelInfo(kind, 256, tiny.VOCAB, "", 8, 0, 0, 0)


async def drive(
    worker: EngineThread, seconds: float, seen: Seen, tell: Callable[[str], None]
) -> None:
    all_of = asks()
    truth = quiet(all_of)
    rng, began, told = random.Random(3), time.monotonic(), 0.0
    running: set[asyncio.Task[None]] = set()
    number = 0

    async def one(kind: str, ask: Request, number: int) -> None:
        name = f"{ask.id}-{number}"
        request = replace(ask, id=name, model=kind)
        leave = rng.randint(0, 20) if rng.random() < 0.2 else None
        got: dict[int, list[int]] = {i: [] for i in range(ask.n)}
        cut = False
        async for output in worker.submit(request):
            got[output.index] += output.tokens
            if output.finish == "error":
                seen.wrong.append(f"{request.id}: {output.error}")
            if leave is not None and not cut and sum(map(len, got.values())) >= leave:
                worker.abort(request.id)
                cut = True
        seen.counts["cancelled" if cut else "answered"] += 1
        for i, tokens in got.items():
            want = truth[ask.id, i]
            if tokens != (want[: len(tokens)] if cut else want):
                seen.wrong.append(f"{kind} {request.id}.{i}: {tokens} instead of {want}")

    while (now := time.monotonic() - began) < seconds and worker.alive():
        while len(running) < rng.randint(1, 12):
            kind, ask = rng.choice(all_of[: ASKS // 3] if rng.random() < 0.5 else all_of)
            running.add(asyncio.ensure_future(one(kind, ask, number := number + 1)))
        if rng.random() < 0.005:
            seen.counts["unloads asked for"] += 1
            running.add(asyncio.ensure_future(worker.unload(rng.choice(KINDS))))
        done, running = await asyncio.wait(running, timeout=rng.choice([0.0, 0.05, 0.2]))
        seen.wrong += [repr(error) for task in done if (error := task.exception())]
        if now - told > SAMPLE_S:
            told = now
            seen.sizes.append((now, memory.footprint(), meter.arrays(), mx.get_active_memory()))
            loads = sum(m.loads for m in worker.models.values())
            size = seen.sizes[-1][1] >> 20
            tell(f"{now:5.0f} s  {seen.counts['answered']} answered, {loads} loads, {size} MiB")
    seen.wrong += [repr(e) for e in await asyncio.gather(*running, return_exceptions=True) if e]


def churn(seconds: float, tell: Callable[[str], None] = lambda line: None) -> Seen:
    """Raises AssertionError for a wrong answer and for what leaked."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as root:
        worker = EngineThread(fleet(Path(root)), max_sequences=5, max_queue=64)
        worker.launch()
        asyncio.run(drive(worker, seconds, seen, tell))
        stats = tiny.stats(worker)
        seen.counts.update(loads=sum(m.loads for m in worker.models.values()))
        seen.counts.update(
            preemptions=stats.preemptions, cached=stats.cached_tokens, steps=stats.steps
        )
        alive = worker.alive()
        for member in worker._manager.slots:
            if member.engine is not None:
                member.engine.check()
                pools = member.engine.scheduler.kv.pools
                assert not any(pool.used for pool in pools), "a block leaked"
        worker.stop()
    assert alive, "the engine died"
    assert not seen.wrong, seen.wrong[:3]
    return seen


if __name__ == "__main__":
    minutes = float(sys.argv[1]) if sys.argv[1:] else 10.0
    found = churn(60 * minutes, lambda line: print("\r" + line, end="", flush=True))
    print("\n" + ", ".join(f"{n} {what}" for what, n in found.counts.items()))
    for what, (name, unit) in enumerate((("RSS", 1 << 20), ("arrays", 1), ("MLX", 1 << 20)), 1):
        early, late = found.most(what, CALM, 0.5), found.most(what, 0.75, 1)
        print(
            f"{name}: at most {early / unit:.1f} in the second quarter, {late / unit:.1f} in the last"
        )

"""The pool's size follows from what is free; the process does not grow with the requests it has served."""

import random
import sys
from pathlib import Path

import pytest

from mlxspec.engine import memory
from mlxspec.engine.engine import Engine
from mlxspec.types import Request, Sampling
from tests import tiny


def test_enough_contexts_or_half_of_what_is_free() -> None:
    assert memory.kv_blocks(8192, 32, 1000, free=1 << 40) == memory.CONTEXTS * 256 + 1
    assert memory.kv_blocks(8192, 32, 1000, free=64_000_000) == 1000 + 1
    assert memory.kv_blocks(100, 32, 1000, free=1 << 40) == memory.CONTEXTS * 4 + 1
    assert memory.kv_blocks(8192, 32, 0, free=0) == memory.CONTEXTS * 256 + 1  # memory that does not grow


def test_available_is_part_of_the_machine() -> None:
    assert 1 << 20 < memory.available(0) < 1 << 50


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    free = memory.available(0)
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(memory.available(0) - free) < 1 << 30
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.available(0) == (4000 if sys.platform == "linux" else free)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def serve(e: Engine, requests: int, vocab: int, longest: int, rng: random.Random) -> None:
    for i in range(requests):
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, longest)))
        e.add(Request(f"r{i}", prompt, rng.randint(1, 8), Sampling(rng.choice([0, 0.8]), seed=i)))
        while e.scheduler.waiting:
            e.step()
    while e.busy:
        e.step()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_500_requests_leave_the_process_as_large_as_50(kind: str) -> None:
    e, rng = tiny.engine(tiny.model(kind), blocks=400), random.Random(1)
    serve(e, 50, tiny.VOCAB, 100, rng)
    early = resident()
    serve(e, 450, tiny.VOCAB, 100, rng)
    assert resident() < 1.05 * early


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_500_requests_to_smollm2(smollm2: Path) -> None:
    from mlxspec.engine.start import Options, start

    e, info = start(smollm2, "smollm2", Options())
    rng = random.Random(1)
    serve(e, 50, info.vocab, 60, rng)
    early = resident()
    serve(e, 450, info.vocab, 60, rng)
    assert resident() < 1.05 * early

"""Yesterday's conversation on a real model: what the first request after a restart waits for."""

import time
from pathlib import Path

import pytest

from mlxspec.config import Config
from mlxspec.engine.engine import Engine
from mlxspec.load.loader import load_engine
from tests.support import tiny

TOKENS = 4096


def first_token(e: Engine, name: str, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds until the first token came, the tokens, and how many of the prompt were cached."""
    began, first, outputs = time.perf_counter(), 0.0, []
    e.add(tiny.request(name, prompt, 8))
    while e.active:
        outputs += e.step()
        if outputs and not first:
            first = time.perf_counter() - began
    return first, tiny.tokens(outputs, name), outputs[-1].cached


@pytest.mark.slow
def test_a_restart_at_4k_tokens(smollm2: Path, tmp_path: Path) -> None:
    """At most a tenth of reading the prompt again, and the same answer."""
    config = Config(cache_dir=str(tmp_path), cache_gb=4, speculate=False)
    prompt = [100 + i * i % 9973 for i in range(TOKENS)]
    e, _ = load_engine(smollm2, "smollm2", config)
    computed, told, cached = first_token(e, "first", prompt)
    assert cached == 0
    e.close(30)
    e, info = load_engine(smollm2, "smollm2", config)
    restored, again, cached = first_token(e, "again", prompt)
    read = e.offloader.disk.stats["disk_read_bytes"]
    e.close(1)
    print(
        f"\nfirst token of {TOKENS} tokens: {computed:.1f} s computed, {restored:.2f} s from disk"
        f" ({read >> 20} MiB): {restored / computed:.3f}"
    )
    assert again == told and cached == TOKENS - info.block_size
    assert restored <= computed / 10

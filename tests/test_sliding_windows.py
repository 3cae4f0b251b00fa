"""Sliding windows: the KV that a model of local and global layers holds, against one that keeps
all."""

from dataclasses import dataclass, field

import pytest

from mlxspec.engine.engine import Engine
from mlxspec.model.runner import Runner
from tests.support import tiny

BLOCK = 32
LONG = 8192
CHUNK = 512
GEMMA = {
    "num_hidden_layers": 6,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "num_attention_heads": 2,
}


@dataclass
class Held:
    """Bytes of KV blocks in use, seen before every step: in the last one, and the most."""

    engine: Engine
    sizes: list[int] = field(init=False)
    most: int = 0
    now: int = 0

    def __post_init__(self) -> None:
        runner: Runner = self.engine.runner
        self.sizes = [
            sum(a.nbytes for p in runner.pages() if p.window_key == key for a in p.pools())
            // blocks
            for key, blocks in runner.view.num_blocks.items()
        ]

    def look(self, _: int) -> None:
        pools = self.engine.scheduler.kv.pools
        now = sum(pool.used * size for pool, size in zip(pools, self.sizes, strict=True))
        self.now = now or self.now
        self.most = max(self.most, self.now)


def held(kind: str, own: bool, change: dict[str, object]) -> tuple[Held, list[int]]:
    m = tiny.model(kind, **change)
    blocks = -(-(LONG + 16) // BLOCK) + 1
    e = tiny.engine(m, block=BLOCK, blocks=blocks, budget=CHUNK, context=LONG + 16, own=own)
    e.add(tiny.request("warm", range(3), 2))
    tiny.run(e)
    watch = Held(e)
    e.add(tiny.request("r", [i * 7 % tiny.VOCAB for i in range(LONG)], 8))
    outputs = tiny.run(e, watch.look)
    return watch, tiny.tokens(outputs, "r")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, change, at_end, at_most",
    [  # windows and patterns as published, other sizes tiny
        ("gemma3_text", GEMMA, 0.30, 0.35),
        ("gpt_oss", {"num_hidden_layers": 2, "sliding_window": 128}, 0.53, 0.60),
    ],
)
def test_kv_at_8k_tokens(
    kind: str, change: dict[str, object], at_end: float, at_most: float
) -> None:
    windows, tokens = held(kind, True, change)
    everything, same = held(kind, False, change)
    assert tokens == same
    ratio, peak = windows.now / everything.now, windows.most / everything.most
    print(f"\n{kind}: {ratio:.3f} of the KV at the end, {peak:.3f} at the most")
    assert ratio <= at_end and peak <= at_most

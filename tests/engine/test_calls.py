"""How much Python a step is: calls of functions, which no other work on the machine changes.

Rule: the bounds are what was counted, with 30 % room. Whoever breaks one has put a loop into every step.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

import mlxspec
from mlxspec.engine.engine import Engine
from tests import tiny
from tests.drafters import attach

OURS = str(Path(mlxspec.__file__).parent)
LAYERS = ("kernels", "model/caches.py", "model/attention.py")  # grow with a model's depth, not with its rows
STEPS = 30


def calls(engine: Engine, streams: int) -> float:
    """Functions of ours that a step calls, layers aside, with `streams` that decode."""
    for i in range(streams):
        prompt = [(31 * i + 7 * j) % tiny.VOCAB for j in range(24)]
        engine.add(tiny.request(f"r{i}", prompt, 80, temperature=0.9, seed=i))
    found: Counter[str] = Counter()
    steps = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[frame.f_code.co_filename[len(OURS) + 1 :]] += 1

    while engine.busy:
        plan = engine._flight[-1][1].plan if engine._flight else []
        decoding = len(plan) == streams and all(e.count == 1 for e in plan) and steps < STEPS
        sys.setprofile(count if decoding else None)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        steps += decoding
    assert steps == STEPS
    return sum(n for file, n in found.items() if not file.startswith(LAYERS)) / STEPS


@pytest.mark.parametrize(
    ("kind", "streams", "most"),
    [("", 1, 230), ("", 16, 1740), ("lookup", 1, 355), ("lookup", 16, 2770)],
)
def test_a_step_calls_no_more_than_this(kind: str, streams: int, most: int) -> None:
    engine = tiny.engine(tiny.model("qwen3"), blocks=400, max_sequences=16)
    if kind:
        attach(engine, kind, row=1e-2)  # too dear to draft: what remains is what looking for copies takes
    found = calls(engine, streams)
    assert most / 2 < found <= most, found

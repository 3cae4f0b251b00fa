"""How much Python a step is: calls and lines, which no other work on the machine changes.

Rule: the bounds are what was counted, with 30 % room. Whoever breaks one has put a loop into every
step.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mlxspec
from mlxspec.engine.engine import Engine
from tests.support import tiny
from tests.support.drafters import attach, attach_head
from tests.support.parameter_rows import only

OURS = str(Path(mlxspec.__file__).parent)
LAYERS = (
    "kernels",
    "model/pages.py",
    "model/attention.py",
)  # grow with a model's depth, not with its rows
LAYER = 37  # calls
SAME: dict[str, Any] = dict(
    blocks=800, budget=1024
)  # all prompts in one step, so that all are as long
STEPS = 30


def calls(engine: Engine, streams: int) -> tuple[float, float]:
    """Functions of ours that a step calls, without layers and in them, with `streams` that
    decode."""
    for i in range(streams):
        prompt = [(31 * i + 7 * j) % tiny.VOCAB for j in range(24)]
        engine.add(tiny.request(f"r{i}", prompt, 80, temperature=0.9, seed=i))
    found: Counter[str] = Counter()
    steps = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[frame.f_code.co_filename[len(OURS) + 1 :]] += 1

    while engine.busy:
        plan = engine.in_flight.plan if engine.in_flight else []
        decoding = len(plan) == streams and all(e.count == 1 for e in plan) and steps < STEPS
        sys.setprofile(count if decoding else None)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        steps += decoding
    assert steps == STEPS
    inside = sum(n for file, n in found.items() if file.startswith(LAYERS))
    return (found.total() - inside) / STEPS, inside / STEPS


@pytest.mark.parametrize(
    ("kind", "streams", "most"),
    only(
        [
            ("", 1, 196),
            ("", 16, 1265),
            ("lookup", 1, 280),
            ("lookup", 16, 1830),
            ("head", 1, 660),
            ("head", 16, 3580),
        ],
        1,
        2,
        5,
    ),
)
def test_a_step_calls_no_more_than_this(kind: str, streams: int, most: int) -> None:
    """A round of the head drafts three tokens."""
    engine = tiny.engine(tiny.model("qwen3"), **SAME, max_sequences=16)
    if kind == "head":
        attach_head(engine, depth=3, kind="eagle")
    elif kind:
        attach(
            engine, kind, row=1e-2
        )  # too dear to draft: what remains is what looking for copies takes
    found, _ = calls(engine, streams)
    assert most / 2 < found <= most, found


@pytest.mark.parametrize("streams", only([1, 16], 0))
def test_a_layer_calls_no_more_than_this(streams: int) -> None:
    """Whatever the streams: what is in a step's view is made once, for all layers."""
    few, many = (
        calls(
            tiny.engine(tiny.model("qwen3", num_hidden_layers=n), max_sequences=16, **SAME), streams
        )[1]
        for n in (2, 6)
    )
    assert 1 < (many - few) / 4 <= LAYER, (many - few) / 4

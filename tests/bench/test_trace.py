"""The timeline of a tiny engine: what stands in the file, and that a gap is seen where there is
one."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bench import timeline, trace
from bench.timeline import Side, Submission, gaps
from mlxspec.engine.engine import Engine
from mlxspec.types import ModelInfo, Request
from tests.support import tiny
from tests.support.drafters import attach

INFO = ModelInfo("tiny", 512, tiny.VOCAB, "rows", 8, 0, 0, 0)
ORDER = ("plan", "build", "submit", "read", "commit", "publish")
Spans = dict[str, list[tuple[float, float]]]


def requests(streams: int) -> list[Request]:
    prompts = ([(7 * i + j) % tiny.VOCAB for j in range(12)] for i in range(streams))
    return [tiny.request(f"r{i}", prompt, 28) for i, prompt in enumerate(prompts)]


def recorded(streams: int, start: Callable[[], Engine]) -> list[Side]:
    return trace.record(lambda: (start(), INFO), lambda engine, info: [("tiny", requests(streams))])


def plain() -> Engine:
    """Wide enough that a step takes the device far longer than the host, also on a busy machine."""
    m = tiny.model("qwen3", hidden_size=512, intermediate_size=16384)
    return tiny.engine(m, blocks=128, budget=512)


def drafting() -> Engine:
    engine = tiny.engine(tiny.model("qwen3"), blocks=128)
    attach(engine, "lookup")
    return engine


def spans_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], Spans]:
    """By process and step, then by track: begin and end in microseconds."""
    found: dict[tuple[int, int], Spans] = defaultdict(lambda: defaultdict(list))
    for e in events:
        if e["ph"] == "X":
            found[e["pid"], e["args"]["step"]][e["name"]].append((e["ts"], e["ts"] + e["dur"]))
    return found


def test_a_timeline_has_every_step_in_order(tmp_path: Path) -> None:
    before = (mx.async_eval, Engine.add, Engine._read_and_commit, sys.getswitchinterval())
    sides = recorded(2, drafting)
    assert (mx.async_eval, Engine.add, Engine._read_and_commit, sys.getswitchinterval()) == before
    assert [side.title for side in sides] == ["tiny, plain", "tiny, drafting"]
    timeline.write(tmp_path / "t.json", sides)
    events = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    spans = spans_of(events)
    for pid in (1, 2):
        steps = sorted(n for p, n in spans if p == pid and spans[p, n]["run"])
        assert len(steps) >= 10 and steps == list(range(steps[0], steps[0] + len(steps)))
        for step in steps:
            at = spans[pid, step]
            assert {len(at[track]) for track in (*ORDER, "run")} == {1}, step
            assert all(at[a][0][1] <= at[b][0][0] + 0.002 for a, b in pairwise(ORDER)), step
    assert any(e["name"] == "draft" for e in events)


@pytest.mark.slow
def test_overlap_leaves_no_gap_and_its_lack_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle() -> float:
        """The part of the time in which nothing was computed."""
        (side,) = recorded(1, plain)
        figures = side.figures()
        assert figures is not None and figures.ours > 0
        assert figures.idle <= figures.likely <= figures.most
        return figures.idle

    overlapped = idle()
    for _ in range(4):  # another process may have taken the core
        if overlapped >= 0.1:
            overlapped = min(overlapped, idle())
    step = Engine.step

    def step_alone(engine: Engine, alone: bool = True) -> Any:
        """Read a step before the next is made, and let the host take 30 ms for it."""
        outputs = engine._read_and_commit(engine.in_flight) if engine.in_flight else []
        engine.in_flight = None
        time.sleep(0.03)
        return outputs + step(engine, alone)

    monkeypatch.setattr(Engine, "step", step_alone)
    assert overlapped < 0.1 < idle()


def test_gaps_lie_where_all_before_was_ready() -> None:
    long = [Submission(1, 0, 1, 5), Submission(2, 1, 2, 6), Submission(3, 8, 9, 9)]
    assert gaps(long) == [(3, 6, 8)]
    long[2].walk = 0.75
    assert gaps(long, "likely") == [(3, 6, 8.75)] == gaps(long, "most")
    late = [Submission(1, 0, 1, 5), Submission(2, 4, 9, 12, 3.0), Submission(3, 11, 13, 14, 0.5)]
    assert gaps(late) == [] and gaps(late, "likely") == [(2, 5, 7)]
    assert gaps(late, "most") == [(2, 5, 8), (3, 12, 12.5)]
    assert gaps([]) == []

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
from bench.trace import Side, Submission, gaps
from mlxspec.engine.engine import Engine
from mlxspec.types import ModelInfo, Request
from tests import tiny
from tests.drafters import attach

INFO = ModelInfo("tiny", 512, tiny.VOCAB, "rows", 8, 64, 0, 0, 0)
BY_STEP = ("plan", "build", "submit", "run", "read", "commit", "publish")  # drafting aside
N = 28  # tokens


def requests(streams: int) -> list[Request]:
    return [
        tiny.request(f"r{i}", [(7 * i + j) % tiny.VOCAB for j in range(12)], N)
        for i in range(streams)
    ]


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


def test_a_timeline_loads_nests_and_counts_its_steps(tmp_path: Path) -> None:
    sides = recorded(2, drafting)
    assert [side.title for side in sides] == ["tiny, plain", "tiny, drafting"]
    timeline.write(tmp_path / "t.json", sides)
    found = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert set(names.values()) == set(timeline.TRACKS)
    spans: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for e in found:
        if e["ph"] == "X":
            assert names[e["pid"], e["tid"]] == e["name"]
            spans[e["pid"], e["args"]["step"]][e["name"]].append((e["ts"], e["ts"] + e["dur"]))
    for pid, side in enumerate(sides, 1):
        numbers = sorted(step for p, step in spans if p == pid and spans[p, step]["run"])
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len(numbers) == len({s.step for s in side.submissions}) >= 10
        for step in numbers:
            at = spans[pid, step]
            assert {track: len(at[track]) for track in BY_STEP} == dict.fromkeys(BY_STEP, 1), step
            order = [
                at[track][0] for track in ("plan", "build", "submit", "read", "commit", "publish")
            ]
            assert all(a[1] <= b[0] + 0.002 for a, b in pairwise(order)), step
            assert at["submit"][0][0] <= at["run"][0][0] <= at["run"][0][1]
        for track in timeline.TRACKS:  # on a track, one thing at a time
            line = sorted(s for (p, _), tracks in spans.items() if p == pid for s in tracks[track])
            assert all(a[1] <= b[0] + 0.002 for a, b in pairwise(line)), track
    assert any(e["name"] == "draft" for e in found)


def test_overlap_leaves_no_gap_and_its_lack_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (overlapped,) = recorded(1, plain)
    monkeypatch.setattr(Engine, "_settle", _at_once(Engine._settle))
    (waited,) = recorded(1, plain)
    shares = []
    for side in (overlapped, waited):
        figures = side.figures()
        assert figures is not None
        shares.append(figures.idle)
        assert figures.idle <= figures.likely <= figures.most < figures.idle + 0.1
    assert shares[0] < 0.02 and shares[1] > 0.2, shares


def _at_once(settle: Callable[..., Any]) -> Callable[..., Any]:
    """Read a step before the next is made, and let the host take 30 ms for it."""

    def settled(engine: Engine, keep: int) -> Any:
        made = settle(engine, 0)
        time.sleep(0.03)
        return made

    return settled


def test_gaps_lie_where_all_before_was_ready() -> None:
    long = [
        Submission(1, 0, 1, 5),
        Submission(2, 1, 2, 6),
        Submission(3, 8, 9, 9),
        Submission(4, 8.5, 9, 10),
    ]
    assert gaps(long) == [(3, 6, 8)]
    long[2].walk = long[3].walk = (
        0.75  # the last one waits for the third, of which 0.25 s may be a walk
    )
    assert gaps(long, "likely") == [(3, 6, 8.75)] == gaps(long, "most")
    late = [Submission(1, 0, 1, 5), Submission(2, 4, 9, 12, 3.0), Submission(3, 11, 13, 14, 0.5)]
    assert gaps(late) == [] and gaps(late, "likely") == [(2, 5, 7)], (
        "the last was called early enough"
    )
    assert gaps(late, "most") == [(2, 5, 8), (3, 12, 12.5)]
    assert gaps([]) == []
    behind = [Submission(1, 0, 1, 9), Submission(2, 2, 3, 4), Submission(3, 8, 9, 12)]  # seen late
    assert gaps(behind) == []


def test_nothing_stays_wrapped() -> None:
    before = (mx.async_eval, Engine.add, Engine._book, sys.getswitchinterval())
    recorded(1, drafting)
    assert (mx.async_eval, Engine.add, Engine._book, sys.getswitchinterval()) == before

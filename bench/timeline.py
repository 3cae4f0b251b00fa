"""What `trace` recorded, as a file for ui.perfetto.dev and as a table.

Rule: nothing is reckoned here that was not recorded; on a track one thing happens at a time.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mlxspec.bench.trace import Side, gaps

TRACKS = (
    "plan",
    "draft",
    "build",
    "submit",
    "run",
    "read",
    "commit",
    "publish",
    "nothing submitted",
)


def events(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Chrome's trace events, in microseconds: a process for each side, a thread for each track. On
    "run" a submission begins when it was called and all before it was ready: a device runs one at a
    time."""
    zero = min((s.began for side in sides for s in side.submissions), default=0.0)
    zero = min([zero, *(span[2] for side in sides for span in side.spans)])
    made: list[dict[str, Any]] = []
    for pid, side in enumerate(sides, 1):
        made.append(_meta("process_name", pid, 0, side.title))
        made += [_meta("thread_name", pid, tid, track) for tid, track in enumerate(TRACKS, 1)]
        made += [
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": tid},
            }
            for tid in range(1, len(TRACKS) + 1)
        ]
        runs, done = [], 0.0
        for s in side.submissions:
            runs.append(("run", s.step, max(s.began, done), max(s.ready, done)))
            done = max(s.ready, done)
        idle = [
            ("nothing submitted", step, began, end) for step, began, end in gaps(side.submissions)
        ]
        for track, step, began, ended in sorted([*side.spans, *runs, *idle], key=lambda s: s[2]):
            tid, micro = TRACKS.index(track) + 1, 1e6
            event = {
                "name": track,
                "cat": "step",
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "args": {"step": step},
            }
            times = {
                "ts": round((began - zero) * micro, 3),
                "dur": round(max(0.0, ended - began) * micro, 3),
            }
            made.append(event | times)
    return made


def _meta(name: str, pid: int, tid: int, said: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": said}}


def write(file: Path, sides: Sequence[Side]) -> None:
    """For chrome://tracing and ui.perfetto.dev."""
    file.write_text(json.dumps({"traceEvents": events(sides), "displayTimeUnit": "ms"}), "utf-8")


def table(sides: Sequence[Side]) -> Table:
    """A line for each side."""
    caption = (
        "Steps that only decoded, with more than half of the streams. nothing submitted: share of their time,"
        " to the call that ends it; with the CPU time of that call, as it came; if all of that came too late."
        " The last four: CPU ms of the engine's thread in a step."
    )
    made = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=caption, caption_justify="left"
    )
    columns = (
        "\nstreams",
        "\nsteps",
        "tokens\ndrafted",
        "nothing submitted\nat least",
        "\nlikely",
        "\nat most",
        "a step\nms",
        "our Python\nmedian",
        "our Python\np99",
        "pages and\nattention",
        "mlx-lm's\ngraph",
    )
    made.add_column("")
    for name in columns:
        made.add_column(name, justify="right")
    for side in sides:
        f = side.figures()
        if f is None:
            made.add_row(side.title, str(side.streams), "few")
            continue
        times = (f.step, f.ours, f.ours_p99, f.seam, f.graph)
        counts = (
            str(side.streams),
            str(f.steps),
            str(f.drafted),
            *(f"{x:.2%}" for x in (f.idle, f.likely, f.most)),
        )
        made.add_row(side.title, *counts, *(f"{t:.2f}" for t in times))
    return made

"""What `bench.trace` recorded: its figures, as a table, and a file for ui.perfetto.dev.

Rule: on a track of the timeline one thing happens at a time.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from mlxspec.speculate import Speculator

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
FEW = 8  # steps below which no figure is worth saying
LEFT_OUT = 2  # steps at both ends, where sequences come and go

Span = tuple[str, int, float, float]  # track, step, seconds
Gap = tuple[int, float, float]  # the step that ended it, seconds
Bound = Literal["least", "likely", "most"]


@dataclass(slots=True)
class Submission:
    """One mx.async_eval: its step, when it was called and came back, when its results were there,
    and what it took of the CPU. Seconds."""

    step: int
    began: float
    ended: float = 0.0
    ready: float = 0.0
    walk: float = 0.0


@dataclass(slots=True)
class Turn:
    """One turn of the engine's thread. `seconds` by what was done: whole, waits (submitting and
    reading), graph (mlx-lm's own Python), seam (our page writes and attention inside it); CPU time
    of the thread."""

    step: int
    rows: int
    drafted: int
    fresh: bool  # whether a prompt was read in it
    seconds: dict[str, float]

    @property
    def ours(self) -> float:
        return self.seconds["whole"] - self.seconds["waits"] - self.seconds["graph"]


def gaps(submissions: Sequence[Submission], bound: Bound = "least") -> list[Gap]:
    """When nothing was submitted: from the moment that all before was ready to the next submission
    (least), to the end of what this takes of the CPU if nothing else holds it up (likely), or if
    all of that comes after that moment (most); where a submission waits, the device has work."""
    found, done = [], submissions[0].ready if submissions else 0.0
    for s in submissions[1:]:
        walks = max(s.began, done) if bound == "most" else s.began
        if (end := s.began if bound == "least" else min(s.ended, walks + s.walk)) > done:
            found.append((s.step, done, end))
        done = max(done, s.ready)
    return found


@dataclass(slots=True)
class Figures:
    """Of the steps that only decoded, more than half of the streams in each. `idle`, `likely`,
    `most`: the share of their time in which nothing was submitted, see `gaps`; the rest in
    milliseconds: a step, then CPU time of the thread in one."""

    steps: int
    drafted: int
    idle: float
    likely: float
    most: float
    step: float
    ours: float
    ours_p99: float
    seam: float
    graph: float


@dataclass
class Side:
    """What was recorded of one run: its title, its streams, and what came of it."""

    title: str
    streams: int
    drafter: Speculator
    spans: list[Span] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def decoding(self) -> list[Turn]:
        full = [t for t in self.turns if 2 * t.rows > self.streams and not t.fresh]
        return full[LEFT_OUT:-LEFT_OUT]

    def idle(self, bound: Bound = "least") -> float:
        """Seconds of the gaps before steps that only decoded."""
        steps = {t.step for t in self.decoding()}
        return sum(
            end - began for step, began, end in gaps(self.submissions, bound) if step in steps
        )

    def figures(self) -> Figures | None:
        """None where there were too few steps."""
        turns = self.decoding()
        if len(turns) < FEW:
            return None
        steps = {t.step for t in turns}
        # A step's time goes from the end of the one before it to its own.
        ready: dict[int, float] = {}
        for s in self.submissions:
            ready[s.step] = max(s.ready, ready.get(s.step, 0.0))
        took = [ready[n] - ready[n - 1] for n in sorted(steps) if n in ready and n - 1 in ready]
        ours = sorted(t.ours - t.seconds["seam"] for t in turns)

        def ms(values: Sequence[float]) -> float:
            return 1000 * statistics.median(values)

        return Figures(
            len(turns),
            sum(t.drafted for t in turns),
            self.idle() / sum(took),
            self.idle("likely") / sum(took),
            self.idle("most") / sum(took),
            ms(took),
            ms(ours),
            1000 * ours[min(len(ours) - 1, int(0.99 * len(ours)))],
            ms([t.seconds["seam"] for t in turns]),
            ms([t.seconds["graph"] for t in turns]),
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

"""What was measured, one row a value, and its way to a CSV file and back.

Rule: a row stands alone: server, workload, metric, round, value. What did not work is a row too.
"""

import csv
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

FAILED = "failed"  # the metric of a row whose note says what did not work
ABOUT = "about"  # the workload of rows that say what was measured, where and how


@dataclass(frozen=True, slots=True)
class Row:
    """`value` is in the unit that the metric's name ends with; rounds count from 0."""

    server: str
    workload: str
    metric: str
    round: int
    value: float
    note: str = ""


@dataclass(slots=True)
class Rows:
    """All rows of a run, in the order in which they came."""

    rows: list[Row] = field(default_factory=list)

    def add(
        self, server: str, workload: str, metric: str, round: int, value: float, note: str = ""
    ) -> None:
        self.rows.append(Row(server, workload, metric, round, float(value), note))

    def failed(self, server: str, workload: str, round: int, why: str) -> None:
        self.add(server, workload, FAILED, round, 0, " ".join(why.split())[:300])

    def servers(self) -> list[str]:
        return list(dict.fromkeys(r.server for r in self.rows if r.server))

    def values(self, server: str, workload: str, metric: str) -> dict[int, float]:
        """By round; the median where a round has several."""
        found: dict[int, list[float]] = {}
        for r in self.rows:
            if (r.server, r.workload, r.metric) == (server, workload, metric):
                found.setdefault(r.round, []).append(r.value)
        return {n: statistics.median(v) for n, v in found.items()}

    def about(self) -> dict[str, str]:
        return {r.metric: r.note for r in self.rows if r.workload == ABOUT}

    def answered(self, server: str, variant: str, cell: str = "") -> tuple[int, int]:
        """Right answers and those asked for, of the probes of a cell, or of all where it is
        empty."""
        right = asked = 0
        for r in self.rows:
            if (
                r.server == server
                and r.workload.endswith(f"/{variant}")
                and r.workload.startswith(cell)
            ):
                right += int(r.value) * (r.metric == "right")
                asked += int(r.value) * (r.metric == "asked")
        return right, asked

    def failures(self) -> list[Row]:
        return [r for r in self.rows if r.metric == FAILED]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and the least and the most."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return shown(self.median)
        return f"{shown(self.median)} ({shown(self.low)}..{shown(self.high)})"


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(values: Iterable[float]) -> Spread | None:
    """None of no values."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found)) if found else None


def ratios(above: dict[int, float], below: dict[int, float]) -> list[float]:
    """Round by round, of the rounds that both have and that divide."""
    return [above[n] / below[n] for n in above if below.get(n)]


def write(file: Path, rows: Rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        table = csv.DictWriter(out, [f.name for f in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(r) for r in rows.rows)


def read(file: Path) -> Rows:
    """Raises SystemExit, naming the line, for a file that is no such table."""
    rows = Rows()
    with file.open(newline="", encoding="utf-8") as lines:
        for n, line in enumerate(csv.DictReader(lines), 2):
            try:
                what = {name: line[name] for name in ("server", "workload", "metric", "note")}
                rows.rows.append(Row(round=int(line["round"]), value=float(line["value"]), **what))
            except (KeyError, TypeError, ValueError) as error:
                raise SystemExit(f"{file}:{n}: not a row of a measurement: {error!r}") from error
    return rows

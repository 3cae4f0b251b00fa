"""What was measured, for people: goals, every figure, wrong answers, what did not work."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from bench.goals import OURS, verdicts
from bench.probes import BATCHES, LENGTHS, PREFIXES
from bench.rows import ABOUT, FAILED, Rows, spread

HIDDEN = {FAILED, "text_hash", "right", "asked"}
VARIANTS = ("no draft", "draft")


def markdown(rows: Rows, pictures: Sequence[str] = ()) -> str:
    """The whole report."""
    facts = rows.about()
    parts = [
        f"# {facts.get('model', 'A model')} on {facts.get('machine', 'a machine')}",
        "Made by `make bench`. Medians of interleaved rounds, in brackets the least and the most; a ratio is"
        " taken within a round. Every server has the same model and BLAS and is asked while the others idle."
        " A gap is the time between two pieces that a client sees, which may hold several tokens. Start: from"
        " the process's start to the first token, later starts than the first, which has a line of its own.",
        "\n".join(f"- {name}: {note}" for name, note in facts.items()),
        "## Goals",
        _table(("goal", "bound", "compared with", "found", ""), goal_lines(rows)),
        "## Figures",
        _figures(rows),
        *(f"![{name}]({name})" for name in pictures),
        "## Right answers",
        *_correct(rows),
    ]
    if failures := rows.failures():
        parts += ["## What did not work"]
        parts += ["\n".join(f"- {r.server}, {r.workload}, round {r.round + 1}: {r.note}" for r in failures)]
    return "\n\n".join(parts) + "\n"


def goal_lines(rows: Rows) -> list[tuple[str, str, str, str, str]]:
    found = []
    for v in verdicts(rows):
        bound = f"{'≥' if v.goal.least else '≤'} {v.goal.bound:.3g}"
        peer = v.peer or v.goal.against or "-"
        found.append((v.goal.text, bound, peer, str(v.found) if v.found else "-", v.said))
    return found


def shown(rows: Rows) -> Table:
    """The goals, for a terminal."""
    table = Table(box=None, pad_edge=False)
    for column in ("goal", "bound", "compared with", "found", ""):
        table.add_column(column)
    for line in goal_lines(rows):
        table.add_row(*line)
    for r in rows.failures():
        table.add_row(f"{r.server}, {r.workload}", "", "", "", r.note, style="red")
    return table


def _figures(rows: Rows) -> str:
    servers = rows.servers()
    kinds = dict.fromkeys(
        (r.workload, r.metric)
        for r in rows.rows
        if r.workload != ABOUT and r.metric not in HIDDEN and "/" not in r.workload
        if not r.metric.startswith(("gap_", "prompt_turn")) or r.metric.endswith("_s")
    )
    lines = []
    for workload, metric in kinds:
        values = [spread(rows.values(s, workload, metric).values()) for s in servers]
        lines.append((workload, metric, *(str(v) if v else "-" for v in values)))
    return _table(("workload", "metric", *servers), lines)


def _correct(rows: Rows) -> Iterable[str]:
    yield (
        "Greedy answers equal to plain decoding with a fresh cache, of those asked for. The model is tiny and"
        " random: each answer depends on every token before it."
    )
    columns = [(s, v) for s in rows.servers() for v in VARIANTS if _count(rows, s, "", v)[1]]
    lines = []
    for prefix in PREFIXES:
        for batch in BATCHES:
            for length in LENGTHS:
                cell = f"{prefix}/{batch}/{length}"
                lines.append((prefix, batch, length, *(_of(_count(rows, s, cell, v)) for s, v in columns)))
    lines.append(("all", "", "", *(_of(_count(rows, s, "", v)) for s, v in columns)))
    yield _table(("prefix", "batch", "length", *(f"{s}, {v}" for s, v in columns)), lines)
    yield "Answers of the workloads equal to mlxspec's, of those that both gave:"
    lines = [(s, *same(rows, s)) for s in rows.servers() if s != OURS]
    yield _table(("server", "equal", "of"), [(s, str(k), str(n)) for s, k, n in lines if n])


def same(rows: Rows, server: str) -> tuple[int, int]:
    """Rounds of workloads in which the text is ours, and how many there are."""
    equal = both = 0
    for workload in dict.fromkeys(r.workload for r in rows.rows if r.metric == "text_hash"):
        ours, theirs = (rows.values(s, workload, "text_hash") for s in (OURS, server))
        both += len(ours.keys() & theirs.keys())
        equal += sum(ours[n] == theirs[n] for n in ours.keys() & theirs.keys())
    return equal, both


def _count(rows: Rows, server: str, cell: str, variant: str) -> tuple[int, int]:
    """Right and asked, of a cell, or of all where it is empty."""
    right = asked = 0
    for r in rows.rows:
        if r.server == server and r.workload.endswith(f"/{variant}") and r.workload.startswith(cell):
            right += int(r.value) * (r.metric == "right")
            asked += int(r.value) * (r.metric == "asked")
    return right, asked


def _of(count: tuple[int, int]) -> str:
    right, asked = count
    return "-" if not asked else f"{right}/{asked}" if right == asked else f"**{right}/{asked}**"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in rows)

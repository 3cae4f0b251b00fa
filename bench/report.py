"""What was measured, for people: goals, every figure, wrong answers, what did not work."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from bench.goals import OURS, verdicts
from bench.probes import BATCHES, LENGTHS, PREFIXES
from bench.rows import ABOUT, FAILED, Rows, spread

HIDDEN = {FAILED, "text_hash", "right", "asked"}
VARIANTS = ("no draft", "draft")
GOALS_HEAD = ("goal", "bound", "compared with", "found", "")
BLOCK = re.compile(r"(?<=<!-- begin: bench -->\n).*?(?=<!-- end: bench -->)", re.S)


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
        _table(GOALS_HEAD, goal_lines(rows)),
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


def blocks(rows: Rows, file: Path, root: Path) -> dict[Path, str]:
    """What a table in `file` says between the marks of the pages in `root`, with the pictures beside it."""
    facts, failures = rows.about(), len(rows.failures())
    what = f"{facts.get('model', 'A model')} on {facts.get('machine', 'a machine')}"
    what += f", {facts.get('date', 'some day')}; medians of {facts.get('rounds', 'some')} interleaved rounds"
    at = Path("..") / file.relative_to(root)
    pictures = [at.with_name(p.name) for p in sorted(file.parent.glob(f"{file.stem}-*.png"))]
    compared = goal_lines(rows, but=("install",))
    readme = [f"{what} ([all figures](docs/performance.md#measured)):", _table(GOALS_HEAD, compared)]
    page = [
        f"Made by `make bench`. {what}, in brackets the least and the most; a ratio is taken within a round.",
        "\n".join(f"- {name}: {note}" for name, note in facts.items()),
        f"[All values]({at}); [the report]({at.with_suffix('.md')}) has the right and wrong answers, and"
        f" what did not work: {failures or 'nothing'}.",
        _table(GOALS_HEAD, goal_lines(rows)),
        _figures(rows),
        *(f"![{p.stem}]({p})" for p in pictures),
    ]
    parts = {"README.md": readme, "docs/performance.md": page}
    return {root / name: "\n\n".join(some) + "\n" for name, some in parts.items()}


def fill(rows: Rows, file: Path, root: Path) -> list[Path]:
    """Write the pages anew. Raises SystemExit for what has no place there."""
    if not file.is_relative_to(root):
        raise SystemExit(f"{file} is not in {root}, so no page can link it; copy it to bench/results")
    if "quick" in rows.about().get("rounds", ""):
        raise SystemExit(f"{file} is of a --quick run, of which no figure counts")
    made = blocks(rows, file, root)
    for page, text in made.items():
        old = page.read_text("utf-8")
        if not BLOCK.search(old):
            raise SystemExit(f"{page} has no <!-- begin: bench --> and <!-- end: bench -->")
        page.write_text(BLOCK.sub(lambda _, text=text: text, old), "utf-8")
    return list(made)


def goal_lines(rows: Rows, but: Sequence[str] = ()) -> list[tuple[str, str, str, str, str]]:
    """All, but those of some workloads."""
    found = []
    for v in verdicts(rows):
        if v.goal.workload in but:
            continue
        bound = f"{'≥' if v.goal.least else '≤'} {v.goal.bound:.3g}"
        peer = v.peer or v.goal.against or "-"
        found.append((v.goal.text, bound, peer, str(v.found) if v.found else "-", v.said))
    return found


def shown(rows: Rows) -> Table:
    """The goals, for a terminal."""
    table = Table(box=None, pad_edge=False)
    for column in GOALS_HEAD:
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

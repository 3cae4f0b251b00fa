"""What was measured, for people: goals, every figure, wrong answers, what did not work."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from bench.cells import BEFORE, BEHIND, DRAWN, KEYS, PROMPTS, TOKENS, TURNS, WARM
from bench.goals import OURS, RIGHT, verdicts
from bench.probes import BATCHES, LENGTHS, PREFIXES
from bench.rows import ABOUT, FAILED, Rows, shown, spread
from bench.servers import DEPTH, HEADS, OWN_HEAD
from bench.setting import MOST_CONTEXT

HIDDEN = {FAILED, "text_hash", "right", "asked", "tokens", "text_tokens", "others_cpu_per_s"}
# What the README compares: a name with its unit, the workload, its figure. The first ones are rows
# of its table; of all it says where another server is better.
ROWS = 3
SHORT = (
    ("one chat, tokens/s", "chat", "tokens_per_s"),
    ("code edit, tokens/s after the first", "edit", "tokens_per_s"),
    ("first token of a long prompt sent again, s", "first token", "hot_s"),
    ("first token of a new long prompt, s", "first token", "cold_s"),
    ("8 streams, tokens/s of all", "streams 8", "tokens_per_s"),
    ("longest gap beside a long prompt, s", "prefill", "gap_longest_s"),
    ("memory after the workloads, MB", "memory", "rss_mb"),
    ("start to first token, s", "start", "first_token_s"),
)
ALONE = ("chat", "edit", "humaneval")
LEGEND = f"""\
- **{", ".join(ALONE)}**: one request after the other, in a round
  {", ".join(f"{sum(DRAWN[w].values())} of {TOKENS[w]} tokens" for w in ALONE)}.
  `tokens_per_s` counts from the first token on, `whole_tokens_per_s` from the request on.
- **streams N**: N requests of {TOKENS["streams 1"]} tokens, half chats and half code, each at a random time
  (Poisson, about two seconds in all).
- **prefill**: a long answer is running, and a prompt of a quarter of the window comes. `gap_*`: the time
  between two pieces that a client sees, which may hold several tokens; the longest may be the wait for an
  answer that begins meanwhile. `ttft_s`: of the prompt.
- **first token**: a prompt of half the window, new (`cold_s`) and once more (`hot_s`).
- **session**: {TURNS} turns, each of which sends all that was said and a file more, at last 15/16 of the
  window, {MOST_CONTEXT:,} tokens at most.
- **start**: from the process's start to the first token; `first_ever_s` is the first start with this model.
- **idle, disconnect**: CPU seconds in a second in which nobody asks anything, and in 10 after a client has
  left its answer.
- **memory**: after all of it. Every server is asked while the others idle."""
# Of workloads that not every table has, by a workload of each line.
MORE = {
    "head chat": f"""\
- **{", ".join(OWN_HEAD)}**: chat and code as above, and chat at that temperature. mlxspec drafts with the head
  of its built-in model and by prompt lookup, mlxspec-no-head by prompt lookup only. mlx-vlm cannot draft for such a model.""",
    "typing": f"""\
- **typing**: {KEYS} keys in the middle of a file, and after each a prompt of about {BEFORE + BEHIND:,} tokens to fill in the
  middle: the first token after the first key and after a later one, how much of a later prompt was cached,
  and to how many keys the model said nothing (`silent_keys`), which have no times. Who knows no `suffix` gets the
  same prompt ready-made. The model has borrowed its tokens for it if it has none.""",
    f"{HEADS[0]} 1": f"""\
- **{", ".join(HEADS)}**, and how many requests at once: the trained pairs of tests/heads, {PROMPTS} prompts, {DEPTH} tokens
  drafted in every round by all; `_warm`: at temperature {WARM}. The models are tiny: the rounds tell about the
  drafts, the seconds about what surrounds them.""",
}
NAMES = {  # what is not the server's default, by the names in the tables
    "mlxspec-no-head": "drafts by prompt lookup only",
    "rapid-mlx-suffix": "is rapid-mlx with its suffix decoding",
}
OTHER_SETTING_OF = {"mlxspec-no-head": "mlxspec", "rapid-mlx-suffix": "rapid-mlx"}
GOALS_HEAD = ("goal", "bound", "compared with", "found", "")
MEDIANS = (
    "Medians of the rounds, in brackets the least and the most where they differ; memory, idle, session,"
    " disconnect and the first start were taken once. A ratio is taken within a round."
)
BLOCK = re.compile(r"(?<=<!-- begin: bench -->\n).*?(?=<!-- end: bench -->)", re.S)


def markdown(rows: Rows, pictures: Sequence[str] = ()) -> str:
    """The whole report."""
    facts = rows.about()
    parts = [
        f"# {facts.get('model', 'A model')} on {facts.get('machine', 'a machine')}",
        f"Made by `make bench`. Every server has the same model and BLAS. {MEDIANS}",
        "\n".join(f"- {name}: {note}" for name, note in facts.items()),
        "## Goals",
        _table(GOALS_HEAD, goal_lines(rows)),
        "## Figures",
        legend(rows),
        _figures(rows),
        *(f"![{name}]({name})" for name in pictures),
        "## Right answers",
        *_correct(rows),
    ]
    if failures := rows.failures():
        parts += ["## What did not work"]
        parts += [
            "\n".join(
                f"- {r.server}, {r.workload}, round {r.round + 1}: {r.note}" for r in failures
            )
        ]
    return "\n\n".join(parts) + "\n"


def blocks(rows: Rows, file: Path, root: Path) -> dict[Path, str]:
    """What a table in `file` says between the marks of the pages in `root`: a short comparison in
    the README, the goals in docs/performance.md. All figures are in the report beside `file`."""
    facts, failures = rows.about(), len(rows.failures())
    what = f"{facts.get('model', 'A model')} on {facts.get('machine', 'a machine')}"
    what += f", {facts.get('date', 'some day')}, {facts.get('rounds', 'some')} interleaved rounds"
    at = Path("..") / file.relative_to(root)
    servers = rows.servers()
    columns = [s for s in servers if OTHER_SETTING_OF.get(s) not in servers]
    readme = [
        _table(("", *columns), [*_short(rows, columns), *_right(rows, columns)]),
        f"{what}; medians, of other servers with the best setting that was measured."
        f" Bold: some answers were wrong or missing. {_worse(rows, columns)}{_missed(rows)}",
    ]
    page = [
        f"Made by `make bench`: {what}. {MEDIANS}",
        f"[The report]({at.with_suffix('.md')}) has every figure and what it means, plots, machine and"
        f" versions, right and wrong answers, and what did not work: {failures or 'nothing'}."
        f" [All values]({at}).",
        _table(GOALS_HEAD, goal_lines(rows)),
    ]
    parts = {"README.md": readme, "docs/performance.md": page}
    return {root / name: "\n\n".join(some) + "\n" for name, some in parts.items()}


def fill(rows: Rows, file: Path, root: Path) -> list[Path]:
    """Write the report pages. Raises SystemExit for what has no place there."""
    if not file.is_relative_to(root):
        raise SystemExit(
            f"{file} is not in {root}, so no page can link it; copy it to bench/results"
        )
    if "quick" in rows.about().get("rounds", ""):
        raise SystemExit(f"{file} is of a --quick run, of which no figure counts")
    made = blocks(rows, file, root)
    for page, text in made.items():
        old = page.read_text("utf-8")
        if not BLOCK.search(old):
            raise SystemExit(f"{page} has no <!-- begin: bench --> and <!-- end: bench -->")
        page.write_text(BLOCK.sub(lambda _, text=text: text, old), "utf-8")
    return list(made)


def legend(rows: Rows) -> str:
    known = {r.workload for r in rows.rows}
    named = _named(rows.servers())
    first = [f"-{named}"] if named else []
    return "\n".join([*first, LEGEND, *(text for name, text in MORE.items() if name in known)])


def _named(servers: Iterable[str]) -> str:
    """Sentences about the servers of NAMES."""
    return "".join(f" {name} {NAMES[name]}." for name in servers if name in NAMES)


def _missed(rows: Rows) -> str:
    """How many goals were missed."""
    every = verdicts(rows)
    known = [v for v in every if v.met is not None]
    missed = sum(not v.met for v in known)
    text = f"Of {len(every)} [goals](docs/performance.md#measured) {len(known)} were measured,"
    return f"{text} {missed or 'none'} of them missed."


def _worse(rows: Rows, servers: Sequence[str]) -> str:
    """A sentence about the figures of SHORT in which another server is better; "" of none."""
    found = []
    for text, workload, metric in SHORT:
        what, _, unit = text.rpartition(", ")
        values = {s: _best(rows, s, workload, metric) for s in servers}
        others = {s: v for s, v in values.items() if v is not None and s != OURS}
        if (ours := values.get(OURS)) is None or not others:
            continue
        peer, best = (max if _rate(metric) else min)(others.items(), key=lambda item: item[1])
        if best > ours if _rate(metric) else best < ours:
            found.append(f"{what} ({shown(ours)} {unit}; {peer} {shown(best)})")
    return f"**mlxspec is worse in**: {', '.join(found)}. " if found else ""


def goal_lines(rows: Rows) -> list[tuple[str, str, str, str, str]]:
    """All goals: text, bound, whom ours was compared with, what was found, whether it is met."""
    found = []
    for v in verdicts(rows):
        bound = f"{v.goal.sign} {v.goal.bound:.3g}"
        peer = v.peer or v.goal.against or "-"
        found.append((v.goal.text, bound, peer, str(v.found) if v.found else "-", v.said))
    return found


def goals(rows: Rows) -> Table:
    """The goals, for a terminal."""
    table = Table(box=None, pad_edge=False)
    for column in GOALS_HEAD:
        table.add_column(column)
    for line in goal_lines(rows):
        table.add_row(*line)
    for r in rows.failures():
        table.add_row(f"{r.server}, {r.workload}", "", "", "", r.note, style="red")
    return table


def _rate(metric: str) -> bool:
    """Whether more is better."""
    return metric.endswith("tokens_per_s")


def _settings(rows: Rows, server: str) -> list[str]:
    """A server and, of others than ours, its other settings that were measured."""
    others = [s for s in rows.servers() if OTHER_SETTING_OF.get(s) == server != OURS]
    return [server, *others]


def _best(rows: Rows, server: str, workload: str, metric: str) -> float | None:
    """The best median of a server's settings."""
    found = [spread(rows.values(s, workload, metric).values()) for s in _settings(rows, server)]
    medians = [s.median for s in found if s]
    return (max if _rate(metric) else min)(medians, default=None)


def _short(rows: Rows, servers: Sequence[str]) -> Iterable[Sequence[str]]:
    for text, workload, metric in SHORT[:ROWS]:
        found = [_best(rows, s, workload, metric) for s in servers]
        if any(v is not None for v in found):
            yield text, *("-" if v is None else shown(v) for v in found)


def _right(rows: Rows, servers: Sequence[str]) -> Iterable[Sequence[str]]:
    """Right answers of all probes, with drafts and without."""
    answered = []
    for server in servers:
        each = [rows.answered(s, v) for s in _settings(rows, server) for v in RIGHT.values()]
        right, asked = (sum(column) for column in zip(*each, strict=True))
        answered.append((right, asked))
    if any(asked for _, asked in answered):
        yield "right answers", *map(_of, answered)


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
    columns = [(s, v) for s in rows.servers() for v in RIGHT.values() if rows.answered(s, v)[1]]
    text = (
        "Greedy answers equal to plain decoding with a fresh cache, of those asked for. The model is tiny and"
        " random: each answer depends on every token before it"
    )
    if any(variant == "head" for _, variant in columns):
        text += "; with a head, a trained target and its head"
    yield f"{text}."
    lines = []
    for prefix in PREFIXES:
        for batch in BATCHES:
            for length in LENGTHS:
                cell = f"{prefix}/{batch}/{length}"
                lines.append(
                    (prefix, batch, length, *(_of(rows.answered(s, v, cell)) for s, v in columns))
                )
    lines.append(("all", "", "", *(_of(rows.answered(s, v)) for s, v in columns)))
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


def _of(count: tuple[int, int]) -> str:
    right, asked = count
    return "-" if not asked else f"{right}/{asked}" if right == asked else f"**{right}/{asked}**"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in rows)

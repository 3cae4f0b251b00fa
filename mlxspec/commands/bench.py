"""`mlxspec bench`: the same prompts with speculation and without it, in turn, on one engine.

Rule: each side starts with an empty prefix cache and drafters that have seen no answer. Measured
costs and acceptance rates stay, as in a server.
"""

import inspect
import json
import pkgutil
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TextIO

from rich.console import Console
from rich.progress import track
from rich.table import Table

from mlxspec import blas
from mlxspec.config import Config, ConfigError
from mlxspec.types import Output, Request, Sampling

blas.load()

from mlxspec.engine.engine import Engine  # noqa: E402  after BLAS
from mlxspec.resolve import resolve_model  # noqa: E402
from mlxspec.speculate import NoSpeculation, Speculator  # noqa: E402
from mlxspec.text.chat import Tokenizer, encode, render_chat  # noqa: E402

# Code of the standard library of 40 to 120 lines, a name in it, a new name.
RENAMES = """
copy:deepcopy memo seen
shutil:move real_dst target
textwrap:dedent margin prefix
heapq:merge value item
statistics:quantiles data values
csv:DictReader row record
urllib.parse:parse_qsl separator delimiter
json.scanner:py_make_scanner nextchar char
quopri:decode new decoded
linecache:updatecache fullname full_path
inspect:getcallargs arg2value values_by_name
difflib:unified_diff lineterm ending
pkgutil:walk_packages info entry
base64:a85decode curr group
calendar:TextCalendar width columns
sched:scheduler action callback
"""
PROMPTS = {
    "code": """
Write in Python: is_balanced(text), whether every bracket of ()[]{} is closed in the right order.
Write in Python: merge_sorted(a, b), one sorted list from two, without calling sort.
Write in Python: roman(n), a number from 1 to 3999 as a Roman numeral.
Write in Python: primes(limit), all primes up to the limit, by the sieve of Eratosthenes.
Write in Python: flatten(items), a list of any depth as a flat list.
Write in Python: longest_run(values), the value that repeats most in a row, and how often.
Write in Python: word_counts(text), how often each word occurs, lower case, no punctuation.
Write in Python: transpose(matrix), its rows as columns; an error if the rows differ in length.
Write in Python: binary_search(values, target), the target's index in a sorted list, or -1.
Write in Python: parse_duration(text), seconds in a text such as "1h 30m 5s".
Write in Python: levenshtein(a, b), the edit distance of two strings.
Write in Python: rotate(values, n), the list turned right by n places, also for negative n.
Write in Python: group_by(items, key), a dictionary from each key to its items, in order.
Write in Python: is_leap_year(year), whether a Gregorian year has a 29th of February.
Write in Python: caesar(text, shift), the text with its letters shifted, the case kept.
Write in Python: topological_sort(graph), the nodes in an order that every edge follows.
""",
    "chat": """
Plan a weekend in a city by the sea for a family with two small children.
Explain to a ten-year-old why the sky is blue and the sunset is red.
Write a polite message to a neighbour about loud music late at night.
Compare trains and planes for a journey of 600 kilometres.
What should I look for when I buy a used bicycle?
Write a short story about a lighthouse keeper who finds a letter.
How do vaccines work, and why do some need a second dose?
Give me a recipe for a vegetable soup and how to keep it for a week.
Summarize the causes of the French Revolution in five points.
Which questions should I ask at the end of a job interview?
What is the difference between weather and climate?
Write a product description for a wooden desk lamp.
How does a hash table work, and when is it slow?
Suggest a training plan for a first 10 km run in eight weeks.
Explain compound interest with an example in numbers.
Describe the rules of chess to somebody who knows draughts.
""",
}
WORKLOADS = ("edits", *PROMPTS)


@dataclass(frozen=True, slots=True)
class Task:
    """One user message. `opening` is how the answer begins: a small model would talk about it."""

    name: str
    text: str
    opening: str = ""


def tasks_of(workload: str) -> list[Task]:
    """All tasks of one of WORKLOADS."""
    if workload == "edits":
        return edits()
    return [Task(line[:60], line) for line in PROMPTS[workload].strip().splitlines()]


def edits() -> list[Task]:
    """To rename a name in code of the standard library, where this Python has it."""
    tasks = []
    for path, old, new in map(str.split, RENAMES.strip().splitlines()):
        with suppress(AttributeError, ImportError, OSError, TypeError):  # moved, or without source
            text = (
                f"```python\n{inspect.getsource(pkgutil.resolve_name(path))}```\n\n"
                f"Rename `{old}` to `{new}` everywhere in this code."
                " Answer with the whole code, changed in nothing else."
            )
            tasks.append(Task(path, text, "```python\n"))
    return tasks


@dataclass(slots=True)
class Answer:
    """One prompt's answer on one side. `decoded` tokens came in `seconds` after the first output;
    `last` is the time of the last one, in seconds from the start."""

    tokens: list[int] = field(default_factory=list)
    last: float = 0.0
    seconds: float = 0.0
    decoded: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, output: Output, now: float) -> None:
        self.rounds, self.drafted = output.rounds, output.drafted
        self.accepted = sum(n for _, n in output.accepted)
        if not output.tokens:
            return
        if self.tokens:
            self.decoded += len(output.tokens)
            self.seconds += now - self.last
        self.last = now
        self.tokens += output.tokens

    @property
    def speed(self) -> float:
        """Tokens/s behind the prompt."""
        return self.decoded / max(self.seconds, 1e-9)


Answers = dict[str, Answer]  # by prompt


@dataclass(slots=True)
class Result:
    """All answers of a workload with so many streams. Each group of prompts is a trial: its
    answers without and with speculation."""

    workload: str
    streams: int
    trials: list[tuple[Answers, Answers]] = field(default_factory=list)

    def differing(self) -> set[str]:
        """Prompts whose tokens are not the same on both sides."""
        return {
            name
            for plain, drafted in self.trials
            for name, answer in plain.items()
            if answer.tokens != drafted[name].tokens
        }

    def figures(self) -> dict[str, float]:
        """Speeds are of one stream while it decodes; the speedup compares the sums of their
        times."""
        plain, drafted = ([a for t in self.trials for a in t[side].values()] for side in (0, 1))
        tokens, seconds = sum(len(a.tokens) for a in drafted), sum(a.seconds for a in drafted)
        return {
            "tokens": tokens,
            "tokens_per_s_plain": median(a.speed for a in plain),
            "tokens_per_s": median(a.speed for a in drafted),
            "speedup": sum(a.seconds for a in plain) / max(seconds, 1e-9),
            "tokens_per_round": tokens / sum(a.rounds for a in drafted),
            "accepted": sum(a.accepted for a in drafted) / max(1, sum(a.drafted for a in drafted)),
        }


def run_group(engine: Engine, speculator: Speculator, requests: Sequence[Request]) -> Answers:
    """Run the requests at the same time. Raises InvalidRequest for a prompt that is too long."""
    engine.proposer = speculator
    engine.reset()
    answers = {request.id: Answer() for request in requests}
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.busy:
        for output in engine.step():
            if output.finish == "error":
                raise RuntimeError(f"{output.request} failed: {output.error}")
            answers[output.request].add(output, time.perf_counter() - began)
    return answers


def prompt_of(task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids, by the chat template where the model has one."""
    if not tokenizer.has_chat_template:
        return tuple(encode(tokenizer, f"{task.text}\n\n{task.opening}"))
    ids = render_chat(tokenizer, [{"role": "user", "content": task.text}])
    return (*ids, *encode(tokenizer, task.opening, special=False))


def groups_of(workload: str, streams: str, prompts: int) -> list[tuple[str, list[Task]]]:
    """Workload and tasks of every group that runs together. Raises ConfigError."""
    names = list(WORKLOADS) if workload == "all" else [workload]
    if not set(names) <= set(WORKLOADS):
        raise ConfigError(f"--workload = {workload!r} is none of {', '.join(WORKLOADS)}, all")
    if not re.fullmatch(r"[1-9]\d?(,[1-9]\d?)*", streams):
        raise ConfigError(f"--streams = {streams!r} is not a list of numbers; give one such as 1,4")
    groups = []
    for name in names:
        tasks = tasks_of(name)
        for size in map(int, streams.split(",")):
            if size > len(tasks):
                raise ConfigError(
                    f"--streams = {size} is more than the {len(tasks)} prompts of {name}"
                )
            last = min(len(tasks) - size, prompts - 1)
            groups += [(name, tasks[at : at + size]) for at in range(0, last + 1, size)]
    return groups


def bench(
    config: Config,
    workload: str,
    prompts: int,
    max_tokens: int,
    temperature: float,
    streams: str,
    rounds: int,
    file: TextIO | None,
) -> int:
    """Measure and print. Returns the exit status: 1 if an answer differs. Raises UserError."""
    groups = groups_of(workload, streams, prompts)
    widest = max(len(tasks) for _, tasks in groups)
    model = resolve_model(replace(config, speculate="on", max_sequences=widest, cache_gb=0.0))
    engine, info = model.load()
    stop = frozenset(model.tokenizer.eos_token_ids)

    def request(task: Task) -> Request:
        prompt = prompt_of(task, model.tokenizer)
        most = min(max_tokens, info.context - len(prompt))
        return Request(task.name, prompt, most, Sampling(temperature), stop)

    results = measure(engine, [(name, list(map(request, tasks))) for name, tasks in groups], rounds)
    console = Console()
    console.print(f"{info.name}, up to {max_tokens} tokens a prompt, temperature {temperature:g}")
    console.print(table(results))
    if file:
        report = {"model": info.name, "results": list(map(asdict, results))}
        json.dump(report | {"figures": [result.figures() for result in results]}, file)
    differing = set().union(*(result.differing() for result in results))
    if differing:
        console.print("Answers that differ with speculation:", *sorted(differing), style="red")
        return 1
    console.print("Every answer is the same with and without speculation.")
    return 0


def measure(
    engine: Engine, groups: Sequence[tuple[str, list[Request]]], rounds: int
) -> list[Result]:
    """Run every group on both sides, `rounds` times; the side that goes first alternates."""
    sides = NoSpeculation(), engine.proposer
    for side in sides:
        run_group(
            engine, side, [replace(r, max_tokens=min(16, r.max_tokens)) for r in groups[0][1]]
        )
    results: dict[tuple[str, int], Result] = {}
    jobs = [group for _ in range(rounds) for group in groups]
    for n, (workload, requests) in enumerate(track(jobs, console=Console(stderr=True))):
        key = workload, len(requests)
        order = (1, 0) if (n + n // len(groups)) % 2 else (0, 1)
        trial = {side: run_group(engine, sides[side], requests) for side in order}
        results.setdefault(key, Result(*key)).trials.append((trial[0], trial[1]))
    return list(results.values())


def table(results: Sequence[Result]) -> Table:
    """One line for each result."""
    made = Table(box=None, pad_edge=False)
    made.add_column("workload")
    for name in (
        "streams",
        "tokens",
        "tok/s\nwithout",
        "tok/s\nwith",
        "speedup",
        "tokens\n/round",
        "accepted",
    ):
        made.add_column(name, justify="right")
    for result in results:
        numbers = (f"{x:.4g}" for x in result.figures().values())
        made.add_row(result.workload, str(result.streams), *numbers)
    return made

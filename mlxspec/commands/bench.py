"""`mlxspec bench`: the same prompts with speculation and without it, in turn, on one engine.

Rule: each side starts with an empty prefix cache and drafters that have seen no answer. Measured
costs and acceptance rates stay, as in a server.
"""

import inspect
import json
import pkgutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TextIO

from rich.console import Console
from rich.progress import track

from mlxspec import blas
from mlxspec.commands.table import print_table
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
    """One prompt's answer on one side. `first` and `last` are the times of its outputs, in seconds
    from the start."""

    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, output: Output, now: float) -> None:
        self.rounds, self.drafted = output.rounds, output.drafted
        self.accepted = sum(n for _, n in output.accepted)
        if output.tokens:
            self.first = self.first or now
            self.last = now
            self.tokens += output.tokens

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return max(self.last - self.first, 1e-9)

    @property
    def speed(self) -> float:
        """Tokens/s behind the prompt."""
        return (len(self.tokens) - 1) / self.seconds


# Of each prompt: its name, and its answers without speculation and with it.
Pairs = list[tuple[str, Answer, Answer]]


def figures(pairs: Pairs) -> dict[str, float]:
    """Speeds are of one stream while it decodes; the speedup compares the sums of their times."""
    _, plain, fast = zip(*pairs, strict=True)
    tokens = rounds = drafted = accepted = 0
    for answer in fast:
        tokens += len(answer.tokens)
        rounds += answer.rounds
        drafted += answer.drafted
        accepted += answer.accepted
    return {
        "tokens": tokens,
        "tokens_per_s_plain": median(answer.speed for answer in plain),
        "tokens_per_s": median(answer.speed for answer in fast),
        "speedup": sum(one.seconds for one in plain) / sum(one.seconds for one in fast),
        "tokens_per_round": tokens / rounds,
        "accepted": accepted / max(drafted, 1),
    }


def run_group(
    engine: Engine, speculator: Speculator, requests: Sequence[Request]
) -> dict[str, Answer]:
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
    groups = []
    for name in WORKLOADS if workload == "all" else (workload,):
        tasks = tasks_of(name)
        for text in streams.split(","):
            size = int(text) if text.isdecimal() else 0
            if not 1 <= size <= len(tasks):
                raise ConfigError(
                    f"--streams = {streams!r} is not allowed; give numbers such as 1,4, at most"
                    f" the {len(tasks)} prompts of {name}"
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
    print(f"{info.name}, up to {max_tokens} tokens a prompt, temperature {temperature:g}")
    rows, report, differing = [], [], set()
    for (name, size), pairs in results.items():
        found = figures(pairs)
        rows.append([name, size, *(f"{value:.4g}" for value in found.values())])
        report.append({"workload": name, "streams": size, **found, "answers": pairs})
        differing |= {prompt for prompt, plain, fast in pairs if plain.tokens != fast.tokens}
    print_table(["workload", "streams", *found], rows)
    if file:
        json.dump({"model": info.name, "results": report}, file, default=asdict)
    if differing:
        print("Answers that differ with speculation:", *sorted(differing))
        return 1
    print("Every answer is the same with and without speculation.")
    return 0


def measure(
    engine: Engine, groups: Sequence[tuple[str, list[Request]]], rounds: int
) -> dict[tuple[str, int], Pairs]:
    """Run every group on both sides, `rounds` times; the side that goes first alternates. Returns
    the answers by workload and number of streams."""
    plain, speculator = NoSpeculation(), engine.proposer
    short = [replace(r, max_tokens=min(16, r.max_tokens)) for r in groups[0][1]]
    run_group(engine, plain, short)
    run_group(engine, speculator, short)
    results: dict[tuple[str, int], Pairs] = {}
    sides = [plain, speculator]
    for _ in range(rounds):
        for workload, requests in track(groups, console=Console(stderr=True)):
            answers = {side is plain: run_group(engine, side, requests) for side in sides}
            sides.reverse()
            slow, fast = answers[True], answers[False]
            pairs = results.setdefault((workload, len(requests)), [])
            pairs += [(name, slow[name], fast[name]) for name in slow]
    return results

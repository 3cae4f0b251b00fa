"""`mlxspec bench`: runs the same prompts with and without speculation, in turn, on one engine.

Rule: each side starts with an empty prefix cache and drafters without earlier answers. Measured
step times and acceptance rates are kept, as in a server.
"""

import inspect
import pkgutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from mlxspec import blas
from mlxspec.commands.table import print_table
from mlxspec.config import Config
from mlxspec.progress import progress
from mlxspec.types import Request, Sampling

blas.load()

from mlxspec.engine.engine import Engine  # noqa: E402  after BLAS
from mlxspec.load.resolve import resolve_model  # noqa: E402
from mlxspec.speculate import NoSpeculation, Speculator  # noqa: E402
from mlxspec.text.chat import Tokenizer, encode, render_chat  # noqa: E402
from mlxspec.training.collect import Answer, answers_to, tokens_of  # noqa: E402

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
TASKS = 8  # of each workload, or as many as run at the same time


@dataclass(frozen=True)
class Task:
    """One user message. `opening` starts the answer: else a small model talks before the code."""

    name: str
    text: str
    opening: str = ""


def tasks_of(workload: str) -> list[Task]:
    """All tasks of one of WORKLOADS."""
    if workload == "edits":
        return edits()
    return [Task(line[:60], line) for line in PROMPTS[workload].strip().splitlines()]


def edits() -> list[Task]:
    """Tasks to rename a name in code of the standard library, if this Python has it."""
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


# For each prompt its name, and its answers without and with speculation.
Pairs = list[tuple[str, Answer, Answer]]


def seconds(answer: Answer) -> float:
    """Seconds from the first tokens to the last."""
    return max(answer[-1][0] - answer[0][0], 1e-9)


def speed(answer: Answer) -> float:
    """Tokens/s after the first token."""
    return (len(tokens_of(answer)) - 1) / seconds(answer)


def figures(pairs: Pairs) -> dict[str, float]:
    """Medians over the prompts, and ratios of their sums. Times and speeds are per stream."""
    tokens = rounds = drafted = accepted = 0
    plain_s = fast_s = 0.0
    for _, plain, fast in pairs:
        plain_s += seconds(plain)
        fast_s += seconds(fast)
        tokens += len(tokens_of(fast))
        last = fast[-1][1]  # its counts are for the whole answer
        rounds += last.rounds
        drafted += last.drafted
        accepted += last.accepted
    return {
        "tokens": tokens,
        "first_token_s": median(fast[0][0] for _, _, fast in pairs),
        "tokens_per_s_plain": median(speed(plain) for _, plain, _ in pairs),
        "tokens_per_s": median(speed(fast) for _, _, fast in pairs),
        "speedup": plain_s / fast_s,
        "tokens_per_round": tokens / rounds,
        "accepted": accepted / max(drafted, 1),
    }


def run_group(
    engine: Engine,
    speculator: Speculator,
    requests: Sequence[Request],
) -> dict[str, Answer]:
    """Run the requests at the same time. Raises InvalidRequest for a prompt that is too long."""
    engine.proposer = speculator
    engine.reset()
    return {request.id: answer for request, answer in answers_to(engine, requests)}


def prompt_of(task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a task, by the chat template if the model has one."""
    if not tokenizer.has_chat_template:
        return tuple(encode(tokenizer, f"{task.text}\n\n{task.opening}"))
    ids = render_chat(tokenizer, [{"role": "user", "content": task.text}])
    return (*ids, *encode(tokenizer, task.opening, special=False))


def bench(config: Config, workload: str, max_tokens: int, streams: int) -> int:
    """Measure and print. Returns the exit status: 1 if an answer differs. Raises UserError."""
    config = replace(config, speculate=True, max_sequences=streams, cache_gb=0.0, others=())
    model = resolve_model(config)
    engine, info = model.load()
    speculator, stop = engine.proposer, frozenset(model.tokenizer.eos_token_ids)
    rows, differing = [], []
    for name in WORKLOADS if workload == "all" else (workload,):
        requests = []
        for task in tasks_of(name)[: max(TASKS, streams)]:
            prompt = prompt_of(task, model.tokenizer)
            requests.append(
                Request(task.name, prompt, max_tokens, sampling=Sampling(0.0), stop_tokens=stop),
            )
        pairs = measure(engine, speculator, requests, streams)
        results = figures(pairs)
        rows.append([name, *(f"{value:.4g}" for value in results.values())])
        for prompt_name, plain, fast in pairs:
            if tokens_of(plain) != tokens_of(fast):
                differing.append(prompt_name)
    print(f"{info.name}, greedy, up to {max_tokens} tokens a prompt, prompts at a time: {streams}")
    names = (name.replace("_", " ") for name in results)  # which a narrow table can break
    print_table(["workload", *names], rows)
    if differing:
        print("Answers that differ with speculation:", *differing)
        return 1
    print("Every answer is the same with and without speculation.")
    return 0


def measure(
    engine: Engine,
    speculator: Speculator,
    requests: Sequence[Request],
    streams: int,
) -> Pairs:
    """Run the requests on both sides, `streams` at a time; the side that goes first alternates."""
    sides = [NoSpeculation(), speculator]
    for side in sides:  # the first passes of a shape are slower
        run_group(engine, side, requests[:streams])
    pairs: Pairs = []
    with progress("Answering prompts") as report:
        for at in range(0, len(requests), streams):
            report(at, len(requests))
            group = requests[at : at + streams]
            answers = {}
            for side in sides:
                answers[side is speculator] = run_group(engine, side, group)
            sides.reverse()
            pairs += [(r.id, answers[False][r.id], answers[True][r.id]) for r in group]
    return pairs

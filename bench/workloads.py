"""What the bench asks a model: edits of code, functions to complete, chat, and a mix of the three.

Rule: a workload is the same list in the same order every time, and any first part of it is a fair
sample.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from mlxspec.bench.corpora import corpus
from mlxspec.bench.edits import edits

ALONE = ("edits", "humaneval", "chat")
NAMES = (*ALONE, "mixed")
OPENING = "```python\n"  # a small model would talk about the edit instead
CATEGORY = 10  # MT-Bench lists its questions by category, ten of each


@dataclass(frozen=True, slots=True)
class Task:
    """One user message, and how the answer begins where a small model needs to be shown."""

    name: str
    text: str
    opening: str = ""


def tasks(workload: str, cache_dir: Path) -> list[Task]:
    """Every task of a workload of NAMES. Raises UserError where its texts cannot be had."""
    if workload == "edits":
        return [Task(name, text, OPENING) for name, text in edits()]
    if workload == "humaneval":
        lines = gzip.decompress(corpus("humaneval", cache_dir)).splitlines()
        return [_completion(json.loads(line)) for line in lines]
    if workload == "chat":
        found = [json.loads(line) for line in corpus("chat", cache_dir).splitlines()]
        made = [Task(f"MT-Bench/{q['question_id']}", q["turns"][0]) for q in found]
        return [task for at in range(CATEGORY) for task in made[at::CATEGORY]]
    several = [tasks(name, cache_dir) for name in ALONE]
    return [
        task for group in zip(*several, strict=False) for task in group
    ]  # as long as each has one


def _completion(problem: dict[str, str]) -> Task:
    text = f"Complete this Python function. Answer with the whole function.\n\n```python\n{problem['prompt']}```"
    return Task(problem["task_id"], text)

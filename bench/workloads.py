"""What bench/ asks a model: edits of code, functions to complete (HumanEval) and chat (MT-Bench).

Rule: a workload is the same list in the same order every time.
"""

import gzip
import json
from pathlib import Path

from bench.corpora import corpus
from mlxspec.commands.bench import Task, edits

ALONE = ("edits", "humaneval", "chat")
CATEGORY = 10  # MT-Bench lists its questions by category, ten of each


def tasks(workload: str, cache_dir: Path) -> list[Task]:
    """Every task of a workload of ALONE. Raises UserError where its texts cannot be fetched."""
    if workload == "edits":
        return edits()
    if workload == "humaneval":
        lines = gzip.decompress(corpus("humaneval", cache_dir)).splitlines()
        return [_completion(json.loads(line)) for line in lines]
    found = [json.loads(line) for line in corpus("chat", cache_dir).splitlines()]
    made = [Task(f"MT-Bench/{q['question_id']}", q["turns"][0]) for q in found]
    return [task for at in range(CATEGORY) for task in made[at::CATEGORY]]


def _completion(problem: dict[str, str]) -> Task:
    text = (
        "Complete this Python function. Answer with the whole function.\n\n"
        f"```python\n{problem['prompt']}```"
    )
    return Task(problem["task_id"], text)

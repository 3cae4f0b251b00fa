"""What is asked: nothing twice, whatever the workload and the round."""

from collections import Counter
from pathlib import Path

import pytest

from bench import cells
from bench.cells import DRAWN, WORKLOADS, Setting, some
from mlxspec.bench.workloads import Task


def test_nothing_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who remembers answers, as the drafter of copies does, would gain by it."""
    sizes = {"humaneval": 164, "chat": 80, "edits": 16}
    lists = {name: [Task(f"{name} {i}", "") for i in range(size)] for name, size in sizes.items()}
    monkeypatch.setattr(cells, "tasks", lambda corpus, cache: lists[corpus])
    setting = Setting(None, 8192, Path(), 0)  # type: ignore[arg-type]
    asked = Counter(
        task.name
        for round in range(4)
        for workload, drawn in DRAWN.items()
        for corpus in drawn
        for task in some(workload, corpus, setting, round)
    )
    assert set(asked.values()) == {1} and len(asked) == 4 * sum(sum(d.values()) for d in DRAWN.values())
    assert set(DRAWN) <= set(WORKLOADS)

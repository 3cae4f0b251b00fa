"""The workloads: whole, in a fixed order, and mixed fairly."""

import gzip
import json
from pathlib import Path

import pytest

from mlxspec.bench import corpora, workloads
from mlxspec.bench.edits import edits

PROBLEMS = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n"} for i in range(164)]
QUESTIONS = [{"question_id": 81 + i, "turns": [f"first {i}", f"second {i}"]} for i in range(80)]


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {name: "\n".join(map(json.dumps, rows)).encode() for name, rows in FILES.items()}
    files = {"humaneval": gzip.compress(lines["humaneval"]), "chat": lines["chat"]}
    monkeypatch.setattr(workloads, "corpus", lambda name, cache_dir: files[name])


FILES = {"humaneval": PROBLEMS, "chat": QUESTIONS}


@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_same_every_time_and_each_prompt_once(name: str, tmp_path: Path) -> None:
    found = workloads.tasks(name, tmp_path)
    assert found == workloads.tasks(name, tmp_path)
    assert len({task.name for task in found}) == len(found) == len({task.text for task in found})


def test_the_functions_are_asked_for_whole(tmp_path: Path) -> None:
    found = workloads.tasks("humaneval", tmp_path)
    assert [t.name for t in found] == [p["task_id"] for p in PROBLEMS]
    assert found[3].text.endswith("```python\ndef f3():\n```") and found[3].opening == ""


def test_chat_takes_the_first_turns_one_of_each_category_first(tmp_path: Path) -> None:
    found = workloads.tasks("chat", tmp_path)
    assert [t.text for t in found[:9]] == [f"first {i}" for i in (0, 10, 20, 30, 40, 50, 60, 70, 1)]
    assert sorted(t.text for t in found) == sorted(f"first {i}" for i in range(80))


def test_mixed_goes_round(tmp_path: Path) -> None:
    found = workloads.tasks("mixed", tmp_path)
    parts = [workloads.tasks(name, tmp_path) for name in ("edits", "humaneval", "chat")]
    assert found[:6] == [
        parts[0][0],
        parts[1][0],
        parts[2][0],
        parts[0][1],
        parts[1][1],
        parts[2][1],
    ]
    assert len(found) == 3 * len(edits())


def test_edits_reads_no_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "corpus", None)
    assert len(workloads.tasks("edits", tmp_path)) >= 12


def test_the_pins_are_of_the_workloads_that_are_fetched() -> None:
    assert set(corpora.SOURCES) == set(workloads.ALONE) - {"edits"}
    assert all("==" not in s.package and s.bytes < 1 << 20 for s in corpora.SOURCES.values())

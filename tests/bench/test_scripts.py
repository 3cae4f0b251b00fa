"""The scripts whose figures NOTES.md keeps run to their tables, on a tiny model: no figure of it
counts."""

import sys

import pytest

from bench import calls, coupling, session, tiny
from mlxspec.bench.workloads import Task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("scripts") / "model", tiny.model()))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def rows(said: str) -> dict[str, list[str]]:
    """Of a table, by their first cell."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines()]
    return {line[0]: line[1:] for line in cells if line}


def test_calls(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of letters calls nothing, which is right where nothing fits."""
    monkeypatch.setattr(calls, "CASES", [calls.CASES[0], calls.CASES[-1]])
    monkeypatch.setattr(sys, "argv", ["calls", model])
    calls.main()
    found = rows(capsys.readouterr().out)
    assert (found["simple"], found["none"]) == (["1", "0", "1", "0"], ["1", "1", "1", "1"])


def test_session(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["session", model, "--system", "300", "--tools", "120", "--result", "40"]
    monkeypatch.setattr(sys, "argv", words)
    session.main()
    found = rows(capsys.readouterr().out)
    prompts, cached = zip(*[map(int, found[turn][:2]) for turn in "123"], strict=True)
    assert cached[0] == 0 and prompts[0] <= cached[1] < prompts[1] <= cached[2] < prompts[2]


def test_coupling(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model drafts for itself: whatever keeps a draft by p and q keeps all."""
    tasks = [Task(f"t{i}", "say" * (i + 2)) for i in range(3)]
    monkeypatch.setattr(coupling, "tasks", lambda workload, cache_dir: tasks)
    words = ["coupling", model, model, "--tasks", "2", "--tokens", "6"]
    monkeypatch.setattr(sys, "argv", words)
    coupling.main()
    found = rows(capsys.readouterr().out)
    assert found["positions"] == ["12", "12", "24"]
    assert {figure.split()[0] for rule in coupling.RULES[:2] for figure in found[rule]} == {
        "1.0000"
    }

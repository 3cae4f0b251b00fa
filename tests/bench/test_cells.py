"""What is asked: nothing twice, whatever the workload and the round."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import cells
from bench.cells import DRAWN, WORKLOADS, Setting, some
from bench.http import Answer, Early, Silent
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
    assert set(asked.values()) == {1} and len(asked) == 4 * sum(
        sum(d.values()) for d in DRAWN.values()
    )
    assert set(DRAWN) <= set(WORKLOADS)


def test_a_turn_without_an_answer_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has nothing to say to it, whoever serves; the others count."""
    asked: list[int] = []

    async def ask(url: str, body: dict[str, Any]) -> Answer:
        asked.append(len(body["messages"]))
        if len(asked) == 3:
            raise Silent("no text")
        return Answer(began=0.0, at=[1.0 * len(asked)], text="x", prompt=10 * len(asked))

    monkeypatch.setattr(cells, "ask", ask)
    monkeypatch.setattr(cells, "turns", lambda *_: iter("abcdefghij"))
    found = asyncio.run(cells._session(cast(Any, SimpleNamespace(url="")), cast(Any, None), 0))
    assert asked == list(range(1, 20, 2)) and "ttft_turn_3_s" not in found
    assert found["ttft_turn_10_s"] == 10 and found["ttft_later_s"] == 6.5


def test_a_client_that_was_answered_too_soon_asks_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    early = 2

    async def leave(url: str, body: dict[str, Any], after: float) -> None:
        asked.append(body["prompt"])
        if len(asked) <= early:
            raise Early("answered")

    monkeypatch.setattr(cells.http, "leave", leave)
    monkeypatch.setattr(cells, "AFTER", 0.0)
    monkeypatch.setattr(cells, "usage", lambda pid: SimpleNamespace(cpu=3.0))
    server = cast(Any, SimpleNamespace(url="", process=SimpleNamespace(pid=0)))
    setting = cast(Any, SimpleNamespace(long=lambda n, seed: f"{n} {seed}", seed=1, window=8192))
    assert asyncio.run(cells._disconnect(server, setting, 0)) == {"cpu_after_leaving_s": 0.0}
    assert len(asked) == len(set(asked)) == 3
    early = 100
    with pytest.raises(Early):
        asyncio.run(cells._disconnect(server, setting, 0))
    assert len(asked) == 3 + cells.ATTEMPTS

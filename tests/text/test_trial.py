"""Grammars are compiled in a process of their own first: what is too much for it holds up itself
only."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mlxspec.text.chat import load_tokenizer
from mlxspec.text.messages import RejectedRequest
from mlxspec.text.structured import trial
from mlxspec.text.structured.grammar import Grammars
from mlxspec.text.structured.json_schema import json_rule
from tests.support.tiny_tokenizer import save_tokenizer

ENDLESS = (
    'start: %json {"multipleOf": 9999991}'  # 264 s and 5.6 GB, if nothing ends it; no client's
)
DEEP = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(20_000)), 'r20000: "a"'])
WIDE = {"properties": {f"k{i}": {} for i in range(10_000)}}
PATTERNS = {"patternProperties": {f"^a{i}.*x{i}$": {"type": "null"} for i in range(480)}}
TOO_MUCH = "compiling it takes more than"

Started = list["subprocess.Popen[bytes]"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The processes that a test starts."""
    made: Started = []

    class Kept(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(trial.subprocess, "Popen", Kept)
    within(monkeypatch, "MAX_CPU_S = 1")
    return made


def within(monkeypatch: pytest.MonkeyPatch, limits: str) -> None:
    """Let processes start with other limits."""
    code = f"import {trial.__name__} as trial\ntrial.{limits}\ntrial.main()"
    monkeypatch.setattr(trial, "COMMAND", (sys.executable, "-c", code))


@pytest.fixture
def grammars(tmp_path: Path, started: Started) -> Grammars:
    return Grammars(load_tokenizer(save_tokenizer(tmp_path)), 330)


def compile(grammars: Grammars, lark: str) -> Any:
    return grammars.compile(lark, False, "grammar").result()


def test_what_takes_long_holds_up_no_other(grammars: Grammars) -> None:
    compile(grammars, 'start: "a"')
    began = time.monotonic()
    endless = [grammars.compile(f"{ENDLESS}\nA: /{i}/", False, "grammar") for i in range(2)]
    compile(grammars, 'start: "b"')
    assert not any(each.done() for each in endless)
    for each in endless:
        with pytest.raises(RejectedRequest, match=TOO_MUCH):
            each.result()
    assert time.monotonic() - began < 3 * trial.MAX_S


@pytest.mark.parametrize("schema", [WIDE, PATTERNS], ids=["names", "patterns of names"])
def test_schemas_that_take_long(grammars: Grammars, schema: Any) -> None:
    with pytest.raises(RejectedRequest, match=TOO_MUCH):
        compile(grammars, grammars.rules([json_rule(schema, "schema")]))


def test_what_overruns_a_stack_ends_a_fork(grammars: Grammars, started: Started) -> None:
    with pytest.raises(RejectedRequest, match=TOO_MUCH):
        compile(grammars, DEEP)
    compile(grammars, 'start: "a"')
    assert len(started) == 1


def test_what_takes_much_memory(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, "MAX_MEMORY = 1 << 24")
    compile(grammars, 'start: "a"')
    began = time.monotonic()
    with pytest.raises(RejectedRequest, match=TOO_MUCH):
        compile(grammars, ENDLESS)
    assert time.monotonic() - began < 2.5, "before its time was up"


def test_a_process_that_has_ended_is_started_again(grammars: Grammars, started: Started) -> None:
    compile(grammars, 'start: "a"')
    started[0].kill()
    for word in "bc":
        compile(grammars, f'start: "{word}"')
    assert len(started) == 2


def test_it_ends_with_its_grammars(tmp_path: Path, started: Started) -> None:
    compile(Grammars(load_tokenizer(save_tokenizer(tmp_path)), 330), 'start: "a"')
    gc.collect()
    started[0].wait(10)


def test_an_idle_process_ends(grammars: Grammars, started: Started, monkeypatch: Any) -> None:
    within(monkeypatch, "IDLE_S = 0.2")
    compile(grammars, 'start: "a"')
    started[0].wait(10)
    compile(grammars, 'start: "b"')


def test_the_error_of_a_large_grammar_is_short(grammars: Grammars) -> None:
    began = time.monotonic()
    with pytest.raises(RejectedRequest) as caught:
        compile(grammars, 'start: "' + "[" * 200_000)
    assert len(str(caught.value)) < 500 and time.monotonic() - began < 5


def test_many_threads_ask_for_the_same_grammar(grammars: Grammars) -> None:
    made: list[Any] = []

    def ask() -> None:
        for i in range(20):
            made.append(compile(grammars, f'start: "{i}"')())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(made) == 80 and all(each.masks([]) for each in made)

"""Whatever a model answers is read the same however it is split, in linear time."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.text.chat import load_tokenizer
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.text.messages import RejectedRequest
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.structured.json_schema import checked_lark
from tests.support.bad_values import save_agent


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    return load_tokenizer(path)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
UNITS = [
    *(
        "{",
        "[",
        "<",
        "\\",
        '"',
        " ",
        "\n",
        "a ",
        "`",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
    ),
    *(
        "<tool_call>{",
        '{"name":',
        "<function=",
        "<tool_call></tool_call>",
        "\ufffd",
        "</",
        "<tool_cal",
    ),
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
]


def parts_of(
    tokenizer: Any, text: str, cuts: list[int], thinking: bool = False
) -> list[tuple[str, str]]:
    """Kinds and texts, neighbours of one kind joined."""
    reader, made = OutputParser(tokenizer, TOOLS, thinking), []
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        made += reader.feed(text[a:b])
    found: list[tuple[str, str]] = []
    for part in [*made, *reader.finish()]:
        said = part.text if part.call is None else f"{part.call.name} {part.call.arguments}"
        if found and part.call is None and found[-1][0] == part.kind:
            said = found.pop()[1] + said
        if part.call is None or part.opens:
            found.append((part.kind, said))
    return found


SPLIT = settings(deadline=None, derandomize=True, database=None)


def same_however_split(tokenizer: Any, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(UNITS) | st.text(max_size=4), max_size=30)))
    text += data.draw(st.sampled_from(UNITS)) * data.draw(st.integers(0, 60))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    thinking = data.draw(st.booleans())
    whole = parts_of(tokenizer, text, [], thinking)
    assert parts_of(tokenizer, text, cuts, thinking) == whole
    assert parts_of(tokenizer, text, [*range(1, len(text))], thinking) == whole


@settings(SPLIT, max_examples=150)
@given(data=st.data())
def test_an_answer_is_the_same_however_it_is_split(tokenizer: Any, data: st.DataObject) -> None:
    same_however_split(tokenizer, data)


@pytest.mark.slow
@settings(SPLIT, max_examples=8000)
@given(data=st.data())
def test_an_answer_is_the_same_however_it_is_split_at_length(
    tokenizer: Any, data: st.DataObject
) -> None:
    same_however_split(tokenizer, data)


@settings(SPLIT, max_examples=150)
@given(
    ids=st.lists(st.integers(0, 400), max_size=60),
    cut=st.integers(0, 60),
    stop=st.text("aé<\ufffd ", max_size=3),
)
def test_any_ids_are_read_the_same_however_they_come(
    tokenizer: Any, ids: list[int], cut: int, stop: str
) -> None:
    stops = [stop] if stop else []
    one, other = (Detokenizer(tokenizer, stops) for _ in range(2))
    whole = one.feed(ids) + one.finish()
    assert other.feed(ids[:cut]) + other.feed(ids[cut:]) + other.finish() == whole
    assert one.count == other.count and one.released == other.released


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def grows(work: Callable[[int], object], small: int) -> float:
    """How much longer 8 times as much takes, per piece: 1 is linear, 8 is quadratic. The best of
    three."""
    return min(
        seconds(lambda: work(8 * small)) / max(seconds(lambda: work(small)), 1e-4) / 8
        for _ in range(3)
    )


@pytest.mark.parametrize("unit", ["<", "{", "\\", " ", "</", "<tool_call>", "<tool_call>{"])
def test_reading_an_answer_takes_linear_time(tokenizer: Any, unit: str) -> None:
    def work(n: int) -> None:
        reader = OutputParser(tokenizer, TOOLS, False)
        for _ in range(n // 8):
            reader.feed(unit * 8)
        reader.finish()

    assert grows(work, 2000 // len(unit)) < 3


@pytest.mark.parametrize("unit", ["[", '"\\', "\\/", "[stop ", "~ ", "(", "//", "stop "])
def test_checking_a_grammar_takes_linear_time(unit: str) -> None:
    def work(n: int) -> None:
        try:
            checked_lark("/" * (unit == "\\/") + unit * n, "grammar")
        except RejectedRequest:
            pass

    assert grows(work, 2000) < 3


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_an_answer_of_400_kb(tokenizer: Any, unit: str) -> None:
    assert (
        seconds(lambda: parts_of(tokenizer, (unit * 400_000)[:400_000], [*range(7, 400_000, 7)]))
        < 30
    )

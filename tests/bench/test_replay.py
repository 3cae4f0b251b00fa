"""Replaying recordings: the score is what the drafts were worth, and bad files are named."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.replay import Recording, Score, flat, read, replay, score
from mlxspec.config import ConfigError
from mlxspec.speculate.proposer import Proposer

CODE = tuple(range(100, 400))


def recordings_of(*pairs: tuple[object, object]) -> str:
    return "".join(json.dumps({"prompt": p, "output": o}) + "\n" for p, o in pairs)


def test_a_copy_takes_few_rounds() -> None:
    total = Score()
    score(Proposer(flat(0.1)), Recording(CODE, CODE[50:200]), total)
    assert total.tokens == 150
    assert total.rounds < 15 and sum(total.kept.values()) == 150 - 1 - total.rounds
    assert total.cost < 149 / 4


def test_what_repeats_nothing_costs_what_plain_decoding_costs() -> None:
    total = Score()
    score(Proposer(flat(0.1)), Recording((1, 2, 3), CODE[:150]), total)
    assert total.tokens == 150 and total.rounds == 149
    assert total.cost <= 149 * 1.03 and not total.kept


def test_an_answer_is_remembered_for_the_next() -> None:
    total, chain = Score(), Proposer(flat(0.1))
    for prompt in ((1, 2, 3), (1, 2, 3)):
        score(chain, Recording(prompt, CODE[:150]), total)
    assert total.kept["suffix"] > 120


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(recordings_of((CODE, CODE[50:200]), ([1], CODE[:9])))
    replay(file, 0.1, Console(width=200))
    out = capsys.readouterr().out
    assert "2 recordings, 159 tokens; a row costs 10% of a step" in out
    assert "lookup" in out and "tokens per round" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no recording"),
        ("{", r":1: .*; give \{\"prompt\""),
        ('{"prompt": [1]}', "output"),
        ('{"prompt": [1], "output": ["a"]}', "token ids"),
        ('{"prompt": [1], "output": [true]}', "token ids"),
        ('{"prompt": [], "output": [1]}', "one at least"),
        ('{"prompt": [1], "output": [1]}\n[1]', ":2:"),
    ],
)
def test_bad_recordings_are_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(tmp_path / "r.jsonl")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--replay = .* cannot be read"):
        read(tmp_path / "none.jsonl")


def test_what_stands_in_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(recordings_of(([1, 2], [3])) + "\n")
    assert read(tmp_path / "r.jsonl") == [Recording((1, 2), (3,))]

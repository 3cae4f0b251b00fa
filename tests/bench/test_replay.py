"""Replaying recordings: the score is what the drafts were worth, and bad files are named."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.replay import Recording, Score, flat, read, replay, score
from mlxspec.config import ConfigError
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer

CODE = tuple(range(100, 400))


def recordings_of(*pairs: tuple[object, object]) -> str:
    return "".join(json.dumps({"prompt": p, "output": o}) + "\n" for p, o in pairs)


def test_a_copy_takes_few_rounds() -> None:
    total = Score()
    score(Proposer(flat(0.1), [NgramDrafter()]), Recording(CODE, CODE[50:200]), total)
    assert total.tokens == 150
    assert total.rounds < 15 and sum(total.kept.values()) == 150 - 1 - total.rounds
    assert total.cost < 149 / 4


def test_what_repeats_nothing_costs_what_plain_decoding_costs() -> None:
    total = Score()
    score(Proposer(flat(0.1), [NgramDrafter()]), Recording((1, 2, 3), CODE[:150]), total)
    assert total.tokens == 150 and total.rounds == 149
    assert total.cost <= 149 * 1.03 and not total.kept


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(recordings_of((CODE, CODE[50:200]), ([1], CODE[:9])))
    assert read(file)[1] == Recording((1,), CODE[:9])
    replay(file, 0.1, Console(width=200))
    out = capsys.readouterr().out
    assert "2 recordings, 159 tokens" in out and "tokens per round" in out
    file.write_text('{"prompt": [1], "output": [1]}\n{"prompt": [], "output": [1]}\n')
    with pytest.raises(ConfigError, match=r"r\.jsonl:2:"):
        read(file)

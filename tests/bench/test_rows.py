"""Rows keep what they are told, through a CSV file and back; medians and ratios are by round."""

from pathlib import Path

import pytest

from bench.rows import Rows, Spread, ratios, read, spread, write


def test_a_csv_gives_back_what_was_written(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("a,b", "chat", "tokens_per_s", 0, 0.1 + 0.2)
    rows.add("", "about", "model", 0, 0, 'says "hello", twice')
    rows.failed("b", "edit", 2, "two\nlines")
    write(tmp_path / "deep" / "r.csv", rows)
    assert read(tmp_path / "deep" / "r.csv") == rows
    assert [r.note for r in rows.failures()] == ["two lines"]
    assert rows.about() == {"model": 'says "hello", twice'} and rows.servers() == ["a,b", "b"]


def test_what_is_no_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "r.csv"
    file.write_text("server,workload,metric,round,value,note\na,b,c,0,1,\na,b,c,0,fast,\n")
    with pytest.raises(SystemExit, match=r"r\.csv:3: .*fast"):
        read(file)


def test_medians_are_of_rounds() -> None:
    rows = Rows()
    for round, value in ((0, 1), (0, 3), (0, 9), (1, 4)):
        rows.add("s", "w", "m", round, value)
    rows.add("s", "w", "other", 0, 100)
    assert rows.values("s", "w", "m") == {0: 3, 1: 4}
    assert spread([3, 1, 2]) == Spread(2, 1, 3) and spread([]) is None
    assert str(Spread(2, 1, 3)) == "2 (1..3)" and str(Spread(2, 2, 2)) == "2"
    assert str(Spread(6420.1, 0.0251, 12345)) == "6,420 (0.0251..12,345)"


def test_a_ratio_is_of_one_round() -> None:
    assert ratios({0: 4, 1: 9, 2: 1}, {0: 2, 1: 3, 3: 5}) == [2, 3]
    assert ratios({0: 4}, {0: 0}) == []

"""What a head learns from: files of answers, prompts, and the user's texts."""

import contextlib
import json
import os
from pathlib import Path

import pytest

from mlxspec.training.samples import (
    PIECE_CHARS,
    Sample,
    SampleFile,
    file_prompts,
    general_prompts,
    held_out,
    pieces,
)
from mlxspec.types import UserError


def test_answers_are_kept_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    """A process may end while it writes."""
    file = SampleFile(tmp_path / "new" / "answers.jsonl")
    assert file.read() == {}
    first, second = Sample([1, 2, 3], 1), Sample([4, 5], 1)
    file.append("a", first)
    file.append("b", second)
    whole = file.path.read_bytes()
    for cut in range(len(whole)):
        file.path.write_bytes(whole[:cut])
        known = file.read()
        assert known in ({}, {"a": first}, {"a": first, "b": second})
    file.path.write_bytes(whole[:-9])
    file.append("c", second)
    assert file.read()["a"] == first


def test_the_prompts_are_many_and_each_is_whole() -> None:
    found = general_prompts()
    assert len({text for _, text in found}) == len(found) > 5000
    assert found == general_prompts()
    held = sum(held_out(subject) for subject, _ in found)
    assert 0.02 < held / len(found) < 0.1
    ((subject, asked),) = file_prompts([("a/b.py", "x = 1\n")])
    assert subject == "a/b.py"
    assert "a/b.py" in asked and "x = 1\n" in asked


def test_texts_are_cut_between_lines(tmp_path: Path) -> None:
    line = "0123456789" * 9 + "\n"
    (tmp_path / "b").mkdir()
    (tmp_path / "b/long.py").write_text(line * 100)
    (tmp_path / "short.md").write_text("one line")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("secret")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "null").write_bytes(b"a\0b")
    (tmp_path / "empty").write_text("")
    found = pieces(tmp_path)
    assert {name for name, _ in found} == {"b/long.py", "short.md"}
    parts = [text for name, text in found if name == "b/long.py"]
    assert sum(map(len, parts)) == 100 * len(line)
    assert all(part.endswith("\n") and len(part) <= PIECE_CHARS for part in parts)
    assert found == pieces(tmp_path)


def test_a_name_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    """As archives of other systems leave them; macOS refuses some."""
    (tmp_path / "whole.py").write_text("x = 1\n")
    (tmp_path / "a\nb.py").write_text("x = 2\n")
    with contextlib.suppress(OSError):
        (tmp_path / os.fsdecode(b"\xff.py")).write_text("x = 3\n")
    assert pieces(tmp_path) == [("whole.py", "x = 1\n")]


def test_no_more_is_read_than_is_ever_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.training.samples.MOST_PIECES", 3)
    for n in range(9):
        (tmp_path / f"{n}.txt").write_text("text\n")
    assert len(pieces(tmp_path)) == 3


def test_tokens_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    """Another model lay in its directory when they were recorded."""
    file = SampleFile(tmp_path / "answers.jsonl", 10)
    file.append("a", Sample([1, 2, 3], 1))
    with file.path.open("a") as out:
        for tokens in ([1, 2, 10], [1, 2, -1], [1, 2, True], [1, 2, 0.5]):
            out.write(json.dumps(["b", {"tokens": tokens, "first": 1}]) + "\n")
        for first in (0, 4, -1):
            out.write(json.dumps(["c", {"tokens": [1, 2, 3], "first": first}]) + "\n")
    assert file.read() == {"a": Sample([1, 2, 3], 1)}


def test_a_directory_without_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(UserError, match=f"--data {tmp_path} holds no text"):
        pieces(tmp_path)

"""`mlxspec cache`: what it shows of the directory, and that emptying it harms no server."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from mlxspec import cli
from mlxspec.cache.disk import DiskCache, Run
from mlxspec.commands import cache
from mlxspec.model.hub import storage_name
from mlxspec.training.samples import Sample, SampleFile

MODEL, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare_settings: None) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


def command(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(cli.app, ["cache", *words], input=typed)


def fill(root: Path, fingerprint: str, model: str, runs: int) -> DiskCache:
    disk = DiskCache(root, fingerprint, 1 << 30, model)
    for i in range(runs):
        keys = tuple((4 * i + j).to_bytes(16, "big") for j in range(4))
        assert disk.save(Run(keys, {"x": np.zeros(1 << 18, np.uint8)}))
    assert disk.flush(30)
    return disk


def test_nothing_there_yet(root: Path) -> None:
    for _ in range(2):
        said = command("ls")
        assert (said.exit_code, said.output) == (0, f"nothing is cached in {root}\n")
        assert command("clear", "--yes").output == "0 B freed; files deleted: 0\n"
        assert "bytes      0 B\nlimit      10.0 GB\n" in command("stats").output
        root.mkdir(exist_ok=True)


def test_every_model_has_a_line_and_the_last_used_is_first(root: Path) -> None:
    fill(root, OTHER, "old/model", 1).close(30)
    for path in (root / OTHER).iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    fill(root, MODEL, "new [red]model", 3).close(30)
    said = command("ls")
    lines = [line.split() for line in said.output.splitlines()]
    assert said.exit_code == 0 and lines[0][:2] == ["model", "fingerprint"]
    assert lines[1][:6] == ["new", "[red]model", MODEL[:8], "3", "12", "0"]
    assert lines[2][0] == "old/model" and lines[2][-2].startswith("2001-09-0")
    totals = dict(line.split(maxsplit=1) for line in command("stats").output.splitlines())
    expected = {"directory": str(root), "models": "2", "files": "4", "blocks": "16"}
    assert totals | expected | {"damaged": "0"} == totals


def test_damaged_files_are_counted(root: Path) -> None:
    fill(root, MODEL, "\x1b[31mtrouble", 2).close(30)
    first, second = sorted((root / MODEL).iterdir())
    first.write_bytes(b"x")
    said = command("ls").output
    assert "?[31mtrouble" in said and "\x1b" not in said
    assert cache.survey(root)[0].damaged == 1
    second.write_bytes(b"")
    assert "damaged    2" in command("stats").output
    assert "1 B freed; files deleted: 2" in command("clear", "--yes").output


def test_clear_asks(root: Path) -> None:
    fill(root, MODEL, "m", 2).close(30)
    history = root.parent / "chat-history"
    history.touch()
    said = command("clear", typed="n\n")
    assert said.exit_code == 1 and str(root.parent) in said.output.replace("\n", "")
    assert command("clear").exit_code == 1  # nobody there to answer
    assert len(list((root / MODEL).iterdir())) == 2 and history.exists()
    said = command("clear", typed="y\n")
    assert said.exit_code == 0 and "files deleted: 3\n" in said.output
    assert not history.exists()
    assert [path.name for path in root.iterdir()] == ["lock"]


def test_recorded_answers_are_shown_and_deleted(root: Path) -> None:
    answers, training = root.parent / "answers", root.parent / "training"
    name = storage_name("some/[red]model", root)
    for ending, count in (("", 2), (".old", 1)):
        for i in range(count):
            SampleFile(answers / f"{name}{ending}.jsonl").append(str(i), Sample([64, 65], 1))
    size = sum(path.stat().st_size for path in answers.iterdir())
    work = training / name / "state.safetensors"
    foreign = [answers / "mine.jsonl", training / "mine.txt", training / "mine/notes.txt"]
    for path in [work, *foreign]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert f"recorded   {size} B\n" in command("stats").output
    assert f"{size + 1} B freed; files deleted: 3\n" == command("clear", "--yes").output
    assert "recorded   0 B\n" in command("stats").output
    assert not work.parent.exists() and all(path.exists() for path in foreign)


def test_a_server_goes_on_with_misses(root: Path) -> None:
    disk = fill(root, MODEL, "m", 2)
    assert command("clear", "--yes").exit_code == 0
    key = (4).to_bytes(16, "big")
    (path,) = disk.files([key])
    assert disk.read(path).result(30) is None and key not in disk
    assert disk.save(Run((key,), {})) and disk.flush(30) and key in disk
    assert disk.stats["disk_bytes"] == sum(path.stat().st_size for path in (root / MODEL).iterdir())
    assert disk.close(30)


def test_a_file_in_place_of_the_directory(root: Path) -> None:
    root.write_text("x")
    with pytest.raises(OSError, match="prompts"):
        cache.survey(root)


def test_the_settings_choose_the_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root.parent / "else/prompts", MODEL, "m", 1).close(30)
    assert MODEL[:8] not in command("ls").output
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", "~/else")
    monkeypatch.setenv("MLXSPEC_CACHE_GB", "0")
    assert "limit      off" in command("stats").output
    assert "models     1" in command("stats").output
    monkeypatch.delenv("MLXSPEC_CACHE_DIR")
    assert "/mlxspec/prompts" in command("ls").output.replace("\n", "")


def test_a_narrow_terminal_loses_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, MODEL, "some-organisation/some-long-model-name-4bit", 1).close(30)
    with monkeypatch.context() as patch:
        patch.setattr("mlxspec.commands.table.WIDTH", 80)
        said = command("ls").output
    assert all(part in said for part in ("some-", "4bit", MODEL[:4], " 4 ")), said

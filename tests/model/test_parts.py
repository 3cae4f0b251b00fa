"""A rank's part of the weights: saved once, read in place of the model's files."""

import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn import Module

from mlxspec.model.layout import load, load_weights
from mlxspec.model.parts import save_part, use_part
from tests.model.test_layout import save

TOKENS = mx.array([[3, 1, 4, 1, 5]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path


def logits(model: Module) -> np.ndarray:
    return np.array(model(TOKENS))


def test_nothing_but_the_part_is_read(path: Path) -> None:
    model, _ = load(path)
    load_weights(model)
    folder = path / "parts" / "digest"
    save_part(model, folder)
    again, _ = load(path)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)  # MLX has opened it, and would fail to read on
    assert use_part(again, folder)
    load_weights(again)
    assert (logits(again) == logits(model)).all()


def test_only_the_last_part_is_kept(path: Path) -> None:
    model, _ = load(path)
    for digest in ("old", "new"):
        save_part(model, path / "parts" / digest)
    assert [each.name for each in (path / "parts").iterdir()] == ["new"]
    assert not use_part(model, path / "parts" / "old")


@pytest.mark.parametrize("damage", ["none", "empty", "garbage", "too few", "other shapes"])
def test_a_damaged_part_is_not_used(path: Path, damage: str) -> None:
    model, _ = load(path)
    truth = logits(model)
    folder = path / "parts" / "digest"
    save_part(model, folder)
    (file,) = folder.iterdir()
    match damage:
        case "none":
            shutil.rmtree(folder)
        case "empty":
            file.unlink()
        case "garbage":
            file.write_bytes(b"x" * 100)
        case "too few":
            mx.save_safetensors(str(file), {"model.norm.weight": mx.ones(64)})
        case "other shapes":
            few = {name: mx.zeros(2) for name in mx.load(str(file))}
            mx.save_safetensors(str(file), few)
    again, _ = load(path)
    assert not use_part(again, folder)
    assert (logits(again) == truth).all()


@pytest.mark.parametrize("why", ["full", "not a folder"])
def test_what_cannot_be_saved_is_logged(
    path: Path, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = load(path)
    folder = path / "parts" / "digest"
    if why == "full":
        monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(2, 1, 1))
    else:
        folder.parent.write_text("")
    save_part(model, folder)
    assert not folder.exists()
    assert "each start reads all weights" in caplog.text

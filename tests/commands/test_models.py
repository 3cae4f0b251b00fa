"""What is on this disk: found, measured, fetched; weights that were cut off are named."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mlxspec import cli
from mlxspec.commands import models
from mlxspec.config import Config
from tests.heads.packagings import SIDECAR
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(autouse=True)
def bare(bare_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def weights(path: Path, size: int = 64) -> Path:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_tokenizer(tmp_path / "model")
    (path / "config.json").write_text("{}")
    weights(path / "model.safetensors")
    return path


def test_damage(model: Path) -> None:
    file = model / "model.safetensors"
    assert models.damage(model) == []
    whole = file.read_bytes()
    for data, said in (
        (whole[:-1], "not fully covered"),
        (whole + b"x", "not fully covered"),
        (whole[:20], "invalid header length"),
        (b"", "header too small"),
        (struct.pack("<Q", 1 << 60), "header too large"),
        (struct.pack("<Q", 2) + b"[]", "invalid JSON in header"),
        (struct.pack("<Q", 8) + b'{"w": 1}', "invalid JSON in header"),
    ):
        file.write_bytes(data)
        assert [said in flaw and str(file) in flaw for flaw in models.damage(model)] == [True], (
            data[:20]
        )


def test_local_models(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def repo(name: str, *files: str, kind: str = "model") -> SimpleNamespace:
        named = [SimpleNamespace(file_name=file) for file in files]
        return SimpleNamespace(
            repo_id=name, repo_type=kind, revisions=[SimpleNamespace(files=named)]
        )

    repos = [
        repo("b/fits", "config.json", "model-00001-of-00002.safetensors"),
        repo("a/gguf", "model.gguf"),
        repo("a/data", "config.json", "model.safetensors", kind="dataset"),
    ]
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: SimpleNamespace(repos=repos))
    found = models.local_models(Config(model=str(model), cache_dir=str(tmp_path / "cache")))
    assert [(one.name, one.path) for one in found] == [
        (str(model), model),
        ("smollm2-135m-instruct", None),
        ("b/fits", None),
    ]
    assert (
        found[0].bytes == (model / "model.safetensors").stat().st_size
        and found[1].bytes > 9 * 10**7
    )


def test_models_and_pull(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(cli.app, list(words))
        assert done.exit_code == 0, done.exception
        return done.stdout

    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    assert run("pull", str(model)).startswith(f"model is in {model}, ")
    monkeypatch.setenv("MLXSPEC_MODEL", str(model))
    lines = run("models").splitlines()
    assert lines[0].split() == ["name", "kind", "size", "path"]
    assert "~/model" in lines[1] and "not downloaded" in lines[2]
    rows = json.loads(run("models", "--json"))
    assert rows[0]["path"] == str(model) and rows[0]["bytes"] > 64


def test_a_head_is_listed_as_what_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its tensors where it is on disk, else by the card that names it."""
    named = "mlx-community/Qwen3.8-27B-4bit"
    config = Config(model=named, draft=str(SIDECAR), cache_dir=str(tmp_path / "cache"))
    found = models.local_models(config)
    assert [(one.kind, one.bytes > 0) for one in found[:2]] == [("model", False), ("head", True)]
    found = models.local_models(replace(config, draft=""))
    assert [one.kind for one in found[:2]] == ["model", "head"] and found[1].path is None


def test_weights_are_found_by_the_names_that_heads_have(model: Path, tmp_path: Path) -> None:
    """Beside a model, in a folder there, or under any name in a directory of its own."""
    (model / "mtp").mkdir()
    files = [
        model / "model.safetensors",
        model / "mtp.safetensors",
        model / "mtp/weights.safetensors",
    ]
    for file in files:
        weights(file)
    weights(model / "adapters.safetensors", 1 << 20)
    each = files[0].stat().st_size
    assert models.weight_bytes(model) == 3 * each
    for file in files:
        file.write_bytes(b"cut off")
    assert len(models.damage(model)) == 3
    head = tmp_path / "head"
    head.mkdir()
    weights(head / "eagle.safetensors")
    assert models.weight_bytes(head) == each and models.damage(head) == []


def test_an_unknown_model() -> None:
    done = CliRunner().invoke(cli.app, ["pull", "nonsense"])
    assert "no model 'nonsense'" in str(done.exception)

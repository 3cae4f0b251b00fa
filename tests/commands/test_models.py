"""What is on this disk: found, measured, fetched; weights that were cut off are named."""

import json
import os
import re
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from typer.testing import CliRunner

from mlxspec import cli
from mlxspec.commands import models
from mlxspec.config import Config
from mlxspec.model.hub import resolve, storage_name
from mlxspec.types import UserError
from tests.heads import packagings
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


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def placed(path: Path, **config: Any) -> Path:
    """A whole model of a few bytes."""
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps(LLAMA | config))
    weights(path / "model.safetensors")
    return path


def cached(hub: Path, name: str, **config: Any) -> Path:
    """In Hugging Face's cache, where files are links to blobs."""
    repo = hub / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("f" * 40)
    path = placed(repo / "snapshots" / ("f" * 40), **config)
    blob = repo / "blobs" / "weights"
    blob.parent.mkdir()
    (path / "model.safetensors").rename(blob)
    (path / "model.safetensors").symlink_to(blob)
    return path


def listed(tmp_path: Path, **settings: Any) -> dict[str, models.LocalModel]:
    config = Config(cache_dir=str(tmp_path / "cache"), **settings)
    return {one.name: one for one in models.local_models(config)}


def test_models_are_found_where_they_lie(model: Path, tmp_path: Path) -> None:
    studio, older = tmp_path / ".lmstudio/models", tmp_path / ".cache/lm-studio/models"
    there = {
        "a/hub": cached(tmp_path / "hub", "a/hub"),
        "b/studio": placed(studio / "b/studio"),
        "b/older": placed(older / "b/older"),
        "flat": placed(tmp_path / ".omlx/models/flat"),
        "c/omlx": placed(tmp_path / ".omlx/models/c/omlx"),
    }
    shutil.copytree(SIDECAR, studio / "b/head")
    placed(older / "b/studio")  # a second copy: the first counts
    (studio / "b/gguf").mkdir()
    weights(studio / "b/gguf/model.gguf")
    placed(studio / "b/unknown", model_type="no_such_model")
    placed(studio / "b/own-code", model_file="model.py")
    found = listed(tmp_path, model=str(model))
    assert {name: found[name].path for name in there} == there
    assert [*found] == [str(model), "smollm2-135m-instruct", *sorted([*there, "b/head"])]
    assert all((found[name].kind, found[name].fits) == ("model", "yes") for name in there)
    assert (found["b/head"].kind, found["b/head"].fits) == ("head", "")
    assert found["smollm2-135m-instruct"].bytes > 9 * 10**7


def test_what_is_half_there_is_named_so(tmp_path: Path) -> None:
    studio, hub = tmp_path / ".lmstudio/models/x", tmp_path / "hub"
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (placed(studio / "shard") / "model.safetensors.index.json").write_text(json.dumps(index))
    (placed(studio / "cut") / "model.safetensors").write_bytes(b"\x80\0\0\0\0\0\0\0{")
    (placed(studio / "no-weights") / "model.safetensors").unlink()
    (placed(studio / "no-tokenizer") / "tokenizer.json").unlink()
    (studio / "no-tokenizer/tokenizer_config.json").unlink()
    (cached(hub, "x/blob").parents[1] / "blobs/weights").unlink()
    names = {"x/shard", "x/cut", "x/no-weights", "x/no-tokenizer", "x/blob"}
    found = listed(tmp_path)
    assert {one.name for one in found.values() if one.fits == "incomplete"} == names


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    studio, hub = tmp_path / ".lmstudio/models", tmp_path / "hub"
    studio.mkdir(parents=True)
    (studio / "loop").symlink_to(studio / "loop")
    (studio / "gone").symlink_to(tmp_path / "nowhere")
    (studio / "round").symlink_to(studio)
    (studio / "file").write_text("")
    for text in ("", "[]", "{", '{"model_type": 3}', '{"model_type": "../llama"}', "\0"):
        path = studio / "p" / f"config {len(text)}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(text)
    odd = {"hidden_size": "4", "num_attention_heads": 0, "text_config": [1], "head_dim": -1}
    placed(studio / "p/odd", **odd)
    (hub / "models--a--none").mkdir(parents=True)
    (hub / "models--a--ref/refs").mkdir(parents=True)
    (hub / "models--a--ref/refs/main").write_text("../../..")
    (hub / "models--").mkdir()
    (tmp_path / ".omlx").write_text("")
    assert {*listed(tmp_path)} == {"smollm2-135m-instruct", "p/odd"}


def test_whether_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the machine's memory, or the limit of the settings."""
    path = placed(tmp_path / ".lmstudio/models/x/model")
    monkeypatch.setattr("mlxspec.engine.memory.total", lambda: 16 << 30)
    monkeypatch.setattr(models, "damage", lambda path: [])
    for size, settings, fits in (
        (8 << 30, {}, "yes"),
        (15 << 30, {}, "yes"),
        ((15 << 30) + (1 << 20), {}, "no"),  # the headroom is 1 GiB
        (8 << 30, {"memory_gb": 8.0}, "no"),
        (1 << 42, {}, "no"),
    ):
        os.truncate(path / "model.safetensors", size)
        assert listed(tmp_path, **settings)["x/model"].fits == fits, (size, settings)


def test_the_head_of_each_is_named(tmp_path: Path) -> None:
    """In its files, learned here, or published."""
    target = "mlx-community/Qwen3.8-27B-4bit"
    studio = tmp_path / ".lmstudio/models"
    placed(studio / target)
    packagings.write("embedded", studio / "x/embedded")
    learner = placed(studio / "x/learner")
    head = tmp_path / "cache/heads" / storage_name("x/learner", learner)
    head.mkdir(parents=True)
    (head / "config.json").write_text("{}")
    placed(studio / "x/plain")
    found = listed(tmp_path)
    names = [found[name].head for name in (target, "x/embedded", "x/learner", "x/plain")]
    assert names == ["mlx-community/Qwen3.8-27B-MTP-4bit", "mtp", str(head), ""]


def test_drafts_that_are_off_are_not_named(tmp_path: Path) -> None:
    studio = tmp_path / ".lmstudio/models"
    packagings.write("embedded", studio / "x/embedded")
    for settings in ({"draft": "off"}, {"speculate": False}):
        assert listed(tmp_path, **settings)["x/embedded"].head == ""


def test_a_wrong_setting_hides_no_model(model: Path, tmp_path: Path) -> None:
    placed(tmp_path / ".lmstudio/models/x/good")
    (model / "model.safetensors").unlink()
    for name in (str(model), "nobody"):
        found = listed(tmp_path, model=name)
        assert found[name].fits == "incomplete" and "x/good" in found


def test_thousands_of_entries(tmp_path: Path) -> None:
    studio = tmp_path / ".lmstudio/models"
    for i in range(50):
        for j in range(60):
            (studio / f"{i}/{j}").mkdir(parents=True)
    for i in range(1000):
        (tmp_path / f"hub/models--x--{i}/refs").mkdir(parents=True)
    placed(studio / "x/model")
    began = time.perf_counter()
    assert "x/model" in listed(tmp_path)
    assert time.perf_counter() - began < 10


def test_models_and_pull(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(cli.app, list(words))
        assert done.exit_code == 0, done.exception
        return done.stdout

    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    assert run("pull", str(model)).startswith(f"model is in {model}, ")
    monkeypatch.setenv("MLXSPEC_MODEL", str(model))
    lines = run("models").splitlines()
    assert lines[0].split() == ["name", "kind", "size", "fits", "images", "tools", "head", "path"]
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


def test_profiles(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'model = "q={model}"\n[models.q]\nseed = 1\n[models."q:a"]\ntop_p = 0.5\n')
    monkeypatch.setenv("MLXSPEC_CONFIG", str(file))
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    done = CliRunner().invoke(cli.app, ["models", "--json"])
    found = [one for one in json.loads(done.stdout) if one["kind"] == "profile"]
    defaults = {one["name"]: one["defaults"] for one in found}
    assert defaults == {"q": "seed 1", "q:a": "top_p 0.5, seed 1"}
    shown = CliRunner().invoke(cli.app, ["models"]).stdout
    assert "top_p 0.5, seed 1" in shown and "q:a" in shown


def run(*words: str, typed: str = "") -> Any:
    return CliRunner().invoke(cli.app, list(words), input=typed)


def test_the_readme_s_models_are_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its table, with its sizes, whether they fit here; one that is here is listed once."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| \d+ GB *\| `([^`]+)` *\| +([\d.]+ GB) \|", readme, re.M))
    assert len(rows) > 5
    monkeypatch.setenv("MLXSPEC_MEMORY_GB", "8")
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    placed(tmp_path / ".lmstudio/models" / next(iter(rows)))
    listed = json.loads(run("models", "--json").stdout)
    names = [one["name"] for one in listed]
    assert len(names) == len({*names}) and {*rows} < {*names}
    for one in listed:
        if one["path"] is None and one["name"] in rows:
            assert (
                models.format_size(one["bytes"]).replace("921.6 MB", "0.9 GB") == rows[one["name"]]
            )
            assert one["fits"] == ("yes" if one["bytes"] < 7 << 30 else "no")


def test_a_narrow_terminal_has_a_line_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    placed(tmp_path / ".lmstudio/models/x/placed")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    models.models()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert lines[0].split() == ["name", "size", "here", "fits", "images", "tools", "head"]
    assert len(lines) == 1 + len(json.loads(run("models", "--json").stdout))
    assert max(map(len, lines)) <= 80
    (line,) = (line.split() for line in lines if line.startswith("x/placed"))
    assert line[2:5] == ["B", "yes", "yes"]


def test_a_name_without_its_publisher() -> None:
    for name, guess in (("Qwen3-8B-4bit", True), ("nonsense", False), ("a b4", False)):
        said = str(run("pull", name).exception)
        assert ("did you mean mlx-community/Qwen3-8B-4bit?" in said) == guess
        assert ("did you mean" in said) == guess


class Hub:
    """The hub's answers about a repository."""

    size = 3 << 30

    def model_info(self, name: str, *, files_metadata: bool = False, **_: Any) -> Any:
        files = {"model.safetensors": self.size, "pytorch_model.bin": 1 << 50, "config.json": None}
        rows = [SimpleNamespace(rfilename=file, size=size) for file, size in files.items()]
        return SimpleNamespace(siblings=rows if files_metadata else None)

    def list_models(self, author: str, search: str, **_: Any) -> Any:
        assert author == "mlx-community"
        return iter([SimpleNamespace(id=f"{author}/{search}-8B-4bit", downloads=1234)])


def test_a_download_says_its_size_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the files that are fetched count, and a disk without room for them is named."""

    def fetch(name: str, **asked: Any) -> str:
        if asked.get("local_files_only"):
            raise LocalEntryNotFoundError("none")
        assert "downloading x/big: 3.0 GB" in caplog.text
        return str(placed(tmp_path / "big"))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with caplog.at_level("INFO"):
        assert resolve("x/big", tmp_path, False).path == tmp_path / "big"
    monkeypatch.setattr(Hub, "size", 1 << 60)
    with pytest.raises(UserError, match=r"x/big has 1073741824\.0 GB, and .* are free on the disk"):
        resolve("x/big", tmp_path, False)


def test_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert "mlx-community/Qwen3-8B-4bit  1,234" in run("search", "Qwen3").stdout
    monkeypatch.setattr(Hub, "list_models", lambda *_, **__: 1 // 0)
    assert "the hub cannot be searched: " in str(run("search", "Qwen3").exception)


def test_a_model_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its repository, by any of its names; another program's stays."""
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    hub, built_in = tmp_path / "hub", tmp_path / "cache/models/smollm2-135m-instruct-fp32"
    for name in ("a/one", "a/two", "b/two", "c/three"):
        cached(hub, name)
    placed(built_in)
    placed(tmp_path / ".lmstudio/models/x/theirs")
    (hub / "models--d--begun/blobs").mkdir(parents=True)  # a download that was stopped
    assert run("rm", "a/one", typed="n\n").exit_code == 1 and (hub / "models--a--one").exists()
    assert " KB freed" in run("rm", "a/one", typed="y\n").stdout
    nothing = run("rm", "a/one", typed="y\n")
    assert "is not on this disk" in str(nothing.exception) and "Delete" not in nothing.stdout
    for name in ("three", "d/begun", "smollm2-135m-instruct", "b/two"):
        assert run("rm", "--yes", name).exit_code == 0, name
    for name, why in (
        ("a/one", "a/one is not on this disk; mlxspec models lists what is"),
        ("../hub", "../hub is not on this disk"),
        ("", " is not on this disk"),
        ("theirs", "x/theirs is another program's; delete it there"),
    ):
        assert why in str(run("rm", "--yes", name).exception)
    assert [path.name for path in hub.iterdir()] == ["models--a--two"] and not built_in.exists()
    cached(hub, "b/two")
    assert "'two' may be any of ['a/two', 'b/two']" in str(run("rm", "--yes", "two").exception)

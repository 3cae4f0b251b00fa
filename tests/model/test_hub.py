"""Model names become directories: cards, directories, hub ids, and what can be wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors

from mlxspec.model import hub
from mlxspec.model.cards import cards
from mlxspec.model.hub import STORED, find_local, resolve, storage_name
from mlxspec.types import UserError

FILES = ("config.json", "model.safetensors", "tokenizer.json")
RESPONSE: Any = SimpleNamespace(headers={}, request=None)  # all that the hub's errors read of one


def test_every_card_is_valid_and_the_default_is_one() -> None:
    found = cards()
    assert hub.BUILT_IN in found and found[hub.BUILT_IN].license == "Apache-2.0"


@pytest.mark.parametrize(
    "text, said",
    [
        ("title = ", "Invalid value"),
        ('title = "x"\nlicense = 3', "license Input should be a valid string"),
        ('title = "x"\nlicense = "y"\n[source]\npackage = "p"', r"source\.version Field required"),
    ],
)
def test_an_error_in_a_card_names_its_file(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setattr("mlxspec.model.cards.data_dir", lambda name: tmp_path)
    with pytest.raises(UserError, match=rf"mine\.toml: .*{said}.*models/README\.md"):
        cards()


def test_a_directory_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json, model\*\.safetensors, tokenizer"):
        resolve(str(tmp_path), tmp_path, False)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert resolve(str(tmp_path), tmp_path, False) == hub.Resolved(
        tmp_path.resolve(), tmp_path.name
    )


def test_missing_shards_are_named(tmp_path: Path) -> None:
    for name in ("config.json", "model-1.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UserError, match=r"model-2\.safetensors"):
        resolve(str(tmp_path), tmp_path, False)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="not an index"):
        resolve(str(tmp_path), tmp_path, False)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UserError, match="is a file"):
        resolve(str(tmp_path / "m.gguf"), tmp_path, False)


@pytest.mark.parametrize("name", ["nonsense", "./not/here", "a/b/c", "/nowhere", "a/"])
def test_other_names_are_refused_with_what_is_accepted(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a directory"):
        resolve(name, tmp_path, False)


@pytest.mark.parametrize(
    "error, said",
    [
        (errors.LocalEntryNotFoundError("offline"), "network"),
        (errors.HFValidationError("odd"), "odd"),
        (OSError("no route"), "no route.*network"),
        (
            errors.GatedRepoError("x", response=RESPONSE),
            "accept its terms there and run `hf auth login`",
        ),
        (errors.RepositoryNotFoundError("x", response=RESPONSE), "owner/repo .*Check the name"),
    ],
)
def test_hub_errors_say_what_to_do(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    for name in ("snapshot_download", "HfApi.model_info"):
        monkeypatch.setattr(f"huggingface_hub.{name}", fail)
    with pytest.raises(UserError, match=said):
        resolve("owner/repo", tmp_path, False)


def test_a_hub_id_is_downloaded_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)

    def fetch(name: str, local_files_only: bool = False, **_: Any) -> str:
        if not local_files_only:
            asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve("owner/repo", tmp_path, False).name == "owner/repo" and asked == ["owner/repo"]


def test_a_model_in_the_hub_s_cache_needs_no_answer(silent_hub: Path, tmp_path: Path) -> None:
    repository, revision = silent_hub / "models--owner--repo", 40 * "a"
    folder = repository / "snapshots" / revision
    for file in (*(folder / name for name in FILES), repository / "refs/main"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(revision)
    assert resolve("owner/repo", tmp_path, False).path == folder
    with pytest.raises(UserError, match=r"cannot be downloaded: .*imeout"):
        resolve("owner/other", tmp_path, False)


def test_a_local_model_is_found_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_local("", tmp_path, True) is None
    (tmp_path / f"models/{hub.BUILT_IN}-4bit").mkdir(parents=True)
    assert find_local("", tmp_path, True) == tmp_path / f"models/{hub.BUILT_IN}-4bit"
    assert find_local("", tmp_path, False) is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_local("owner/repo", tmp_path, False) is None
    with pytest.raises(UserError, match="neither a directory"):
        find_local("nonsense", tmp_path, False)


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Makes models in LM Studio's folder; there is no hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_download", lambda name: pytest.fail(f"{name} was downloaded"))

    def make(name: str) -> Path:
        path = tmp_path / ".lmstudio/models" / name
        path.mkdir(parents=True)
        for file in FILES:
            (path / file).touch()
        return path

    return make


def test_another_program_s_model_is_taken_by_its_name(
    studio: Callable[[str], Path], tmp_path: Path
) -> None:
    """By all of it or by its last part, and it is served under all of it."""
    path = studio("owner/My-Model")
    for name in ("owner/My-Model", "My-Model"):
        assert resolve(name, tmp_path, False) == hub.Resolved(path, "owner/My-Model")
        assert find_local(name, tmp_path, False) == path
    for other in ("Model", "owner", "my-model"):
        with pytest.raises(UserError, match=r"no model .*mlxspec models"):
            resolve(other, tmp_path, False)


def test_a_name_that_several_have_lists_them(studio: Callable[[str], Path], tmp_path: Path) -> None:
    studio("one/model")
    path = studio("two/model")
    with pytest.raises(UserError, match=r"'model' .*(one|two)/model.*(one|two)/model.* whole name"):
        resolve("model", tmp_path, False)
    assert resolve("two/model", tmp_path, False).path == path


def test_a_model_that_is_half_there_is_refused_with_what_is_missing(
    studio: Callable[[str], Path], tmp_path: Path
) -> None:
    (studio("owner/model") / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"not a complete mlx-lm model: 1 missing \(tokenizer"):
        resolve("model", tmp_path, False)


def test_a_head_as_a_pt_file_is_refused_with_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"\.pt file as docs/heads.md says"):
        resolve(str(tmp_path), tmp_path, False, draft=True)
    with pytest.raises(UserError) as caught:
        resolve(str(tmp_path), tmp_path, False)
    assert ".pt" not in str(caught.value)


def test_what_is_kept_of_a_model_is_named_after_it(tmp_path: Path) -> None:
    first, second = tmp_path / "a/model", tmp_path / "b/model"
    name = storage_name("owner/model", first)
    assert name.startswith("owner--model-") and len(name) == len("owner--model-") + 8
    assert name == storage_name("owner/model", tmp_path / "b/../a/model")
    assert storage_name("owner/model", second) != name
    assert storage_name("another name", first)[-9:] == name[-9:] == storage_name("", first)
    (tmp_path / name).touch()
    assert [path.name for path in tmp_path.glob(STORED)] == [name]

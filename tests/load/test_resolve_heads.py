"""Which head a user gets: in the model's files, by a card, by --draft, or none."""

import json
import logging
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config, data_dir
from mlxspec.files import weight_bytes
from mlxspec.load import resolve
from mlxspec.load.drafting import load_drafting
from mlxspec.model import hub
from mlxspec.model.cards import head_of, target_of
from mlxspec.model.checkpoint import load_model
from mlxspec.speculate.heads.files import find_draft, find_head
from mlxspec.training.run import drop_others, install
from mlxspec.types import UnsupportedModel
from tests.heads import kinds, packagings
from tests.heads.packagings import SIDECAR, TARGET, write_json

DOWNLOAD = hub._download
RUN = ("mtp", "eagle3", "peagle", "dflash", "dspark", "assistant")
MODEL, HEAD = "mlx-community/Qwen3.8-27B-4bit", "mlx-community/Qwen3.8-27B-MTP-4bit"


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """A hub with the trained pair under published names; what it lacks cannot be downloaded."""
    shared = {MODEL: TARGET, HEAD: SIDECAR}

    def download(name: str) -> Path:
        if name not in shared:
            raise UnsupportedModel(f"{name} cannot be downloaded")
        return shared[name]

    monkeypatch.setattr(hub, "_download", download)
    monkeypatch.setattr(resolve, "find_local", lambda *args, **kw: None)
    return shared


def resolved(tmp_path: Path, **settings: Any) -> Path | None:
    """The directory of what drafts for the model."""
    found = resolve.resolve_model(Config(cache_dir=str(tmp_path), **settings))
    return found.draft.path if found.draft else None


def test_cards_name_the_head_of_a_model_and_the_model_of_a_head() -> None:
    assert head_of(MODEL) == head_of(MODEL.partition("/")[2]) == HEAD
    assert head_of("4bit") == head_of("mlx-community/SmolLM2") == ""
    assert target_of(HEAD) == MODEL and target_of("4bit") == ""


def test_every_head_has_one_card_and_a_target() -> None:
    """None is fetched but the first MTP head."""
    cards = {f.stem: tomllib.loads(f.read_text()) for f in data_dir("models").glob("heads/*.toml")}
    heads = [(name, head) for name, card in cards.items() for head in card["heads"]]
    targets = [target for card in cards.values() for target in card["targets"]]
    ids = [head["id"] for _, head in heads]
    assert len({*ids, *targets}) == len(ids) + len(targets) and len(cards) > 20
    for name, head in heads:
        assert target_of(head["id"]) == cards[name]["targets"][0]
        assert head["kind"] in RUN
    for name, card in cards.items():
        fetched = next((head["id"] for head in card["heads"] if head["kind"] == "mtp"), "")
        assert {head_of(target) for target in card["targets"]} == {fetched}
        assert all(target.partition("/")[2].lower().startswith(name) for target in card["targets"])


def test_a_card_s_head_is_fetched(online: dict[str, Path], tmp_path: Path) -> None:
    assert resolved(tmp_path, model=MODEL) == SIDECAR
    assert resolved(tmp_path, model=MODEL, draft="off") is None
    assert resolved(tmp_path, model=MODEL, speculate=False) is None
    assert resolve.models_of(Config(model=MODEL)) == [MODEL, HEAD]
    assert resolve.models_of(Config(model=MODEL, draft="off")) == [MODEL]


def test_a_model_loads_where_only_its_head_does_not_fit(
    online: dict[str, Path], tmp_path: Path
) -> None:
    """What a model must find free says nothing about a head."""
    found = resolve.resolve_model(Config(cache_dir=str(tmp_path), model=MODEL))
    assert found.draft and found.info.weight_bytes == weight_bytes(TARGET) > 0


def test_a_model_that_holds_its_head_needs_no_other(
    online: dict[str, Path], tmp_path: Path
) -> None:
    online[MODEL] = packagings.write("embedded", tmp_path / "embedded")
    assert resolved(tmp_path, model=MODEL) is None


def test_no_card_s_head_is_named_for_a_model_that_holds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is on disk; `doctor` and `models` show these names."""
    path = packagings.write("embedded", tmp_path / "embedded")
    monkeypatch.setattr(resolve, "find_local", lambda *_, **__: path)
    assert resolve.models_of(Config(model=MODEL)) == [MODEL]
    assert resolve.models_of(Config(model=MODEL, draft=HEAD)) == [MODEL, HEAD]
    (path / "model.safetensors").write_bytes(b"cut off")
    assert resolve.models_of(Config(model=MODEL)) == [MODEL]


def test_a_card_that_cannot_be_read_hides_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom `doctor` and `models` would else not show."""

    def unreadable(model: str) -> str:
        raise UnsupportedModel("card.toml: no TOML")

    monkeypatch.setattr(resolve, "find_local", lambda *_, **__: None)
    monkeypatch.setattr(resolve, "head_of", unreadable)
    settings = Config(model=MODEL, others=("other/one",))
    assert resolve.models_of(settings) == [MODEL, "other/one"]


@pytest.mark.parametrize("how", ["missing", "damaged", "no head"])
def test_what_a_card_names_can_be_done_without(
    online: dict[str, Path], tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "missing":
        del online[HEAD]
    else:
        online[HEAD] = shutil.copytree(SIDECAR, tmp_path / "head")
        weights = online[HEAD] / "model.safetensors"
        content = (TARGET / "model.safetensors").read_bytes()
        weights.write_bytes(content if how == "no head" else content[:1000])
        if how == "damaged":
            (online[HEAD] / "config.json").write_text("{}")
    online[MODEL] = promising(tmp_path / "model")
    line = said_without_a_head(tmp_path, caplog)
    assert line.startswith("decoding without a head: ") and HEAD in line


def promising(out: Path) -> Path:
    """A model whose config.json promises a head that its files do not hold."""
    shutil.copytree(TARGET, out)
    config = json.loads((out / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (out / "config.json").write_text(json.dumps(config))
    found = find_head(out)
    assert not found.kind and found.promised
    return out


def said_without_a_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The one line about it, where the model is found and loaded."""
    with caplog.at_level(logging.WARNING):
        found = resolve.resolve_model(Config(cache_dir=str(tmp_path), model=MODEL))
        assert found.draft is None
        model, _ = load_model(found.path)
        assert load_drafting(model, found.path, None, found.config).head is None
    (line,) = caplog.messages
    return line


def test_a_hub_that_never_answers_is_not_waited_for(
    online: dict[str, Path],
    tmp_path: Path,
    silent_hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = promising(tmp_path / "model")
    monkeypatch.setattr(hub, "_download", lambda n: path if n == MODEL else DOWNLOAD(n))
    line = said_without_a_head(tmp_path, caplog)
    assert HEAD in line and "imeout" in line


def test_a_head_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match="serve the model that it was made for and give this as"
    ):
        hub.resolve(str(SIDECAR), tmp_path, False)
    assert hub.resolve(str(SIDECAR), tmp_path, False, draft=True).path == SIDECAR
    named = shutil.copytree(SIDECAR, tmp_path / HEAD.partition("/")[2])
    with pytest.raises(UnsupportedModel, match=f"serve {MODEL} and give this as --draft"):
        hub.resolve(str(named), tmp_path, False)
    write_json(named / "config.json", {"model_type": "gemma4_assistant"})
    other = named.rename(tmp_path / "gemma-4-31B-it-assistant-bf16")
    with pytest.raises(UnsupportedModel, match="serve google/gemma-4-31B-it and give"):
        hub.resolve(str(other), tmp_path, False)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dflash2", "dspark"])
def test_a_head_of_any_kind_is_no_model(kind: str, tmp_path: Path) -> None:
    for packaging in kinds.PACKAGINGS[kind]:
        path = kinds.write(kind, packaging, tmp_path / packaging)
        with pytest.raises(UnsupportedModel, match=r"is a head, which .* the model that it was"):
            hub.resolve(str(path), tmp_path, False)


def test_a_head_s_id_is_refused_before_it_is_downloaded(
    tmp_path: Path, online: dict[str, Path]
) -> None:
    with pytest.raises(UnsupportedModel, match="serve Qwen/Qwen3-8B and give this as --draft"):
        hub.resolve("AngelSlim/Qwen3-8B_eagle3", tmp_path, False)


@pytest.mark.parametrize("draft", ["none", "OFF", "some/head"])
def test_what_is_wrong_with_draft_is_said_of_it(
    draft: str, online: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=f"^--draft: .*{draft}.*--draft off"):
        resolved(tmp_path, model=MODEL, draft=draft)


@pytest.mark.parametrize("name", ["model.safetensors", "mtp.safetensors"])
def test_draft_takes_a_head_without_anything_else(tmp_path: Path, name: str) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(SIDECAR / "model.safetensors", bare / name)
    assert resolved(tmp_path, model=str(TARGET), draft=str(bare)) == bare
    model, _ = load_model(TARGET)
    assert load_drafting(model, TARGET, bare, Config()).head is not None


def test_only_tensors_tell_what_a_directory_holds(tmp_path: Path) -> None:
    """Also where config.json is the model's own, or a head without a prefix lies beside a model."""
    copied = shutil.copytree(SIDECAR, tmp_path / "copied")
    shutil.copy(TARGET / "config.json", copied)
    assert find_head(copied).standalone and not find_head(TARGET).standalone
    beside = shutil.copytree(TARGET, tmp_path / "beside")
    shutil.copy(SIDECAR / "model.safetensors", beside / "mtp.safetensors")
    found, alone = find_head(beside), find_head(SIDECAR)
    assert found and alone and found.tensors.keys() == alone.tensors.keys()
    assert not find_head(beside).standalone


def test_draft_off_leaves_a_model_s_own_head(tmp_path: Path) -> None:
    path = packagings.write("embedded", tmp_path / "embedded")
    model, _ = load_model(path)
    assert load_drafting(model, path, None, Config()).head is not None
    assert load_drafting(model, path, None, Config(draft="off")).head is None
    assert load_drafting(model, path, None, Config(speculate=False)).head is None


@pytest.mark.parametrize("part", [False, True])
def test_draft_takes_only_the_head_of_the_same_model(tmp_path: Path, part: bool) -> None:
    """Also of a part of its files: that with the head, and config.json."""
    raw = packagings.write("raw", tmp_path / "raw")
    found = find_head(raw)
    assert found.kind and not found.standalone
    if part:
        for file in raw.iterdir():
            if not file.name.startswith(("config", "model.safetensors-00002")):
                file.unlink()
    made = resolve.resolve_model(Config(cache_dir=str(tmp_path), model=str(TARGET), draft=str(raw)))
    assert made.draft and made.draft.path == raw
    assert made.info.weight_bytes == weight_bytes(TARGET)
    model, _ = load_model(TARGET)
    drafting = load_drafting(model, TARGET, raw, Config())
    assert drafting.head is not None and drafting.small is None


def test_a_small_model_that_holds_a_head_drafts_as_a_whole(tmp_path: Path) -> None:
    raw, large = packagings.write("raw", tmp_path / "raw"), tmp_path / "large"
    large.mkdir()
    config = json.loads((TARGET / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] *= 2
    write_json(large / "config.json", config)
    assert find_draft(raw, TARGET).standalone and not find_draft(raw, large).standalone


def drafting_of(found: resolve.ResolvedModel) -> list[str]:
    engine, _ = found.load()
    return [drafter.name for drafter in engine.proposer.drafters if drafter.lazy]


@pytest.mark.slow
def test_a_running_server_takes_the_head_that_is_there_when_it_loads(tmp_path: Path) -> None:
    """One that was trained since, a better one in its place, none where it was deleted."""
    cache = tmp_path / "cache"
    found = resolve.resolve_model(
        Config(model=str(kinds.TARGET), cache_dir=str(cache), cache_gb=0, kv_blocks=64)
    )
    assert drafting_of(found) == []
    place = cache / "heads" / hub.storage_name("x", kinds.TARGET)
    first = kinds.write("eagle3", "speculators", place.with_name(f"{place.name}.1"))
    install(first, place)
    assert drafting_of(found) == ["eagle3"]
    started = resolve.resolve_model(found.config)  # a server that has begun with the first
    second = kinds.write("dflash", "speculators", place.with_name(f"{place.name}.2"))
    install(second, place)
    drop_others(place)
    assert not first.exists()
    assert drafting_of(found) == drafting_of(started) == ["dflash"]
    place.unlink()
    shutil.rmtree(second)
    assert drafting_of(found) == drafting_of(started) == []


def test_a_head_that_was_trained_here_comes_first(tmp_path: Path) -> None:
    """By whatever name the model is served; before the head in its own files."""
    embedded = packagings.write("embedded", tmp_path / "model")
    settings = Config(model=str(embedded), cache_dir=str(tmp_path / "cache"))
    assert resolved(tmp_path / "cache", model=str(embedded)) is None
    assert resolve.models_of(settings) == [str(embedded)]
    name = hub.storage_name("another-name", embedded)
    shutil.copytree(SIDECAR, tmp_path / "cache/heads" / name)
    for model in (str(embedded), f"mine={embedded}"):
        found = resolved(tmp_path / "cache", model=model)
        assert found == tmp_path / "cache/heads" / name
    assert resolve.models_of(settings) == [str(embedded), str(found)]
    assert resolved(tmp_path / "cache", model=str(embedded), draft="off") is None

"""From settings to models: names, shares, what the files say, whether a model fits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlxspec.config import Config, ConfigError
from mlxspec.load import server_models as module
from mlxspec.load.resolve import resolve_model, resolve_models
from mlxspec.load.server_models import make_manager
from mlxspec.types import UserError
from tests.support import tiny
from tests.support.served_model import save


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[str, str]:
    return str(save(tmp_path / "one")), str(save(tmp_path / "x=y", max_position_embeddings=99))


def test_names_and_shares(dirs: tuple[str, str]) -> None:
    one, two = dirs
    alone = resolve_model(Config(model=one))
    assert alone.name == "one"
    both = resolve_models(Config(model=one, others=(two,), context=256, draft=""))
    assert [c.name for c in both] == ["one", "x=y"]  # a path that is there is a path
    assert [len(c.config.others) for c in both] == [1, 1] and both[1].config.context == 256
    three = resolve_models(Config(model=f"first={one}", others=(f"a={one}", f"b={two}")))
    assert [c.name for c in three] == ["first", "a", "b"]
    assert resolve_model(Config(model=f"first={one}", name="mine")).name == "mine"
    with pytest.raises(UserError, match="no model 'gone'"):
        resolve_models(Config(model=one, others=("a=gone",)))


def test_names_must_differ(dirs: tuple[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"others: two models are named 'one'; give one as NAME=.*one$"
    ):
        resolve_models(Config(model=dirs[0], others=(dirs[0],)))
    with pytest.raises(ConfigError, match="pin = 'tow' is not a model; give some of one, b"):
        resolve_models(Config(model=dirs[0], others=(f"b={dirs[1]}",), pin=("b", "tow")))


def test_a_draft_is_the_first_models(dirs: tuple[str, str]) -> None:
    both = resolve_models(Config(model=dirs[0], others=(f"b={dirs[1]}",), draft=dirs[0]))
    assert both[0].draft is not None and both[1].draft is None


def test_info_before_loading(dirs: tuple[str, str]) -> None:
    info = resolve_model(Config(model=dirs[1], name="b")).info
    assert (info.name, info.context, info.vocab) == ("b", 99, tiny.VOCAB)
    assert info.weight_bytes == (Path(dirs[1]) / "model.safetensors").stat().st_size
    assert resolve_model(Config(model=dirs[1], context=50)).info.context == 50
    config = json.loads((Path(dirs[1]) / "config.json").read_text())
    del config["vocab_size"]
    (Path(dirs[1]) / "config.json").write_text(json.dumps(config))
    made = resolve_model(Config(model=dirs[1]))
    assert made.info.vocab == len(made.tokenizer)
    (Path(dirs[1]) / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        _ = made.info


def test_whether_a_model_fits(dirs: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=dirs[0], others=(f"b={dirs[1]}",), pin=("b",), idle_ttl=9)
    manager = make_manager(resolve_models(config), config)
    assert [m.pinned for m in manager.slots] == [False, True] and manager.ttl == 9
    size = manager.slots[1].info.weight_bytes
    need = size + module.memory.headroom() + module.LEAST
    monkeypatch.setattr(module.memory, "available", lambda: need - 5)
    a, b = manager.slots
    a.engine, a.info = object(), replace(a.info, weight_bytes=9)  # type: ignore[assignment]
    for held in (9, 12):  # what a step takes beside the model is not freed with another one
        monkeypatch.setattr(module.meter, "held", lambda held=held: (held, 0))
        assert manager.memory_check(b, 4) == "" and "are available" in manager.memory_check(b, 5)
    monkeypatch.setattr(module.meter, "held", lambda: (0, 0))
    limited = make_manager(resolve_models(config := replace(config, memory_gb=2.0)), config)
    assert limited.memory_check(b, (2 << 30) - need) == ""
    assert limited.memory_check(b, (2 << 30) - need + 1).startswith("it needs ")
    split = make_manager(resolve_models(config), config, group=module.ProcessGroup(size=2))
    b = split.slots[1]
    assert split.memory_check(b, (2 << 30) - need + size // 2) == ""
    assert split.memory_check(b, (2 << 30) - need + size - size // 2 + 1)
    # Ranks on one machine: each has half of the memory.
    config = replace(config, ranks=2)
    local = make_manager(resolve_models(config), config, group=module.ProcessGroup(size=2))
    assert local.memory_check(b, (1 << 30) - need + size // 2) == ""
    assert local.memory_check(b, (1 << 30) - need + size - size // 2 + 1)


def test_a_model_keeps_to_its_share(
    dirs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pools are as large as one alone would be."""
    monkeypatch.setattr("mlxspec.load.plan.CONTEXTS", 1 << 20)
    monkeypatch.setattr(
        "mlxspec.engine.memory.available", lambda: module.memory.headroom() + (64 << 20)
    )
    config = Config(
        model=dirs[0], cache_dir=str(tmp_path), cache_gb=0, speculate=False, max_sequences=2
    )
    each = [resolve_model(replace(config, others=others)) for others in ((), ("two",))]
    whole, half = (model.load()[0].scheduler.pool.size for model in each)
    least = -(-512 // 32) + 1  # what one sequence needs comes first
    assert abs(whole - 2 * half) <= least

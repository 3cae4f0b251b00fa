"""Loading a model with a head: what is planned, and what its prompts on disk are worth."""

import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.files import format_size
from mlxspec.load import loader
from mlxspec.load.loader import load_engine
from mlxspec.load.plan import STATES
from mlxspec.speculate import heads
from mlxspec.speculate.calibrate import MEASURED
from mlxspec.speculate.chain import DraftCosts
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.types import FINAL_NORM, CacheBytes, OutOfMemory
from tests.support import tiny
from tests.support.checkpoints import both, save
from tests.support.engine_with_head import BLOCK, K, head_of, loud, some
from tests.support.expected_drafts import Drafted, check, few, recorded
from tests.support.parameter_rows import diagonal, only

settings = partial(Config, cache_gb=0, block_size=BLOCK, kv_blocks=64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.model.hub.default_cache_dir", lambda: tmp_path / "cache")


@pytest.mark.parametrize("kind", only(["llama", "qwen3_5"], 0))
def test_the_memory_of_a_head_is_planned(tmp_path: Path, kind: str) -> None:
    target, path = both(tmp_path, kind)
    without, plain = load_engine(target, "tiny", settings())
    e, info = load_engine(target, "tiny", settings(), path)
    head = head_of(e).head
    assert e.scheduler.pool.size == without.scheduler.pool.size == 64
    kept = heads.cache_bytes(head)
    more = 64 * BLOCK * kept.token
    states, same = e.scheduler.kv.states, without.scheduler.kv.states
    if states is not None and same is not None:
        assert states.capacity == same.capacity
        more += (states.capacity + STATES * e.scheduler.max_sequences) * kept.state
    assert info.kv_bytes == plain.kv_bytes + more
    own = sum(x.nbytes for _, x in tree_flatten(head.module.parameters()))
    assert info.weight_bytes == plain.weight_bytes + own


@pytest.mark.parametrize(
    "kind, lacks", diagonal(["llama", "qwen3_5"], ["weights", "caches", "caches found late"])
)
def test_a_head_that_does_not_fit_is_left_out(
    tmp_path: Path,
    kind: str,
    lacks: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where there is room for the model alone: the first line says how much both need."""
    target, path = both(tmp_path, kind)
    few_blocks = settings(kv_blocks=12)
    _, plain = load_engine(target, "tiny", few_blocks)
    _, info = load_engine(target, "tiny", few_blocks, path)
    alone = plain.weight_bytes + plain.kv_bytes
    own = info.weight_bytes - plain.weight_bytes
    room = memory.headroom() + (alone if lacks == "weights" else alone + own)
    monkeypatch.setattr(memory, "available", lambda: room)
    if lacks == "caches found late":
        monkeypatch.setattr(loader, "geometry", lambda *_: CacheBytes(0, (), 0))
    caplog.clear()
    e, found = load_engine(target, "tiny", few_blocks, path)
    assert (found.weight_bytes, found.kv_bytes) == (plain.weight_bytes, plain.kv_bytes)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    both_weigh = format_size(info.weight_bytes)
    assert len([line for line in said if both_weigh in line and "without a head" in line]) == 1
    e.add(tiny.request("r", [1, 2, 3], 8))
    assert tiny.tokens(tiny.run(e), "r") == tiny.Plain(tiny.model(kind))([1, 2, 3], 8)
    monkeypatch.setattr(memory, "available", lambda: memory.headroom() + alone - 1)
    with pytest.raises(OutOfMemory, match=format_size(plain.weight_bytes)):
        load_engine(target, "tiny", few_blocks, path)


@pytest.mark.parametrize("draft", only(["head", "small model"], 0))
def test_what_drafts_cost_is_measured_once(
    tmp_path: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(self: DraftCosts, *_: Any) -> None:
        self.token, self.fixed = 2.0, 3.0

    target, head = both(tmp_path, "llama")
    config = settings(kv_blocks=64 + MEASURED // BLOCK)  # room to try the head at the first start
    path, other = (head, target) if draft == "head" else (target, head)
    monkeypatch.setattr(DraftCosts, "measure", found)
    e, _ = load_engine(target, "tiny", config, path)
    head_of(e).costs.learn(1.0, 1)  # which is not kept
    monkeypatch.setattr(DraftCosts, "measure", None)  # measuring again would fail
    e, _ = load_engine(target, "tiny", config, path)
    assert head_of(e).costs == DraftCosts(2.0, 3.0)
    monkeypatch.setattr(DraftCosts, "measure", lambda *_: None)
    e, _ = load_engine(target, "tiny", config, other)
    assert head_of(e).costs.token < 1.0  # those of another draft are not taken


PROMPT = some(6 * BLOCK + 3)


def serve(target: Path, head: Path | None, **change: Any) -> tuple[list[Drafted], int]:
    """Start with a disk cache, answer PROMPT and end: what was drafted, and how many tokens of it
    were restored. The answer is that without a head."""
    e, _ = load_engine(target, "tiny", settings(cache_gb=1.0, **change), head)
    drafted: list[Drafted] = []
    if len(e.proposer.drafters) > 1:  # type: ignore[attr-defined]
        drafted = recorded(e, head_of(e))
        loud(e)
    e.add(few("r", PROMPT, 20))
    outputs = tiny.run(e)
    while e.active:
        e.step()
    e.close(5)
    plain = tiny.engine(e.runner.model, layout=e.runner.layout, block=BLOCK)
    plain.add(few("r", PROMPT, 20))
    assert tiny.tokens(outputs, "r") == tiny.tokens(tiny.run(plain), "r")
    return drafted, outputs[-1].cached


@pytest.mark.parametrize("kind, inside", diagonal(["llama", "qwen3_5"], [True, False], every=2))
def test_prompts_on_disk_are_those_of_the_same_head(
    tmp_path: Path, kind: str, inside: bool
) -> None:
    """The first prompt after a start is restored, and drafted for as if it had been read; not with
    a head that did not read it. The head has a directory of its own, or a folder in the model's."""
    target, path = both(tmp_path, kind)
    weights, draft = path / "model.safetensors", path
    if inside:
        weights, draft = target / "mtp/weights.safetensors", None
        shutil.move(path, weights.parent)
        (weights.parent / "model.safetensors").rename(weights)
    assert serve(target, None, draft="off")[1] == 0
    cold, cached = serve(target, draft)
    assert cached == 0 and check(kind, cold) > 20 / (K + 1)
    warm, cached = serve(target, draft)
    assert cached >= 5 * BLOCK and check(kind, warm) == len(cold)
    tensors = mx.load(str(weights))
    mx.save_safetensors(str(weights), tensors | {"norm.weight": tensors["norm.weight"] * 0.9})
    assert serve(target, draft)[1] == 0


@pytest.mark.slow
def test_prompts_on_disk_are_those_of_the_same_hidden_state(tmp_path: Path) -> None:
    """A later trial, as after an update, may choose another one for the head to read."""
    target, path = both(tmp_path, "qwen3_5")
    room = dict(kv_blocks=64 + MEASURED // BLOCK)  # to try the head
    assert serve(target, path, **room)[1] == 0
    assert serve(target, path, **room)[1] >= 5 * BLOCK
    (known,) = (tmp_path / "cache/costs").iterdir()
    found = json.loads(known.read_text())
    (head,) = found["taps"]
    found["taps"][head] = 3 if found["taps"][head] == FINAL_NORM else FINAL_NORM
    known.write_text(json.dumps(found))
    assert serve(target, path, **room)[1] == 0


@pytest.mark.slow
def test_a_head_that_cannot_run_leaves_no_name_on_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, path = both(tmp_path, "qwen3_5")
    with monkeypatch.context() as patch:
        patch.setattr(HeadDrafter, "draft_once", lambda *_: 1 / 0)
        assert serve(target, path) == ([], 0)
    assert serve(target, None)[1] >= 5 * BLOCK
    assert serve(target, path)[1] == 0


@pytest.mark.parametrize("kind", only(["qwen3", "mamba2", "llama"], 1, 2))
def test_the_head_of_another_model_is_left_out(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, path = both(tmp_path, "qwen3_5")
    other = tmp_path / "other"
    other.mkdir()
    save(other, kind)
    e, _ = load_engine(other, "tiny", settings(), path)
    assert "decoding without a head: " in caplog.text and "Traceback" not in caplog.text
    e.add(tiny.request("r", [1, 2, 3], 8))
    assert tiny.tokens(tiny.run(e), "r") == tiny.Plain(tiny.model(kind))([1, 2, 3], 8)


@pytest.mark.slow
def test_a_head_without_a_config_is_used(tmp_path: Path) -> None:
    target, path = both(tmp_path, "qwen3_5")
    (path / "config.json").unlink()
    e, _ = load_engine(target, "tiny", settings(), path)
    drafted = recorded(e, head_of(e))
    loud(e)
    e.add(few("r", some(20)))
    tiny.run(e)
    assert check("qwen3_5", drafted) > 3

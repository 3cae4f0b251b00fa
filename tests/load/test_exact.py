"""A start with `exact`: what is found is kept, used, told, and measured in idle moments."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.commands.doctor import examine as examined
from mlxspec.engine.orders import LoadCommand
from mlxspec.kernels.verify import KERNELS
from mlxspec.load import loader
from mlxspec.load.exact import Exactness, examine
from mlxspec.load.loader import load_engine
from mlxspec.load.warmup import WarmupCache
from mlxspec.metrics import Metrics
from mlxspec.model.invariant import CHUNK
from mlxspec.types import Interrupted, Served
from tests.load.test_loader import settings
from tests.model.test_layout import save
from tests.support import tiny
from tests.support.parameter_rows import only
from tests.tiny_tokenizer import save_tokenizer

SIZE = dict(block_size=8, kv_blocks=96)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("mlxspec.model.hub.default_cache_dir", lambda: tmp_path / "cache")
    save(tmp_path)
    return tmp_path


@pytest.fixture
def model(path: Path) -> Path:
    """A model beside the cache, whose files are not the model's."""
    (path / "model").mkdir()
    save(path / "model")
    return path / "model"


def kept(path: Path, change: Callable[[Exactness], Exactness] = lambda e: e) -> WarmupCache:
    """What the start has kept, with a change."""
    (file,) = (path / "cache/costs").iterdir()
    found = WarmupCache.load(file)
    assert found and found.exact
    found.file, found.exact = file, change(found.exact)
    found.save()
    return found


def start(path: Path, exact: str, **change: Any):
    return load_engine(
        path, "tiny", settings(exact=exact, **SIZE, **change), **{"measure_idle": True}
    )


def test_on_is_used_at_once_and_proven_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e, info = start(path, "on")
    assert e.runner.invariance and e.scheduler.kv.chunk == CHUNK
    assert (info.exact, info.exact_rows) == ("exact up to 33 rows", 33)
    monkeypatch.setattr(loader, "examine", None)  # it is known now
    e, info = start(path, "on")
    assert e.runner.invariance and info.exact_rows == 33


def test_off_looks_at_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "examine", None)
    e, info = start(path, "off")
    assert e.runner.invariance is None and (info.exact, info.exact_rows) == ("", 0)


def test_auto_is_used_once_it_is_known_to_be_cheap(path: Path) -> None:
    e, info = start(path, "auto")
    assert e.runner.invariance is None and info.exact_rows == 0 and "when idle" in info.exact
    calls = iter(range(100))

    def stop() -> None:
        if next(calls) == 40:
            raise Interrupted

    e.work_idle(stop)
    assert e.idle_work and e.runner.invariance is None, "as it was"
    e.work_idle()
    found = kept(path).exact
    assert e.idle_work is None and found and found.cost and min(found.cost) >= 0
    assert e.runner.invariance is None and e.scheduler.kv.chunk == 0
    kept(path, lambda exact: replace(exact, cost=(0.01, 0.02)))
    e, info = start(path, "auto")
    assert e.runner.invariance, "proven now"
    assert info.exact == "exact up to 33 rows, for 1% of a step's time and 2% of a prompt's"
    kept(path, lambda exact: replace(exact, cost=(0.01, 0.2)))
    e, info = start(path, "auto")
    assert e.runner.invariance is None and "which --exact on pays" in info.exact


def test_a_first_start_looks_for_nothing_before_it_serves(path: Path) -> None:
    """And what idle moments have tried is not tried again."""
    e, _ = start(path, "auto")
    layers = {id(m): type(m) for m in e.runner.model.modules()}
    tried = 0

    def stop() -> None:
        nonlocal tried
        tried += 1
        if tried % 50 == 0:
            raise Interrupted

    moments = 0
    while e.idle_work and moments < 1000:
        e.work_idle(stop)
        moments += 1
    assert 1 < moments < 1000
    assert kept(path).exact.cost
    assert {id(m): type(m) for m in e.runner.model.modules()} == layers, "as they were"


def test_kernels_of_idle_moments_are_those_that_it_is_found_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the second start uses it."""
    e, _ = start(path, "auto")
    monkeypatch.setattr("mlxspec.load.measuring.kernels_in_use", lambda: "some")
    e.work_idle()
    kept(path, lambda exact: replace(exact, cost=(0.0, 0.0)))
    monkeypatch.setattr(loader, "kernels_in_use", lambda: "some")
    _, info = start(path, "auto")
    assert info.exact_rows == 33


def test_what_idle_moments_find_is_shown_from_then_on(path: Path) -> None:
    models = tiny.manager(lambda: start(path, "auto"))
    models.launch()
    [shown] = models.snapshot().values()
    assert "when idle" in shown.info.exact
    models.work_idle(lambda: None)
    [shown] = models.snapshot().values()
    found = kept(path).exact
    assert found and found.cost and shown.info.exact == found.describe("auto")
    models.submit(LoadCommand(models.slots[0].info.name, load=False))
    models.step()
    [unloaded] = models.snapshot().values()
    assert unloaded.status == "unloaded" and unloaded.info.exact == shown.info.exact


def test_what_cannot_be_found_is_told_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("a layer of its own kind")

    monkeypatch.setattr("mlxspec.model.invariant.try_calls", fails)
    e, _ = start(path, "auto")
    e.work_idle()
    assert e.idle_work is None
    e, info = start(path, "auto")
    assert info.exact == "not exact: ValueError: a layer of its own kind" and not e.idle_work


def test_no_more_is_drafted_than_is_exact(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(path, "on")
    for rows, depth in ((33, 32), (5, 4), (1, 0)):
        kept(path, lambda exact, rows=rows: replace(exact, rows=rows, why="it"))
        e, _ = start(path, "on")
        assert e.proposer.max_depth == depth


def cached(model: Path, exact: str) -> int:
    """How many tokens of a prompt a start finds on disk."""
    e, info = start(model, exact, cache_gb=1.0)
    assert e.offloader and info.exact_rows == (33 if exact == "on" else 0)
    e.add(tiny.request("r", range(1, 80), 4))
    tiny.run(e)
    e.close(5)
    return e.counters["cached_tokens"]


def test_prompts_on_disk_are_of_one_order(model: Path) -> None:
    assert cached(model, "on") == cached(model, "off") == 0 < cached(model, "on")


def test_other_kernels_are_another_proof(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(path, "on")
    monkeypatch.setattr(loader, "kernels_in_use", lambda: "others")
    seen = []
    monkeypatch.setattr(loader, "examine", lambda *a: seen.append(a) or Exactness(rows=0, why="it"))
    _, info = start(path, "on")
    assert seen and info.exact == "not exact: it"
    KERNELS.verdicts.clear()


SETTINGS = ["MLX_ENABLE_TF32", "MLX_GDN_PACKED", "MLX_SDPA_BLOCKS"]


@pytest.mark.parametrize("name", only(SETTINGS, 1))
def test_another_order_of_sums_is_another_proof(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also of prompts on disk, which hold what was computed."""
    seen = []

    def look(*about: Any) -> Exactness:
        seen.append(about)
        return examine(*about)

    monkeypatch.setattr(loader, "examine", look)
    assert cached(model, "on") == 0 < cached(model, "on") and len(seen) == 1
    monkeypatch.setenv(name, "64")
    assert cached(model, "on") == 0 and len(seen) == 2


def test_it_is_told(path: Path, bare_settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tokenizer(path / "model")
    save(model)
    _, info = start(model, "on")
    page = Metrics(lambda: {"tiny": Served(info)}).render()
    assert b'mlxspec_exact_rows{model="tiny"} 33' in page
    monkeypatch.setenv("MLXSPEC_EXACT", "on")
    for name, value in (("BLOCK_SIZE", "8"), ("CACHE_DIR", str(path / "cache"))):
        monkeypatch.setenv(f"MLXSPEC_{name}", value)
    checks = list(examined(str(model)))
    lines = [check.text for check in checks if check.name == "exact"]
    assert lines == [f"{model}: exact up to 33 rows"], checks

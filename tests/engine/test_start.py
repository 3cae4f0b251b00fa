"""From a directory to a warm engine, and what is refused on the way."""

import logging
from pathlib import Path

import pytest

from mlxspec.engine import memory, start
from mlxspec.engine.start import Options
from mlxspec.speculate import NoDrafter
from mlxspec.speculate.chain import Chain
from mlxspec.types import Unfit
from tests import tiny
from tests.model.test_load import save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path


def test_everything_is_derived_and_reported(path: Path) -> None:
    e, info = start.start(path, "tiny", Options(block_size=16))
    assert (info.name, info.layout, info.vocab, info.context) == ("tiny", "rows", tiny.VOCAB, 512)
    assert info.kv_blocks == memory.CONTEXTS * 512 // 16 + 1
    pools = [p for pages in e.runner.caches for p in pages.pools()]
    assert info.kv_bytes == sum(p.nbytes for p in pools) and info.weight_bytes > 0
    assert info.prefill_budget == e.scheduler.pace.rows(decoding=True) > 0
    stats = e.stats()
    assert (stats.steps, stats.blocks_cached, stats.blocks_used) == (0, 0, 0), "warm-up leaves no trace"
    e.add(tiny.request("r", [1, 2, 3], 8))
    assert tiny.tokens(tiny.run(e), "r") == tiny.Plain(tiny.model("llama"))([1, 2, 3], 8)


def test_options_override(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mlxspec"):
        e, info = start.start(path, "tiny", Options(block_size=8, kv_blocks=9, context=100, layout="gather"))
    assert (info.layout, info.context, e.scheduler.max_sequences) == ("gather", 64, 16)
    assert "context cut from 100 to 64" in caplog.text


def test_no_memory_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda weights: 1 << 10)
    with pytest.raises(Unfit, match="0 MiB are free"):
        start.start(path, "tiny", Options())


def test_a_context_of_nothing_is_refused(path: Path) -> None:
    with pytest.raises(Unfit, match="raise --context"):
        start.start(path, "tiny", Options(context=1))


def test_a_pool_that_is_copied_is_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "WORTH_CHECKING", 1 << 10)
    wide = Options(block_size=32, kv_blocks=3000)
    with caplog.at_level(logging.WARNING, "mlxspec"):
        start.start(path, "tiny", wide)
    assert "copy the pool" not in caplog.text
    held = []
    put = start.Engine.step

    def step(self):
        held[:] = [p.pools() for p in self.runner.caches if p.keys is not None]
        kept = [tuple(a[:] for a in pair) for pair in held]  # readers that are never done
        held.append(kept)
        return put(self)

    monkeypatch.setattr(start.Engine, "step", step)
    with caplog.at_level(logging.WARNING, "mlxspec"):
        start.start(path, "tiny", wide)
    assert "copy the pool" in caplog.text


def test_it_speculates_unless_told_otherwise(path: Path, tmp_path: Path) -> None:
    e, _ = start.start(path, "tiny", Options(block_size=16, cache=tmp_path / "costs"))
    assert isinstance(e.drafter, Chain) and e.drafter.model is None
    assert list((tmp_path / "costs").iterdir()) and e.scheduler.pool.used == 0
    off, _ = start.start(path, "tiny", Options(block_size=16, speculate=False))
    assert isinstance(off.drafter, NoDrafter)


def test_a_draft_model_drafts(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    e, info = start.start(path, "tiny", Options(block_size=16, kv_blocks=20, draft=path))
    assert isinstance(e.drafter, Chain) and e.drafter.model is not None
    assert "ms a token" in caplog.text
    alone = start.start(path, "tiny", Options(block_size=16, kv_blocks=20))[1]
    assert (info.kv_bytes, info.weight_bytes) == (2 * alone.kv_bytes, 2 * alone.weight_bytes)
    e.add(tiny.request("r", [1, 2, 3], 30))
    assert tiny.tokens(tiny.run(e), "r") == tiny.Plain(tiny.model("llama"))([1, 2, 3], 30)


def test_what_cannot_draft_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(Unfit, match="--draft needs the rows layout; the model runs in gather"):
        start.start(path, "tiny", Options(layout="gather", draft=path))
    other = tmp_path / "other"
    other.mkdir()
    save(other, "mamba2")
    with pytest.raises(Unfit, match=r"other cannot draft: .*; give another --draft"):
        start.start(path, "tiny", Options(draft=other))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (Options(layout="solo"), "the solo layout"),
        (Options(block_size=8, kv_blocks=4), "too small to measure"),
    ],
)
def test_no_speculation_is_said(
    path: Path, options: Options, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    e, _ = start.start(path, "tiny", options)
    assert isinstance(e.drafter, NoDrafter)
    assert "no speculation: " in caplog.text and why in caplog.text

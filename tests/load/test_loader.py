"""Loading: what is derived, cached, refused and reported."""

import gc
import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.kernels import verify
from mlxspec.kernels.verify import KERNELS, Case, Verdict
from mlxspec.load import loader
from mlxspec.load import plan as planning
from mlxspec.load.loader import load_engine
from mlxspec.model import layout as loading
from mlxspec.model.checkpoint import load_model, load_weights
from mlxspec.model.layout import LayoutChoice, find_layout, geometry
from mlxspec.model.pages import Pages
from mlxspec.model.runner import Runner
from mlxspec.speculate import NoSpeculation, calibrate
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import OutOfMemory, Request, Sampling, UserError
from tests.support import tiny
from tests.support.checkpoints import save, settings
from tests.support.drafters import small_model
from tests.support.parameter_rows import only


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of these tests."""
    monkeypatch.setattr("mlxspec.model.hub.default_cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path


def test_fixed_rows_are_not_tried(path: Path) -> None:
    e, _ = load_engine(path, "tiny", settings(prefill_budget=16))
    e.add(tiny.request("r", range(1, 41), 2))
    tiny.run(e)
    assert e.counters["steps"] == 4, "three steps read the prompt"
    assert not e.scheduler.prefill_budget.largest


def test_sizes_and_layout_are_derived_and_reported(path: Path) -> None:
    e, info = load_engine(path, "tiny", settings(block_size=16))
    assert (info.name, info.layout, info.vocab, info.context) == ("tiny", "rows", tiny.VOCAB, 512)
    assert e.scheduler.pool.size == planning.CONTEXTS * 512 // 16 + 1
    pools = [p for pages in e.runner.caches for p in pages.pools()]
    assert info.kv_bytes == sum(p.nbytes for p in pools) and info.weight_bytes > 0
    assert e.scheduler.prefill_budget.rows([], 0, decoding=True) > 0
    stats = e.stats()
    assert (stats.steps, stats.blocks_cached, stats.blocks_used) == (0, 0, 0), (
        "warm-up leaves no trace"
    )
    e.add(tiny.request("r", [1, 2, 3], 8))
    assert tiny.tokens(tiny.run(e), "r") == tiny.Plain(tiny.model("llama"))([1, 2, 3], 8)


def test_settings_override_what_is_derived(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mlxspec"):
        e, info = load_engine(
            path, "tiny", settings(block_size=8, kv_blocks=9, context=100, layout="gather")
        )
    assert (info.layout, info.context, e.scheduler.max_sequences) == ("gather", 64, 16)
    assert "context cut from 100 to 64" in caplog.text


def test_a_lack_of_memory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1 << 10)
    monkeypatch.setattr(loader, "load_weights", lambda model: pytest.fail("a weight was read"))
    with pytest.raises(UserError, match=r"1.0 KB are free of"):
        load_engine(path, "tiny", settings())
    monkeypatch.setattr(memory, "available", lambda: memory.headroom() + (380 << 10))
    with pytest.raises(UserError, match=r"KB for caches, but"):
        load_engine(path, "tiny", settings())
    with pytest.raises(UserError, match=r"for caches, .*leave out --kv-blocks"):
        load_engine(path, "tiny", settings(kv_blocks=20))


def test_memory_gb_is_the_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 0)
    monkeypatch.setattr(planning, "CONTEXTS", 1 << 20)
    monkeypatch.setattr(loader.meter, "held", lambda: (0, 0))  # other tests' models
    held = sum(p.stat().st_size for p in path.glob("*.safetensors"))
    asked = (memory.headroom() + held + (8 << 20)) / 2**30
    info = load_engine(path, "tiny", settings(memory_gb=asked, speculate=False))[1]
    assert 3 << 20 < info.kv_bytes <= 4 << 20, "half of what weights and headroom leave"


def test_an_oversize_model_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    """48 GiB of weights in a file that takes no disk."""
    config = dict(
        tiny.CONFIGS["llama"], model_type="llama", hidden_size=4096, intermediate_size=1 << 20
    )
    (tmp_path / "config.json").write_text(
        json.dumps(config | dict(num_hidden_layers=1, head_dim=64))
    )
    wide = {
        "mlp.gate_proj": [1 << 20, 4096],
        "mlp.up_proj": [1 << 20, 4096],
        "mlp.down_proj": [4096, 1 << 20],
    }
    heads = {"self_attn.q_proj": 256, "self_attn.k_proj": 128, "self_attn.v_proj": 128}
    shapes = {f"layers.0.{name}": shape for name, shape in wide.items()}
    shapes |= {f"layers.0.{name}": [rows, 4096] for name, rows in heads.items()}
    shapes |= {f"layers.0.{name}_layernorm": [4096] for name in ("input", "post_attention")}
    shapes |= {
        "layers.0.self_attn.o_proj": [4096, 256],
        "norm": [4096],
        "embed_tokens": [tiny.VOCAB, 4096],
    }
    table, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        table[f"model.{name}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [at, at + size],
        }
        at += size
    head = json.dumps(table).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + at)
    loader.load_model(tmp_path)  # imports what it needs
    gc.collect()  # of what other tests left, which would be held already
    mx.clear_cache()
    before, free = memory.footprint(), memory.available()
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    told = r"48.0 GB for weights, .* but (39|40)\.\d GB are left of --memory-gb"
    with pytest.raises(UserError, match=told):
        load_engine(tmp_path, "wide", settings(memory_gb=40))
    assert mx.get_peak_memory() - active < 1 << 20 and memory.footprint() - before < 16 << 20
    assert free - memory.available() < 1 << 30


def test_a_context_of_one_token_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match="raise --context"):
        load_engine(path, "tiny", settings(context=1))


def test_the_pool_takes_memory_as_it_is_used(path: Path) -> None:
    engine, info = load_engine(path, "tiny", settings(block_size=8, kv_blocks=400, speculate=False))
    runner = engine.runner
    held = sum(pool.nbytes for pages in runner.pages() for pool in pages.pools())
    assert held < info.kv_bytes / 2
    prompt = tuple(i * 7 % engine.vocab for i in range(480))
    model, _ = load_model(path)
    load_weights(model)
    want = tiny.Plain(model)(prompt, 20)
    engine.add(Request("short", prompt[:40], 3, Sampling(temperature=0)))
    tiny.run(engine)
    for name, own in (("long", prompt), ("other", prompt[::-1]), ("third", prompt[1:])):
        engine.add(Request(name, own, 20, Sampling(temperature=0)))
    assert tiny.tokens(tiny.run(engine), "long") == want
    assert sum(pool.nbytes for pages in runner.pages() for pool in pages.pools()) > 2 * held


def test_what_other_models_may_still_take_is_not_free(path: Path) -> None:
    with pytest.raises(OutOfMemory, match="does not fit"):
        load_engine(path, "tiny", settings(), reserved=1 << 50)


def test_a_pool_that_could_not_grow_tries_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its layers had grown: nothing may be written behind the others' ends."""
    engine, _ = load_engine(path, "tiny", settings(block_size=8, kv_blocks=400, speculate=False))
    runner, real, done = engine.runner, Pages.grow, []

    def short(self: Pages, blocks: int) -> None:
        if len(done) == 1:
            raise RuntimeError("[malloc] Unable to allocate")
        done.append(self)
        real(self, blocks)

    engine.scheduler.kv.pool.allocate(200)
    with monkeypatch.context() as broken:
        broken.setattr(Pages, "grow", short)
        with pytest.raises(RuntimeError, match="malloc"):
            runner.grow()
    runner.grow()
    slots = {pool.shape[1] for pages in runner.pages() for pool in pages.pools()}
    assert (
        slots == {runner.view.allocated[None] * 8}
        and 200 * 8 < min(slots) <= (201 + 400 // 32 + 1) * 8
    )


def test_a_layout_refused_for_lack_of_memory_is_not_cached(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, options = loading.probe_logits, settings()

    def short(runner: Runner) -> object:
        if runner.layout == "rows":
            raise RuntimeError("[malloc] Unable to allocate")
        return real(runner)

    with monkeypatch.context() as broken:
        broken.setattr(loading, "probe_logits", short)
        assert load_engine(path, "tiny", options)[1].layout != "rows"
    assert load_engine(path, "tiny", options)[1].layout == "rows"


def test_the_next_start_uses_the_warmup_cache(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(cache_dir=str(cache))
    first, info = load_engine(path, "tiny", options)
    monkeypatch.setattr(loader, "find_layout", None)  # trying again would fail
    monkeypatch.setattr(calibrate, "time_step", None)  # and so would measuring
    second, again = load_engine(path, "tiny", options)
    assert replace(again, created=info.created, exact=info.exact) == info
    assert second.counters["steps"] == 0
    assert isinstance(first.proposer, Proposer) and isinstance(second.proposer, Proposer)
    measured = [[list(x) for x in e.proposer.costs.measured] for e in (first, second)]
    assert measured[0] == measured[1]
    load_engine(path, "tiny", replace(options, speculate=False))  # forgets nothing
    with monkeypatch.context() as other:
        other.setitem(
            KERNELS.verdicts, "a 1", Verdict("plain", 1, 2)
        )  # another kernel, other costs
        with pytest.raises(TypeError):
            load_engine(path, "tiny", options)
    load_engine(path, "tiny", options)
    (kept,) = (cache / "costs").iterdir()
    whole = json.loads(kept.read_text())
    short = {**whole, "costs": {**whole["costs"], "measured": "fast"}}
    for text in (
        json.dumps(short),
        "",
        "[]",
        '{"layout": {"windows": {}, "refused": []}, "slowest": 1}',
    ):
        kept.write_text(text)
        with pytest.raises(TypeError):
            load_engine(path, "tiny", options)
    monkeypatch.undo()
    config = path / "config.json"
    config.write_text(config.read_text().replace("}", " }"))  # another file is another model
    load_engine(path, "tiny", options)
    assert len(list((cache / "costs").glob("known-*"))) == 2


def test_speculation_is_on_by_default(path: Path, cache: Path) -> None:
    e, _ = load_engine(path, "tiny", settings(block_size=16))
    assert isinstance(e.proposer, Proposer) and small_model(e.proposer) is None
    assert list((cache / "costs").iterdir()) and e.scheduler.pool.used == 0
    off, _ = load_engine(path, "tiny", settings(block_size=16, speculate=False))
    assert isinstance(off.proposer, NoSpeculation)


def test_a_draft_model_drafts(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    e, info = load_engine(path, "tiny", settings(block_size=16, kv_blocks=20), path)
    assert isinstance(e.proposer, Proposer) and small_model(e.proposer)
    assert any("model drafts" in line and str(path) in line for line in caplog.messages)
    alone = load_engine(path, "tiny", settings(block_size=16, kv_blocks=20))[1]
    assert (info.kv_bytes, info.weight_bytes) == (2 * alone.kv_bytes, 2 * alone.weight_bytes)
    e.add(tiny.request("r", [1, 2, 3], 30))
    assert tiny.tokens(tiny.run(e), "r") == tiny.Plain(tiny.model("llama"))([1, 2, 3], 30)


@pytest.mark.parametrize(
    ("kind", "layout", "how"),
    only(
        [
            ("llama", "gather", "tiny: gather layout, ready"),
            ("llama", "rect", "tiny: rect layout, ready"),
            ("mamba2", "auto", "tiny: rect layout, ready"),
        ],
        0,
        2,
    ),
)
def test_a_draft_model_drafts_for_every_layout_that_takes_drafts_back(
    path: Path, tmp_path: Path, kind: str, layout: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    target = tmp_path / "target"
    target.mkdir()
    save(target, kind)
    e, _ = load_engine(target, "tiny", settings(layout=layout, block_size=16, kv_blocks=20), path)
    assert how in caplog.text
    assert isinstance(e.proposer, Proposer) and small_model(e.proposer)
    e.add(tiny.request("r", [1, 2, 3], 30))
    assert tiny.tokens(tiny.run(e), "r") == tiny.Plain(tiny.model(kind))([1, 2, 3], 30)
    assert isinstance(e.proposer, Proposer)


def test_quantized_kv_sizes_are_known_before_loading(tmp_path: Path) -> None:
    save(tmp_path, "qwen3:4")
    m = tiny.model("qwen3:4")
    for bits in (0, 4, 8):
        assert geometry(m, bits).token == find_layout(m, kv_bits=bits).cache_bytes.token
    with pytest.raises(UserError, match=r"a context of 0 tokens .* raise --context or --kv-blocks"):
        load_engine(tmp_path, "tiny", settings(kv_blocks=1))


def test_quantized_pools_are_counted_and_a_draft_model_keeps_its_own_precision(
    tmp_path: Path,
) -> None:
    save(tmp_path, "qwen3:4")
    sizes = settings(block_size=16, kv_blocks=20)
    plain = load_engine(tmp_path, "tiny", sizes)[1].kv_bytes
    e, info = load_engine(tmp_path, "tiny", replace(sizes, kv_bits=4))
    assert (
        info.kv_bytes
        == sum(p.nbytes for pages in e.runner.caches for p in pages.pools())
        < plain / 2
    )
    e, both = load_engine(tmp_path, "tiny", replace(sizes, kv_bits=4), tmp_path)
    assert both.kv_bytes == info.kv_bytes + plain
    assert all(
        not pages.view.kv_bits for pages in small_model(e.proposer).head.module.runner.caches
    )


def test_unusable_draft_models_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--draft: .* the solo layout"):
        load_engine(path, "tiny", settings(layout="solo"), path)
    other = tmp_path / "other"
    other.mkdir()
    save(other, "mamba2")
    with pytest.raises(UserError, match=r"other cannot draft: .*; give another --draft"):
        load_engine(path, "tiny", settings(), other)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (settings(layout="solo"), "cannot roll back"),
        (settings(block_size=8, kv_blocks=4), "too small to measure"),
    ],
)
def test_why_there_is_no_speculation_is_logged(
    path: Path, options: Config, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    e, _ = load_engine(path, "tiny", options)
    assert isinstance(e.proposer, NoSpeculation)
    assert "no speculation: " in caplog.text and why in caplog.text


def test_kernels_are_verified_at_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case that wins, by a kernel that is MLX's own and a stock that is slower."""
    runs = []

    def stock(x: mx.array) -> mx.array:
        runs.append(len(x))
        for _ in range(64):
            x = mx.exp(mx.log(x))
        return mx.sqrt(x)

    def inputs(seed: int) -> tuple[mx.array]:
        return (mx.arange(1.0, 257.0).reshape(4, 64),)

    case = Case("fake 1", (1, 4), inputs, stock, mx.sqrt, {"plain": mx.sqrt}, 1e-5)
    monkeypatch.setattr(LayoutChoice, "cases", lambda *of: [case])
    options = settings(block_size=16, speculate=False)
    load_engine(path, "tiny", options)
    assert not runs and not KERNELS.verdicts, "there is no Metal here"
    monkeypatch.setattr(verify, "unavailable", lambda: "")
    try:
        load_engine(path, "tiny", options)
        assert KERNELS.variant("fake 1", 4) and runs
        count = len(runs)
        load_engine(path, "tiny", options)
        assert len(runs) == count, "it is known"
    finally:
        KERNELS.verdicts.clear()

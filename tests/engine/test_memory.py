"""The machine's figures, the plan for a model, and that serving does not make the process grow."""

import mmap
import random
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.engine.engine import Engine
from mlxspec.load import plan as planning
from mlxspec.load.drafting import Drafting
from mlxspec.load.plan import MemoryPlan, Room, make_plan
from mlxspec.model import meter
from mlxspec.model.layout import LayoutChoice
from mlxspec.model.runner import Runner
from mlxspec.types import MAX_DEPTH, CacheBytes, OutOfMemory, Request, Sampling
from tests.support import tiny
from tests.support.machines import GIB, MAC, Libc, on_linux, on_mac


def test_macos_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    # user, system, two wakeups, pageins, wired, resident, footprint, behind a uuid of two words
    words = {
        0: 11,
        1: 12,
        2: 1,
        3: 2,
        4: 3,
        5: 4,
        6: 5,
        7: 6,
        8: 7 * GIB,
        9: 9 * GIB,
        10: 8,
        34: 10 * GIB,
    }
    on_mac(monkeypatch, Libc(MAC, words))
    assert memory.total() == 16 * GIB and memory.headroom() == GIB
    assert memory.available() == (1000 + 20000 + 300) * 16384
    assert memory.footprint() == 9 * GIB


def test_unknown_figures_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_mac(monkeypatch, Libc({}))
    assert memory.total() > GIB and memory.footprint() == 0
    assert memory.available() == memory.available() == memory.total() * 3 // 4


def test_linux_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = "MemTotal:       8000000 kB\nMemFree: 100 kB\nMemAvailable:    3000000 kB\nHugePages_Total: 0\n"
    status = "VmRSS:\t 9000 kB\nRssAnon:\t 500 kB\nRssFile:\t 8000 kB\nRssShmem:\t 20 kB\nVmSwap:\t 3 kB\n"
    on_linux(monkeypatch, tmp_path, meminfo=meminfo, self__status=status)
    assert memory.available() == 3000000 << 10
    assert memory.footprint() == 523 << 10


def test_this_machine() -> None:
    assert 1 << 20 < memory.available() < memory.total() < 1 << 50
    before, private = memory.footprint(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(
        -1, 256 << 20, private
    ) as held:  # malloc might hand out what the process holds already
        for at in range(0, len(held), mmap.PAGESIZE):
            held[at] = 1
        assert memory.footprint() - before > 240 << 20  # others may give some back meanwhile


def test_the_wired_limit_is_set_in_one_place() -> None:
    """It is what panics Macs."""
    package = Path(__file__).parents[2] / "mlxspec"
    found = [path for path in package.rglob("*.py") if "set_wired_limit" in path.read_text("utf-8")]
    assert found == [package / "model/meter.py"]


def plan(
    cache: CacheBytes,
    free: int,
    context: int = 8192,
    weights: int = 0,
    **settings: Any,
) -> MemoryPlan:
    """A plan for `free` bytes beside headroom."""
    config = Config(cache_gb=0, **settings)
    return make_plan(Room(config, context, free + memory.headroom()), weights, cache)


def test_the_kv_pool_holds_four_contexts_or_takes_half_of_the_free_memory() -> None:
    def blocks(context: int, token_bytes: int, free: int) -> int:
        return plan(CacheBytes(token_bytes), free, context).blocks

    assert blocks(8192, 1000, 1 << 40) == planning.CONTEXTS * 256 + 1
    assert blocks(8192, 1000, 64_000_000) == 1000
    assert blocks(100, 1000, 1 << 40) == planning.CONTEXTS * 4 + 1
    assert blocks(8192, 0, 0) == planning.CONTEXTS * 256 + 1  # memory that does not grow


def test_windows_and_states_are_planned() -> None:
    cache = CacheBytes(1000, ((512, 5000),), 1 << 20)
    rich = plan(cache, 1 << 40, 32768, prefill_budget=2048)
    least = 1 + 16 * (19 + 2) + 128  # a window and the rows of two steps each, two chunks for all
    assert (rich.blocks, rich.windows) == (4097, {512: 2 * least})
    assert (rich.sequences, rich.snapshots) == (16, 32)
    assert rich.cache_bytes == 32 * (4097 * 1000 + 2 * least * 5000) + (2 * 16 + 32) * (1 << 20)
    for uncut, more in ((1024, 0), (3072, 64)):  # rows of an image: it has steps of its own
        room = Room(Config(cache_gb=0, prefill_budget=2048), 32768, 1 << 40, uncut=uncut)
        assert make_plan(room, 0, cache).windows == {512: 2 * (least + more)}
    poor = plan(cache, 80 << 20, 32768, prefill_budget=2048)
    assert 257 <= poor.blocks < 4097 and 150 <= poor.windows[512] < 2 * least
    assert 1 <= poor.sequences < 16
    whole = plan(CacheBytes(windows=((1 << 20, 10),)), 1 << 40, 1024)
    assert (whole.blocks, whole.windows) == (planning.CONTEXTS * 32 + 1, {}), (
        "a window beyond the context is full attention"
    )


@pytest.mark.parametrize(("gib", "sequences", "snapshots"), [(7, 2, 4), (3, 1, 1), (40, 4, 8)])
def test_a_few_conversations_come_before_one_long_context(
    gib: int, sequences: int, snapshots: int
) -> None:
    """With a state as large as that of Qwen3.8-27B; an agent asks a small question beside its own,
    which would cost the prefix of the long one."""
    got = plan(CacheBytes(65536, state=154 << 20), gib * GIB, 262_144)
    assert got.sequences >= sequences and got.snapshots >= snapshots
    assert got.blocks > planning.LEAST_CONTEXT // 32
    assert got.cache_bytes <= gib * GIB // 2


def test_snapshots_keep_their_distance() -> None:
    assert plan(CacheBytes(state=1 << 20), 1 << 40).snapshot_stride == 32
    assert plan(CacheBytes(1 << 20, state=1), 1 << 50, 1 << 20).snapshot_stride == 128


def test_a_draft_models_kv_lies_in_the_pool_for_full_attention() -> None:
    small = CacheBytes(100, ((64, 10),), 0)
    layout = LayoutChoice("rows", True, False, small, 9)
    own = CacheBytes(1000, ((512, 5000),), 0)
    both = Drafting(Path(), object(), layout=layout).beside(own)
    assert both == own._replace(token=1110)


@given(
    token_bytes=st.integers(0, 1 << 20),
    windows=st.lists(
        st.tuples(st.integers(1, 1 << 15), st.integers(1, 1 << 20)),
        max_size=2,
        unique_by=lambda w: w[0],
    ),
    state_bytes=st.integers(0, 1 << 27),
    context=st.integers(1, 1 << 18),
    block_size=st.integers(1, 512),
    max_sequences=st.integers(1, 64),
    chunk=st.integers(1, 4096),
    free=st.integers(0, 64 * GIB),
    models=st.integers(1, 20),
)
def test_a_plan_keeps_its_share_and_serves_one_sequence(
    token_bytes: int,
    windows: list[tuple[int, int]],
    state_bytes: int,
    context: int,
    block_size: int,
    max_sequences: int,
    chunk: int,
    free: int,
    models: int,
) -> None:
    cache = CacheBytes(token_bytes, tuple(windows), state_bytes)
    settings = dict(block_size=block_size, max_sequences=max_sequences, prefill_budget=chunk)
    try:
        got = plan(cache, free, context, others=("m",) * (models - 1), **settings)
    except OutOfMemory as error:
        assert error.need > free
        return
    budget = free * planning.CACHE_SHARE
    if got.cache_bytes > budget / models:  # one sequence alone takes more than the share
        assert got.cache_bytes <= budget
        with pytest.raises(OutOfMemory):
            plan(cache, free // models, context, **settings)
    for window, _ in windows:
        if window >= context:
            continue
        assert (got.windows[window] - 1) * block_size >= min(context, window + chunk)
        rows = window + 2 * (1 + MAX_DEPTH)
        most = 2 * (max_sequences * (rows / block_size + 3) + 2 * chunk / block_size + 2)
        assert got.windows[window] <= most
    assert (got.blocks - 1) * block_size >= min(context, planning.LEAST_CONTEXT)
    assert got.blocks <= planning.CONTEXTS * (context / block_size + 1) + 1
    assert 1 <= got.sequences <= max_sequences


def test_what_does_not_fit_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    on_mac(monkeypatch, Libc(MAC))

    def cache_bytes(weights: float, token_bytes: int, free: float, **settings: Any) -> int:
        config, cache = Config(cache_gb=0, **settings), CacheBytes(token_bytes)
        room = Room(config, 32768, int(free * GIB))
        return make_plan(room, int(weights * GIB), cache).cache_bytes

    assert 0.99 * 1.5 * GIB < cache_bytes(4, 65536, 8) <= 1.5 * GIB
    with pytest.raises(OutOfMemory) as large:
        cache_bytes(40, 65536, 8)
    for figure in (
        "40.0 GB for weights",
        "1.0 GB of headroom",
        "8.0 GB are free of 16.0 GB",
    ):
        assert figure in str(large.value)
    with pytest.raises(OutOfMemory, match="set --kv-bits 4 or set a lower --context"):
        cache_bytes(6.5, 65536, 8)
    with pytest.raises(OutOfMemory, match="close programs or set a lower --context"):
        cache_bytes(6.5, 65536, 8, kv_bits=4)
    with pytest.raises(OutOfMemory, match="raise --memory-gb"):
        cache_bytes(1, 65536, 0.5, memory_gb=0.5)
    with pytest.raises(OutOfMemory, match="leave out --kv-blocks") as fixed:
        cache_bytes(1, 65536, 4, kv_blocks=2000)
    assert fixed.value.need == 2 * GIB + 2000 * 32 * 65536


def pool_bytes(runner: Runner) -> int:
    return sum(pool.nbytes for pages in runner.pages() for pool in pages.pools())


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def serve(e: Engine, requests: int, vocab: int, longest: int, rng: random.Random) -> None:
    for i in range(requests):
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, longest)))
        e.add(Request(f"r{i}", prompt, rng.randint(1, 8), Sampling(rng.choice([0, 0.8]), seed=i)))
        while e.scheduler.waiting:
            e.step()
    while e.busy:
        e.step()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_200_requests_leave_the_process_as_large_as_40(kind: str) -> None:
    e, rng = tiny.engine(tiny.model(kind), blocks=400), random.Random(1)
    serve(e, 40, tiny.VOCAB, 60, rng)
    early = resident()
    serve(e, 160, tiny.VOCAB, 60, rng)
    assert resident() < 1.05 * early


def test_120_requests_with_cancels_leave_nothing_behind() -> None:
    e, rng = tiny.engine(tiny.model("qwen3"), blocks=200), random.Random(2)

    def churn(requests: int) -> tuple[int, int]:
        for i in range(requests):
            prompt = tuple(rng.randrange(tiny.VOCAB) for _ in range(rng.randint(1, 90)))
            e.add(
                Request(f"r{i}", prompt, rng.randint(1, 20), Sampling(rng.choice([0, 0.8]), seed=i))
            )
            for _ in range(rng.randint(0, 3)):
                e.step()
            if rng.random() < 0.3:
                e.abort(f"r{rng.randint(0, i)}")
        while e.busy:
            e.step()
        e.check()
        return meter.arrays(), mx.get_active_memory()

    churn(20)  # makes the pools
    early = churn(20)
    assert early[0] > 20
    live, active = churn(120)
    assert live == early[0]
    # The last step's positions and tables stay, and how many rows it has is up to the pace, which
    # is time.
    assert abs(active - early[1]) < 1024


def test_spare_buffers_are_bounded() -> None:
    before = mx.set_cache_limit(1 << 30)
    try:
        meter.bound(1 << 20)
        mx.eval([mx.zeros((1 << 18,)) + i for i in range(16)])
        assert meter.held()[1] <= 1 << 20
        meter.bound(1 << 25)
        assert mx.set_cache_limit(before) == 1 << 20, "a lower limit stands"
        meter.trim()
        assert meter.held()[1] == 0
    finally:
        mx.set_cache_limit(before)


def test_the_recommended_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meter.device_free() > 1 << 50
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 12 * GIB})
    assert meter.device_free() == 12 * GIB - mx.get_active_memory()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_500_requests_to_smollm2(smollm2: Path, tmp_path: Path) -> None:
    from mlxspec.load.loader import load_engine

    config = Config(cache_dir=str(tmp_path), cache_gb=0)
    e, info = load_engine(smollm2, "smollm2", config)
    rng = random.Random(1)
    serve(e, 50, info.vocab, 60, rng)
    early, before = resident(), pool_bytes(e.runner)
    serve(e, 450, info.vocab, 60, rng)
    taken = pool_bytes(e.runner) - before  # the pools grow with what they keep
    assert taken and resident() < 1.05 * (early + taken)

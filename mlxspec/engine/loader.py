"""From a model directory to an engine that is ready to serve: `load_engine` lists the steps.

Rule: what is derived here is reported once, in ModelInfo, and never decided again.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.disk import DiskCache, fingerprint
from mlxspec.cache.offload import KVOffloader
from mlxspec.cache.prefix import KVCacheManager, Window
from mlxspec.cache.states import StateCache
from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.engine.budget import PrefillBudget
from mlxspec.engine.engine import Engine
from mlxspec.engine.memory import MemoryPlan, make_plan
from mlxspec.engine.scheduler import Scheduler
from mlxspec.engine.warmup import WarmupCache, cache_file, kernels_in_use, versions
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import HangDetector, VerdictFile, missing, verify
from mlxspec.model import meter, recurrent
from mlxspec.model.hub import cache_of, prompts_of
from mlxspec.model.layout import (
    LayoutChoice,
    context_of,
    find_layout,
    geometry,
    load,
    load_weights,
    weights,
)
from mlxspec.model.quantized import cases_of
from mlxspec.model.runner import Runner, owed
from mlxspec.model.transfer import Transfer
from mlxspec.progress import progress
from mlxspec.speculate import Drafter
from mlxspec.speculate.calibrate import MEASURED, calibrate, one_row
from mlxspec.speculate.draft_model import DraftModel, SmallModel, fit_small
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import ModelInfo, Request, Sampling, UnsupportedModel

log = logging.getLogger("mlxspec")

KERNELS_DIR = "kernels"  # in the cache directory: what was found out about kernels
WARM_ROWS = 64  # of a warm-up prompt


def load_engine(
    path: Path,
    name: str,
    config: Config,
    draft: Path | None = None,
    share: float = 1.0,
) -> tuple[Engine, ModelInfo]:
    """Load the model at `path`, and maybe a draft model. This thread owns MLX from now on.

    `share` is the model's part of the memory for caches. Raises UnsupportedModel with the reason
    and the fix.
    """
    # Load. The weights stay on disk until the plan shows that they fit.
    began = time.perf_counter()
    loaded = [load(each) for each in (path, draft) if each]
    models = [each for each, _ in loaded]
    context = min(context_of(loaded[0][1]), config.context or 1 << 31)
    size = sum(weights(each) for each in models)  # a Runner hides some of them
    cases = _cases(models, config)  # likewise
    plan_for = partial(make_plan, config, context, size, free=_free_bytes(config), share=share)
    plan_for([(0, (), 0)])  # the weights alone: with some models, geometry() reads weights
    plan_for([geometry(models[0], config.kv_bits), *map(geometry, models[1:])])
    for each in models:
        load_weights(each)

    # Choose the layout, as an earlier start did, and the kernels.
    file = cache_file(path, config)
    cache = WarmupCache.load(file)
    fresh = cache is None
    if cache is None:
        try:
            cache = WarmupCache(layout=find_layout(models[0], config.layout, config.kv_bits))
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from error
    layout = cache.layout
    small = fit_small(draft, *loaded[1], layout) if draft else None
    stalls = _verify_kernels(cases, config)  # before the pools take memory

    # Plan again with what the layout really keeps, build the engine, warm up, calibrate.
    plan = plan_for([layout.cache_bytes, *([small.fit.cache_bytes] if small else [])])
    identity = _identity(path, layout, plan, config)
    engine = _build(models[0], layout, plan, context, identity, config)
    engine.stalls = stalls
    _warm_up(engine, fresh)
    if config.speculate == "on":
        _speculate(engine, cache, small)
    cache.save(file)
    if config.disk_bytes and layout.sharing:
        disk = DiskCache(prompts_of(config), identity, config.disk_bytes, name)
        offloader = KVOffloader(disk, engine.scheduler.kv, Transfer(engine.runner))
        engine.offloader = engine.scheduler.offloader = offloader

    log.info("%s: %s layout, ready in %.1f s", name, layout.layout, time.perf_counter() - began)
    return engine, _report(engine.scheduler, name, layout, plan, context)


def _report(
    scheduler: Scheduler, name: str, layout: LayoutChoice, plan: MemoryPlan, context: int
) -> ModelInfo:
    """Log why the engine is slower or smaller than requested, and return what was derived."""
    for reason in layout.refused:
        log.info("layout refused: %s", reason)
    if layout.lone:
        log.warning("%s: sequences run one at a time", name)
    if scheduler.limit < context:
        log.warning("context cut from %d to %d tokens by the KV pool", context, scheduler.limit)
    return ModelInfo(
        name=name,
        context=scheduler.limit,
        vocab=layout.vocab,
        layout=layout.layout,
        block_size=scheduler.pool.block_size,
        kv_blocks=plan.blocks,
        kv_bytes=plan.cache_bytes,
        weight_bytes=plan.weights,
        created=int(time.time()),
    )


def _cases(models: Sequence[Module], config: Config) -> list[Case]:
    """The kernels to verify. The K/V of a draft model are not quantized."""
    if config.kernels == "off":
        return []
    found = cases_of(models[0], config.block_size, config.kv_bits)
    for draft in models[1:]:
        found += cases_of(draft, config.block_size)
    return found


def _free_bytes(config: Config) -> int:
    """What this model may take, beside other models whose pools are still growing."""
    free = min(memory.available(), meter.device_free())
    if config.memory_gb:
        free = config.memory_bytes - meter.held()[0]
    return max(0, free - owed())


def _verify_kernels(cases: Sequence[Case], config: Config) -> HangDetector | None:
    """Decide which kernels are used. None if none is used."""
    began, file = time.perf_counter(), VerdictFile(cache_of(config) / KERNELS_DIR)
    with progress("Trying kernels") as report:
        verdicts = verify(cases, file, report)
    used = [name for name, verdict in verdicts.items() if verdict.way]
    if verdicts and not missing():
        took = time.perf_counter() - began
        log.info("%d of %d kernels in use, checked in %.1f s", len(used), len(verdicts), took)
    return HangDetector() if used else None


def _identity(path: Path, layout: LayoutChoice, plan: MemoryPlan, config: Config) -> str:
    """A hash of everything that the content of a KV block depends on, beside its tokens."""
    facts = versions() | {
        "layout": layout.layout,
        "bits": str(layout.kv_bits),
        "block": str(config.block_size),
        "windows": str(sorted(plan.windows)),
        "device": str(mx.default_device()),
    }
    return fingerprint(path, facts)


def _build(
    model: Module,
    layout: LayoutChoice,
    plan: MemoryPlan,
    context: int,
    identity: str,
    config: Config,
) -> Engine:
    """Runner, pools and scheduler. The pools grow as they are used."""
    meter.bound(memory.headroom() // 2)  # the other half is for a step's activations
    runner = layout.runner(model, config.block_size, plan.blocks, plan.windows)

    def pool(blocks: int) -> BlockPool:
        return BlockPool(blocks, config.block_size, identity.encode())

    states = None
    if layout.state_bytes:
        states = StateCache(plan.snapshots, plan.snapshot_stride, recurrent.own)
    windows = [Window(tokens, pool(blocks)) for tokens, blocks in plan.windows.items()]
    kv = KVCacheManager(pool(plan.blocks), windows, states)
    runner.grow_on_demand(lambda: [pool.highest for pool in kv.pools])
    scheduler = Scheduler(
        kv,
        context=context,
        max_sequences=min(config.max_sequences, plan.sequences),
        pace=PrefillBudget(config.decode_gap_ms / 1000, config.prefill_budget),
        sharing=layout.sharing,
        drafts=layout.drafts,
    )
    return Engine(runner, scheduler, vocab=layout.vocab)


def _warm_up(engine: Engine, fresh: bool) -> None:
    """Run short requests through the real pools, which allocates them and compiles what is compiled
    lazily. At the first start of a model also check that steps write the pools in place; later a
    single row is enough."""
    scheduler, limit = engine.scheduler, engine.scheduler.limit
    if limit < 2:
        raise UnsupportedModel(
            f"a context of {limit} tokens has no room for an answer; raise --context or --kv-blocks"
        )
    pace, scheduler.pace = scheduler.pace, PrefillBudget()  # learns nothing from compiling
    if not fresh:
        _run(engine, (1,), 1, 1)
    else:
        rows, places = min(WARM_ROWS, limit - 1), set()
        # With odd and even numbers of steps: two buffers in turn are back in place after two.
        for numbers, tokens in (((1, 2), 4), ((3, 4), 4), ((5, 6), 3)):
            _run(engine, numbers, rows, tokens)
            sizes = tuple(engine.runner.view.held.values())
            places.add((sizes, engine.runner.addresses()))
        if len({sizes for sizes, _ in places}) < len(places):  # a grown pool may have moved
            log.warning(
                "MLX copies the KV pool in each step instead of writing in place: answers are right"
                " but slow; please report it"
            )
    scheduler.pace = pace
    engine.reset()


def _run(engine: Engine, numbers: Sequence[int], rows: int, tokens: int) -> None:
    """Serve a prompt of `rows` tokens for each number."""
    for number in numbers:
        prompt = tuple((number + at) % engine.vocab for at in range(rows))
        engine.add(Request(f"warm-up {number}", prompt, tokens, Sampling(seed=1)))
    while engine.busy:
        engine.step()


def _speculate(engine: Engine, cache: WarmupCache, small: SmallModel | None) -> None:
    """Measure what steps cost, unless the cache knows, and give the idle engine its drafters."""
    runner, pool = engine.runner, engine.scheduler.pool
    if not engine.scheduler.drafts:
        log.warning("no speculation: this model cannot roll back a rejected draft")
        return
    highest, kernels = pool.highest, kernels_in_use()
    known = cache.costs if cache.kernels == kernels else None
    table = pool.allocate(min(len(pool.free_blocks), -(-MEASURED // pool.block_size))) or []
    try:
        with progress("Measuring steps") as report:
            costs = calibrate(runner, engine.vocab, table, known, report)
        if costs is None:
            log.warning("no speculation: the KV pool is too small to measure what a draft costs")
            return
        drafters: list[Drafter] = [NgramDrafter()]
        if small:
            drafters.append(_draft_model(engine, small, table))
    finally:
        pool.free(table)
        pool.highest = highest  # the measurement left nothing worth keeping
    cache.costs, cache.kernels = costs, kernels
    runner.tap([tap for drafter in drafters for tap in drafter.taps])
    engine.proposer = Proposer(costs, drafters, overlap=runner.layout == "rows")


def _draft_model(engine: Engine, small: SmallModel, table: list[int]) -> DraftModel:
    """The draft model over the target's block ids; `table` are blocks to measure it with."""
    pool = engine.scheduler.pool
    runner = Runner(small.model, "rows", pool.block_size, pool.size, trunk=small.fit.trunk)
    runner.grow_on_demand(lambda: [pool.highest])
    seconds = one_row(runner, table)
    return DraftModel(runner, engine.vocab, seconds, small.fit.vocab, small.context)

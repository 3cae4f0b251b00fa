"""From a model directory to an engine that is ready to serve: `load_engine` lists the steps.

Rule: what is derived here is reported once, in ModelInfo, and never decided again.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

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
from mlxspec.kernels.verify import VerdictFile, verify
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
from mlxspec.model.quantized import kernel_cases
from mlxspec.model.runner import Runner
from mlxspec.model.transfer import Transfer
from mlxspec.progress import progress
from mlxspec.speculate import Drafter
from mlxspec.speculate.calibrate import MEASURED, calibrate, one_row
from mlxspec.speculate.controller import Costs
from mlxspec.speculate.draft_model import DraftModel, SmallModel, fit_small
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import MAX_DEPTH, ModelInfo, Request, UnsupportedModel

log = logging.getLogger("mlxspec")

MAX_PADDED_DEPTH = 15  # of a draft outside the rows layout: the attention kernel takes 16 rows
KERNELS_DIR = "kernels"  # in the cache directory: the verdicts about kernels


def load_engine(
    path: Path,
    name: str,
    config: Config,
    draft: Path | None = None,
    share: float = 1.0,
    reserved: int = 0,
) -> tuple[Engine, ModelInfo]:
    """Load the model at `path`, and maybe a draft model; this thread owns MLX from now on. `share`
    is the model's part of the memory for caches, `reserved` the bytes that other models may still
    take. Raises UnsupportedModel.
    """
    began = time.perf_counter()
    loaded = [load(each) for each in (path, draft) if each]  # their weights stay on disk
    models = [model for model, _ in loaded]
    context = min(context_of(loaded[0][1]), config.context or 1 << 31)
    size = sum(map(weights, models))  # a Runner hides some of them
    cases = _cases(models, config)  # likewise
    free = _free_bytes(config) - reserved
    plan_for = partial(make_plan, config, context, size, free=free, share=share)
    plan_for([(0, (), 0)])  # the weights alone: with some models, geometry() reads weights
    plan_for([geometry(models[0], config.kv_bits), *map(geometry, models[1:])])
    for model in models:
        load_weights(model)
    file = cache_file(path, config)
    cache = WarmupCache.load(file) or _find_layout(path, models[0], config)
    layout = cache.layout
    caches, small = [layout.cache_bytes], None
    if draft:
        small = fit_small(draft, *loaded[1], layout)
        caches.append(small.fit.cache_bytes)
    with progress("Trying kernels") as report:  # before the pools take memory
        verify(cases, VerdictFile(cache_of(config) / KERNELS_DIR), report)
    plan = plan_for(caches)  # with what the layouts really keep
    kept = f"{layout.layout} {config.kv_bits} {config.block_size} {sorted(plan.windows)}"
    identity = fingerprint(path, versions() | {"kept": kept})  # of a KV block, beside its tokens
    engine = _build(models[0], layout, plan, context, identity, config)
    _warm_up(engine, config)
    if config.speculate == "on":
        _add_drafters(engine, cache, small)
    cache.save(file)
    if config.disk_bytes and layout.sharing:
        disk = DiskCache(prompts_of(config), identity, config.disk_bytes, name)
        offloader = KVOffloader(disk, engine.scheduler.kv, Transfer(engine.runner))
        engine.offloader = engine.scheduler.offloader = offloader
    _log_limits(engine.scheduler, layout, context)
    log.info("%s: %s layout, ready in %.1f s", name, layout.layout, time.perf_counter() - began)
    return engine, _info(engine.scheduler, name, layout, plan)


def _find_layout(path: Path, model: Module, config: Config) -> WarmupCache:
    """Find the layout, at the first start of a model."""
    try:
        return WarmupCache(layout=find_layout(model, config.layout, config.kv_bits))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error


def _log_limits(scheduler: Scheduler, layout: LayoutChoice, context: int) -> None:
    """Log why the engine is slower or smaller than requested."""
    for reason in layout.refused:
        log.info("layout refused: %s", reason)
    if scheduler.limit < context:
        log.warning("context cut from %d to %d tokens by the KV pool", context, scheduler.limit)


def _info(
    scheduler: Scheduler,
    name: str,
    layout: LayoutChoice,
    plan: MemoryPlan,
) -> ModelInfo:
    """What the server knows of the loaded model."""
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
    found = []
    if config.kernels == "auto":
        for model, bits in zip(models, (config.kv_bits, 0), strict=False):
            found += kernel_cases(model, config.block_size, bits)
    return found


def _free_bytes(config: Config) -> int:
    """What this model may take, beside what other models hold."""
    free = min(memory.available(), meter.device_free())
    if config.memory_gb:
        free = config.memory_bytes - meter.held()[0]
    return free


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
    runner = layout.runner(
        model, config.block_size, plan.blocks, windows=plan.windows, kv_bits=config.kv_bits
    )
    pool = partial(BlockPool, block_size=config.block_size, salt=identity.encode())
    states = None
    if layout.cache_bytes.state:
        states = StateCache(plan.snapshots, plan.snapshot_stride, recurrent.own)
    windows = [Window(tokens, pool(blocks)) for tokens, blocks in plan.windows.items()]
    kv = KVCacheManager(pool(plan.blocks), windows, states)
    runner.grow_on_demand(lambda: [pool.highest for pool in kv.pools])
    scheduler = Scheduler(
        kv,
        context=context,
        max_sequences=min(config.max_sequences, plan.sequences),
        sharing=layout.sharing,
        can_draft=layout.can_draft,
    )
    return Engine(runner, scheduler, vocab=layout.vocab)


def _warm_up(engine: Engine, config: Config) -> None:
    """Run two requests through the real pools, which compiles what is compiled lazily. The prefill
    budget is made afterwards, so that it learns nothing from compiling."""
    limit = engine.scheduler.limit
    if limit < 2:
        raise UnsupportedModel(
            f"a context of {limit} tokens has no room for an answer; raise --context or --kv-blocks"
        )
    for token in range(2):
        engine.add(Request("warm-up", (token,), 1))
    while engine.busy:
        engine.step()
    engine.reset()
    gap = config.decode_gap_ms / 1000
    engine.scheduler.prefill_budget = PrefillBudget(gap, config.prefill_budget)


def _add_drafters(engine: Engine, cache: WarmupCache, small: SmallModel | None) -> None:
    """Measure what steps cost, and give the idle engine its drafters."""
    pool = engine.scheduler.pool
    if not engine.scheduler.can_draft:
        log.warning("no speculation: this model cannot roll back a rejected draft")
        return
    highest = pool.highest
    blocks = min(len(pool.free_blocks), -(-MEASURED // pool.block_size))
    table = pool.allocate(blocks) or []
    costs = _measure_steps(engine, cache, table)
    if costs:
        drafters: list[Drafter] = [NgramDrafter()]
        if small:
            draft = Runner(small.model, "rows", pool.block_size, pool.size, trunk=small.fit.trunk)
            draft.grow_on_demand(lambda: [pool.highest])
            seconds = one_row(draft, table)
            vocab = small.fit.vocab
            drafters.append(DraftModel(draft, engine.vocab, seconds, vocab, small.context))
        engine.runner.tap([tap for drafter in drafters for tap in drafter.taps])
        layout = engine.runner.layout
        depth = MAX_DEPTH if layout == "rows" else MAX_PADDED_DEPTH
        engine.proposer = Proposer(costs, drafters, layout != "solo", depth)
    else:
        log.warning("no speculation: the KV pool is too small to measure what a draft costs")
    pool.free(table)
    pool.highest = highest  # the measurement left nothing worth keeping


def _measure_steps(engine: Engine, cache: WarmupCache, table: list[int]) -> Costs | None:
    """The cost of a step, from the cache if it was measured with the kernels in use; None if the
    blocks in `table` are too few."""
    kernels = kernels_in_use()
    known = cache.costs if cache.kernels == kernels else None
    with progress("Measuring steps") as report:
        costs = calibrate(engine.runner, table, known, report)
    cache.costs = costs
    cache.kernels = kernels
    return costs

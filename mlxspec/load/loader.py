"""From a model directory to an engine that is ready to serve: `load_engine` lists the steps.

Rule: what is derived here is reported once, in ModelInfo, and never decided again.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlx.nn import Module

from mlxspec import log
from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.disk import DiskCache, fingerprint
from mlxspec.cache.offload import KVOffloader
from mlxspec.cache.prefix import KVCacheManager, StateCache, Window
from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.engine.budget import PrefillBudget
from mlxspec.engine.engine import Engine
from mlxspec.engine.scheduler import Scheduler
from mlxspec.kernels.verify import VerdictFile, recall
from mlxspec.load.drafting import Drafting, add_drafters, facts_of, load_drafting
from mlxspec.load.measuring import Measuring
from mlxspec.load.plan import MemoryPlan, make_plan
from mlxspec.load.warmup import WarmupCache, cache_file, versions
from mlxspec.model import meter, recurrent
from mlxspec.model.hub import cache_of, prompts_of
from mlxspec.model.layout import (
    CacheBytes,
    LayoutChoice,
    context_of,
    find_layout,
    geometry,
    load,
    load_weights,
    weights,
)
from mlxspec.model.mirror import Mirror
from mlxspec.model.parallel import Ranks
from mlxspec.model.transfer import Transfer
from mlxspec.types import ModelInfo, Request, UnsupportedModel

KERNELS_DIR = "kernels"  # in the cache directory: the verdicts about kernels


def load_engine(
    path: Path,
    name: str,
    config: Config,
    draft: Path | None = None,
    reserved: int = 0,
    ranks: Ranks | None = None,
    measure_idle: bool = False,
) -> tuple[Engine, ModelInfo]:
    """Load the model at `path` and what drafts for it, a small model or a head at `draft` or the
    head in its own files; this thread owns MLX from now on. `reserved`: the bytes that other models
    may still take. `measure_idle`: what a first start measures is left to the engine's
    `work_idle`. Of several `ranks`, those above 0 do what a Follower needs. Raises
    UnsupportedModel."""
    began = time.perf_counter()
    ranks = ranks or Ranks()
    model, drafting, context, plan_for = _read_weights(path, draft, config, reserved, ranks)
    file = cache_file(path, config, ranks)
    cache = _find_layout(path, model, config, file, ranks)
    layout = cache.layout
    drafting.fit_to(layout)
    cases = []
    if config.kernels:  # the K/V of what drafts are not quantized
        cases = layout.cases(model, config.block_size, config.kv_bits) + drafting.cases(config)
    recall(cases, verdict_file(config))
    plan = plan_for(layout.cache_bytes)  # with what the layouts really keep
    kept = f"{layout.layout} {config.kv_bits} {config.block_size} {sorted(plan.windows)}"
    ranks.same(kept, "layout")
    ranks.enough([plan.blocks, *plan.windows.values()])
    mirror = Mirror(ranks, name) if ranks.size > 1 and not ranks.rank else None
    engine, info = _build(model, name, layout, plan, context, config, mirror)
    facts = versions() | {"kept": kept}
    if ranks.size > 1:
        facts["rank"] = str(ranks)
    add_disk = partial(_add_disk, engine, config, path, name)
    if ranks.rank:  # it only follows
        add_disk(facts)
    ranks.gather("ready")
    if not ranks.rank:
        save = partial(cache.save, file)
        _warm_up(engine, config)
        if config.speculate:
            add_drafters(engine, drafting, config)
        known = Measuring(engine, cache, save, cases, verdict_file(config), drafting.key)
        known.recall(lambda drafter: add_disk(facts | facts_of(drafting, drafter)))
    cache.save(file)
    _log_limits(engine.scheduler, layout, context, config.max_sequences)
    log.info("%s: %s layout, ready in %.1f s", name, layout.layout, time.perf_counter() - began)
    if not measure_idle:
        engine.work_idle()
    return engine, info


def _read_weights(
    path: Path, draft: Path | None, config: Config, reserved: int, ranks: Ranks
) -> tuple[Module, Drafting, int, Callable[[CacheBytes], MemoryPlan]]:
    """The model and what drafts for it, if they fit into memory, the context in tokens, and what
    makes the plan of their memory. Raises UnsupportedModel."""
    model, files = load(path, ranks.group)  # the weights stay on disk
    drafting = load_drafting(model, path, draft, config)
    context = context_of(files, config.context)
    size = weights(model)
    _compare(ranks, path, config, f"{files} {size} {context}")
    # What loaded models may still take is known to rank 0 alone.
    free = min(ranks.gather(free_bytes(config))) - max(ranks.gather(reserved))
    make = partial(make_plan, config, context, free=free)
    plan_for = partial(drafting.plan, make, size)
    plan_for()  # the weights alone: with some models, geometry() reads weights
    ranks.gather("planned")
    plan_for(geometry(model, config.kv_bits))
    ranks.gather("planned")  # a rank without memory says so before the others read arrays
    with ranks.reading():
        load_weights(model, ranks.heard if ranks.group else None)
    drafting.load_weights()
    return model, drafting, context, plan_for


def _compare(ranks: Ranks, path: Path, config: Config, facts: str) -> None:
    """Check that all ranks have the same model. Raises UnsupportedModel."""
    if ranks.size == 1:
        return
    facts += f" {config.block_size} {config.kv_bits} {config.layout} {versions()}"
    facts += (
        f" {config.kv_blocks} {config.max_sequences} {config.prefill_budget} {len(config.others)}"
    )
    ranks.same(f"{facts} {config.disk_bytes > 0}", "model, version or setting")
    ranks.same(fingerprint(path, {}, mtime=False), "weights")


def _find_layout(
    path: Path, model: Module, config: Config, file: Path, ranks: Ranks
) -> WarmupCache:
    """What earlier starts of the model found, on all ranks; else find its layout."""
    known = WarmupCache.load(file)
    if all(ranks.gather(known is not None)) and known:
        return known
    try:
        return WarmupCache(layout=find_layout(model, config.layout, config.kv_bits))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error


def _log_limits(scheduler: Scheduler, layout: LayoutChoice, context: int, wanted: int) -> None:
    """Log why the engine is slower or smaller than requested: with `context` tokens, and `wanted`
    sequences at a time."""
    for reason in layout.refused:
        log.info("layout refused: %s", reason)
    if scheduler.max_sequences < wanted:
        log.warning(
            "max_sequences reduced to %d: not enough memory for recurrent state",
            scheduler.max_sequences,
        )
    if scheduler.limit < context:
        log.warning("context cut from %d to %d tokens by the KV pool", context, scheduler.limit)


def verdict_file(config: Config) -> VerdictFile:
    """The verdicts about kernels."""
    return VerdictFile(cache_of(config) / KERNELS_DIR)


def free_bytes(config: Config) -> int:
    """What a model may take, beside what MLX holds now. Ranks that one server started share the
    machine's memory."""
    if config.memory_gb:
        return config.memory_bytes // config.ranks - meter.held()[0]
    return min(memory.available(), meter.device_free()) // config.ranks


def _build(
    model: Module,
    name: str,
    layout: LayoutChoice,
    plan: MemoryPlan,
    context: int,
    config: Config,
    mirror: Mirror | None,
) -> tuple[Engine, ModelInfo]:
    """Runner, pools and scheduler, and what the server knows of them. The pools grow as they are
    used."""
    meter.bound(memory.headroom() // 2)  # the other half is for a step's activations
    runner = layout.runner(
        model, config.block_size, plan.blocks, windows=plan.windows, kv_bits=config.kv_bits
    )
    runner.mirror = mirror
    pool = partial(BlockPool, block_size=config.block_size)
    states = None
    if layout.cache_bytes.state:
        copy = mirror.keep if mirror else recurrent.own
        states = StateCache(plan.snapshots, plan.snapshot_stride, copy)
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
    info = ModelInfo(
        name=name,
        context=scheduler.limit,
        vocab=layout.vocab,
        layout=layout.layout,
        block_size=config.block_size,
        kv_bytes=plan.cache_bytes,
        weight_bytes=plan.weights,
    )
    return Engine(runner, scheduler, vocab=layout.vocab), info


def _add_disk(engine: Engine, config: Config, path: Path, name: str, facts: dict[str, str]) -> None:
    """Keep prompts on disk, if the settings and the layout allow it; beside tokens, K/V depend on
    `facts`."""
    if not (config.disk_bytes and engine.scheduler.sharing):
        return
    disk = DiskCache(prompts_of(config), fingerprint(path, facts), config.disk_bytes, name)
    offloader = KVOffloader(disk, engine.scheduler.kv, Transfer(engine.runner))
    engine.offloader = engine.scheduler.offloader = offloader


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

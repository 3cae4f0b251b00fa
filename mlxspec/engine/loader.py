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
from mlxspec.types import ModelInfo, Request, UnsupportedModel

log = logging.getLogger("mlxspec")

KERNELS_DIR = "kernels"  # in the cache directory: what was found out about kernels
WARM_ROWS = 64  # of a warm-up prompt


def load_engine(
    path: Path, name: str, config: Config, draft: Path | None = None, share: float = 1.0
) -> tuple[Engine, ModelInfo]:
    """Load the model at `path`, and maybe a draft model; this thread owns MLX from now on. `share`
    is the model's part of the memory for caches. Raises UnsupportedModel.
    """
    began = time.perf_counter()
    loaded = [load(each) for each in (path, draft) if each]  # their weights stay on disk
    models = [model for model, _ in loaded]
    context = min(context_of(loaded[0][1]), config.context or 1 << 31)
    size = sum(map(weights, models))  # a Runner hides some of them
    cases = _cases(models, config)  # likewise
    plan_for = partial(make_plan, config, context, size, free=_free_bytes(config), share=share)
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
    stalls = _verify_kernels(cases, config)  # before the pools take memory
    plan = plan_for(caches)  # with what the layout really keeps
    identity = _identity(path, layout, plan, config)
    engine = _build(models[0], layout, plan, context, identity, config)
    engine.stalls = stalls
    _warm_up(engine, cache)
    if config.speculate == "on":
        _speculate(engine, cache, small)
    cache.save(file)
    if config.disk_bytes and layout.sharing:
        disk = DiskCache(prompts_of(config), identity, config.disk_bytes, name)
        offloader = KVOffloader(disk, engine.scheduler.kv, Transfer(engine.runner))
        engine.offloader = engine.scheduler.offloader = offloader
    log.info("%s: %s layout, ready in %.1f s", name, layout.layout, time.perf_counter() - began)
    return engine, _report(engine.scheduler, name, layout, plan, context)


def _find_layout(path: Path, model: Module, config: Config) -> WarmupCache:
    """At the first start."""
    try:
        return WarmupCache(layout=find_layout(model, config.layout, config.kv_bits))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error


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
    found, bits = [], config.kv_bits
    for model in models:
        found += cases_of(model, config.block_size, bits)
        bits = 0
    return found


def _free_bytes(config: Config) -> int:
    """What this model may take, beside other models whose pools are still growing."""
    free = min(memory.available(), meter.device_free())
    if config.memory_gb:
        free = config.memory_bytes - meter.held()[0]
    return free - owed()


def _verify_kernels(cases: Sequence[Case], config: Config) -> HangDetector | None:
    """Decide which kernels are used. None if none is used."""
    with progress("Trying kernels") as report:
        verdicts = verify(cases, VerdictFile(cache_of(config) / KERNELS_DIR), report)
    used = [verdict for verdict in verdicts.values() if verdict.way]
    if verdicts and not missing():
        log.info("%d of %d kernels in use", len(used), len(verdicts))
    return HangDetector() if used else None


def _identity(
    path: Path,
    layout: LayoutChoice,
    plan: MemoryPlan,
    config: Config,
) -> str:
    """A hash of everything that the content of a KV block depends on, beside its tokens."""
    kept = f"{layout.layout} {layout.kv_bits} {config.block_size} {sorted(plan.windows)}"
    return fingerprint(path, versions() | {"kept": kept, "device": str(mx.default_device())})


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
        prefill_budget=PrefillBudget(config.decode_gap_ms / 1000, config.prefill_budget),
        sharing=layout.sharing,
        can_draft=layout.can_draft,
    )
    return Engine(runner, scheduler, vocab=layout.vocab)


def _warm_up(engine: Engine, cache: WarmupCache) -> None:
    """Run short requests through the real pools, which allocates them and compiles what is compiled
    lazily. At the first start of a model also check that steps write the pools in place, and time a
    prompt, from which the budget for prompts starts."""
    scheduler, limit = engine.scheduler, engine.scheduler.limit
    if limit < 2:
        raise UnsupportedModel(
            f"a context of {limit} tokens has no room for an answer; raise --context or --kv-blocks"
        )
    budget, scheduler.prefill_budget = (
        scheduler.prefill_budget,
        PrefillBudget(),
    )  # learns nothing from compiling
    if cache.prefill_seconds:
        _run(engine, 0, 1, 1)
    else:
        sizes, places = set(), set()
        # With odd and even numbers of steps: two buffers in turn are back in place after two.
        for number, tokens in enumerate((4, 4, 3, 1)):
            _run(engine, 2 * number, WARM_ROWS, tokens)
            held = tuple(engine.runner.view.held.values())
            sizes.add(held)
            places.add((held, engine.runner.addresses()))
        if len(sizes) < len(places):  # a grown pool may have moved
            log.warning("MLX copies the KV pool in each step: answers are slow; please report it")
        cache.prefill_seconds = engine.step_seconds / 2  # of the last prompts, in one step
    scheduler.prefill_budget = budget
    budget.learn(WARM_ROWS, True, cache.prefill_seconds)
    engine.reset()


def _run(
    engine: Engine,
    number: int,
    rows: int,
    tokens: int,
) -> None:
    """Serve two prompts of `rows` tokens."""
    for start in (number, number + 1):
        prompt = tuple((start + at) % engine.vocab for at in range(rows))
        engine.add(Request("warm-up", prompt[: engine.scheduler.limit - 1], tokens))
    while engine.busy:
        engine.step()


def _speculate(engine: Engine, cache: WarmupCache, small: SmallModel | None) -> None:
    """Measure what steps cost, unless the cache knows, and give the idle engine its drafters."""
    runner, pool = engine.runner, engine.scheduler.pool
    if not engine.scheduler.can_draft:
        log.warning("no speculation: this model cannot roll back a rejected draft")
        return
    highest, kernels = pool.highest, kernels_in_use()
    known = cache.costs if cache.kernels == kernels else None
    blocks = min(len(pool.free_blocks), -(-MEASURED // pool.block_size))
    table = pool.allocate(blocks) or []
    try:
        with progress("Measuring steps") as report:
            costs = calibrate(runner, table, known, report)
        if costs is None:
            log.warning("no speculation: the KV pool is too small to measure what a draft costs")
            return
        drafters: list[Drafter] = [NgramDrafter()]
        if small:
            drafts = Runner(small.model, "rows", pool.block_size, pool.size, trunk=small.fit.trunk)
            drafts.grow_on_demand(lambda: [pool.highest])
            seconds, vocab = one_row(drafts, table), small.fit.vocab
            drafters.append(DraftModel(drafts, engine.vocab, seconds, vocab, small.context))
    finally:
        pool.free(table)
        pool.highest = highest  # the measurement left nothing worth keeping
    cache.costs, cache.kernels = costs, kernels
    runner.tap([tap for drafter in drafters for tap in drafter.taps])
    engine.proposer = Proposer(costs, drafters, overlap=runner.layout == "rows")

"""From a model directory to an engine that is ready to serve: `load_engine` lists the steps.

Rule: what is derived here is reported once, in ModelInfo, and never decided again.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlx.nn import Module

from mlxspec import log
from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.disk import fingerprint
from mlxspec.cache.prefix import KVCacheManager, StateCache, Window
from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.engine.budget import PrefillBudget
from mlxspec.engine.engine import Engine
from mlxspec.engine.scheduler import Scheduler
from mlxspec.kernels import verify
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import VerdictFile, recall
from mlxspec.load.drafting import Drafting, add_drafters, load_drafting
from mlxspec.load.exact import UNPROVEN, Exactness, examine, unsupported
from mlxspec.load.measuring import Measuring
from mlxspec.load.plan import MemoryPlan, Room, make_plan
from mlxspec.load.vision import open_eyes, open_tower, tower_bytes
from mlxspec.load.warmup import (
    PromptStore,
    WarmupCache,
    cache_file,
    here,
    kernels_in_use,
    versions,
)
from mlxspec.model import meter
from mlxspec.model.checkpoint import context_of, load_model, load_weights, parameter_bytes
from mlxspec.model.hub import cache_of
from mlxspec.model.layout import LayoutChoice, find_layout, geometry
from mlxspec.model.mirror import runner_type
from mlxspec.model.parallel import ALONE, ProcessGroup
from mlxspec.model.vision.seam import Eyes
from mlxspec.progress import progress
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import ModelInfo, Request, UnsupportedModel

KERNELS_DIR = "kernels"  # in the cache directory: the verdicts about kernels


def load_engine(
    path: Path,
    name: str,
    config: Config,
    draft: Path | None = None,
    reserved: int = 0,
    group: ProcessGroup = ALONE,
    measure_idle: bool = False,
) -> tuple[Engine, ModelInfo]:
    """Load the model at `path` and what drafts for it, a small model or a head at `draft` or the
    head in its own files; this thread owns MLX from now on. `reserved`: the bytes that other models
    may still take. `measure_idle`: what a first start measures is left to the engine's
    `work_idle`. Of a `group` of several, rank 0 alone drafts and measures. Raises
    UnsupportedModel."""
    began = time.perf_counter()
    model, context = _open(path, config, group)
    tower = open_tower(path, config, group)
    drafting = load_drafting(model, path, draft=draft, config=config)
    room = _agree_on_room(config, context, reserved=reserved, group=group)
    _check_fits(model, tower, drafting, room=room, group=group)
    _read_weights(model, drafting, group)
    cache = _recall_or_find_layout(model, path, config=config, group=group)
    eyes = open_eyes(model, tower, cache, path=path, config=config)
    plan = _plan_memory(model, eyes, drafting, layout=cache.layout, room=room)
    cases = _recall_kernels(model, drafting, layout=cache.layout, config=config, group=group)
    exact = _find_exactness(model, cache, config, group)
    facts = _agree_on_pools(plan, cache.layout, config=config, group=group)
    if exact and exact.used(config.exact):
        facts |= here() | {"exact": str(exact.invariance)}
    engine, info = _build(model, name, layout=cache.layout, plan=plan, room=room, group=group)
    engine.runner.see(eyes)
    info = _apply_exact(engine, info, exact=exact, config=config)
    info = replace(info, sees=eyes is not None)
    measuring = Measuring(
        engine=engine,
        cache=cache,
        cases=cases,
        verdicts=verdict_file(config),
        drafting=drafting,
        prompts=PromptStore(path, name, config=config, facts=facts),
    )
    _start(measuring, config, group)
    if info.exact_rows and isinstance(engine.proposer, Proposer):
        engine.proposer.draft_at_most(info.exact_rows - 1)
    _log_limits(engine.scheduler, cache.layout, room)
    log.info("%s: %s layout, ready in %.1f s", name, info.layout, time.perf_counter() - began)
    if not measure_idle:
        engine.work_idle()
    return engine, info


def _open(path: Path, config: Config, group: ProcessGroup) -> tuple[Module, int]:
    """The model, whose weights stay on disk, and its longest context in tokens; all ranks have the
    same. Raises UnsupportedModel."""
    model, files = load_model(path, group)
    context = context_of(files, config.context)
    if group.size > 1:
        _check_same(path, f"{files} {parameter_bytes(model)} {context}", config=config, group=group)
    return model, context


def _check_same(path: Path, facts: str, config: Config, group: ProcessGroup) -> None:
    """Check that all ranks have the same model. Raises UnsupportedModel."""
    facts += f" {config.block_size} {config.kv_bits} {config.layout} {versions()}"
    facts += (
        f" {config.kv_blocks} {config.max_sequences} {config.prefill_budget} {len(config.others)}"
    )
    group.same(f"{facts} {config.disk_bytes > 0}", "model, version or setting")
    group.same(fingerprint(path, {}, mtime=False), "weights")


def _agree_on_room(config: Config, context: int, reserved: int, group: ProcessGroup) -> Room:
    """The room on the rank that has the least. What loaded models may still take is known to rank 0
    alone."""
    free = min(group.gather(free_bytes(config))) - max(group.gather(reserved))
    return Room(config, context, free)


def _check_fits(
    model: Module,
    tower: Module | None,
    drafting: Drafting,
    room: Room,
    group: ProcessGroup,
) -> None:
    """Check that weights and the least caches fit into memory, before weights are read; a head
    that does not fit is left out. Raises OutOfMemory."""
    size = parameter_bytes(model) + tower_bytes(tower)
    drafting.check_room(room, size)  # with some models, geometry() reads weights
    group.gather("planned")
    drafting.check_room(room, size, geometry(model, room.config.kv_bits, group))
    group.gather("planned")  # a rank without memory says so before the others read arrays


def _read_weights(model: Module, drafting: Drafting, group: ProcessGroup) -> None:
    """Read the weights of both. Raises UnsupportedModel."""
    with group.together():
        load_weights(model, group)
    drafting.load_weights()


def _recall_or_find_layout(
    model: Module, path: Path, config: Config, group: ProcessGroup
) -> WarmupCache:
    """What earlier starts of the model found, on all ranks; else find its layout."""
    file = cache_file(path, config, group)
    known = WarmupCache.load(file)
    if not all(group.gather(known is not None)) or not known:
        try:
            layout = find_layout(model, config.layout, config.kv_bits, group=group)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from error
        known = WarmupCache(layout=layout, file=file)
        known.save()
    known.file = file
    return known


def _find_exactness(
    model: Module,
    cache: WarmupCache,
    config: Config,
    group: ProcessGroup,
) -> Exactness | None:
    """What earlier starts found with the kernels in use, proven before it is used for the first
    time; under `auto`, the first start finds it out in idle moments. None where it is not
    wanted."""
    if group.group or config.exact == "off":
        return None
    if cache.exact is None or cache.exact_kernels != kernels_in_use():
        why = unsupported(cache.layout)
        cache.exact = Exactness(rows=0, why=why) if why else Exactness()
        cache.exact_kernels = kernels_in_use()
    exact = cache.exact
    if exact.rows == UNPROVEN and (config.exact == "on" or exact.pays):
        with progress("Checking which rows keep their bits"):
            proven = examine(
                model,
                cache.layout,
                config.block_size,
                exact.invariance,
                config.kv_bits,
            )
        cache.exact = replace(proven, cost=exact.cost)
        cache.save()
    return cache.exact


def _apply_exact(
    engine: Engine,
    info: ModelInfo,
    exact: Exactness | None,
    config: Config,
) -> ModelInfo:
    """Make an engine's rows keep their bits, if that is wanted; adds the verdict to `info`."""
    if not exact:
        return info
    text = exact.describe(config.exact)
    log.info("%s: %s", info.name, text)
    if not exact.used(config.exact):
        return replace(info, exact=text)
    assert exact.invariance
    engine.runner.set_invariance(exact.invariance)
    engine.scheduler.kv.chunk = exact.invariance.chunk
    return replace(info, exact=text, exact_rows=exact.rows)


def _plan_memory(
    model: Module,
    eyes: Eyes | None,
    drafting: Drafting,
    layout: LayoutChoice,
    room: Room,
) -> MemoryPlan:
    """The plan with what the layouts really keep; what cannot draft in them is left out. Raises
    UnsupportedModel."""
    drafting.fit_layout(layout)
    size = parameter_bytes(model) + tower_bytes(eyes.tower if eyes else None)
    drafting.check_room(room, size, layout.cache_bytes)
    cached = drafting.beside(layout.cache_bytes)
    room = replace(room, uncut=eyes.uncut if eyes else 0)
    return make_plan(room, size + drafting.nbytes, cached)


def _recall_kernels(
    model: Module,
    drafting: Drafting,
    layout: LayoutChoice,
    config: Config,
    group: ProcessGroup,
) -> list[Case]:
    """The kernels of the model and of what drafts, whose K/V are not quantized; those that earlier
    starts found to be faster are used from now on. A group of several has none, as the results of
    all must be equal to the last bit."""
    cases = []
    if group.group:
        log.info("%s: no kernels of our own", group)
    elif config.kernels and not verify.unavailable():
        cases = layout.cases(model, config.block_size, config.kv_bits) + drafting.cases(config)
    recall(cases, verdict_file(config))
    return cases


def _agree_on_pools(
    plan: MemoryPlan,
    layout: LayoutChoice,
    config: Config,
    group: ProcessGroup,
) -> dict[str, str]:
    """What the K/V of this rank depend on; those of all must be alike. Raises UnsupportedModel."""
    kept = f"{layout.layout} {config.kv_bits} {config.block_size} {sorted(plan.windows)}"
    group.same(kept, "layout")
    group.enough([plan.blocks, *plan.windows.values()])
    facts = versions() | {"kept": kept}
    return facts | {"rank": str(group)} if group.size > 1 else facts


def _log_limits(scheduler: Scheduler, layout: LayoutChoice, room: Room) -> None:
    """Log why the engine is slower or smaller than requested."""
    for reason in layout.refused:
        log.info("layout refused: %s", reason)
    if scheduler.max_sequences < room.config.max_sequences:
        log.warning(
            "max_sequences reduced to %d: not enough memory for recurrent state",
            scheduler.max_sequences,
        )
    if scheduler.limit < room.context:
        log.warning(
            "context cut from %d to %d tokens by the KV pool",
            room.context,
            scheduler.limit,
        )


def verdict_file(config: Config) -> VerdictFile:
    """The verdicts about kernels."""
    return VerdictFile(cache_of(config) / KERNELS_DIR)


def room(config: Config) -> int:
    """Bytes that a model's weights may take here, with nothing cached, whatever else runs."""
    most = config.memory_bytes or memory.total()
    return min(most, meter.working_set()) - memory.headroom()


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
    room: Room,
    group: ProcessGroup,
) -> tuple[Engine, ModelInfo]:
    """Runner, pools and scheduler, and what the server knows of them. The pools grow as they are
    used."""
    config = room.config
    meter.bound(memory.headroom() // 2)  # the other half is for a step's activations
    runner = layout.runner(
        model,
        config.block_size,
        plan.blocks,
        make=runner_type(group, name),
        windows=plan.windows,
        kv_bits=config.kv_bits,
    )
    pool = partial(BlockPool, block_size=config.block_size)
    states = None
    if layout.cache_bytes.state:
        states = StateCache(plan.snapshots, plan.snapshot_stride, runner.keep)
    windows = [Window(tokens, pool(blocks)) for tokens, blocks in plan.windows.items()]
    kv = KVCacheManager(pool(plan.blocks), windows, states)
    runner.grow_on_demand(lambda: [pool.highest for pool in kv.pools])
    scheduler = Scheduler(
        kv,
        context=room.context,
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


def _start(known: Measuring, config: Config, group: ProcessGroup) -> None:
    """Warm up, and add what drafts and the disk; ranks above 0 follow."""
    if group.rank:
        known.prompts.open(known.engine)
    group.gather("ready")
    if group.rank:
        return
    with group.together():
        _warm_up(known.engine)
        # After it, so that it learns nothing from compiling.
        budget = PrefillBudget(config.decode_gap_ms / 1000, config.prefill_budget)
        known.engine.scheduler.prefill_budget = budget
        if config.speculate:
            add_drafters(known.engine, known.drafting, config)
        known.recall()


def _warm_up(engine: Engine) -> None:
    """Run two requests through the real pools, which compiles what is compiled lazily."""
    limit = engine.scheduler.limit
    if limit < 2:
        why = f"a context of {limit} tokens has no room for an answer"
        raise UnsupportedModel(f"{why}; raise --context or --kv-blocks")
    for token in range(2):
        engine.add(Request("warm-up", (token,), 1))
    while engine.busy:
        engine.step()
    engine.reset()

"""From a model directory to a warm engine: load, choose the layout, size the pool, warm up.

Rule: what was derived is reported once, in ModelInfo; nothing is decided again later.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from mlxspec.engine import memory
from mlxspec.engine.blocks import BlockPool
from mlxspec.engine.engine import Engine
from mlxspec.engine.groups import Groups
from mlxspec.engine.pace import Pace
from mlxspec.engine.scheduler import Scheduler
from mlxspec.model.load import context_of, fit, growth, load, weights
from mlxspec.model.runner import Runner
from mlxspec.speculate.calibrate import MEASURED, calibrate, one_row
from mlxspec.speculate.chain import Chain
from mlxspec.speculate.draft_model import DraftModel, Small, load_small
from mlxspec.types import ModelInfo, Request, Sampling, Unfit

log = logging.getLogger("mlxspec")

WARM_ROWS = 64  # a prompt long enough to tell what a row costs
WORTH_CHECKING = 1 << 24  # bytes of one layer's keys; below that, activations hide a copy


@dataclass(frozen=True, slots=True)
class Options:
    """What of the configuration the engine heeds; 0 and "auto" mean derived."""

    block_size: int = 32
    kv_blocks: int = 0
    context: int = 0
    layout: str = "auto"
    max_sequences: int = 16
    prefill_budget: int = 0
    decode_gap: float = 0.25  # seconds
    speculate: bool = True
    draft: Path | None = None  # a draft model's directory
    cache: Path | None = None  # directory for what was measured


def start(path: Path, name: str, options: Options) -> tuple[Engine, ModelInfo]:
    """Load `path` on this thread, which owns MLX from now on. Raises Unfit with the reason and the mend."""
    began = time.perf_counter()
    model, config = load(path)
    weight_bytes = weights(model)  # before the runner grafts its trunk, which hides them
    found = fit(model, options.layout)
    for reason in found.refused:
        log.info("layout refused: %s", reason)
    small = load_small(options.draft, found) if options.draft else None
    held = weight_bytes + (small.weights if small else 0)
    token_bytes = found.token_bytes + (small.fit.token_bytes if small else 0)
    context = min(context_of(config), options.context or 1 << 31)
    # A step holds the states it read beside those it leaves.
    free = max(0, memory.available(held) - 2 * options.max_sequences * found.state_bytes)
    blocks = options.kv_blocks or memory.kv_blocks(context, options.block_size, token_bytes, free)
    if blocks < 2:
        raise Unfit(
            f"{free >> 20} MiB are free, less than one KV block of {options.block_size} tokens"
            " needs twice over; close something, or pick a smaller model"
        )
    runner = found.runner(model, options.block_size, blocks)
    pool = BlockPool(blocks, options.block_size, salt=f"{path}:{found.layout}".encode())
    scheduler = Scheduler(
        Groups(pool),
        context=context,
        max_sequences=options.max_sequences,
        pace=Pace(options.decode_gap, options.prefill_budget),
        sharing=found.sharing,
        drafts=found.drafts,
    )
    engine = Engine(runner, scheduler, vocab=found.vocab)
    _warm(engine)
    if options.speculate:
        _speculate(engine, path, small, options)
    if scheduler.limit < context:
        log.warning("context cut from %d to %d tokens: the KV pool holds no more", context, scheduler.limit)
    info = ModelInfo(
        name=name,
        context=scheduler.limit,
        vocab=found.vocab,
        layout=found.layout,
        block_size=options.block_size,
        kv_blocks=blocks,
        kv_bytes=blocks * options.block_size * token_bytes,
        weight_bytes=held,
        prefill_budget=scheduler.pace.rows(decoding=True),
        created=int(time.time()),
    )
    how = found.layout + ", one sequence at a time" * (found.lone and found.layout != "solo")
    if found.rewind:
        how += f" (a draft leaves the {found.state_bytes} bytes of a sequence's state by {found.rewind})"
    log.info("%s: %s layout, ready in %.1f s", name, how, time.perf_counter() - began)
    return engine, info


def _speculate(engine: Engine, path: Path, small: Small | None, options: Options) -> None:
    """Give the engine its drafter, with the costs of this machine. The engine is idle."""
    scheduler, runner = engine.scheduler, engine.runner
    pool = scheduler.pool
    if not scheduler.drafts:
        log.warning("no speculation: the solo layout cannot take a draft back")
        return
    table = pool.alloc(min(len(pool.free), -(-MEASURED // pool.block_size))) or []
    try:
        costs = calibrate(runner, engine.vocab, table, path, options.cache)
        if costs is None:
            log.warning("no speculation: the KV pool is too small to measure what a draft costs")
            return
        model = None
        if small and options.draft:
            own = Runner(small.model, "rows", pool.block_size, pool.size, trunk=small.fit.trunk, shares=True)
            model = DraftModel(own, engine.vocab, one_row(own, table), small.fit.vocab, small.context)
            log.info("%s drafts: %.1f ms a token", options.draft.name, model.seconds * 1e3)
    finally:
        pool.drop(table)
    engine.drafter = chain = Chain(costs, model, late=runner.layout == "rows")
    scheduler.blind = chain.blind


def _warm(engine: Engine) -> None:
    """Two pairs of short requests through the real pool: the first allocates it and compiles what is compiled
    lazily, the second shows what a step costs and that it writes the pool in place, which all stands on."""
    limit, worst = engine.scheduler.limit, 0.0
    if limit < 2:
        raise Unfit(f"a context of {limit} tokens cannot hold a prompt and an answer; raise --context")
    rows = min(WARM_ROWS, limit - 1)

    def run(first: int) -> None:
        nonlocal worst
        for i in (first, first + 1):
            prompt = tuple((i + at) % engine.vocab for at in range(rows))
            engine.add(Request(f"warm-up {i}", prompt, min(4, limit - rows), Sampling(seed=1)))
        worst = 0.0
        while engine.busy:
            engine.step()
            worst = max(worst, engine.step_seconds)

    run(1)
    grown = growth(lambda: run(3))
    engine.scheduler.pace.calibrate(2 * rows, worst)
    pools = [pool.nbytes for pages in engine.runner.pages() for pool in pages.pools()]
    if pools and max(pools) > WORTH_CHECKING and grown > max(pools) // 2:
        log.warning(
            "a step takes %d MiB beside the KV pool: MLX seems to copy the pool instead of writing in place."
            " Answers are right but slow; a smaller --kv-blocks helps, and please report it",
            grown >> 20,
        )
    engine.forget()

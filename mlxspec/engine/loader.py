"""From a model directory to a warm engine: load, choose the layout, size the pool, warm up.

Rule: what was derived is reported once, in ModelInfo; nothing is decided again later.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.disk import PENDING, READING, Disk
from mlxspec.cache.offload import Tier
from mlxspec.cache.prefix import KVCacheManager, Window
from mlxspec.cache.runfile import fingerprint
from mlxspec.cache.states import StateCache
from mlxspec.engine import memory, warmup
from mlxspec.engine.budget import CEILING, PrefillBudget
from mlxspec.engine.engine import Engine
from mlxspec.engine.scheduler import Scheduler
from mlxspec.kernels.verify import (
    AT_START_S,
    TUNING_S,
    Case,
    HangDetector,
    VerdictFile,
    missing,
    verify,
)
from mlxspec.model import meter, recurrent
from mlxspec.model.layout import Kept, LayoutChoice, context_of, fit, geometry, load, read, weights
from mlxspec.model.quantized import cases_of
from mlxspec.model.runner import Runner, owed
from mlxspec.model.transfer import Transfer
from mlxspec.speculate.calibrate import MEASURED, calibrate, one_row
from mlxspec.speculate.draft_model import DraftModel, Small, fit_small
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import ModelInfo, OutOfMemory, Request, Sampling, UnsupportedModel, UserError

log = logging.getLogger("mlxspec")

TELL_S = 2.0  # between two lines on what takes long
WARM_ROWS = 64  # a prompt long enough to tell what a row costs
DISK_BUFFERS = PENDING + READING  # bytes on their way to the disk and back
DISK_LEAST = 256 << 20  # bytes, below which a prompt cache is hardly of use
LEAST_STRIDE = 16  # blocks between two states that a long prompt leaves behind


@dataclass(frozen=True, slots=True)
class Options:
    """What of the configuration the engine heeds; 0 and "auto" mean derived."""

    block_size: int = 32
    kv_blocks: int = 0
    memory: int = 0  # bytes that weights, pools and headroom may take; 0: what is free
    context: int = 0
    layout: str = "auto"
    kv_bits: int = 0  # 8 or 4; 0: K/V as the model computes them
    max_sequences: int = 16
    prefill_budget: int = 0
    decode_gap: float = 0.25  # seconds
    share: float = 1.0  # of the free memory; what is left of it is for other models
    speculate: bool = True
    draft: Path | None = None  # a draft model's directory
    cache: Path | None = None  # directory for what was measured
    kernels: bool = True
    proofs: Path | None = None  # directory for what was found out about kernels
    again: bool = False  # whatever was measured before is measured again
    disk: Path | None = None  # directory for what outlives the process
    disk_bytes: int = 0  # 0: nothing does


def start(path: Path, name: str, options: Options) -> tuple[Engine, ModelInfo]:
    """Load `path` on this thread, which owns MLX from now on. Raises UnsupportedModel with the
    reason and the mend."""
    began = time.perf_counter()
    models = [load(p) for p in (path, options.draft) if p]
    model, config = models[0]
    context = min(context_of(config), options.context or 1 << 31)
    held = sum(
        weights(m) for m, _ in models
    )  # before the runner grafts its trunk, which hides them
    cases = _cases([m for m, _ in models], options)  # likewise
    room = _room([m for m, _ in models], held, context, options)
    for m, _ in models:
        read(m)
    file = warmup.place(options.cache, path, options.layout, options.kv_bits, options.block_size)
    now = warmup.recall(file, options.again) or warmup.Known(_fit(path, model, options))
    found = now.fit
    small = fit_small(options.draft, *models[1], found) if options.draft else None
    stalls = _prove(cases, options)  # before the pool is there: it takes memory too
    needs = _needs([found.kept, *([small.fit.kept] if small else [])], context)
    sizes = _sizes(needs, context, options, room)
    meter.bound(memory.headroom() // 2)  # the other half is for what a step has in use
    windows = dict(zip((window for window, _ in needs.windows), sizes.window_blocks, strict=True))
    runner = found.runner(model, options.block_size, sizes.blocks, windows)
    known_as = _fingerprint(path, found, windows, options)
    salt = known_as.encode()
    groups = KVCacheManager(
        BlockPool(sizes.blocks, options.block_size, salt),
        [Window(w, BlockPool(n, options.block_size, salt)) for w, n in windows.items()],
        _snapshots(needs, sizes, context, options.block_size),
    )
    runner.by_need(lambda: [pool.given for pool in groups.pools])
    scheduler = Scheduler(
        groups,
        context=context,
        max_sequences=min(options.max_sequences, sizes.sequences),
        pace=PrefillBudget(options.decode_gap, options.prefill_budget),
        sharing=found.sharing,
        drafts=found.drafts,
    )
    engine = Engine(runner, scheduler, vocab=found.vocab)
    engine.stalls = stalls
    _warm(engine, now)
    _speculate(engine, now, small, options)
    warmup.keep(file, now)
    if options.disk and options.disk_bytes and found.sharing:
        _outlive(engine, Disk(options.disk, known_as, options.disk_bytes, model=name), options)
    if scheduler.limit < context:
        log.warning(
            "context cut from %d to %d tokens: the KV pool holds no more", context, scheduler.limit
        )
    info = ModelInfo(
        name=name,
        context=scheduler.limit,
        vocab=found.vocab,
        layout=found.layout,
        block_size=options.block_size,
        kv_blocks=sizes.blocks,
        kv_bytes=memory.taken(needs, sizes, options.block_size),
        weight_bytes=held,
        prefill_budget=scheduler.pace.rows(decoding=True),
        created=int(time.time()),
    )
    log.info("%s: %s, ready in %.1f s", name, _how(found), time.perf_counter() - began)
    return engine, info


def _fit(path: Path, model: Module, options: Options) -> LayoutChoice:
    try:
        return fit(model, options.layout, options.kv_bits)
    except UserError as error:
        raise UnsupportedModel(f"{path}: {error}") from error


def _how(found: LayoutChoice) -> str:
    for reason in found.refused:
        log.info("layout refused: %s", reason)
    how = (
        found.layout
        + " layout"
        + ", one sequence at a time" * (found.lone and found.layout != "solo")
    )
    if found.rewind:
        how += f" (a draft leaves the {found.state_bytes} bytes of a sequence's state by {found.rewind})"
    return how


def _cases(models: Sequence[Module], options: Options) -> list[Case]:
    """What there is to prove for the model and maybe its draft model, whose K/V are not
    quantized."""
    pairs = zip(models if options.kernels else (), (options.kv_bits, 0), strict=False)
    return [
        case for model, kv_bits in pairs for case in cases_of(model, options.block_size, kv_bits)
    ]


def _prove(cases: Sequence[Case], options: Options) -> HangDetector | None:
    """Decide which kernels run. Returns what watches the steps, if any runs."""
    if options.proofs is None:
        return None
    began, file = time.perf_counter(), VerdictFile(options.proofs)
    with _bar("Trying kernels") as tell:
        seconds = TUNING_S if options.again else AT_START_S
        found = verify(cases, file, seconds, options.again, tell)
    used = [name for name, verdict in found.items() if verdict.way]
    if found and not missing():
        took = time.perf_counter() - began
        log.info(
            "%d of %d kernels are used; %.1f s to know (mlxspec doctor)",
            len(used),
            len(found),
            took,
        )
    return HangDetector() if used else None


@contextmanager
def _bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """What is to be told how many are done out of how many: a bar on stderr, or a line now and
    then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task, told = bar.add_task(text, total=None, visible=False), time.perf_counter()

        def tell(done: int, of: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=of, visible=True)
            if bar.disable and time.perf_counter() - told > TELL_S:
                told = time.perf_counter()
                log.info("%s: %d of %d", text, done, of)

        yield tell


def _outlive(engine: Engine, disk: Disk, options: Options) -> None:
    """Let what is computed outlive the process."""
    tier = engine.tier = engine.scheduler.tier = Tier(
        disk, engine.scheduler.groups, Transfer(engine.runner)
    )
    for group, pool in enumerate(engine.scheduler.groups.pools):
        pool.kept = partial(tier.keeps, group)
    held, most = memory.gib(disk.stats().bytes), memory.gib(options.disk_bytes)
    log.info("prompt cache: %s of %s in %s", held, most, options.disk)
    if options.disk_bytes < DISK_LEAST:
        log.warning("--cache-gb: so little holds hardly a prompt; give more, or 0")


def _room(models: Sequence[Module], held: int, context: int, options: Options) -> int:
    """Bytes that the weights will leave free, asked before any is read. Raises UnsupportedModel."""
    held += DISK_BUFFERS if options.disk_bytes else 0
    free = min(memory.available(), meter.device_free())
    if options.memory:
        free = options.memory - meter.held()[0]
    free = max(0, free - owed())  # other models may be here
    # The weights alone come first: a few models evaluate themselves when they are asked for more.
    memory.room(
        held, memory.Needs(0), context, options.block_size, _chunk(options), free, options.memory
    )
    found = [geometry(model, options.kv_bits * (n == 0)) for n, model in enumerate(models)]
    needs = _needs(found, context)
    if not options.kv_blocks:
        rest = (options.block_size, _chunk(options), free, options.memory)
        return memory.room(held, needs, context, *rest)
    pool = memory.taken(needs, _sizes(needs, context, options, 0), options.block_size)
    if (left := free - held - pool - memory.headroom()) < 0:
        raise OutOfMemory(
            f"--kv-blocks {options.kv_blocks} takes {memory.gib(pool)}, {memory.gib(-left)} more than weights"
            f" and headroom leave of the {memory.gib(free)} that are free; leave it out"
        )
    return left


def _needs(kept: Sequence[Kept], context: int) -> memory.Needs:
    """Of a model and maybe its draft model, whose K/V lie under the blocks that see everything,
    whatever its windows. A window that the context never leaves needs no blocks of its own."""
    (token, windows, state), *drafts = kept
    token += sum(size for w, size in windows if w >= context)
    token += sum(each + sum(size for _, size in local) for each, local, _ in drafts)
    return memory.Needs(token, tuple((w, size) for w, size in windows if w < context), state)


def _sizes(needs: memory.Needs, context: int, options: Options, room: int) -> memory.Sizes:
    most, chunk = options.max_sequences, _chunk(options)
    if options.kv_blocks == 1:
        raise UnsupportedModel(
            "kv_blocks = 1: one block holds what is padded; give 2 or more, or 0"
        )
    if options.kv_blocks:
        return memory.fixed(needs, options.kv_blocks, options.block_size, most, chunk)
    try:
        share = memory.SHARE * options.share
        return memory.sizes(needs, context, options.block_size, most, chunk, room, share)
    except UserError:  # where one sequence takes more, another model will have to leave
        return memory.sizes(needs, context, options.block_size, most, chunk, room)


def _snapshots(
    needs: memory.Needs, sizes: memory.Sizes, context: int, block_size: int
) -> StateCache | None:
    """A long prompt leaves a state behind as often as they take no more than its K/V, and a full
    context no more than a quarter of what is kept."""
    if not needs.state_bytes:
        return None
    capacity = sizes.snapshot_bytes // needs.state_bytes
    stride = -(-needs.state_bytes // (needs.token_bytes * block_size)) if needs.token_bytes else 0
    fewest = -(-context // (block_size * max(1, capacity // 4)))
    return StateCache(capacity, max(LEAST_STRIDE, stride, fewest), recurrent.own)


def _fingerprint(
    path: Path, found: LayoutChoice, windows: Mapping[int, int], options: Options
) -> str:
    """Of all that what a block holds depends on, besides its tokens."""
    about = {name: version(name) for name in ("mlx", "mlx-lm")}
    about |= {"layout": found.layout, "block": str(options.block_size), "bits": str(found.kv_bits)}
    about |= {"device": str(mx.default_device()), "windows": str(sorted(windows))}
    return fingerprint(path, about)


def _chunk(options: Options) -> int:
    """The rows of a prompt that one step may read."""
    return options.prefill_budget or CEILING


def _speculate(engine: Engine, now: warmup.Known, small: Small | None, options: Options) -> None:
    """Give the engine its drafter, with this machine's costs, which `now` is told. The engine is
    idle."""
    scheduler, runner = engine.scheduler, engine.runner
    pool = scheduler.pool
    if not options.speculate:
        return
    if not scheduler.drafts:
        log.warning("no speculation: the solo layout cannot take a draft back")
        return
    given = pool.given
    table = pool.alloc(min(len(pool.free), -(-MEASURED // pool.block_size))) or []
    try:
        used = warmup.kernels()
        before = now.costs if now.kernels == used else None
        with _bar("Measuring steps") as tell:
            costs = calibrate(runner, engine.vocab, table, before, options.again, tell)
        if costs is None:
            log.warning("no speculation: the KV pool is too small to measure what a draft costs")
            return
        now.costs, now.kernels = costs, used
        model = None
        if small and options.draft:
            own = Runner(
                small.model, "rows", pool.block_size, pool.size, trunk=small.fit.trunk, shares=True
            )
            own.by_need(lambda: [pool.given])
            model = DraftModel(
                own, engine.vocab, one_row(own, table), small.fit.vocab, small.context
            )
            log.info("%s drafts: %.1f ms a token", options.draft.name, model.seconds * 1e3)
    finally:
        pool.drop(table)
        pool.given = given  # they hold nothing that anybody will read
    engine.drafter = chain = Proposer(costs, model, late=runner.layout == "rows")
    scheduler.blind = chain.blind


def _places(engine: Engine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many blocks the pools hold, and where they lie."""
    return tuple(engine.runner.view.held.values()), engine.runner.places()


def _warm(engine: Engine, now: warmup.Known) -> None:
    """Short requests through the real pool. The first pair allocates it and compiles what is
    compiled lazily; the second shows what a step costs and that it writes the pool in place, which
    all stands on. Where an earlier start has found what one takes, a single row does. `now` is told
    the seconds of the slowest."""
    limit, worst = engine.scheduler.limit, 0.0
    if limit < 2:
        raise UnsupportedModel(
            f"a context of {limit} tokens cannot hold a prompt and an answer; raise --context"
        )
    rows = min(WARM_ROWS, limit - 1)

    def run(first: int, rows: int, tokens: int) -> None:
        nonlocal worst
        for i in (first, first + 1)[: 1 if now.seconds else 2]:
            prompt = tuple((i + at) % engine.vocab for at in range(rows))
            engine.add(Request(f"warm-up {i}", prompt, min(tokens, limit - rows), Sampling(seed=1)))
        worst = 0.0
        while engine.busy:
            engine.step()
            worst = max(worst, engine.step_seconds)

    run(1, *((1, 1) if now.seconds else (rows, 4)))
    if not now.seconds:
        seen = {_places(engine)}
        # Odd and even numbers of steps: two buffers that take turns are where they were after two.
        for first, tokens in ((3, 4), (5, 3)):
            run(first, rows, tokens)
            seen.add(_places(engine))
        if len({held for held, _ in seen}) < len(seen):  # a pool that has grown may be elsewhere
            log.warning(
                "steps take memory beside the KV pool: MLX copies the pool instead of writing in place."
                " Answers are right but slow; please report it"
            )
    now.seconds = now.seconds or worst
    engine.scheduler.pace.calibrate(2 * rows, now.seconds)
    engine.forget()

"""What drafts for a model beside copies: a small model, a trained head, or neither.

Rule: a small model that cannot draft is the user's mistake and is refused; a head that does not fit
is left out, and the log says why.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx.nn import Module

from mlxspec import log
from mlxspec.cache.disk import fingerprint
from mlxspec.config import Config
from mlxspec.engine.engine import Engine
from mlxspec.engine.memory import MemoryPlan
from mlxspec.engine.warmup import WarmupCache, kernels_in_use
from mlxspec.kernels.trial import Case
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
from mlxspec.model.quantized import linear_cases
from mlxspec.model.runner import Runner
from mlxspec.model.trunk import decoder_layers
from mlxspec.progress import progress
from mlxspec.speculate import Drafter, NoSpeculation
from mlxspec.speculate.calibrate import MORE, calibrate, contexts_in, time_step
from mlxspec.speculate.controller import Costs
from mlxspec.speculate.draft_model import DraftModel
from mlxspec.speculate.heads import cache_bytes, load_head, read_weights
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.files import find_draft
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import FINAL_NORM, OutOfMemory, Request, Sampling, Tap, UnsupportedModel

NONE = "off"  # --draft off: neither small model nor head
TRIED_ANSWERS, TRIED_TOKENS = 4, 64  # to choose what a head reads
# Of these answers. At 1 a head that fits guesses too little of what they ramble to stand out.
TRIED_TEMPERATURE = 0.7
CLEARLY = 1.15  # times the acceptance rate: less may be chance


@dataclass(slots=True)
class Drafting:
    """A small model or a head, from the files at `path`; both None: copies only."""

    path: Path
    small: Any = None  # a Module
    head: HeadModel | None = None
    context: int = 0  # the small model's
    fit: LayoutChoice | None = None  # the small model's
    nbytes: int = 0  # of the weights
    # What the content of the model's blocks depends on: K/V of what drafts lie in them.
    facts: dict[str, str] = field(default_factory=dict)

    def cases(self, config: Config) -> list[Case]:
        """The kernels to verify for it, once it is fitted."""
        if self.head:
            return linear_cases(self.head.module)
        return self.fit.cases(self.small, config.block_size) if self.fit else []

    def beside(self, own: CacheBytes) -> CacheBytes:
        """What the model caches, `own`, and what is kept for drafting. Its K/V lie under the ids of
        the blocks for full attention."""
        kept = CacheBytes(0, (), 0)
        if self.head:
            kept = cache_bytes(self.head)
        elif self.fit:
            kept = self.fit.cache_bytes
        elif self.small:
            kept = geometry(self.small)
        token = own.token + kept.token + sum(size for _, size in kept.windows)
        return own._replace(token=token, state=own.state and own.state + kept.state)

    def plan(
        self, make: Callable[..., MemoryPlan], size: int, own: CacheBytes | None = None
    ) -> MemoryPlan:
        """What `make` plans for the model, whose weights have `size` bytes and whose caches take
        `own`, and what drafts for it; without a head that does not fit. Raises OutOfMemory."""
        cache = self.beside(own) if own else CacheBytes(0, (), 0)
        try:
            return make(size + self.nbytes, cache)
        except OutOfMemory as error:
            if not self.head:
                raise
            self.drop_head()
            plan = self.plan(make, size, own)
            log.warning("decoding without a head: with it, %s", error)
            return plan

    def load_weights(self) -> None:
        """Read the weights; a damaged head is left out. Raises UnsupportedModel."""
        if self.small:
            load_weights(self.small)
        if self.head and not read_weights(self.head):
            self.drop_head()

    def fit_to(self, target: LayoutChoice) -> None:
        """Find the small model's layout, or whether the target can use a head. Raises
        UnsupportedModel where the small model cannot draft."""
        if self.small:
            if not target.can_draft:
                raise UnsupportedModel(
                    f"--draft: rejected drafts cannot be rolled back in the {target.layout} layout"
                    " of this model; leave --draft out"
                )
            try:
                self.fit = find_layout(self.small, "rows")
            except UnsupportedModel as error:
                raise UnsupportedModel(
                    f"{self.path} cannot draft: {error}; give another --draft"
                ) from error
        if self.head and not (target.can_draft and target.trunk):
            log.warning("decoding without a head: this model cannot use one here")
            self.drop_head()

    def drop_head(self) -> None:
        self.head, self.nbytes = None, 0


def load_drafting(model: Module, path: Path, draft: Path | None, config: Config) -> Drafting:
    """What `draft` holds, or the head in the model's own files; the weights stay on disk. Raises
    UnsupportedModel."""
    if config.speculate != "on" or config.draft == NONE:
        return Drafting(path)
    found = find_draft(draft or path, path)
    if draft and not found.standalone:
        small, files = load(draft)
        return Drafting(draft, small, context=context_of(files), nbytes=weights(small))
    head = load_head(found, model)
    return Drafting(found.path, head=head, nbytes=weights(head.module) if head else 0)


def add_drafters(engine: Engine, cache: WarmupCache, drafting: Drafting, config: Config) -> None:
    """Give the idle engine its drafters, after measuring what steps cost with the kernels in use,
    unless an earlier start did."""
    pool = engine.scheduler.pool
    if not engine.scheduler.can_draft:
        log.warning("no speculation: this model cannot roll back a rejected draft")
        return
    free = len(pool.free_blocks)
    contexts = contexts_in(free * pool.block_size)
    kernels = kernels_in_use()
    costs = cache.costs
    if costs and (costs.contexts != contexts or cache.kernels != kernels):
        costs = None
    # Blocks that are used once take memory for good.
    tokens = (contexts[0] if costs else contexts[1]) + MORE
    table = pool.allocate(min(free, -(-tokens // pool.block_size))) or []
    if not costs and contexts[1] > 0:
        with progress("Measuring steps") as report:
            costs = calibrate(engine.runner, table, contexts, report)
        cache.drafts = {}
    cache.costs = costs
    cache.kernels = kernels
    if costs:
        drafters: list[Drafter] = [NgramDrafter()]
        if drafter := _attach(engine, drafting, table, costs, cache):
            drafters.append(drafter)
        padded = engine.runner.layout != "rows"
        depth = config.draft_depth if len(drafters) > 1 else 0
        engine.proposer = Proposer(costs, drafters, depth, padded, tries_likeliest=True)
    else:
        log.warning("no speculation: the KV pool is too small to measure what a draft costs")
    pool.free(table)


def _attach(
    engine: Engine, drafting: Drafting, table: list[int], costs: Costs, cache: WarmupCache
) -> HeadDrafter | None:
    """The small model or the head, measured and tried; None where there is none, or the head's code
    fails."""
    kv, pool = engine.scheduler.kv, engine.scheduler.pool
    head = drafting.head
    if drafting.fit:
        runner = Runner(drafting.small, "rows", pool.block_size, pool.size)
        head = DraftModel(runner, engine.vocab, drafting.fit.vocab, drafting.context).head()
    if not head:
        return None
    drafter = HeadDrafter(head, engine.runner)
    key = fingerprint(drafting.path, {})
    try:
        cache.drafts = {key: drafter.measure(table, cache.drafts.get(key))}
        needed = TRIED_ANSWERS * (TRIED_TOKENS // pool.block_size + 2)
        if head.tries_taps and len(pool.free_blocks) > needed:
            if key not in cache.taps:
                cache.taps = {key: _choose_tap(engine, drafter, costs)}
            drafter.use((cache.taps[key],))
        if kv.states is not None:
            # Shows what a state holds before one comes from the disk.
            time_step(engine.runner, table, 1, 1)
    except Exception:  # mlx-lm's modules with the head's weights
        if not drafting.head:
            raise
        log.exception("decoding without a head: it cannot run")
        for n in range(TRIED_ANSWERS):
            engine.abort(f"try-{n}")
        drafter.detach()
        engine.proposer = NoSpeculation()
        while engine.busy:
            engine.step()
        engine.reset()
        return None
    reads = head.slot_offset > 0 and head.kv_layers > 0
    kv.rereads = reads and kv.states is None
    drafting.facts = {"draft": f"{key} {drafter.taps}"}
    where = ["the final norm" if tap == FINAL_NORM else f"layer {tap}" for tap in drafter.taps]
    reading = f" from the hidden states after {', '.join(where)}" if where else ""
    log.info("%s drafts%s: %s", head.name, reading, drafting.path)
    return drafter


def _choose_tap(engine: Engine, head: HeadDrafter, costs: Costs) -> Tap:
    """The hidden state with which drafts are accepted more often, where that is clear, else the
    head's default: after the final norm or before it. Checkpoints do not say which theirs was
    trained with."""
    usual = head.taps[0]
    rates: dict[Tap, float] = {}
    with progress("Trying the head") as report:
        last = len(decoder_layers(engine.runner.model)) - 1
        for done, tap in enumerate((FINAL_NORM, last)):
            report(done, 2)
            head.use((tap,))
            once = replace(costs, factors={})  # what steps take now says nothing
            engine.proposer = trial = Proposer(once, [head], depth=1)
            for n in range(TRIED_ANSWERS):
                sampling = Sampling(temperature=TRIED_TEMPERATURE, seed=n)
                engine.add(Request(f"try-{n}", (n + 1, n + 2), TRIED_TOKENS - 2, sampling))
            while engine.busy:
                engine.step()
            if not trial.drafters:
                raise RuntimeError("it failed in a trial")
            counts = engine.spec_metrics
            rates[tap] = counts.accepted.total() / max(1, counts.drafted.total())
            engine.reset()
    best = max(rates, key=lambda tap: rates[tap])
    log.debug("acceptance rates by hidden state: %s", rates)
    return best if rates[best] > CLEARLY * rates[usual] else usual

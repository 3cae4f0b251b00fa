"""What a model's first start measures in idle moments while serving: the cost of steps and drafts,
the kernels, and which hidden state its head should read.

Rule: a request waits for the one step that is running, never for a measurement, which goes on in
the next idle moment. Nothing is drafted before steps are measured.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mlxspec import log
from mlxspec.engine.engine import Engine, SpecDecodeMetrics
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import (
    KERNELS,
    VerdictFile,
    untried,
    verify,
)
from mlxspec.load.drafting import Drafting, facts_of
from mlxspec.load.exact import TIMED, Search, measure_cost
from mlxspec.load.warmup import PromptStore, WarmupCache, kernels_in_use
from mlxspec.model.trunk import decoder_layers
from mlxspec.progress import progress
from mlxspec.speculate.calibrate import MORE, Calibration, contexts_in
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import (
    FINAL_NORM,
    Check,
    Interrupted,
    Request,
    Sampling,
    Tap,
    line_of,
)

TRIED_ANSWERS, TRIED_TOKENS = 4, 64  # to choose what a head reads
# Of these answers. At 1 a head that fits guesses too little of what they ramble to stand out.
TRIED_TEMPERATURE = 0.7
CLEARLY = 1.15  # times the acceptance rate: less may be chance


@dataclass(slots=True)
class Measuring:
    """The measurements of one model, which go into its WarmupCache. `cases` are its kernels;
    `prompts` are opened once it is known what a head reads, as the content of blocks depends on
    it. Each call of `run` goes on where the last one was interrupted."""

    engine: Engine
    cache: WarmupCache
    cases: Sequence[Case]
    verdicts: VerdictFile
    drafting: Drafting
    prompts: PromptStore
    contexts: tuple[int, int] = (0, 0)
    _calibration: Calibration | None = None
    _rates: dict[Tap, float] = field(default_factory=dict)  # of the hidden states tried so far
    _search: Search | None = None
    _took: dict[tuple[int, bool], list[float]] = field(default_factory=dict)  # steps, when exact

    def __post_init__(self) -> None:
        pool = self.engine.scheduler.pool
        self.contexts = contexts_in(len(pool.free_blocks) * pool.block_size)

    @property
    def proposer(self) -> Proposer | None:
        """None where nothing drafts."""
        found = self.engine.proposer
        return found if isinstance(found, Proposer) else None

    @property
    def head(self) -> HeadDrafter | None:
        """The head or small model, unless it failed."""
        drafters = self.proposer.drafters if self.proposer else []
        return next((each for each in drafters if isinstance(each, HeadDrafter)), None)

    @property
    def must_try_taps(self) -> bool:
        """Whether we still have to find out which hidden state the head reads, and have room."""
        pool = self.engine.scheduler.pool
        needed = TRIED_ANSWERS * (TRIED_TOKENS // pool.block_size + 2)
        head = self.head
        unknown = head is not None and head.head.tap_unknown and self.key not in self.cache.taps
        return unknown and pool.size > needed + 1

    @property
    def key(self) -> str:
        """The fingerprint of what drafts."""
        return self.drafting.key

    def recall(self) -> None:
        """Take over what earlier starts measured, and leave the rest to the engine's idle
        moments."""
        cache, head = self.cache, self.head
        if head and self.key in cache.taps:
            head.use((cache.taps[self.key],))
        if head and self.key in cache.drafts:
            head.costs = replace(cache.drafts[self.key])
        if not self.must_try_taps:
            self.prompts.open(self.engine, **facts_of(self.drafting, head))
        if self.proposer and self._known and (not head or self.key in cache.drafts):
            self.proposer.start(cache.costs)
        waits = self.proposer and (not self.proposer.costs or self.must_try_taps)
        if waits or untried(self.cases) or self._exact_waits:
            self.engine.idle_work = self.run

    def run(self, check: Check) -> None:
        """Measure what is left. Calls `check` before each step, and raises what it raises."""
        if self.proposer:
            self._measure_costs(self.proposer, check)
        if untried(self.cases):
            used = dict(KERNELS.verdicts)
            with progress("Trying kernels") as report:
                verify(self.cases, self.verdicts, report, check)
            if self.engine.runner.invariance:  # others, with other bits, from the next start on
                KERNELS.verdicts.update(used)
            self.cases = ()  # what there was no time for, the next start tries
        if self.proposer:  # again, if other kernels run now
            self._measure_costs(self.proposer, check)
        if self.proposer and self.head and self.must_try_taps:
            self._try_taps(self.proposer, self.head, check)
        if self._exact_waits:
            self._measure_exact(check)
        self.cache.save()

    @property
    def _exact_waits(self) -> bool:
        """Whether we still have to measure what exact logits cost."""
        exact = self.cache.exact
        return exact is not None and exact.rows != 0 and exact.cost is None

    def _measure_exact(self, check: Check) -> None:
        """How rows would be exact, and what that costs, with the kernels in use now."""
        cache, pool = self.cache, self.engine.scheduler.pool
        assert cache.exact is not None
        room = TIMED[-1] + TIMED[1] + 1
        if len(pool.free_blocks) * pool.block_size <= room:
            return
        runner, exact = self.engine.runner, cache.exact
        try:
            with pool.lent(room) as table:
                if exact.invariance is None:
                    with progress("Finding how rows are exact"):
                        self._search = self._search or Search(runner, table)
                        exact = replace(exact, invariance=self._search.run(check))
                assert exact.invariance is not None
                cost = measure_cost(runner, exact.invariance, table, check, self._took)
            cache.exact = replace(exact, cost=cost)
        except Interrupted:
            raise
        except Exception as failed:  # the model's own code
            cache.exact = replace(exact, rows=0, why=line_of(failed))
        if not runner.invariance:
            cache.exact_kernels = kernels_in_use()
        self.engine.exact = cache.exact.describe("on" if runner.invariance else "auto")
        log.info("%s", self.engine.exact)

    @property
    def _in_use(self) -> str:
        """What steps are computed with."""
        exact = " exact" if self.engine.runner.invariance else ""
        return kernels_in_use() + exact

    @property
    def _known(self) -> bool:
        """Whether it is known what steps cost with the kernels in use."""
        cache = self.cache
        same = cache.kernels == self._in_use
        return same and cache.costs is not None and cache.costs.contexts == self.contexts

    def _measure_costs(self, proposer: Proposer, check: Check) -> None:
        """What a step costs with the kernels in use, and a draft; then drafting starts."""
        cache, pool = self.cache, self.engine.scheduler.pool
        if not self._known:
            self._calibration = self._calibration or Calibration(self.engine.runner, self.contexts)
            with pool.lent(self.contexts[1] + MORE) as table:
                with progress("Measuring steps") as report:
                    cache.costs = self._calibration.run(table, check, report)
            cache.kernels, cache.drafts, self._calibration = self._in_use, {}, None
        if self.head and self.key not in cache.drafts:
            with pool.lent(self.contexts[0] + MORE) as table:
                cache.drafts = {self.key: self.head.measure(table, check)}
        if proposer.costs is not cache.costs:
            proposer.start(cache.costs)
            self.cache.save()

    def _try_taps(self, proposer: Proposer, head: HeadDrafter, check: Check) -> None:
        try:
            self._choose_tap(proposer, head, check)
        except Interrupted:
            raise
        except Exception:  # mlx-lm's modules with the head's weights
            log.exception("decoding without a head: it cannot run")
            proposer.drop(head)
            head.detach()
        self.prompts.open(self.engine, **facts_of(self.drafting, self.head))

    def _choose_tap(self, proposer: Proposer, head: HeadDrafter, check: Check) -> None:
        """Let an MTP head read the hidden state with which drafts are accepted more often, where
        that is clear, else its default: after the final norm or before it. Checkpoints do not say
        which theirs was trained with."""
        (usual,) = head.taps
        last = len(decoder_layers(self.engine.runner.model)) - 1
        with progress("Trying the head") as report:
            for done, tap in enumerate((FINAL_NORM, last)):
                report(done, 2)
                if tap not in self._rates:
                    self._rates[tap] = self._acceptance_rate(proposer, head, tap, check)
        best = max(self._rates, key=lambda tap: self._rates[tap])
        log.debug("acceptance rates by hidden state: %s", self._rates)
        if self._rates[best] <= CLEARLY * self._rates[usual]:
            best = usual
        self.cache.taps = {self.key: best}
        if best != usual:
            head.use((best,))
            self.engine.scheduler.kv.evict_cached()  # with K/V that the head made of the other

    def _acceptance_rate(
        self,
        proposer: Proposer,
        head: HeadDrafter,
        tap: Tap,
        check: Check,
    ) -> float:
        """Of drafts of one token in a few answers, with the head reading the hidden state `tap`.
        They leave no trace in the prefix cache and the engine's counters."""
        assert proposer.costs
        once = replace(proposer.costs, factors={})  # what steps take now says nothing
        trial = Proposer(once, [head], fixed_depth=1)
        counts = SpecDecodeMetrics()
        engine = replace(self.engine, proposer=trial, counters=Counter(), spec_metrics=counts)
        usual, sharing = head.taps, engine.scheduler.sharing
        head.use((tap,))
        engine.scheduler.sharing = False
        try:
            for n in range(TRIED_ANSWERS):
                sampling = Sampling(temperature=TRIED_TEMPERATURE, seed=n)
                prompt = n + 1, n + 2
                engine.add(Request(f"try-{n}", prompt, TRIED_TOKENS - 2, sampling))
            while engine.busy:
                check()
                engine.step()
        finally:
            for n in range(TRIED_ANSWERS):
                engine.abort(f"try-{n}")
            while engine.busy:
                engine.step()
            engine.scheduler.sharing = sharing
            head.use(usual)
        if not trial.drafters:
            raise RuntimeError("it failed in a trial")
        return counts.accepted.total() / max(1, counts.drafted.total())

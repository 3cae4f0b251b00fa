"""The step loop of one model: plan, draft, forward, sample, submit; read the previous step; accept,
commit, observe.

Rule: a step is submitted before the previous one is read, unless that samples nothing or
`_needs_sync` says otherwise. A stop token is noticed one step late: this wastes one row but never
yields a wrong token.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile

from mlxspec.cache.offload import KVOffloader
from mlxspec.engine.memory import CRITICAL, NORMAL, MemoryMonitor
from mlxspec.engine.scheduler import Scheduler, cut_at_stop
from mlxspec.model import meter
from mlxspec.model.batch import Step
from mlxspec.model.runner import Runner
from mlxspec.sequences import Accepted, Draft, Plan, Seq
from mlxspec.speculate import NoSpeculation, Speculator
from mlxspec.types import (
    NOT_FINITE,
    Check,
    Interrupted,
    InvalidRequest,
    Output,
    Outputs,
    Request,
    Stats,
)

DISK_WAIT_S = 0.002


@dataclass(slots=True)
class SpecDecodeMetrics:
    """Drafted and accepted tokens by (source, position), and seconds of decoding without any draft.
    Bounded: few sources, MAX_DEPTH positions."""

    drafted: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    parked: float = 0.0

    def record(self, draft: Draft, accepted: int) -> None:
        for i in range(draft.size):
            key = draft.source, i + 1
            self.drafted[key] += 1
            self.accepted[key] += i < accepted


@dataclass(slots=True)
class Engine:
    """One model's scheduler, runner and drafters. `trace` is called with ("submit" | "read",
    number of the step)."""

    runner: Runner
    scheduler: Scheduler
    proposer: Speculator = field(default_factory=NoSpeculation)
    vocab: int = 0  # width of the logits
    offloader: KVOffloader | None = None  # None: no disk cache
    trace: Callable[[str, int], None] = lambda event, step: None
    counters: Counter[str] = field(default_factory=Counter)  # names in Stats
    spec_metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    step_seconds: float = 0.0  # of the last step; 0: the disk took part of it
    monitor: MemoryMonitor | None = None
    idle_work: Callable[[Check], None] | None = None  # measurements left over from a first start
    exact: str = ""  # new text for ModelInfo.exact, from idle_work; "": unchanged
    in_flight: Step | None = None  # submitted and not read
    _pressure: int = NORMAL
    _disk_busy: bool = False  # blocks were moved to or from the disk after the last step
    _last_read: float = 0.0  # time at which a step was last read
    _tower_runs: int = 0  # of the model's eyes, up to that step
    _live: dict[Seq, None] = field(default_factory=dict)  # sequences that the drafters have begun

    # ---- requests ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest for a prompt without room for an answer, and for
        an embedding where hidden states cannot be read, and images where nothing sees them."""
        if request.pooling and not self.runner.trunk:
            raise InvalidRequest("this model's hidden states cannot be read; embed with another")
        if request.images and not self.runner.eyes:
            raise InvalidRequest("this model turned out to read text only; send it again")
        self.scheduler.add(request)

    def abort(self, request: str, index: int | None = None) -> Outputs:
        """End a request's choices now; their blocks are free when this returns."""
        outputs = self.scheduler.abort(request, index)
        self._end_finished()
        return outputs

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.in_flight or self.scheduler.running or self.scheduler.waiting)

    @property
    def priority(self) -> int:
        """That of its most important request, the lowest."""
        waiting = self.scheduler.waiting[:1]
        return min((seq.priority for seq in (*self.scheduler.running[:1], *waiting)), default=0)

    @property
    def active(self) -> bool:
        """Whether a request runs or waits, or blocks are to be saved to disk."""
        return self.busy or bool(self.offloader and self.offloader.saving)

    # ---- a step ------------------------------------------------------------------------------

    def step(self, alone: bool = True) -> Outputs:
        """Submit one step and commit the one before it. `alone`: no other engine has work, so a
        moment may pass where this one can do nothing until the disk answers."""
        outputs: Outputs = []
        previous = self.in_flight
        self.in_flight = None
        if previous and self._needs_sync():
            outputs += self._read_and_commit(previous)
            previous = None
        began = time.perf_counter()
        depths = self.proposer.depths(self.scheduler.decoding())
        plan = self.scheduler.plan(depths)
        self._begin_new(plan)
        self.runner.copy_blocks(self.scheduler.copies)  # before a head writes there
        self.scheduler.copies.clear()
        self.proposer.draft(plan, previous)
        outputs += self._mask(plan)
        plan = [e for e in plan if not e.seq.finish]
        if plan:
            step = self.runner.forward(plan, previous)
            sampled = self.runner.sample(step)
            self.runner.submit(step, sampled)
            self.counters["steps"] += 1
            step.number = self.counters["steps"]
            step.began = began
            step.overlaps = previous is not None
            self.scheduler.submitted(plan)
            self.in_flight = step
            self.trace("submit", step.number)
        if previous:
            outputs += self._read_and_commit(previous)
        if self.in_flight and not self.in_flight.sampled:
            # A step of prompts alone takes a second and brings no token: it is read now, so that
            # requests that arrive in that second are planned into the next one.
            outputs += self._read_and_commit(self.in_flight)
            self.in_flight = None
        self._end_finished()
        self.housekeep()
        if alone and not (plan or outputs or self._disk_busy):
            time.sleep(DISK_WAIT_S)
        return outputs

    def _needs_sync(self) -> bool:
        """Whether the step in flight must be read before the next one is planned: a grammar's mask
        or a drafter depends on tokens that were not read."""
        running = self.scheduler.running
        masked = any(seq.restricted and seq.pending for seq in running)
        return masked or self.proposer.needs_sync(running)

    def _read_and_commit(self, step: Step) -> Outputs:
        """Read a submitted step: accept, commit, observe."""
        results = step.read()
        self.trace("read", step.number)
        self._learn_time(step)
        accepted = []
        for e, (tokens, logprobs) in zip(step.plan, results, strict=True):
            new = cut_at_stop(e, tokens, logprobs)
            accepted.append(new)
            if len(new.tokens) < len(tokens) and new.finish != "error" and not e.seq.finish:
                self.runner.cut(step, e, e.count + new.drafts)
            if new.tokens and not e.seq.finish:
                self.counters["rounds"] += 1
                self.spec_metrics.record(e.draft, new.drafts)
            prompt = e.seq.prompt_len - e.start
            self.counters["prompt_tokens"] += max(0, min(e.count, prompt))
        outputs = self.scheduler.commit(step.plan, accepted)
        self.counters["generated_tokens"] += sum(len(o.tokens) for o in outputs)
        outputs += self._advance(step.plan, accepted)  # before drafters ask what is forced next
        self.proposer.observe(step, accepted, self.step_seconds)
        return outputs

    # ---- grammars ----------------------------------------------------------------------------

    def _mask(self, plan: Plan) -> Outputs:
        """Fill the masks of the entries that sample under a grammar, and cut their drafts before
        the first token that it refuses. A grammar that fails ends its own choice only."""
        failed = []
        for e in plan:
            if not e.seq.restricted or not e.samples:
                continue
            # A draft on the device is read here: the masks depend on its tokens.
            tokens = list(takewhile(NOT_FINITE.__ne__, e.draft.tokens))
            try:
                e.masks = e.seq.matcher.masks(tokens)
                e.draft = replace(e.draft, tokens=tokens[: len(e.masks) - 1])
            except Exception as error:
                failed.append(self._fail(e.seq, error))
        return failed

    def _advance(self, plan: Plan, accepted: Sequence[Accepted]) -> Outputs:
        """Advance the grammars of unfinished choices over the accepted tokens."""
        failed = []
        for e, new in zip(plan, accepted, strict=True):
            if e.seq.matcher and not e.seq.finish:
                loops = e.seq.loops
                try:
                    e.seq.matcher.take(new.tokens)
                except Exception as error:
                    failed.append(self._fail(e.seq, error))
                self.counters["loops"] += e.seq.loops - loops
        return failed

    def _fail(self, seq: Seq, error: Exception) -> Output:
        ended = self.scheduler.end(seq, "error", f"the grammar cannot go on: {error}")
        return replace(ended, fault="grammar")

    # ---- after a step ------------------------------------------------------------------------

    def _learn_time(self, step: Step) -> None:
        """Measure the time of a step, from its start or the previous read, whichever is later, to
        its read, which is now, and teach it to the prefill budget."""
        now = time.perf_counter()
        self.step_seconds = now - max(step.began, self._last_read)
        self._last_read = now
        eyes = self.runner.eyes
        looked = eyes is not None and eyes.runs != self._tower_runs
        self._tower_runs = eyes.runs if eyes else 0
        if self._disk_busy or looked:  # its time says nothing about the next one's
            self.step_seconds = 0.0
            return
        self.scheduler.prefill_budget.learn(step.plan, self.step_seconds)
        decoding = any(e.count == 1 for e in step.plan)
        if decoding and not any(e.draft.size for e in step.plan):
            self.spec_metrics.parked += self.step_seconds

    def _begin_new(self, plan: Plan) -> None:
        for e in plan:
            if e.seq not in self._live:
                self._live[e.seq] = None
                self.counters["cached_tokens"] += e.seq.reported_cached
                self.proposer.begin(e.seq)

    def _end_finished(self) -> None:
        for seq in list(self._live):
            if seq.finish and not seq.flight:
                del self._live[seq]
                self.proposer.end(seq)

    # ---- idle moments ------------------------------------------------------------------------

    def work_idle(self, check: Check = lambda: None) -> None:
        """Continue the idle work until it is done or `check`, which is called before each of its
        steps, raises Interrupted."""
        if self.idle_work:
            with suppress(Interrupted):
                self.idle_work(check)
                self.idle_work = None

    # ---- housekeeping ------------------------------------------------------------------------

    def housekeep(self) -> None:
        """Move blocks to and from the disk, and free memory while it is short. After each step, and
        when idle."""
        self._disk_busy = bool(self.offloader and self.offloader.poll(self.busy))
        if not self.monitor:
            return
        kv = self.scheduler.kv
        level = self.monitor.poll()
        self.scheduler.low_memory = level == CRITICAL
        if level > self._pressure:
            meter.trim()
            if level == CRITICAL and kv.states:  # pools keep their memory, snapshots do not
                kv.states.snapshots.clear()
        for pool in kv.pools:
            pool.save_memory = level > NORMAL  # then cached blocks are evicted as others are needed
        self._pressure = level

    def close(self, seconds: float) -> None:
        """End after the last step: let the disk cache finish writing, for at most `seconds`."""
        if self.offloader:
            for seq in self.scheduler.running:
                self.offloader.save(seq)
            self.offloader.close(seconds)
        self.runner.close(seconds)

    def reset(self) -> None:
        """Clear the prefix cache, the drafters' memory and the counters of an idle engine."""
        self.scheduler.kv.evict_cached()
        self.counters.clear()
        self.spec_metrics = SpecDecodeMetrics()
        self.proposer.clear()

    def check(self) -> None:
        """Assert the invariants; for an idle engine and for tests."""
        self.scheduler.check()

    def stats(self) -> Stats:
        """A snapshot, without the figures of the whole process, which the ModelManager adds."""
        scheduler = self.scheduler
        pool = scheduler.pool
        running = scheduler.running
        drafts = self.spec_metrics
        disk = self.offloader.disk.stats if self.offloader else {}
        reading = [seq for seq in (*running, *scheduler.waiting) if not seq.generated]
        return Stats(
            **self.counters,
            **disk,
            running=len(running),
            waiting=len(scheduler.waiting),
            blocks_used=pool.used,
            blocks_cached=len(pool.idle),
            blocks_free=len(pool.free_blocks) - len(pool.idle),
            prompt_left=sum(max(0, seq.prompt_len - seq.computed) for seq in reading),
            drafts=tuple((*key, n, drafts.accepted[key]) for key, n in drafts.drafted.items()),
            parked_seconds=drafts.parked,
            preemptions=scheduler.preemptions,
            step_seconds=self.step_seconds,
            states=len(scheduler.kv.states.snapshots) if scheduler.kv.states else 0,
            running_requests=tuple(
                (seq.request.id, seq.reported_cached, min(seq.computed, seq.prompt_len))
                for seq in running
            ),
        )

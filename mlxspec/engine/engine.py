"""The loop: plan, draft, forward, sample, submit; read the step before; accept, commit, observe.

Rule: a step is submitted before the one in front of it is read, unless it samples nothing. A stop
that is found late costs one wasted row, never a wrong token.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mlxspec.cache.disk import DiskStats
from mlxspec.cache.offload import KVOffloader
from mlxspec.engine import structured
from mlxspec.engine.pressure import NORMAL, MemoryMonitor
from mlxspec.engine.scheduler import Scheduler, accept
from mlxspec.kernels.verify import HangDetector
from mlxspec.model import meter
from mlxspec.model.batch import Step
from mlxspec.model.runner import Runner
from mlxspec.speculate import NoSpeculation, Speculator
from mlxspec.types import Accepted, Entry, InvalidRequest, Output, Request, Stats
from mlxspec.types import Sequence as Seq

log = logging.getLogger("mlxspec")

PROGRESS_S = 5.0  # between two log lines on the progress of prompts

COUNTERS = ("steps", "rounds", "prompt", "cached", "generated")


@dataclass(slots=True)
class SpecDecodeMetrics:
    """Drafted and accepted tokens by (source, position), rounds by draft length, and seconds of
    decoding without any draft. Bounded: few sources, MAX_DEPTH positions."""

    drafted: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    parked: float = 0.0

    def record(self, source: str, drafted: int, accepted: int) -> None:
        self.depths[drafted] += 1
        self.drafted.update((source, i) for i in range(1, drafted + 1))
        self.accepted.update((source, i) for i in range(1, accepted + 1))

    def table(self) -> tuple[tuple[str, int, int, int], ...]:
        return tuple((*key, n, self.accepted[key]) for key, n in self.drafted.items())


@dataclass(slots=True)
class Engine:
    """One model's scheduler, runner and drafters. `trace` is called with ("submit" | "read",
    number of the step)."""

    runner: Runner
    scheduler: Scheduler
    proposer: Speculator = field(default_factory=NoSpeculation)
    vocab: int = 0  # 0: token ids are not checked
    offloader: KVOffloader | None = None  # None: no disk cache
    trace: Callable[[str, int], None] = lambda event, step: None
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    drafts: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    step_seconds: float = 0.0
    rests: bool = False  # nothing can be done until the disk is
    monitor: MemoryMonitor | None = None
    stalls: HangDetector | None = None  # None: no kernel is in use
    in_flight: Step | None = None
    _pressure: tuple[int, float] = (NORMAL, 0.0)  # level and time of the monitor's last reading
    _disk_busy: bool = False  # the last step moved blocks to or from the disk, which took time
    _last_read: float = 0.0
    _read_wait: float = 0.0  # seconds that the last read waited for the device
    _reported: float = field(default_factory=time.monotonic)
    _live: dict[Seq, None] = field(default_factory=dict)

    # ---- requests ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest where it can never run."""
        biased = (token for token, _ in request.sampling.logit_bias)
        ids = (*request.prompt, *request.prediction, *biased)
        if self.vocab and not all(0 <= token < self.vocab for token in ids):
            raise InvalidRequest(
                f"a token id is outside the model's vocabulary of {self.vocab}; send ids below it"
            )
        self.scheduler.add(request)

    def abort(self, request: str, index: int | None = None) -> list[Output]:
        """End a request's choices now; their blocks are free when this returns."""
        outputs = self.scheduler.abort(request, index)
        self._end_finished()
        return outputs

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.in_flight or self.scheduler.running or self.scheduler.waiting)

    @property
    def active(self) -> bool:
        """Whether there is anything to do, if only for the disk."""
        return self.busy or (self.offloader is not None and self.offloader.saving)

    # ---- a step ------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Submit one step and commit the one before it."""
        outputs: list[Output] = []
        self.poll_memory()
        if self.in_flight and self._needs_sync():
            outputs += self._finish(self.in_flight)
        began = time.perf_counter()
        previous, self.in_flight = self.in_flight, None
        depths = self.proposer.depths(self.scheduler.decoding())
        plan = self.scheduler.plan(depths)
        self._begin_new(plan)
        self.proposer.draft(plan, previous)
        plan, failed = self._apply_grammars(plan)
        self.runner.copy_blocks(self.scheduler.copies)
        self.scheduler.copies.clear()
        if plan:
            forward = self.runner.forward(plan, previous)
            sampled = self.runner.sample(forward)
            self.in_flight = self.runner.submit(forward, sampled)
            self._submitted(self.in_flight, began, previous)
        if previous:
            outputs += self._finish(previous)
        if self.in_flight and not self.in_flight.sampled:
            # A step of prompts alone takes a second and brings nothing: requests that come
            # meanwhile go before the next one.
            outputs += self._finish(self.in_flight)
        outputs += failed
        self._housekeeping(idle=not (plan or outputs))
        return outputs

    def _needs_sync(self) -> bool:
        """Whether the step in flight must be read before the next one is planned: a grammar's mask
        or a drafter depends on tokens that were not read."""
        running = self.scheduler.running
        if any(s.matcher is not None and s.pending for s in running):
            return True
        return self.proposer.needs_sync(running)

    def _finish(self, step: Step) -> list[Output]:
        """Read a submitted step: accept, commit, observe."""
        if step is self.in_flight:
            self.in_flight = None
        results = self._read(step)
        accepted = [accept(e, *new) for e, new in zip(step.plan, results, strict=True)]
        pairs = list(zip(step.plan, accepted, strict=True))
        self.runner.rollback(step.plan, [e.count + new.drafts for e, new in pairs])
        self._count(pairs)
        failures = structured.advance(pairs)
        outputs = self.scheduler.commit(step.plan, accepted)
        self.counters["generated"] += sum(len(o.tokens) for o in outputs)
        outputs += [self.scheduler.fail(seq, why) for seq, why in failures if seq.finish is None]
        self.proposer.observe(step, accepted, self.step_seconds)
        return outputs

    def _read(self, step: Step) -> list[tuple[list[int], list[Any]]]:
        """Wait for a step, and learn from its time."""
        began = time.perf_counter()
        results = step.read()
        now = time.perf_counter()
        self.trace("read", step.number)
        self._read_wait = now - began
        self._learn_time(step, now)
        return results

    def _apply_grammars(self, plan: list[Entry]) -> tuple[list[Entry], list[Output]]:
        """Mask the sampled rows and cut the drafts of sequences under a grammar."""
        outputs = []
        for seq, why in structured.mask(plan):
            outputs.append(self.scheduler.fail(seq, why))
            plan = [e for e in plan if e.seq is not seq]
        return plan, outputs

    def _submitted(self, step: Step, began: float, previous: Step | None) -> None:
        self.counters["steps"] += 1
        step.number, step.began, step.overlaps = self.counters["steps"], began, previous is not None
        self.scheduler.submitted(step.plan)
        self.trace("submit", step.number)

    def _count(self, pairs: Iterable[tuple[Entry, Accepted]]) -> None:
        for e, new in pairs:
            if e.samples and e.seq.finish is None:
                self.counters["rounds"] += 1
                self.drafts.record(e.draft.source, len(e.draft), new.drafts)
            self.counters["prompt"] += max(0, min(e.start + e.count, e.seq.prompt_len) - e.start)

    def _learn_time(self, step: Step, now: float) -> None:
        """A step lasts from the later of its beginning and the read before it to its own read."""
        self.step_seconds = now - max(step.began, self._last_read)
        self._last_read = now
        if self._disk_busy:  # its time says nothing about the next one's
            self.step_seconds = 0.0
            return
        prefill = sum(e.count for e in step.plan if e.count > 1)
        decoding = any(e.count == 1 for e in step.plan)
        self._watch_for_hang(step, prefill)
        self.scheduler.pace.learn(prefill, decoding, self.step_seconds)
        if decoding and not any(len(e.draft) for e in step.plan):
            self.drafts.parked += self.step_seconds

    def _watch_for_hang(self, step: Step, prefill: int) -> None:
        """Report a step whose time is the kernels': without prompts in it or in the step built
        meanwhile, and while memory is not short."""
        if self.stalls is None or prefill or (self.monitor and self.monitor.poll() > NORMAL):
            return
        beside = self.in_flight  # was built while this one ran
        if beside and any(e.count > 1 for e in beside.plan):
            return
        held = beside.submit_seconds if beside else 0.0
        if not step.overlaps:
            held += step.submit_seconds
        rows = sum(e.rows for e in step.plan)
        beside_rows = sum(e.rows for e in beside.plan) if beside else 0
        self.stalls.took(rows, self.step_seconds, self._read_wait + held, beside_rows)

    def _begin_new(self, plan: Iterable[Entry]) -> None:
        for e in plan:
            if e.seq not in self._live:
                self._live[e.seq] = None
                self.counters["cached"] += e.seq.reported_cached
                self.proposer.begin(e.seq)

    def _end_finished(self) -> None:
        for seq in [s for s in self._live if s.finish is not None and not s.flight]:
            del self._live[seq]
            self.proposer.end(seq)

    # ---- housekeeping ------------------------------------------------------------------------

    def _housekeeping(self, idle: bool) -> None:
        self._end_finished()
        self._report_progress()
        self._disk_busy = self.offloader is not None and self.offloader.poll()
        self.rests = idle and not self._disk_busy

    def poll_memory(self) -> None:
        """Read the memory pressure and give memory back where it is high. Once a step, and idle."""
        if self.monitor is None:
            return
        level, (before, read) = self.monitor.poll(), self._pressure
        if level > NORMAL and self.monitor.read != read:
            meter.trim()
        if level > before:
            evicted = self.scheduler.kv.evict_cached()
            log.info("memory pressure: evicted %d cached blocks and all recurrent states", evicted)
        self.scheduler.short, self._pressure = level > NORMAL, (level, self.monitor.read)
        if level != before:
            for pool in self.scheduler.kv.pools:
                pool.save_memory = level > NORMAL

    def _report_progress(self) -> None:
        """Log how far long prompts have been read."""
        now = time.monotonic()
        if now - self._reported < PROGRESS_S:
            return
        self._reported = now
        for seq in self.scheduler.running:
            if left := _unread(seq):
                done = seq.prompt_len - left
                log.info("%s: %d of %d prompt tokens read", seq.request.id, done, seq.prompt_len)

    def close(self, seconds: float) -> None:
        """No step will follow: let the disk finish, for at most so many seconds."""
        if self.offloader is not None:
            self.offloader.close(seconds)

    def reset(self) -> None:
        """Clear the prefix cache, the drafters' memory and the counters of an idle engine."""
        self.scheduler.kv.evict_cached()
        self.counters, self.drafts = dict.fromkeys(COUNTERS, 0), SpecDecodeMetrics()
        self.proposer.clear()

    def check(self) -> None:
        """Assert the invariants; for an idle engine and for tests."""
        self.scheduler.check()

    def stats(self) -> Stats:
        """A snapshot. The caller adds `progress` and `disk_bytes`, which are not of one model."""
        scheduler, pool, count = self.scheduler, self.scheduler.pool, self.counters
        used, cached = pool.used, len(pool.idle)
        disk = self.offloader.disk.stats() if self.offloader is not None else DiskStats()
        states = scheduler.kv.states
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_used=used,
            blocks_cached=cached,
            blocks_free=pool.size - 1 - used - cached,
            steps=count["steps"],
            rounds=count["rounds"],
            prompt_tokens=count["prompt"],
            prompt_left=sum(map(_unread, (*scheduler.running, *scheduler.waiting))),
            cached_tokens=count["cached"],
            generated_tokens=count["generated"],
            drafts=self.drafts.table(),
            depths=tuple(sorted(self.drafts.depths.items())),
            parked_seconds=self.drafts.parked,
            preemptions=scheduler.preemptions,
            step_seconds=self.step_seconds,
            **of_process(self.monitor),
            states=0 if states is None else len(states),
            disk_read_bytes=disk.read,
            disk_written_bytes=disk.written,
            disk_runs_found=disk.hits,
            disk_runs_damaged=disk.damaged,
            seated=tuple((s.request.id, s.reported_cached) for s in scheduler.running),
        )


def _unread(seq: Seq) -> int:
    """Prompt tokens that are not computed yet."""
    return 0 if seq.generated else max(0, seq.prompt_len - seq.computed)


def of_process(monitor: MemoryMonitor | None) -> dict[str, Any]:
    """The part of Stats that is the process's, whether a model is loaded or not."""
    active, spare = meter.held()
    return dict(
        memory_pressure=monitor.level if monitor else NORMAL,
        footprint_bytes=monitor.footprint if monitor else 0,
        mlx_active_bytes=active,
        mlx_cache_bytes=spare,
        live_arrays=meter.arrays(),
    )

"""The loop: plan, draft, forward, sample, submit; read the step before; accept, commit.

Rule: step n+1 is submitted before step n is read, if that samples. A stop that is found late costs
one wasted row, never a wrong token.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlxspec.cache.disk import DiskStats
from mlxspec.cache.offload import Tier
from mlxspec.engine import structured
from mlxspec.engine.pressure import NORMAL, MemoryMonitor
from mlxspec.engine.scheduler import Scheduler, cut
from mlxspec.kernels.verify import HangDetector
from mlxspec.model import meter
from mlxspec.model.runner import Runner, Step
from mlxspec.speculate import Drafter, NoDrafter
from mlxspec.types import Draft, Entry, InvalidRequest, Logprob, Output, Request, Stats
from mlxspec.types import Sequence as Seq

log = logging.getLogger("mlxspec")

T = TypeVar("T")

TELL_S = 5.0  # between two lines on the progress of prompts

_COUNTERS = ("steps", "rounds", "prompt", "cached", "generated")


@dataclass(slots=True)
class SpecDecodeMetrics:
    """What was drafted and kept, by source and position; rounds by draft length; seconds of
    decoding without any draft. Keys are bounded: a handful of sources, MAX_DEPTH positions."""

    tried: Counter[tuple[str, int]] = field(default_factory=Counter)
    kept: Counter[tuple[str, int]] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    parked: float = 0.0

    def book(self, source: str, drafted: int, kept: int) -> None:
        self.depths[drafted] += 1
        if not drafted:
            return
        self.tried.update((source, i) for i in range(1, drafted + 1))
        self.kept.update((source, i) for i in range(1, kept + 1))

    def table(self) -> tuple[tuple[str, int, int, int], ...]:
        return tuple((*key, n, self.kept[key]) for key, n in self.tried.items())


@dataclass(slots=True)
class Engine:
    """One model's scheduler, runner and drafter. `trace` is told ("submit" | "read", number)."""

    runner: Runner
    scheduler: Scheduler
    drafter: Drafter = field(default_factory=NoDrafter)
    vocab: int = 0  # 0: token ids are not checked
    tier: Tier | None = None  # None: nothing outlives the process
    trace: Callable[[str, int], None] = lambda event, step: None
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    drafts: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    step_seconds: float = 0.0
    rests: bool = False  # nothing can be done until the disk has
    _moved: bool = False  # something went to the disk or came from it, which took time
    guard: MemoryMonitor | None = None  # None: memory is not watched
    stalls: HangDetector | None = None  # None: no kernel is used
    census: meter.Census = field(default_factory=meter.Census)
    _pressed: tuple[int, float] = (
        NORMAL,
        0.0,
    )  # the guard's level and reading that were heeded last
    _flight: deque[tuple[int, Step]] = field(default_factory=deque)
    _settled: float = 0.0
    _waited: float = 0.0  # seconds that the last read took
    _told: float = field(default_factory=time.monotonic)
    _live: dict[Seq, None] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest where it can never run; then nothing is kept of
        it."""
        ids = (
            *request.prompt,
            *request.prediction,
            *(token for token, _ in request.sampling.logit_bias),
        )
        if self.vocab and not all(0 <= token < self.vocab for token in ids):
            raise InvalidRequest(f"a token id is outside the model's vocabulary of {self.vocab}")
        self.scheduler.add(request)

    def abort(self, request: str, index: int | None = None) -> list[Output]:
        """End a request's choices now; their blocks are free when this returns."""
        outputs = self.scheduler.abort(request, index)
        self._retire()
        return outputs

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._flight or self.scheduler.running or self.scheduler.waiting)

    @property
    def active(self) -> bool:
        """Whether there is anything to do, if only for the disk."""
        return self.busy or (self.tier is not None and self.tier.saving)

    def step(self) -> list[Output]:
        """Submit one step and book the one before it."""
        outputs: list[Output] = []
        self.look()
        running = self.scheduler.running
        if self._flight and (structured.waits(running) or self._ask(self.drafter.waits, running)):
            outputs += self._settle(keep=0)
        began = time.perf_counter()
        plan = self.scheduler.plan(self._depths)
        self._enlist(e.seq for e in plan)
        self._ask(self.drafter.draft, plan, self._flight[-1][1] if self._flight else None)
        if isinstance(self.drafter, NoDrafter):  # it may have failed half way
            for e in plan:
                e.draft = Draft()
        for seq, why in structured.mask(plan):
            outputs.append(self.scheduler.fail(seq, why))
            plan = [e for e in plan if e.seq is not seq]
        self.runner.copy(self.scheduler.copies)
        self.scheduler.copies.clear()
        if plan:
            self._submit(plan, began)
        # A step of prompts alone takes a second and brings nothing: who comes meanwhile goes before
        # the next.
        outputs += self._settle(keep=int(any(e.samples for e in plan)))
        self._retire()
        self._tell()
        self._moved = self.tier is not None and self.tier.turn()
        self.rests = not (plan or outputs or self._moved)
        return outputs

    def look(self) -> None:
        """See how short memory is, and give back what can be had again. Once per turn, and when
        idle."""
        self.census.take(idle=not self.busy)
        if self.guard is None:
            return
        level, before = self.guard.look(), self._pressed
        if level > NORMAL and self.guard.read != before[1]:
            meter.trim()
        if level > before[0]:
            log.info(
                "%d cached KV blocks were forgotten, and all states", self.scheduler.groups.forget()
            )
        self.scheduler.short, self._pressed = level > NORMAL, (level, self.guard.read)
        for pool in self.scheduler.groups.pools if level != before[0] else ():
            pool.thrifty = level > NORMAL

    def _tell(self) -> None:
        """Say how far long prompts have been read."""
        now = time.monotonic()
        if now - self._told < TELL_S:
            return
        self._told = now
        for seq in self.scheduler.running:
            if left := self._unread(seq):
                log.info(
                    "%s: %d of %d prompt tokens read",
                    seq.request.id,
                    seq.prompt_len - left,
                    seq.prompt_len,
                )

    @staticmethod
    def _unread(seq: Seq) -> int:
        return 0 if seq.generated else max(0, seq.prompt_len - seq.computed)

    def _depths(self, seqs: list[Seq]) -> Mapping[Seq, int]:
        self._enlist(seqs)
        return self._ask(self.drafter.plan, seqs) or {}

    def _ask(self, verb: Callable[..., T], *args: Any) -> T | None:
        """Ask the drafter. It only makes things faster: where it fails, decoding goes on without
        it."""
        try:
            return verb(*args)
        except Exception:
            log.exception("the drafter failed; no more speculation until the next start")
            self.drafter = NoDrafter()
            self.scheduler.blind = lambda seq: False
            return None

    def _submit(self, plan: Sequence[Entry], began: float) -> None:
        before = self._flight[-1][1] if self._flight else None
        step = self.runner.run(plan, before)
        step.began, step.overlaps = began, before is not None
        self.scheduler.submitted(plan)
        self.counters["steps"] += 1
        self._flight.append((self.counters["steps"], step))
        self.trace("submit", self.counters["steps"])

    def _settle(self, keep: int) -> list[Output]:
        """Read and commit submitted steps, oldest first, until `keep` are left in flight."""
        outputs: list[Output] = []
        while len(self._flight) > keep:
            number, step = self._flight.popleft()
            began = time.perf_counter()
            tokens, logprobs, kept = step.read()
            now = time.perf_counter()
            self.trace("read", number)
            self._waited = now - began
            self._clock(step, now)
            outputs += self._book(step, tokens, logprobs, kept)
        return outputs

    def _book(
        self, step: Step, tokens: list[int], logprobs: list[list[Logprob]], kept: Iterable[int]
    ) -> list[Output]:
        accepted, lps, r, stands = [], [], 0, iter(kept)
        for e in step.plan:
            new = tokens[r : r + 1 + next(stands)] if e.samples else []
            accepted.append(new)
            lps.append([lp for row in logprobs[r : r + len(new)] for lp in row])
            r += e.sampled
            if e.samples and e.seq.finish is None:  # or what it brings is dropped
                self.counters["rounds"] += 1
                self.drafts.book(e.draft.source, len(e.draft), len(new) - 1)
            cut(e.seq, new)
            self.counters["prompt"] += max(
                0, min(e.start + e.count, e.seq.prompt_len) - e.start - e.again
            )
        self.runner.rewind(
            step.plan,
            [e.count + max(0, len(new) - 1) for e, new in zip(step.plan, accepted, strict=True)],
        )
        outputs = self.scheduler.commit(step.plan, accepted, lps)
        self.counters["generated"] += sum(len(o.tokens) for o in outputs)
        how = "overlap" if step.overlaps else "exact"
        for seq, why in structured.take(step.plan, accepted):
            outputs.append(self.scheduler.fail(seq, why))
        self._ask(self.drafter.observe, step.plan, accepted, self.step_seconds, how)
        return outputs

    def _clock(self, step: Step, now: float) -> None:
        """A step lasts from the later of its beginning and the read before it to its own read."""
        since = max(step.began, self._settled)
        self.step_seconds = now - since
        self._settled = now
        prefill = sum(e.count for e in step.plan if e.fresh > 1)
        decoding = any(e.fresh == 1 for e in step.plan)
        if self._moved:  # it says nothing about the next
            self.step_seconds = 0.0
            return
        self._watch(step, prefill)
        self.scheduler.pace.learn(prefill, decoding, self.step_seconds)
        if decoding and not any(len(e.draft) for e in step.plan):
            self.drafts.parked += self.step_seconds

    def _watch(self, step: Step, prefill: int) -> None:
        """Tell of a step whose time is the kernels': none of a prompt, none beside which one was
        built, none while memory is short. What the host does itself and what other models take is
        no waiting."""
        if self.stalls is None or prefill or (self.guard and self.guard.look() > NORMAL):
            return
        beside = self._flight[-1][1] if self._flight else None
        if not any(e.fresh > 1 for e in (beside.plan if beside else ())):
            held = (0.0 if step.overlaps else step.held) + (beside.held if beside else 0.0)
            rows = [sum(e.rows for e in s.plan) if s else 0 for s in (step, beside)]
            self.stalls.took(rows[0], self.step_seconds, self._waited + held, rows[1])

    def _enlist(self, seqs: Iterable[Seq]) -> None:
        for seq in seqs:
            if seq not in self._live:
                self._live[seq] = None
                self.counters["cached"] += seq.reported_cached
                self._ask(self.drafter.begin, seq)

    def _retire(self) -> None:
        for seq in [s for s in self._live if s.finish is not None and not s.flight]:
            del self._live[seq]
            self._ask(self.drafter.end, seq)

    def close(self, seconds: float) -> None:
        """No step will follow: let the disk finish, in so many seconds at most."""
        if self.tier is not None:
            self.tier.close(seconds)

    def forget(self) -> None:
        """Drop what the prefix cache knows and start the counters afresh. The engine must be
        idle."""
        self.scheduler.groups.forget()
        self.counters, self.drafts = dict.fromkeys(_COUNTERS, 0), SpecDecodeMetrics()
        self.drafter.forget()

    def check(self) -> None:
        """Assert the invariants; meant for an idle engine and for tests."""
        self.scheduler.check()

    def stats(self) -> Stats:
        """A snapshot. The caller adds `progress` and `disk_bytes`, which are not of one model."""
        pool, c = self.scheduler.pool, self.counters
        used, cached = pool.used, len(pool.idle)
        disk = self.tier.disk.stats() if self.tier is not None else DiskStats()
        states = self.scheduler.groups.states
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_used=used,
            blocks_cached=cached,
            blocks_free=pool.size - 1 - used - cached,
            steps=c["steps"],
            rounds=c["rounds"],
            prompt_tokens=c["prompt"],
            prompt_left=sum(
                self._unread(s) for s in (*self.scheduler.running, *self.scheduler.waiting)
            ),
            cached_tokens=c["cached"],
            generated_tokens=c["generated"],
            drafts=self.drafts.table(),
            depths=tuple(sorted(self.drafts.depths.items())),
            parked_seconds=self.drafts.parked,
            preemptions=self.scheduler.preemptions,
            step_seconds=self.step_seconds,
            **of_process(self.guard),
            states=0 if states is None else len(states),
            disk_read_bytes=disk.read,
            disk_written_bytes=disk.written,
            disk_runs_found=disk.hits,
            disk_runs_damaged=disk.damaged,
            seated=tuple((s.request.id, s.reported_cached) for s in self.scheduler.running),
        )


def of_process(guard: MemoryMonitor | None) -> dict[str, Any]:
    """What of Stats is the process's, whether a model is loaded or not."""
    active, spare = meter.held()
    return dict(
        memory_pressure=guard.level if guard else NORMAL,
        footprint_bytes=guard.footprint if guard else 0,
        mlx_active_bytes=active,
        mlx_cache_bytes=spare,
        live_arrays=meter.arrays(),
    )

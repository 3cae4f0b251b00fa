"""Which sequence computes which tokens in a step: admission, budget, blocks, preemption, commit.

Rule: there is no prefill phase and no decode phase. A sequence catches up from `computed` to the
tokens that exist plus its draft. When blocks run out, drafts are cut first, then the sequence
whose turn is last is preempted. No MLX here.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from operator import attrgetter

from mlxspec import log
from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.offload import KVOffloader
from mlxspec.cache.prefix import Copies, KVCacheManager, PrefixMatch
from mlxspec.engine.budget import PrefillBudget
from mlxspec.sequences import Accepted, Entry, Seq, pass_over
from mlxspec.types import (
    NOT_FINITE,
    Finish,
    InvalidRequest,
    Logprob,
    Output,
    Outputs,
    Request,
    not_finite,
    too_long,
)

MAX_DEFERRED = 8  # plans in which other prefills may go first
TURN = attrgetter("turn")


@dataclass(eq=False)
class Scheduler:
    """Holds every live sequence. Engine thread only.

    `context` bounds prompt + output in tokens; `sharing` is off where blocks do not hold everything
    a model keeps of a prefix; `can_draft` is off where a rejected draft cannot be rolled back.
    With `low_memory`, sequences are started one at a time.
    """

    kv: KVCacheManager
    context: int
    max_sequences: int = 16
    prefill_budget: PrefillBudget = field(default_factory=PrefillBudget)
    sharing: bool = True
    can_draft: bool = True
    waiting: list[Seq] = field(default_factory=list)  # by turn, as are the running ones
    running: list[Seq] = field(default_factory=list)
    offloader: KVOffloader | None = None
    copies: Copies = field(default_factory=list)  # to do before the next plan's rows are written
    low_memory: bool = False
    preemptions: int = 0
    _order: Iterator[int] = field(default_factory=count)
    # The sequence that could not be admitted, and the free blocks then: until more are free, its
    # prompt is not hashed again.
    _blocked: Seq | None = None
    _blocked_free: int = 0
    _held: Seq | None = None  # not planned: it is to be preempted, and a draft of it is in flight

    @property
    def pool(self) -> BlockPool:
        """The pool of the layers with full attention."""
        return self.kv.pool

    @property
    def limit(self) -> int:
        """The longest prompt + output that can run here, in tokens."""
        return min(self.context, self.pool.capacity)

    # ---- requests ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request's choices, `max_tokens` cut to the context. Raises InvalidRequest for a
        prompt without room for an answer."""
        room = self.limit - len(request.prompt)
        if room <= 0:
            raise InvalidRequest(too_long(len(request.prompt), self.limit))
        request = replace(request, max_tokens=min(request.max_tokens, room))
        choices = []
        for index in range(request.n):
            seq = Seq(request, index, next(self._order), tokens=[*request.prompt])
            seq.windows = [[] for _ in self.kv.windows]
            if request.grammar:
                seq.matcher = request.grammar()
            choices.append(seq)
        self.waiting += choices
        self.waiting.sort(key=TURN)

    def abort(self, request: str, index: int | None = None) -> Outputs:
        """End the choices of `request` (all, or one) and free their blocks."""
        choices = [s for s in (*self.running, *self.waiting) if s.request.id == request]
        return [self.end(s, "abort") for s in choices if index in (None, s.index)]

    def end(self, seq: Seq, finish: Finish, error: str = "") -> Output:
        """End a choice that is not complete, and free its blocks."""
        seq.finish = finish
        self._release(seq)
        return _output(seq, Accepted(), error)

    # ---- planning ----------------------------------------------------------------------------

    def decoding(self) -> list[Seq]:
        """The running sequences that decode in the next step, and so may take a draft."""
        if not self.can_draft:
            return []
        return [s for s in self.running if s.remaining == 1 and s.room > 0]

    def plan(self, depths: Mapping[Seq, int]) -> list[Entry]:
        """The next step: decodes first, then prefills within the budget. Reserves blocks for every
        row. `depths`: how many tokens to draft, by sequence."""
        self._admit()
        ready = [s for s in self.running if s.remaining and s.room > 0 and s is not self._held]
        plan: list[Entry] = []
        for seq in ready:
            if seq.remaining == 1:
                self._add_entry(plan, seq, 1)
        # A token in flight is also a running answer that this step would delay.
        decoding = bool(plan) or any(s.pending for s in self.running)
        prefills = [s for s in ready if s.remaining > 1]
        prefills.sort(
            key=lambda s: (-(s.deferred // MAX_DEFERRED), s.priority, s.remaining, s.order)
        )
        for seq in prefills:
            budget = self.prefill_budget.rows(plan, seq.computed, decoding)
            n = min(seq.remaining, budget)
            n = seq.uncut(self.kv.limit_rows(seq, n), alone=all(e.count == 1 for e in plan))
            if n > 0 and self._add_entry(plan, seq, n):
                seq.deferred = 0
                decoding |= plan[-1].samples  # its answer begins with this step and waits for it
            else:
                seq.deferred += 1
        for e in plan:
            depth = min(depths.get(e.seq, 0), e.seq.room - 1)
            if depth > 0:  # as far as blocks are free
                end = e.start + e.inflight_drafts + e.count
                if need := self.kv.blocks_needed(e.seq, end + depth):
                    self.kv.allocate(e.seq, min(need, self.kv.num_free))
                e.depth = min(depth, len(e.seq.table) * self.pool.block_size - end)
        return plan

    def _add_entry(self, plan: list[Entry], seq: Seq, n: int) -> bool:
        """Add an entry of `n` rows, preempting less important sequences if blocks run out; False
        where that is not enough."""
        if seq not in self.running:  # preempted for another entry of this plan
            return False
        drafts = seq.inflight_drafts
        while need := self.kv.blocks_needed(seq, seq.computed + drafts + n):
            if self.kv.allocate(seq, need):
                break
            others = [s for s in self.running if s.turn > seq.turn and not s.inflight_drafts]
            if not others:
                return False
            self._preempt(others[-1])
            plan[:] = [e for e in plan if e.seq in self.running]
        samples = n == seq.remaining
        pending = samples and seq.pending > 0
        entry = Entry(
            seq=seq,
            state=seq.state,
            tables=seq.tables,
            tokens=seq.tokens,
            start=seq.computed,
            count=n,
            samples=samples,
            pending=pending,
            inflight_drafts=drafts,
        )
        plan.append(entry)
        return True

    def _preempt(self, seq: Seq) -> None:
        """Free its blocks and queue it again; most of them are still cached when it is admitted. It
        has been passed as often as its siblings, which may wait for it."""
        self.preemptions += 1
        self.running.remove(seq)
        self.kv.free(seq)
        siblings = [s for s in self.waiting if s.request is seq.request]
        seq.passed = max(s.passed for s in (seq, *siblings))
        insort(self.waiting, seq, key=TURN)

    def submitted(self, plan: Iterable[Entry]) -> None:
        """The step was submitted: its rows count as computed, its samples as pending."""
        for e in plan:
            seq = e.seq
            seq.flight.append(e)
            seq.computed = e.start + e.count
            e.recurrent = seq.state.recurrent
            if e.samples:
                seq.pending += 1
                seq.inflight_drafts += e.draft.size

    # ---- admission ---------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting sequences, by turn, while there are slots and blocks."""
        self._held = None
        while self.waiting and self._start_next():
            pass

    def _start_next(self) -> bool:
        """Start the first waiting sequence that can, preempting less important ones where slots or
        blocks lack; False where none can."""
        # Before memory was low, more may have been started than are now.
        places = max(1, len(self.running)) if self.low_memory else self.max_sequences
        free = self._free()
        for seq in self.waiting:
            # Once it has been passed too often it is next, but interrupts nobody.
            others = [s for s in self.running if s.priority > seq.request.priority]
            most = free + sum(len(s.table) + self._lacking(s) for s in others)
            blocked = seq is self._blocked and most <= self._blocked_free
            if blocked or len(self.running) - len(others) >= places:
                return False
            if self._must_wait(seq):
                continue
            # An embedding needs every row, and the texts of an index would evict conversations.
            sharing = self.sharing and not seq.request.pooling
            match = self.kv.match(seq.tokens, self.kv.chunked(seq)) if sharing else PrefixMatch()
            if self.running and self._need(seq, match) > most:
                self._blocked, self._blocked_free = seq, most
                return False
            if self.offloader and sharing and self.offloader.start_restore(seq, match):
                continue
            while self.running and (
                len(self.running) >= places or self._need(seq, match) > self._free()
            ):
                if not others:
                    return False
                if others[-1].inflight_drafts:
                    self._held = others[-1]
                    return False
                self._preempt(others.pop())
            self._start(seq, match)
            return True
        return False

    def _free(self) -> int:
        """Blocks that are free and not promised to running sequences."""
        return len(self.pool.free_blocks) - sum(self._lacking(s) for s in self.running)

    def _need(self, seq: Seq, match: PrefixMatch) -> int:
        """Free blocks that it needs to start; none for those that it shares with running ones."""
        cached = match.tables[0] if match.tables else ()
        shared = [block for block in cached if block not in self.pool.free_blocks]
        return self._lacking(seq) - len(shared)

    def _must_wait(self, seq: Seq) -> bool:
        """Whether a waiting sequence must not start yet: its own step is in flight (it was
        preempted), the disk restores its prefix, or another choice of its request computes the
        prompt that they share."""
        if seq.flight or (self.offloader and self.offloader.restoring(seq)):
            return True
        older = [s for s in (*self.running, *self.waiting) if s.order < seq.order]
        return any(s.request is seq.request and not s.generated for s in older)

    def _lacking(self, seq: Seq) -> int:
        """Blocks a sequence still needs to catch up and to hold one more token."""
        return self.kv.blocks_needed(seq, seq.known + 1)

    def _start(self, seq: Seq, match: PrefixMatch) -> None:
        self.copies += self.kv.allocate_prefix(seq, match)
        if self.offloader:
            self.offloader.cancel(seq)
        if not seq.admitted:
            seq.admitted = True
            seq.reported_cached = seq.computed
        self.waiting.remove(seq)
        pass_over(self.waiting, seq)
        self.waiting.sort(key=TURN)
        insort(self.running, seq, key=TURN)

    # ---- commit ------------------------------------------------------------------------------

    def commit(self, plan: Iterable[Entry], accepted: Iterable[Accepted]) -> Outputs:
        """Apply the tokens of a step that was read, in submission order. Entries of sequences that
        have ended since are ignored; slots of rejected drafts are written again.

            tokens:  [ shared ][ computed before ][ count ][ accepted drafts ] new | rejected
        """
        outputs = []
        for e, new in zip(plan, accepted, strict=True):
            seq = e.seq
            seq.flight.popleft()
            if seq.finish:
                continue
            if new.finish == "error":
                outputs += self._fail(e, new)
                continue
            if e.samples:
                outputs.append(self._extend(e, new))
            if seq.table:
                upto = e.start + e.count + new.drafts
                if self.sharing and not seq.request.pooling:
                    self._cache_prefix(e, upto)
                self.kv.free_passed(seq, min(upto, seq.computed))
            if seq.finish:
                self._release(seq)
        return outputs

    def _extend(self, entry: Entry, new: Accepted) -> Output:
        """Append the tokens, and shift the sequence's entries in flight by the accepted drafts."""
        seq, drafts = entry.seq, new.drafts
        seq.pending -= 1
        seq.inflight_drafts -= entry.draft.size
        seq.rounds += 1
        seq.drafted += entry.draft.size
        seq.accepted += drafts
        seq.tokens += new.tokens
        computed = entry.start + entry.count + drafts
        for e in seq.flight:
            e.start += drafts
            e.inflight_drafts -= entry.draft.size
            computed += e.count
        if seq.table:
            seq.computed = computed
        seq.finish = new.finish
        return _output(seq, new)

    def _fail(self, entry: Entry, new: Accepted) -> Outputs:
        """End a choice whose numbers are not finite, and take its blocks out of the prefix cache.
        First the accepted drafts, which without a draft would have come before."""
        seq = entry.seq
        outputs = []
        if new.tokens:
            seq.tokens += new.tokens
            outputs.append(_output(seq, replace(new, finish=None)))
        keys = self.kv.forget(seq)
        if self.offloader:
            self.offloader.forget(keys)
        error = not_finite(seq.request.model, entry.start + entry.count + new.drafts)
        log.warning("%s: %s", seq.request.id, error)
        ended = self.end(seq, "error", error)
        return [*outputs, replace(ended, fault="numbers", embedding=None)]

    def _cache_prefix(self, entry: Entry, upto: int) -> None:
        """Enter the sequence's first `upto` tokens into the prefix cache: full blocks after each
        step; the partial last block at the end of the prompt and of the answer; recurrent states
        where a later prompt may continue. The disk gets the prompt."""
        seq = entry.seq
        self.kv.cache_blocks(seq, upto)
        prompt_done = entry.start < seq.prompt_len <= upto
        if prompt_done:
            self.kv.cache_partial(seq, seq.prompt_len)
        if seq.finish:
            self.kv.cache_partial(seq, upto)
        self.kv.cache_state(seq, upto, entry.recurrent)
        if self.offloader and prompt_done:
            self.offloader.save(seq)

    def _release(self, seq: Seq) -> None:
        """Free the blocks of a sequence that has ended, however it did; the disk keeps them."""
        if self.offloader:
            self.offloader.save(seq)
            self.offloader.cancel(seq)
        self.kv.free(seq)
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)

    def check(self) -> None:
        """Assert that no block leaked."""
        self.kv.check([*self.running, *self.waiting])


def cut_at_stop(entry: Entry, sampled: list[int], logprobs: list[Logprob]) -> Accepted:
    """The sampled tokens of an entry that are valid: those before NOT_FINITE, up to and including a
    stop token, at most `max_tokens`."""
    request = entry.seq.request
    room = request.max_tokens - entry.seq.generated
    tokens = list(takewhile(NOT_FINITE.__ne__, sampled[:room]))
    finish: Finish | None = "length" if len(tokens) == room else None
    if NOT_FINITE in sampled[:room]:
        finish = "error"
    if request.pooling:
        return Accepted(finish=finish)
    for n, token in enumerate(tokens, 1):
        if token in request.stop_tokens:
            return Accepted(tokens[:n], logprobs[:n], "stop")
    return Accepted(tokens, logprobs[: len(tokens)], finish)


def _output(seq: Seq, new: Accepted, error: str = "") -> Output:
    return Output(
        seq.request.id,
        seq.index,
        tuple(new.tokens),
        logprobs=tuple(new.logprobs),
        finish=seq.finish,
        cached=seq.reported_cached,
        rounds=seq.rounds,
        error=error,
        drafted=seq.drafted,
        accepted=seq.accepted,
        embedding=seq.state.embedding,
        loops=seq.loops,
    )

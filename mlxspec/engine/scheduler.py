"""Which sequence computes which tokens in a step: admission, budget, blocks, preemption, commit.

Rule: there is no prefill phase and no decode phase. A sequence catches up from `computed` to what
is known plus its draft; whatever is short of blocks gives up drafts first, then its youngest
neighbour. No mlx here.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Protocol

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.prefix import Copies, KVCacheManager, PrefixMatch
from mlxspec.engine.budget import PrefillBudget
from mlxspec.types import Entry, Finish, InvalidRequest, Logprob, Output, Request, Sequence

PATIENCE = 8  # plans that may pass a prefill over for shorter ones


class Tier(Protocol):
    """What outlives the process: see `mlxspec.engine.tier`."""

    def waits(self, seq: Sequence) -> bool: ...
    def seeks(self, seq: Sequence, hit: PrefixMatch) -> bool: ...
    def forget(self, seq: Sequence) -> None: ...
    def note(self, seq: Sequence) -> None: ...


Depths = Callable[[list[Sequence]], Mapping[Sequence, int]]


class Scheduler:
    """Holds every live sequence. `context` bounds prompt + output in tokens; `sharing` is off where
    a model keeps more of a prefix than blocks hold; an entry of more than `drafts` known rows takes
    no draft (0: none does); `blind` says whether a sequence may go on while a draft of it is in
    flight and nobody knows how far it got. Engine thread only."""

    def __init__(
        self,
        groups: KVCacheManager,
        *,
        context: int,
        max_sequences: int = 16,
        pace: PrefillBudget | None = None,
        sharing: bool = True,
        drafts: int = 1 << 31,
        blind: Callable[[Sequence], bool] = lambda seq: False,
    ) -> None:
        self.groups, self.context, self.max_sequences, self.sharing = (
            groups,
            context,
            max_sequences,
            sharing,
        )
        self.pace, self.blind, self.drafts = pace or PrefillBudget(), blind, drafts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.tier: Tier | None = None
        self.copies: Copies = []  # blocks to copy before the next plan's rows are written
        self.short = False  # of memory: then a sequence starts when none runs
        self.preemptions = 0
        self._order = count()
        self._stuck: tuple[Sequence, int] | None = (
            None  # who could not be admitted, with how many blocks
        )

    @property
    def pool(self) -> BlockPool:
        """Of the layers that see everything."""
        return self.groups.pool

    @property
    def limit(self) -> int:
        """The longest prompt + output that can run here, in tokens."""
        return min(self.context, self.pool.capacity)

    def add(self, request: Request) -> None:
        """Queue a request's choices. Raises InvalidRequest where it could never run."""
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; send one token at least")
        if request.max_tokens < 1 or len(request.prompt) + request.max_tokens > self.limit:
            raise InvalidRequest(
                f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} do not fit"
                f" in {self.limit} tokens; shorten one of them"
            )
        leader = None
        for index in range(request.n):
            seq = Sequence(request, index, next(self._order), list(request.prompt), leader=leader)
            seq.windows = [[] for _ in self.groups.windows]
            seq.matcher = request.grammar() if request.grammar else None
            leader = leader or seq
            self.waiting.append(seq)

    def abort(self, request: str, index: int | None = None) -> list[Output]:
        """End the choices of `request` (all, or one), freeing their blocks now. Unknown ids do
        nothing."""
        hit = [
            s
            for s in (*self.running, *self.waiting)
            if s.request.id == request and index in (None, s.index) and s.finish is None
        ]
        for seq in hit:
            seq.finish = "abort"
            self._release(seq)
            self._succeed(seq)
        return [_output(seq, (), ()) for seq in hit]

    def fail(self, seq: Sequence, error: str) -> Output:
        """End a choice that cannot go on."""
        seq.finish = "error"
        self._release(seq)
        self._succeed(seq)
        return replace(_output(seq, (), ()), error=error)

    def plan(self, depths: Depths = lambda seqs: {}) -> list[Entry]:
        """The next step: decodes first, then prefills inside the budget. Reserves blocks for every
        row. `depths` is asked how many tokens to draft for the sequences that sample."""
        self._admit()
        ready = [
            s
            for s in self.running
            if s.remaining and s.room > 0 and (not s.spread or self.blind(s))
        ]
        plan: list[Entry] = []
        for seq in ready:
            if seq.remaining == 1:
                self._place(plan, seq, seq.remaining)
        # Somebody also waits for what is in flight, if it is the end of an answer.
        budget = self.pace.rows(decoding=bool(plan) or any(s.pending for s in self.running))
        prefills = [s for s in ready if s.remaining > 1]
        for seq in sorted(prefills, key=lambda s: (s.deferred < PATIENCE, s.remaining, s.order)):
            n = self.groups.cut(seq, min(seq.remaining, budget))
            if n > 0 and self._place(plan, seq, n):
                budget -= n
                seq.deferred = 0
                if plan[
                    -1
                ].samples:  # whoever begins to answer waits no longer than who does already
                    budget = min(budget, self.pace.rows(decoding=True))
            else:
                seq.deferred += 1
        drafting = [e for e in plan if e.samples and e.count <= self.drafts]
        if self.drafts:
            wanted = depths([e.seq for e in drafting])
            for entry in drafting:
                if (want := min(wanted.get(entry.seq, 0), entry.seq.room - 1)) > 0:
                    entry.depth = self._widen(entry, want)
        return plan

    def submitted(self, plan: Iterable[Entry]) -> None:
        """The step is on its way: its rows count as computed; a plain sampling entry has a pending
        token."""
        for e in plan:
            seq = e.seq
            seq.flight.append(e)
            seq.computed = e.start + e.count
            e.state = seq.state
            if e.samples:
                seq.pending += 1
                seq.spread += len(e.draft)

    def commit(
        self,
        plan: Iterable[Entry],
        accepted: Iterable[list[int]],
        logprobs: Iterable[list[Logprob]],
    ) -> list[Output]:
        """Book what a step brought, oldest step first. A row of a sequence that has ended meanwhile
        is ignored; drafted slots behind the accepted ones are free to be written again.

            tokens:  [ shared ][ computed before ][ count ][ kept drafts ] new | rejected
        """
        outputs = []
        for e, new, lps in zip(plan, accepted, logprobs, strict=True):
            seq = e.seq
            seq.flight.popleft()
            if seq.finish is not None:
                continue
            if e.samples:
                seq.pending -= 1
                seq.spread -= len(e.draft)
                seq.rounds += 1
                seq.drafted += len(e.draft)
                if len(new) > 1:
                    seq.accepted[e.draft.source] = (
                        seq.accepted.get(e.draft.source, 0) + len(new) - 1
                    )
                outputs.append(self._extend(e, new, lps))
            if seq.table:
                self._publish(e, len(new))
            if seq.finish is not None:
                self._release(seq)
        return outputs

    def check(self) -> None:
        """Assert what must hold between steps."""
        live = (*self.running, *self.waiting)
        self.groups.check(live)
        assert all(not s.table and not s.computed for s in self.waiting), (
            "a waiting sequence holds blocks"
        )
        assert len(self.running) <= self.max_sequences
        for seq in live:
            assert seq.finish is None, "an ended sequence is still listed"
            assert seq.shared <= seq.prompt_len or seq.generated, "shared beyond the prompt"
            assert seq.computed <= max(0, len(seq.table)) * self.pool.block_size, (
                "computed without a block"
            )
            assert seq.computed <= seq.known, "computed what does not exist"

    # ---- admission
    # ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if not self.waiting:  # what the running lack is then nobody's business
            return
        held: list[Sequence] = []
        promised = sum(self._lacking(s) for s in self.running)
        while self.waiting and len(self.running) < (1 if self.short else self.max_sequences):
            seq = self.waiting.popleft()
            # A preempted sequence waits until its step in flight has been read.
            behind = seq.leader and not seq.leader.generated and seq.leader.finish is None
            if seq.flight or behind or (self.tier and self.tier.waits(seq)):
                held.append(seq)
                continue
            slack = len(self.pool.free) - promised
            stuck = self._stuck and self._stuck[0] is seq and slack <= self._stuck[1]
            if stuck or (hit := self._fits(seq, promised)) is None:
                self._stuck = (seq, slack)  # so that its prompt is not hashed again at every step
                self.waiting.appendleft(seq)
                break
            if self.tier and self.tier.seeks(seq, hit):
                held.append(seq)
                continue
            self._start(seq, hit)
            promised += self._lacking(seq)
        self.waiting.extendleft(reversed(held))

    def _lacking(self, seq: Sequence) -> int:
        """Blocks a sequence still needs to catch up and to hold one more token."""
        return self.groups.lacking(seq, seq.known + 1)

    def _fits(self, seq: Sequence, promised: int) -> PrefixMatch | None:
        """What the prefix cache has for a waiting sequence; None where there is no room for the
        rest."""
        hit = self.groups.match(seq.tokens) if self.sharing else PrefixMatch()
        hits = hit.tables[0] if hit.tables else ()
        idle = sum(b in self.pool.free for b in hits)
        need = self._lacking(seq) - len(hits) + idle
        return None if self.running and need + promised > len(self.pool.free) else hit

    def _start(self, seq: Sequence, hit: PrefixMatch) -> None:
        self.copies += self.groups.take(seq, hit)
        if self.tier:
            self.tier.forget(seq)
        seq.cached = seq.computed
        if not seq.admitted:
            seq.admitted, seq.reported_cached = True, min(seq.cached, seq.prompt_len)
        self.running.append(seq)
        self.running.sort(key=lambda s: s.order)

    # ---- blocks
    # ---------------------------------------------------------------------------------------

    def _place(self, plan: list[Entry], seq: Sequence, n: int) -> bool:
        """Add an entry of `n` rows if blocks can be had; younger sequences pay for older ones."""
        if seq not in self.running:  # it has paid already, in this plan
            return False
        while need := self.groups.lacking(seq, seq.computed + seq.spread + n):
            if self.groups.grow(seq, need):
                break
            victim = next((s for s in reversed(self.running) if not s.spread), seq)
            if victim.order <= seq.order:
                return False
            self._preempt(victim)
            plan[:] = [e for e in plan if e.seq is not victim]
        samples = seq.computed + n == seq.known
        plan.append(
            Entry(
                seq,
                seq.computed,
                n,
                samples,
                pending=samples and seq.pending > 0,
                spread=seq.spread,
            )
        )
        return True

    def _widen(self, entry: Entry, want: int) -> int:
        """Blocks for up to `want` drafted tokens out of what is free; never by preemption."""
        end = entry.start + entry.spread + entry.count
        need = self.groups.lacking(entry.seq, end + want)
        self.groups.grow(entry.seq, min(need, self.groups.free))
        return min(want, len(entry.seq.table) * self.pool.block_size - end)

    def _preempt(self, seq: Sequence) -> None:
        """Take its blocks; catch-up and the prefix cache will do the rest."""
        self.preemptions += 1
        self.running.remove(seq)
        self.groups.drop(seq)
        self.waiting.appendleft(seq)

    # ---- commit
    # ---------------------------------------------------------------------------------------

    def _extend(self, entry: Entry, new: list[int], lps: list[Logprob]) -> Output:
        seq = entry.seq
        finish = cut(seq, new)
        seq.tokens += new
        kept = max(0, len(new) - 1)
        if seq.table:
            seq.computed = entry.start + entry.count + kept + sum(e.count for e in seq.flight)
        for later in seq.flight:
            later.start += kept
            later.spread -= len(entry.draft)
        if finish:
            seq.finish = finish
        return _output(seq, tuple(new), tuple(lps[: len(new)]))

    def _publish(self, entry: Entry, new: int) -> None:
        seq, groups = entry.seq, self.groups
        upto = entry.start + entry.count + max(0, new - 1)
        if self.sharing and upto <= len(seq.table) * self.pool.block_size:
            groups.publish(seq, upto)
            read = entry.start < seq.prompt_len <= upto
            if read:
                groups.publish_tail(seq, seq.prompt_len)
            if seq.finish is not None:
                groups.publish_tail(seq, upto)
            known = groups.states is not None
            if known and (seq.finish is not None or groups.marked(seq, upto)):
                groups.remember(seq, upto, entry.state if seq.flight else seq.state)
            if self.tier and (read or seq.finish is not None):
                self.tier.note(seq)
        groups.slide(seq, min(upto, seq.computed))

    def _succeed(self, leader: Sequence) -> None:
        """Where a leader goes before its prompt is known, the next of its siblings leads."""
        if not leader.generated:
            next_leader = None
            for heir in [s for s in self.waiting if s.leader is leader]:
                heir.leader = next_leader
                next_leader = next_leader or heir

    def _release(self, seq: Sequence) -> None:
        self.groups.drop(seq)
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        if self.tier:
            self.tier.forget(seq)


def cut(seq: Sequence, new: list[int]) -> Finish | None:
    """Drop what a step brought behind a stop token or max_tokens; why the choice ends with it, if
    it does."""
    for n, token in enumerate(new, 1):
        finish: Finish | None = "stop" if token in seq.request.stop_tokens else None
        if seq.generated + n == seq.request.max_tokens:
            finish = finish or "length"
        if finish:
            del new[n:]
            return finish
    return None


def _output(seq: Sequence, tokens: tuple[int, ...], logprobs: tuple[Logprob, ...]) -> Output:
    return Output(
        seq.request.id,
        seq.index,
        tokens,
        logprobs,
        seq.finish,
        seq.reported_cached,
        seq.rounds,
        drafted=seq.drafted,
        accepted=tuple(seq.accepted.items()),
    )

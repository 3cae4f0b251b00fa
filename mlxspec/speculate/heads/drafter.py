"""Drafts with a trained head of any kind, or with a small model.

Rule: the row of a position lies in its slot under the target's block ids, so that a block is a
function of its prefix. After a step with drafts the rows of all its samples are read at once: those
after the last accepted one are written again before they are read.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlxspec.model.batch import Step, build_inputs
from mlxspec.model.runner import Runner
from mlxspec.speculate import Drafter, Proposals
from mlxspec.speculate.calibrate import unused_seq
from mlxspec.speculate.chain import LIKELIEST, Chain, DraftCosts, deepest_first
from mlxspec.speculate.controller import Proposal
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.heads.read_states import ReadState, ReadStates, joined
from mlxspec.types import Accepted, Entry, Plan, Seq, Tap


class HeadDrafter(Drafter):
    """Drafts with a HeadModel for the target that `runner` runs."""

    lazy = True

    def __init__(
        self,
        head: HeadModel,
        runner: Runner,
    ) -> None:
        self.name = head.name
        self.head = head
        self.runner = runner
        self.costs = DraftCosts()
        self._pass = head.pass_type(head, runner)
        runner.adopted = self._pass.pages
        self.use(head.taps)
        self._reads = ReadStates(head.slot_offset, runner.view.block_size, self._before)

    def begin(self, seq: Seq) -> None:
        self._reads.live[seq] = ReadState()

    def end(self, seq: Seq) -> None:
        del self._reads.live[seq]

    def use(self, taps: tuple[Tap, ...]) -> None:
        """Read these hidden states of the target from now on."""
        self.taps = taps
        self.runner.tap(taps)
        self.runner.states.taps = taps if self.head.slot_offset else ()

    def detach(self) -> None:
        """Leave the runner as if the head had never been there."""
        self.close()
        self.use(())

    def close(self) -> None:
        self.runner.adopted = ()  # else blocks would be saved whose rows it did not read
        self._reads.live.clear()
        # Recurrent states with and without hidden states cannot share a batch.
        if not self.runner.states.layers:
            self.use(())

    def options(self, seq: Seq) -> list[Proposal]:
        """Greedy drafts, or, at a temperature above 0, those drawn with the target's noise and the
        likeliest tokens, which a drafter less sure than its target guesses better. Each has rates
        of its own: greedy requests say nothing about others."""
        most = min(self.head.depth, seq.room - 1)
        if most < 1 or seq.remaining != 1 or not self._pass.can_draft(seq):
            return []
        costs, made = self.costs, []
        for how in ("drawn", LIKELIEST) if seq.request.sampling.temperature > 0 else ("greedy",):
            keys = [(self.name, how, i + 1) for i in range(most)]
            made.append(Proposal(self.name, (), costs.token, costs.fixed, keys))
        return made

    def draft(
        self,
        plan: Plan,
        previous: Step | None,
        chosen: Proposals,
    ) -> None:
        self._reads.place(plan)
        drafting = deepest_first(plan, chosen)
        if not drafting:
            return
        self.runner.grow()
        shift = None
        if previous is not None and any(e.inflight_drafts for e in drafting):
            shift = previous.shift_of(drafting)
        rows = self._reads.unread(drafting, previous, self._hidden(previous))
        tokens = build_inputs(drafting, previous, shift)
        chain = Chain(drafting, chosen, shift, tokens)
        self._pass.draft(rows, chain)

    def observe(
        self,
        step: Step,
        accepted: Sequence[Accepted],
    ) -> None:
        rows = self._reads.observe(step, self._hidden(step), accepted)
        if rows.entries:
            self.runner.grow()
            self._pass.read(rows)

    def _hidden(self, step: Step | None) -> mx.array:
        """What the head reads of a step's rows, [T, D]; without a step [0, 0]."""
        if step is None:
            return joined([])
        return self.head.prepare(joined([step.taps[tap] for tap in self.taps], axis=-1))

    def _before(self, e: Entry) -> list[mx.array]:
        """The hidden state before a sequence's first row, which a recurrent state brings."""
        if not (self.head.slot_offset and e.start and self.runner.states.layers):
            return []
        return [self.head.prepare(e.seq.state[-1].reshape(1, -1))]

    # ---- costs -------------------------------------------------------------------------------

    def learn_seconds(
        self,
        seconds: float,
        depth: int,
    ) -> None:
        self.costs.learn(seconds, depth)

    def measure(self, table: list[int], known: DraftCosts | None = None) -> DraftCosts:
        """Time drafts in unused blocks; where what they cost is `known`, one shows that they can be
        made."""
        if known:
            self._seconds(table, 1)
            self.costs = replace(known)
        else:
            self.costs.measure(partial(self._seconds, table), self.head.depth)
        return replace(self.costs)

    def _seconds(
        self,
        table: list[int],
        depth: int,
    ) -> float:
        """Seconds that a draft of so many tokens takes behind one row."""
        context = min(64, len(table) * self.runner.view.block_size - depth - 1)
        seq = unused_seq(self.runner, table, context)
        dtype = self.head.embed(mx.array([0])).dtype
        hidden = self.head.prepare(mx.zeros((1, self.head.width), dtype))
        read = context - 1 + self.head.slot_offset
        self._reads.live[seq] = ReadState(read, [hidden], table)
        entry = Entry(seq, context, 1, True, depth=depth)
        began = time.perf_counter()
        self.draft([entry], None, {seq: Proposal(self.name)})
        mx.eval(entry.draft.tokens)
        self.end(seq)
        return time.perf_counter() - began

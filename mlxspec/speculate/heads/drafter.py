"""Drafts with a trained head of any kind, or with a small model.

Rule: each position's row lies in its own slot under the target's block ids, so that a block is a
function of its prefix. After a step with drafts the head is run over the rows of all its samples at
once: those after the last accepted one are written again before they are used. The head is run over
rows that others may share or the disk may save as soon as they are final: of prompts, full blocks,
finished sequences.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from mlxspec.model.batch import Step, build_inputs, joined, starts_of
from mlxspec.model.runner import Runner
from mlxspec.sequences import Accepted, Draft, Entry, LazyTokens, Plan, Seq, Span
from mlxspec.speculate import Drafter
from mlxspec.speculate.calibrate import unused_span
from mlxspec.speculate.chain import (
    LIKELIEST,
    Chain,
    DraftCosts,
    deepest_first,
    sampling_of,
)
from mlxspec.speculate.controller import Proposal
from mlxspec.speculate.heads.model import HeadInput, HeadModel
from mlxspec.types import Check, Tap

MAX_LAG = 32  # tokens that a drafter may fall behind a sequence for which it does not draft


@dataclass(slots=True)
class ReadState:
    """One sequence: its rows in the slots before `read` are right, and `hidden` are the hidden
    states [n, D] of the rows from there on. If its blocks went to another sequence, it restarts
    after its cached prefix."""

    read: int = 0
    hidden: list[mx.array] = field(default_factory=list)
    table: list[int] | None = None  # None: it has no blocks, or they may be another's
    step: Step | None = None  # in flight; the head was run over its rows for the next one's draft


class HeadDrafter(Drafter):
    """Drafts with a HeadModel for the target that `runner` runs. The row that is made of the hidden
    state at position p is in slot p + `head.slot_offset`, 0 or 1."""

    lazy = True

    def __init__(self, head: HeadModel, runner: Runner) -> None:
        self.name = head.name
        self.head = head
        self.runner = runner
        self.costs = DraftCosts()
        self._pass = head.pass_type(head, runner)
        runner.head_pages = self._pass.pages
        self.use(head.taps)
        self._live: dict[Seq, ReadState] = {}

    def begin(self, seq: Seq) -> None:
        self._live[seq] = ReadState()

    def end(self, seq: Seq) -> None:
        del self._live[seq]

    def use(self, taps: tuple[Tap, ...]) -> None:
        """Read these hidden states of the target from now on."""
        self.taps = taps
        self.runner.tap(taps)
        self.runner.states.taps = taps if self.head.slot_offset else ()

    def detach(self) -> None:
        """Leave the runner as it was without the head."""
        self.close()
        self.runner.complete = True
        self.use(())

    def close(self) -> None:
        # Else blocks would be saved without its rows.
        self.runner.complete = not self.runner.head_pages
        self.runner.head_pages = ()
        self._live.clear()
        # Recurrent states with and without hidden states cannot share a batch.
        if not self.runner.states.layers:
            self.use(())

    def options(self, seq: Seq) -> list[Proposal]:
        """Greedy drafts, or, at a temperature above 0, those sampled with the target's noise and
        the likeliest tokens, with which a drafter less sure than its target is right more often.
        Each has its own rates: greedy requests say nothing about others."""
        most = min(self.head.depth, seq.room - 1)
        if most < 1 or seq.remaining != 1 or not self._pass.can_draft(seq):
            return []
        warm = seq.request.sampling.temperature > 0
        costs = self.costs
        proposals = []
        for sampling in ("drawn", LIKELIEST) if warm else ("greedy",):
            keys = [(self.name, sampling, i + 1) for i in range(most)]
            proposal = Proposal(
                self.name,
                seconds=costs.token,
                fixed=costs.fixed,
                rate_keys=keys,
                sampling=sampling,
            )
            proposals.append(proposal)
        return proposals

    def draft(self, plan: Plan, previous: Step | None) -> None:
        self._track_blocks(plan)
        drafting = deepest_first(self.chosen(plan))
        if not drafting:
            return
        self.runner.grow()
        shift = None
        if previous is not None and any(e.inflight_drafts for e in drafting):
            shift = previous.shift_of(drafting)
        rows = self._unread(drafting, previous)
        tokens = build_inputs(drafting, previous, shift)
        chain = Chain(
            drafting,
            depths=[e.depth for e in drafting],
            samplings=[sampling_of(e) for e in drafting],
            shift=shift,
            tokens=tokens,
        )
        self._pass.draft(rows, chain)
        for e, drafted in zip(drafting, chain.drafts, strict=True):
            e.draft = Draft(drafted, e.proposal.source, e.proposal.rate_keys)

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        """Keep a step's hidden states up to the last accepted draft, and run the head over rows
        that are due; over others once there are MAX_LAG."""
        hidden = None
        offset, size = self.head.slot_offset, self.runner.view.block_size
        first = starts_of(step.plan)
        due = []
        for e, new in zip(step.plan, accepted, strict=True):
            live = self._live[e.seq]
            ends = new.finish in ("stop", "length") and e.seq.finish == new.finish
            if live.table is None or not (ends or live.table is e.seq.table):
                continue
            end = e.start + e.count + new.drafts
            if live.step is step:
                live.step = None
                live.hidden = []
                live.read = end + offset
            else:
                if hidden is None:  # of few steps
                    hidden = self._hidden(step)
                rows = hidden[first[e] : first[e] + end - e.start]
                live.hidden.append(rows + 0 if len(hidden) > MAX_LAG else rows)  # a slice pins all
            lag = end - live.read
            fills = live.read // size < end // size
            must_write = ends or e.start < e.seq.prompt_len or fills
            if lag > 0 and (must_write or e.count > 1 or lag >= MAX_LAG):
                run = Span(
                    e.state,
                    [live.table],
                    e.tokens,
                    start=live.read,
                    count=lag,
                    samples=False,
                )
                rows = joined(live.hidden)
                due.append((run, rows[:lag]))
                live.read = end
                # A slice would pin the step.
                live.hidden = [rows[lag:] + 0] if offset else []
                mx.async_eval(live.hidden)
            if ends:
                live.table = None  # its blocks may be another's from the next plan on
        if due:
            self.runner.grow()
            self._pass.write(_head_input(due, None))

    def _track_blocks(self, plan: Plan) -> None:
        """Find the sequences that have new blocks, before each step's drafts."""
        for seq, live in self._live.items():
            if live.table is not seq.table:  # its blocks may be another's now
                live.table = None
                live.hidden = []
        for e in plan:
            live = self._live[e.seq]
            if live.table is None:
                live.table = e.seq.table
                live.step = None
                live.hidden = self._before(e)
                live.read = e.start + self.head.slot_offset - len(live.hidden)

    def _before(self, e: Entry) -> list[mx.array]:
        """The hidden state before a sequence's first row, which is part of a recurrent state."""
        if not (self.head.slot_offset and e.start and self.runner.states.layers):
            return []
        return [self.head.prepare(e.state.recurrent[-1].reshape(1, -1))]

    def _unread(self, drafting: Plan, previous: Step | None) -> HeadInput:
        """The rows of these sequences that the head has not been run over, up to their newest
        tokens; also those of the step in flight. It is run over them now."""
        flying: dict[Seq, mx.array] = {}
        if previous:
            hidden = self._hidden(previous)
            starts = starts_of(previous.plan)
            flying = {e.seq: hidden[n : n + e.rows] for e, n in starts.items()}
        offset = self.head.slot_offset
        runs = []
        for e in drafting:
            live = self._live[e.seq]
            end = e.start + e.count - 1 + offset
            run = Span(
                e.state,
                e.tables,
                e.tokens,
                start=live.read,
                count=end - live.read,
                samples=True,
                pending=e.pending and offset > 0,
            )
            states = live.hidden
            if e.seq in flying:
                live.step = previous
                states = [*states, flying[e.seq]]
            else:
                live.read = end
                live.hidden = []
            if e.inflight_drafts and previous and previous.sampled:
                first = previous.first_row[e.state] + offset
                places = [*range(first, first + e.inflight_drafts)]
                run.draft = Draft(LazyTokens(previous.sampled.tokens, places))
            if states:
                runs.append((run, joined(states)))
        return _head_input(runs, previous)

    def _hidden(self, step: Step) -> mx.array:
        """The head's input from a step's rows, [T, D]."""
        return self.head.prepare(joined([step.taps[tap] for tap in self.taps], axis=-1))

    # ---- costs -------------------------------------------------------------------------------

    def learn_seconds(self, seconds: float, depth: int) -> None:
        self.costs.learn(seconds, depth)

    def draft_once(self, table: list[int]) -> None:
        """Draft in unused blocks, which shows that the head's code runs."""
        self._seconds(table, 1)

    def measure(self, table: list[int], check: Check = lambda: None) -> DraftCosts:
        """Time drafts in unused blocks. Calls `check` before each, and raises what it raises."""

        def seconds(depth: int) -> float:
            check()
            return self._seconds(table, depth)

        self.costs.measure(seconds, self.head.depth)
        return replace(self.costs)

    def _seconds(self, table: list[int], depth: int) -> float:
        """Seconds that a draft of `depth` tokens takes after one row."""
        context = min(64, len(table) * self.runner.view.block_size - depth - 1)
        newest = unused_span(self.runner, table, context)
        dtype = self.head.embed(mx.array([0])).dtype
        hidden = self.head.prepare(mx.zeros((1, self.head.width), dtype))
        run = replace(newest, start=context - 1 + self.head.slot_offset)
        began = time.perf_counter()
        self.runner.grow()
        chain = Chain(
            [newest],
            depths=[depth],
            samplings=[newest.state.sampling],
            shift=None,
            tokens=build_inputs([newest], None, None),
        )
        self._pass.draft(_head_input([(run, hidden)], None), chain)
        mx.eval([draft.array for draft in chain.drafts])
        return time.perf_counter() - began


def _head_input(runs: Sequence[tuple[Span, mx.array]], previous: Step | None) -> HeadInput:
    """Rows with their hidden states and tokens; tokens in flight are taken lazily."""
    spans = [span for span, _ in runs]
    return HeadInput(spans, build_inputs(spans, previous, None), joined([rows for _, rows in runs]))

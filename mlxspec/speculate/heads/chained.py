"""A head that drafts token by token: each of its rows joins a token with the target's hidden state
of the position before it; a drafted token is joined with the head's own output.

Rule: the row of the token at position p lies in slot p, under the target's block ids, so that a
block is a function of its prefix; slot 0 has no row. After a step with drafts the rows of all its
samples are run at once: those after the last accepted one are written again before they are read.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import mlx.core as mx
import mlx.nn as nn

from mlxspec.model import attention
from mlxspec.model.batch import Step, bucket, fill_view, sampled_rows, starts_of
from mlxspec.model.pages import DensePages, Pages, View
from mlxspec.model.runner import Runner, pools_of
from mlxspec.speculate import Proposals
from mlxspec.speculate.chain import (
    MAX_DEPTH,
    MAX_LAG,
    deepest_first,
    draw,
    fill_drafts,
    plain_sampling,
    proposals,
    sampling_of,
)
from mlxspec.speculate.controller import Proposal, corrected
from mlxspec.types import Accepted, Draft, Entry, Plan, Request, Sampling, Seq, Tap

TIMED_DEPTHS = 1, 3


@dataclass(slots=True)
class HeadModel:
    """A loaded head. `module(embedded [B, L, D], hidden [B, L, D], caches)` is [B, L, D]: it stands
    for the target's next hidden state. `embed` and `lm_head` are those that it drafts with, as a
    rule the target's own."""

    name: str
    module: nn.Module
    embed: Callable[[mx.array], mx.array]
    lm_head: Callable[[mx.array], mx.array]
    tap: Tap


@dataclass(slots=True)
class Follower:
    """How far the head has read a sequence: its rows in the slots before `read` are right, and
    `hidden` are the target's hidden states [n, D] from position `read - 1` on."""

    sampling: Sampling
    read: int = 1
    hidden: list[mx.array] = field(default_factory=list)
    table: list[int] | None = None  # None: it has no blocks, or they may be another's
    step: Step | None = None  # in flight; its rows were read when the next step was drafted


class ChainedHead:
    """Drafts with a HeadModel for the target that `runner` runs."""

    lazy = True

    def __init__(self, head: HeadModel, runner: Runner) -> None:
        self.name = head.name
        self.taps: tuple[Tap, ...] = ()
        self.head = head
        self.runner = runner
        self.seconds, self.fixed = 1e-6, 0.0  # until they are measured
        target = runner.view
        blocks: dict[int | None, int] = {None: target.num_blocks[None]}
        self.view = View(target.block_size, blocks, target.allocated, first=1)
        self.dense = runner.layout == "gather"  # where layers like its own need dense K/V
        make = DensePages if self.dense else Pages
        self.pages = [make(self.view, None) for _ in head.module.layers]
        attention.install(head.module)
        runner.adopt(self.pages)
        self.use(head.tap)
        self._live: dict[Seq, Follower] = {}

    def begin(self, seq: Seq) -> None:
        self._live[seq] = Follower(plain_sampling(seq))

    def end(self, seq: Seq) -> None:
        del self._live[seq]

    def use(self, tap: Tap) -> None:
        """Read this hidden state of the target from now on."""
        self.taps = (tap,)
        self.runner.tap(self.taps)
        self.runner.states.tap = tap

    def detach(self) -> None:
        """Leave the runner as if the head had never been there."""
        self.runner.adopt(())
        self.runner.tap(())
        self.runner.states.tap = None

    def clear(self) -> None:
        """Its blocks go with the prefix cache's."""

    def options(self, seq: Seq) -> list[Proposal]:
        most = min(MAX_DEPTH, seq.room - 1)
        if most < 1 or seq.remaining != 1 or seq not in self._live:
            return []
        temperature = seq.request.sampling.temperature
        return proposals(self.name, most, self.seconds, self.fixed, temperature)

    # ---- drafting ----------------------------------------------------------------------------

    def draft(
        self,
        plan: Plan,
        previous: Step | None,
        chosen: Proposals,
    ) -> None:
        for seq, live in self._live.items():
            if live.table is not seq.table:  # its blocks may be another's now
                live.table, live.hidden = None, []
        for e in plan:
            self._place(e)
        drafting = deepest_first(plan, chosen)
        if not drafting:
            return
        shift = None
        if previous is not None and any(e.inflight_drafts for e in drafting):
            shift = previous.shift_of(drafting)
        hidden = self._read(drafting, previous, shift)
        entries = [replace(e, start=e.start + e.count - 1, count=1) for e in drafting]
        samplings = {
            e.seq: sampling_of(self._live[e.seq].sampling, chosen[e.seq]) for e in drafting
        }

        def next_tokens(n: int, last: mx.array | None) -> mx.array:
            nonlocal entries, hidden
            part = None if shift is None else shift[:n]
            if last is not None:
                entries = [replace(e, start=e.end) for e in entries[:n]]
                hidden = self._forward(entries, last, hidden[:n], part)
            return draw(self.head.lm_head(hidden[:n]), entries[:n], samplings, part)

        fill_drafts(drafting, chosen, self.name, next_tokens)

    def _place(self, e: Entry) -> None:
        """A sequence that has new blocks starts after what the prefix cache had of it."""
        live = self._live[e.seq]
        if live.table is not None:
            return
        live.table, live.step = e.seq.table, None
        live.read, live.hidden = e.start + 1, []
        if e.start and self.runner.states.layers:
            live.read, live.hidden = e.start, [e.seq.state[-1].reshape(1, -1)]

    def _read(
        self,
        drafting: Sequence[Entry],
        previous: Step | None,
        shift: mx.array | None,
    ) -> mx.array:
        """Read all rows up to the newest token's of each sequence; the head's output there,
        [entries, D]. Of a step in flight, the rows of all its samples are read, and one is chosen
        by the accept count `shift`."""
        inputs = _Inputs(previous, self.taps[0])
        entries = []
        newest = []
        row = -1
        for e in drafting:
            live = self._live[e.seq]
            inputs.add(e.seq.tokens[live.read :], live.hidden)
            if inputs.add_step(e.seq):
                live.step = previous
            end = e.start + e.count
            draft = Draft([0 for _ in range(e.inflight_drafts)])
            entries.append(Entry(e.seq, live.read, end - live.read, True, draft=draft))
            newest.append(row + 1)
            row += entries[-1].sampled
            if live.step is None:
                live.read, live.hidden = end, []
        out = self._forward(entries, inputs.tokens(), inputs.hidden(), None)
        rows = mx.array(newest)
        return out[rows if shift is None else rows + shift]

    def _forward(
        self,
        entries: Plan,
        tokens: mx.array,
        hidden: mx.array,
        shift: mx.array | None,
    ) -> mx.array:
        """The head's output [R, D] in the sampled rows, each pass submitted at once, so that the
        next may write its pages in place. Dense K/V are gathered for neighbours that are alike."""
        self.runner.grow()
        view = self.view
        out = []
        first = row = 0
        for _, members in groupby(entries, lambda e: self.dense and bucket(e, view.block_size)):
            batch = list(members)
            last = first + len(batch)
            end = row + sum(e.rows for e in batch)
            part = None if shift is None else shift[first:last]
            fill_view(view, batch, part, one_group=self.dense)
            shape = -1, batch[0].rows if self.dense else 1, hidden.shape[-1]
            view.positions = view.positions[:: shape[1]]
            x = self.head.embed(tokens[row:end]).reshape(shape)
            x = self.head.module(x, hidden[row:end].reshape(shape), self.pages).flatten(0, 1)
            x = x[sampled_rows(batch)]
            # Only K and V where nothing is drawn. A pool that is named would be copied by the next.
            pools = pools_of(self.pages)
            mx.async_eval(x if len(x) else [pool.flatten()[:1] + 0 for pool in pools])
            out.append(x)
            first, row = last, end
        return mx.concatenate(out)

    # ---- after a step ------------------------------------------------------------------------

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        """Keep the hidden states of the rows that stand. What others may share or the disk may save
        is read now: prompts, full blocks, what ends; other rows once there are MAX_LAG."""
        hidden = step.taps[self.taps[0]]
        first = starts_of(step.plan)
        size = self.view.block_size
        due = []
        for e, new in zip(step.plan, accepted, strict=True):
            live = self._live.get(e.seq)
            ends = new.finish is not None and e.seq.finish == new.finish
            if live is None or live.table is None or not (ends or live.table is e.seq.table):
                continue
            rows = e.count + new.drafts
            end = e.start + rows
            if live.step is step:
                live.step, live.hidden = None, []
                live.read = end + 1
            else:
                live.hidden.append(hidden[first[e] : first[e] + rows])
            lag = end - live.read
            shared = ends or e.start < e.seq.prompt_len or live.read // size < end // size
            if lag > 0 and (shared or e.count > 1 or lag >= MAX_LAG):
                owner = Seq(e.seq.request, tokens=e.seq.tokens, table=live.table)
                due.append((Entry(owner, live.read, lag, False), live))
            if ends:
                live.table = None  # its blocks may be another's from the next plan on
        if due:
            self._catch_up(due)

    def _catch_up(self, due: Sequence[tuple[Entry, Follower]]) -> None:
        """Read these rows of each sequence."""
        inputs = _Inputs(None, self.taps[0])
        for e, live in due:
            rows = mx.concatenate(live.hidden)
            inputs.add(e.seq.tokens[e.start : e.end], [rows[: e.count]])
            live.read = e.end
            live.hidden = [rows[e.count :] + 0]  # a slice pins all that the step read
            mx.async_eval(live.hidden)
        self._forward([e for e, _ in due], inputs.tokens(), inputs.hidden(), None)

    # ---- costs -------------------------------------------------------------------------------

    def learn_seconds(self, seconds: float, depth: int) -> None:
        ratio = corrected(seconds / (self.fixed + depth * self.seconds))
        self.seconds *= ratio
        self.fixed *= ratio

    def measure(self, table: list[int]) -> None:
        """Time drafts in unused blocks: what a token costs, and what drafting at all costs."""
        short, long = TIMED_DEPTHS
        self._time(table, long)  # the first compiles
        one = min(self._time(table, short) for _ in range(3))
        more = min(self._time(table, long) for _ in range(3))
        self.seconds = max(1e-9, (more - one) / (long - short))
        self.fixed = max(0.0, one - short * self.seconds)

    def _time(self, table: list[int], depth: int) -> float:
        seq = Seq(Request("measure", (0,), 1), table=table)
        context = min(64, len(table) * self.view.block_size - depth - 1)
        seq.tokens = [0 for _ in range(context + 1)]
        self.begin(seq)
        size = self.head.embed(mx.array([0]))
        self._live[seq] = replace(
            self._live[seq], read=context, hidden=[mx.zeros_like(size)], table=table
        )
        entry = Entry(seq, context, 1, True, depth=depth)
        began = time.perf_counter()
        self.draft([entry], None, {seq: Proposal(self.name)})
        mx.eval(entry.draft.tokens)
        self.end(seq)
        return time.perf_counter() - began


class _Inputs:
    """Gathers a pass's tokens [T] and hidden states [T, D]: known ones, and those that the step in
    flight brings."""

    def __init__(self, previous: Step | None, tap: Tap) -> None:
        self._previous = previous
        self._hidden: list[mx.array] = []
        self._host: list[int] = []
        self._places: list[int] = []  # of each token: among the host's, or -1 - its sampled row
        self._first = {} if previous is None else starts_of(previous.plan)
        self._entries = {e.seq: e for e in self._first}
        self._taps = None if previous is None else previous.taps[tap]

    def add(self, tokens: Sequence[int], hidden: Sequence[mx.array]) -> None:
        """Tokens that are read, and hidden states."""
        self._places += range(len(self._host), len(self._host) + len(tokens))
        self._host += tokens
        self._hidden += hidden

    def add_step(self, seq: Seq) -> bool:
        """What the step in flight brings for the sequence; False where it has no part in it."""
        e = self._entries.get(seq)
        if e is None or self._taps is None or self._previous is None:
            return False
        row = self._first[e]
        self._hidden.append(self._taps[row : row + e.rows])
        if e.samples:  # else its tokens are known
            first = self._previous.first_row[seq]
            self._places += [-1 - (first + i) for i in range(e.sampled)]
        return True

    def tokens(self) -> mx.array:
        known = mx.array(self._host, mx.int32)
        if min(self._places) >= 0:
            return known
        assert self._previous is not None and self._previous.sampled is not None
        sampled = self._previous.sampled.tokens
        at = [p + sampled.size if p >= 0 else -1 - p for p in self._places]
        if at == list(range(sampled.size)):
            return sampled
        return mx.concatenate([sampled, known])[mx.array(at)]

    def hidden(self) -> mx.array:
        if len(self._hidden) == 1:
            return self._hidden[0]
        return mx.concatenate(self._hidden)

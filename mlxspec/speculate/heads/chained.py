"""A head that drafts token by token: each of its rows joins a token with the target's hidden state
of the position before it; a drafted token is joined with the head's own output.

Rule: the row of the token at position p lies in slot p, under the target's block ids, so that a
block is a function of its prefix; slot 0 has no row. After a step with drafts the rows of all its
samples are run at once: those after the last accepted one are written again before they are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import mlx.core as mx
import mlx.nn as nn

from mlxspec.model import attention
from mlxspec.model.batch import Step, bucket, fill_view, sampled_rows
from mlxspec.model.pages import DensePages, Pages, View
from mlxspec.model.runner import Runner, pools_of
from mlxspec.speculate import Proposals
from mlxspec.speculate.chain import (
    MAX_DEPTH,
    DraftCosts,
    deepest_first,
    draw,
    fill_drafts,
    proposals,
    shift_after,
)
from mlxspec.speculate.controller import Proposal
from mlxspec.speculate.heads.followers import Flying, Followers, joined, taps_of, time_draft
from mlxspec.types import FINAL_NORM, Accepted, Draft, Entry, Plan, Seq, Tap


def as_it_is(hidden: mx.array) -> mx.array:
    return hidden


@dataclass(slots=True)
class HeadModel:
    """A loaded head. `module(embedded [B, L, D], hidden [B, L, D], caches)` is [B, L, D]: it stands
    for the target's next hidden state. `prepare` makes `hidden` of the target's `taps`, side by
    side; `embed` and `lm_head` are those that it drafts with, as a rule the target's own."""

    name: str
    module: nn.Module
    embed: Callable[[mx.array], mx.array]
    lm_head: Callable[[mx.array], mx.array]
    taps: tuple[Tap, ...] = (FINAL_NORM,)
    prepare: Callable[[mx.array], mx.array] = as_it_is


class ChainedHead:
    """Drafts with a HeadModel for the target that `runner` runs."""

    lazy = True

    def __init__(self, head: HeadModel, runner: Runner) -> None:
        self.name = head.name
        self.taps: tuple[Tap, ...] = ()
        self.head = head
        self.runner = runner
        self.costs = DraftCosts()
        target = runner.view
        blocks: dict[int | None, int] = {None: target.num_blocks[None]}
        self.view = View(target.block_size, blocks, target.allocated, first=1)
        self.dense = runner.layout == "gather"  # where layers like its own need dense K/V
        make = DensePages if self.dense else Pages
        self.pages = [make(self.view, None) for _ in head.module.layers]
        attention.install(head.module)
        runner.adopt(self.pages)
        self.use(head.taps)
        self._followers = Followers(1, target.block_size, self._before)

    def begin(self, seq: Seq) -> None:
        self._followers.begin(seq)

    def end(self, seq: Seq) -> None:
        self._followers.end(seq)

    def use(self, taps: tuple[Tap, ...]) -> None:
        """Read these hidden states of the target from now on."""
        self.taps = taps
        self.runner.tap(taps)
        self.runner.states.taps = taps

    def detach(self) -> None:
        """Leave the runner as if the head had never been there."""
        self.runner.adopt(())
        self.use(())

    def close(self) -> None:
        # Hidden states are handed out still: states with and without them cannot share a batch.
        self.runner.adopt(())  # else blocks would be saved whose rows it did not read
        self._followers.live.clear()

    def clear(self) -> None:
        """Its blocks go with the prefix cache's."""

    def options(self, seq: Seq) -> list[Proposal]:
        most = min(MAX_DEPTH, seq.room - 1)
        if most < 1 or seq.remaining != 1 or seq not in self._followers.live:
            return []
        return proposals(self.name, most, self.costs, seq.request.sampling.temperature)

    # ---- drafting ----------------------------------------------------------------------------

    def draft(
        self,
        plan: Plan,
        previous: Step | None,
        chosen: Proposals,
    ) -> None:
        self._followers.place(plan)
        drafting = deepest_first(plan, chosen)
        if not drafting:
            return
        shift = shift_after(previous, drafting)
        hidden = self._read(drafting, previous, shift)
        entries = [replace(e, start=e.start + e.count - 1, count=1) for e in drafting]
        samplings = self._followers.samplings(drafting, chosen)

        def next_tokens(n: int, last: mx.array | None) -> mx.array:
            nonlocal entries, hidden
            part = None if shift is None else shift[:n]
            if last is not None:
                entries = [replace(e, start=e.end) for e in entries[:n]]
                hidden = self._forward(entries, last, hidden[:n], part)
            return draw(self.head.lm_head(hidden[:n]), entries[:n], samplings, part)

        fill_drafts(drafting, chosen, self.name, next_tokens)

    def _before(self, e: Entry) -> list[mx.array]:
        """The hidden state before a sequence's first row, which a recurrent state brings."""
        if not (e.start and self.runner.states.layers):
            return []
        return [self.head.prepare(e.seq.state[-1].reshape(1, -1))]

    def _read(
        self,
        drafting: Sequence[Entry],
        previous: Step | None,
        shift: mx.array | None,
    ) -> mx.array:
        """Read all rows up to the newest token's of each sequence; the head's output there,
        [entries, D]. Of a step in flight, the rows of all its samples are read, and one is chosen
        by the accept count `shift`."""
        flying = Flying(previous, self._hidden(previous))
        entries = []
        hidden = []
        newest = []
        row = -1
        for e in drafting:
            start, rows = self._followers.take(e, flying)
            flying.add_tokens(e.seq, start)
            hidden += rows
            draft = Draft([0 for _ in range(e.inflight_drafts)])
            count = e.start + e.count - start
            entries.append(Entry(e.seq, start, count, True, draft=draft))
            newest.append(row + 1)
            row += entries[-1].sampled
        out = self._forward(entries, flying.tokens(), joined(hidden), None)
        at = mx.array(newest)
        return out[at if shift is None else at + shift]

    def _hidden(self, step: Step | None) -> mx.array:
        """What the head reads of a step's rows, [T, D]."""
        taps = taps_of(step, self.taps)
        return self.head.prepare(taps) if step else taps

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
        due = self._followers.observe(step, self._hidden(step), accepted)
        if due:
            tokens = [token for e, _ in due for token in e.seq.tokens[e.start : e.end]]
            hidden = joined([rows for _, rows in due])
            self._forward([e for e, _ in due], mx.array(tokens, mx.int32), hidden, None)

    # ---- costs -------------------------------------------------------------------------------

    def learn_seconds(self, seconds: float, depth: int) -> None:
        self.costs.learn(seconds, depth)

    def measure(self, table: list[int]) -> None:
        """Time drafts in unused blocks."""
        hidden = mx.zeros_like(self.head.embed(mx.array([0])))
        self.costs.measure(lambda depth: time_draft(self, self._followers, table, depth, hidden))

"""Drafts with a head that makes a block in one pass, and draws its tokens one after the other.

Rule: the context row of position p is a function of the target's hidden states there alone and lies
in slot p, under the target's block ids; a block's own K/V are never stored. Rows after the last
accepted one are written again before they are read.
"""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlxspec.kernels.reference import block_array
from mlxspec.model.batch import Step, fill_view
from mlxspec.model.pages import Pages, View
from mlxspec.model.runner import Runner, pools_of
from mlxspec.speculate import Proposals
from mlxspec.speculate.chain import (
    DraftCosts,
    deepest_first,
    draw,
    fill_drafts,
    proposals,
    shift_after,
)
from mlxspec.speculate.controller import Proposal
from mlxspec.speculate.heads.block import BlockCache, BlockModel
from mlxspec.speculate.heads.followers import Flying, Followers, joined, taps_of, time_draft
from mlxspec.types import Accepted, Entry, Plan, Seq, Tap


class BlockHead:
    """Drafts with a BlockModel for the target that `runner` runs."""

    lazy = True

    def __init__(self, head: BlockModel, runner: Runner) -> None:
        self.name = head.name
        self.head = head
        self.runner = runner
        self.taps: tuple[Tap, ...] = head.taps
        self.costs = DraftCosts()
        target = runner.view
        blocks: dict[int | None, int] = {None: target.num_blocks[None]}
        self.view = View(target.block_size, blocks, target.allocated)
        self.pages = [Pages(self.view, None) for _ in head.module.layers]
        runner.adopt(self.pages)
        runner.tap(self.taps)
        self._followers = Followers(0, target.block_size)

    def begin(self, seq: Seq) -> None:
        self._followers.begin(seq)

    def end(self, seq: Seq) -> None:
        self._followers.end(seq)

    def detach(self) -> None:
        """Leave the runner as if the head had never been there."""
        self.runner.adopt(())
        self.runner.tap(())

    def close(self) -> None:
        # Hidden states are handed out still: states with and without them cannot share a batch.
        self.runner.adopt(())  # else blocks would be saved whose rows it did not read
        self._followers.live.clear()

    def clear(self) -> None:
        """Its blocks go with the prefix cache's."""

    def options(self, seq: Seq) -> list[Proposal]:
        most = min(self.head.width, seq.room - 1)
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
        self._read(drafting, previous)
        depth = drafting[0].depth
        anchors = _newest(drafting, previous, shift)
        hidden = self._block(drafting, anchors, depth, shift)
        logits = self.head.lm_head(hidden)
        entries = [replace(e, start=e.start + e.count - 1, count=1) for e in drafting]
        samplings = self._followers.samplings(drafting, chosen)
        row = -1

        def next_tokens(n: int, last: mx.array | None) -> mx.array:
            nonlocal entries, row
            row += 1
            before = anchors if last is None else last
            if last is not None:
                entries = [replace(e, start=e.end) for e in entries[:n]]
            scores = self.head.module.scores(logits[:n, row], hidden[:n, row], before[:n])
            return draw(scores, entries[:n], samplings, None if shift is None else shift[:n])

        fill_drafts(drafting, chosen, self.name, next_tokens)

    def _read(self, drafting: Sequence[Entry], previous: Step | None) -> None:
        """Write the context rows up to the newest token, also those of a step in flight, accepted
        or not."""
        flying = Flying(previous, taps_of(previous, self.taps))
        due = []
        for e in drafting:
            start, hidden = self._followers.take(e, flying)
            if hidden:
                rows = joined(hidden)
                due.append((Entry(e.seq, start, len(rows), False), rows))
        self._store(due)

    def _block(
        self,
        drafting: Sequence[Entry],
        anchors: mx.array,
        depth: int,
        shift: mx.array | None,
    ) -> mx.array:
        """The head's output [n, depth, D] in the rows that predict."""
        head = self.head
        extra = 0 if head.from_anchor else 1
        masks = mx.full((len(drafting), depth + extra - 1), head.mask, mx.int32)
        tokens = mx.concatenate([anchors[:, None], masks], axis=1)
        starts = mx.array([e.start + e.count - 1 for e in drafting])
        if shift is not None:
            starts = starts + shift
        seen: dict[object, tuple[mx.array, mx.array]] = {}
        kinds = [(layer.window, layer.causal) for layer in head.module.layers]
        for kind in kinds:
            if kind not in seen:
                seen[kind] = self._context(drafting, starts, tokens.shape[1], *kind)
        caches = [
            BlockCache(pages, seen[kind][0], starts)
            for pages, kind in zip(self.pages, kinds, strict=True)
        ]
        out: mx.array = head.module(head.embed(tokens), [seen[kind][1] for kind in kinds], caches)
        out = out[:, extra:]
        mx.async_eval(out)
        return out

    def _context(
        self,
        drafting: Sequence[Entry],
        starts: mx.array,
        rows: int,
        window: int | None,
        causal: bool,
    ) -> tuple[mx.array, mx.array]:
        """The blocks int32 [n, W] whose K and V a layer reads, and the mask, bool
        [n, 1, rows, W * block_size + rows]: what each row of a block sees of them and of the block.
        `starts` int32 [n] are the newest tokens' positions."""
        size = self.view.block_size
        newest = [e.start + e.count - 1 for e in drafting]
        low = max(0, min(newest) - window) // size if window else 0
        high = -(-max(n + e.inflight_drafts for n, e in zip(newest, drafting, strict=True)) // size)
        width = max(1, high - low)
        blocks = block_array([e.seq.table[low : low + width] for e in drafting], width)
        slot = low * size + mx.arange(width * size)
        first = starts[:, None, None]
        row = mx.arange(rows)[:, None]
        own = mx.ones((rows, rows), mx.bool_)
        if causal:
            own = mx.tril(own)
        else:
            row = mx.zeros_like(row)
        context = mx.broadcast_to(slot < first, (len(starts), rows, width * size))
        if window:
            context = context & (slot > first + row - window)
        own = mx.broadcast_to(own, (len(starts), rows, rows))
        return blocks, mx.concatenate([context, own], axis=-1)[:, None]

    def _store(self, due: Sequence[tuple[Entry, mx.array]]) -> None:
        """Write the context rows of these hidden states."""
        if not due:
            return
        self.runner.grow()
        fill_view(self.view, [e for e, _ in due], None)
        self.head.module.store(joined([rows for _, rows in due]), self.pages)
        # A pool that is named would be copied by the next pass.
        mx.async_eval([pool.flatten()[:1] + 0 for pool in pools_of(self.pages)])

    # ---- after a step ------------------------------------------------------------------------

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        self._store(self._followers.observe(step, taps_of(step, self.taps), accepted))

    # ---- costs -------------------------------------------------------------------------------

    def learn_seconds(self, seconds: float, depth: int) -> None:
        self.costs.learn(seconds, depth)

    def measure(self, table: list[int]) -> None:
        """Time drafts in unused blocks."""
        hidden = mx.zeros((1, self.head.read_width), self.head.embed(mx.array([0])).dtype)
        self.costs.measure(
            lambda depth: time_draft(self, self._followers, table, depth, hidden), self.head.width
        )


def _newest(drafting: Sequence[Entry], previous: Step | None, shift: mx.array | None) -> mx.array:
    """The newest token of each sequence, int32 [n]; those in flight are taken lazily."""
    if previous is None or previous.sampled is None:
        return mx.array([e.seq.tokens[-1] for e in drafting])
    sampled = previous.sampled.tokens
    host = [e.seq.tokens[-1] for e in drafting if not e.pending]
    at = []
    known = len(sampled)
    for e in drafting:
        if e.pending:
            at.append(previous.first_row[e.seq])
        else:
            at.append(known)
            known += 1
    rows = mx.array(at)
    if shift is not None:
        rows = rows + shift
    if not host:
        return sampled[rows]
    return mx.concatenate([sampled, mx.array(host, mx.int32)])[rows]

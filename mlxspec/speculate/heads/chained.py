"""A head that drafts token by token: each of its rows joins a token with the target's hidden state
of the position before it; a drafted token is joined with the head's own output.

Rule: the rows of drafted tokens are written over by those with the target's hidden states.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.model.batch import Shift, bucket, fill_view, sampled_rows
from mlxspec.speculate.chain import NextLogits, logits_by_row
from mlxspec.speculate.heads.model import HeadModel, Pass, Rows
from mlxspec.types import Draft, Entry, Plan


class ChainedPass(Pass):
    """`head.module(embedded [B, L, D], hidden [B, L, D], caches)` is [B, L, D]: it stands for the
    target's next hidden state."""

    @staticmethod
    def fill(head: HeadModel, caches: Sequence[Any]) -> None:
        rows = head.embed(mx.array([[0, 0]]))
        head.module(rows, rows, caches)

    def read(self, rows: Rows) -> None:
        self._forward(rows, None)

    def start(
        self,
        rows: Rows,
        drafting: Plan,
        tokens: Array,
        shift: Shift,
    ) -> NextLogits:
        out = self._forward(rows, None)[rows.newest(shift)]

        def next_logits(
            entries: Plan,
            last: Array | None,
            shift: Shift,
        ) -> Array:
            nonlocal out
            if last is not None:
                out = self._forward(Rows(entries, last, out[: len(entries)]), shift)
            return self.head.lm_head(out)

        return next_logits

    def _forward(self, rows: Rows, shift: Shift) -> Array:
        """The head's output [R, D] in the sampled rows. Dense K/V are gathered for neighbours that
        are alike."""
        view, hidden = self.view, rows.hidden
        out = []
        first = row = 0
        for _, members in groupby(
            rows.entries, lambda e: self.dense and bucket(e, view.block_size)
        ):
            batch = list(members)
            last = first + len(batch)
            end = row + sum(e.rows for e in batch)
            part = None if shift is None else shift[first:last]
            fill_view(view, batch, part, one_group=self.dense)
            shape = -1, batch[0].rows if self.dense else 1, hidden.shape[-1]
            view.positions = view.positions[:: shape[1]]
            x = self.head.embed(rows.tokens[row:end]).reshape(shape)
            x = self.head.module(x, hidden[row:end].reshape(shape), self.pages).flatten(0, 1)
            x = x[sampled_rows(batch)]
            self.submit(x)
            out.append(x)
            first, row = last, end
        return mx.concatenate(out)


class ParallelPass(ChainedPass):
    """P-EAGLE's (arXiv 2602.01469): rows of `module.mask` with `module.mask_hidden` behind the
    newest token's draft the tokens after the first, in the same pass."""

    def __init__(self, head: HeadModel, *args: Any) -> None:
        super().__init__(head, *args)
        self._hidden = head.prepare(head.module.mask_hidden)

    def start(
        self,
        rows: Rows,
        drafting: Plan,
        tokens: Array,
        shift: Shift,
    ) -> NextLogits:
        mask = len(rows.tokens)
        runs: list[Entry] = []
        index: list[int] = []
        behind: list[int] = []  # rows behind the first of the samples
        owners: list[int] = []
        row = 0
        for n, (run, e) in enumerate(zip(rows.entries, drafting, strict=True)):
            drafts = run.sampled + e.depth - 2
            last = row + run.rows
            index += [*range(row, last), *(mask for _ in range(1, e.depth))]
            behind += range(run.sampled - run.rows, run.sampled + e.depth - 1)
            runs.append(replace(run, draft=Draft([0 for _ in range(drafts)])))
            owners += [n for _ in range(runs[-1].rows)]
            row = last
        places = mx.array(index)
        if shift is not None:  # a rejected draft's row is a mask too
            places = mx.where(mx.array(behind) > shift[mx.array(owners)], mask, places)
        hidden = mx.concatenate([rows.hidden, self._hidden])
        all_tokens = mx.concatenate([rows.tokens, mx.array([self.head.module.mask])])
        made = Rows(runs, all_tokens[places], hidden[places])
        out = self._forward(made, None)
        at = made.newest(shift)[:, None] + mx.arange(drafting[0].depth)
        wanted = out[mx.minimum(at, len(out) - 1).flatten()]  # shallower drafts have fewer rows
        return logits_by_row(self.head.lm_head(wanted).reshape(*at.shape, -1))

"""A head that drafts token by token: each of its rows joins a token with the target's hidden state
of the position before it; a drafted token is joined with the head's own output.

Rule: the rows of drafted tokens are written over by those with the target's hidden states.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx

from mlxspec.model.batch import bucket, fill_view, sampled_rows
from mlxspec.speculate.chain import NextLogits
from mlxspec.speculate.heads.model import HeadModel, Pass, Rows
from mlxspec.types import Plan


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
        tokens: mx.array,
        shift: mx.array | None,
    ) -> NextLogits:
        out = self._forward(rows, None)[rows.newest(shift)]

        def next_logits(
            entries: Plan,
            last: mx.array | None,
            shift: mx.array | None,
        ) -> mx.array:
            nonlocal out
            if last is not None:
                out = self._forward(Rows(entries, last, out[: len(entries)]), shift)
            return self.head.lm_head(out)

        return next_logits

    def _forward(self, rows: Rows, shift: mx.array | None) -> mx.array:
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

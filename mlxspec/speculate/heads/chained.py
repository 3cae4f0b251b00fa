"""A head that drafts token by token: each row combines a token with the target's hidden state at
the previous position; a drafted token is combined with the head's own output.

Rule: the rows of drafted tokens are kept beside the pages until all are drafted; where our kernel
does not attend, they are written, and overwritten by those with the target's hidden states.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.model.batch import Shift, bucket, fill_view, joined, runs_of, starts_of
from mlxspec.sequences import Draft
from mlxspec.speculate.chain import Chain
from mlxspec.speculate.heads.model import HeadInput, HeadModel, Pass


class ChainedPass(Pass):
    """`head.module(embedded [B, L, D], hidden [B, L, D], caches)` is [B, L, D]: it stands for the
    target's next hidden state."""

    @staticmethod
    def fill(head: HeadModel, caches: Sequence[Any]) -> None:
        rows = head.embed(mx.array([[0, 0]]))
        head.module(rows, rows, caches)

    def write(self, rows: HeadInput) -> None:
        for _ in self._outputs(rows):
            self.submit()

    def draft(self, rows: HeadInput, chain: Chain) -> None:
        out = self._forward(rows)[rows.newest(chain.shift)]
        chain.sample_next(self.head.lm_head(out))
        self.view.beside = defaultdict(list)
        try:
            while chain.spans:
                drafted = HeadInput(chain.spans, chain.tokens, out[: len(chain.spans)])
                out = self._forward(drafted, chain.shift)
                chain.sample_next(self.head.lm_head(out))
        finally:
            self.view.beside = None

    def _forward(self, rows: HeadInput, shift: Shift = None) -> Array:
        """The head's output [T, D]."""
        out = []
        for part in self._outputs(rows, shift):
            self.submit(part)
            out.append(part)
        return joined(out)

    def _outputs(self, rows: HeadInput, shift: Shift = None) -> Iterator[Array]:
        """The head's outputs, to be submitted one after the other. Dense K/V are gathered for
        neighbours that are alike."""
        view, hidden = self.view, rows.hidden
        for batch, places, at in runs_of(
            rows.spans,
            lambda e: view.dense and bucket(e, view.block_size),
        ):
            part = None if shift is None else shift[places]
            fill_view(view, batch, part)
            self.turn(batch, part)
            shape = -1, batch[0].rows if view.dense else 1, hidden.shape[-1]
            view.positions = view.positions[:: shape[1]]
            embedded = self.head.embed(rows.tokens[at]).reshape(shape)
            before = hidden[at].reshape(shape)
            out = self.head.module(embedded, before, self.pages)
            yield out.flatten(0, 1)


class ParallelPass(ChainedPass):
    """P-EAGLE's (arXiv 2602.01469): rows of `module.mask` with `module.mask_hidden` after the
    newest token's draft the tokens after the first, in the same pass."""

    def __init__(self, head: HeadModel, *args: Any) -> None:
        super().__init__(head, *args)
        self._hidden = head.prepare(head.module.mask_hidden)

    def draft(self, rows: HeadInput, chain: Chain) -> None:
        depth, shift = chain.depths[0], chain.shift
        starts = starts_of(rows.spans)
        newest = mx.array([starts[run] + run.count - 1 for run in rows.spans])
        if shift is not None:
            newest = newest + shift
        runs = []
        places: list[int] = []
        owners: list[int] = []  # the number of each row's run
        for n, (run, run_depth) in enumerate(zip(rows.spans, chain.depths, strict=True)):
            masks = Draft([0 for _ in range(run.num_sampled + run_depth - 2)])
            runs.append(replace(run, draft=masks))
            first, count = starts[run], runs[-1].rows
            places += range(first, first + count)
            owners += [n for _ in range(count)]
        at = mx.array(places)
        exists = at <= newest[mx.array(owners)]
        at = mx.where(exists, at, len(rows.tokens))  # else the mask
        tokens = mx.concatenate([rows.tokens, mx.array([self.head.module.mask])])
        hidden = mx.concatenate([rows.hidden, self._hidden])
        inputs = HeadInput(runs, tokens[at], hidden[at])
        out = self._forward(inputs)
        wanted = inputs.newest(shift)[:, None] + mx.arange(depth)
        wanted = mx.minimum(wanted, len(out) - 1)  # shallower drafts have fewer rows
        logits = self.head.lm_head(out[wanted.flatten()]).reshape(*wanted.shape, -1)
        for token in range(depth):
            chain.sample_next(logits[: len(chain.spans), token])

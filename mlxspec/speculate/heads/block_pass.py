"""A head that makes a block in one pass, of which tokens are drawn one after the other.

Rule: the context row of position p is a function of the target's hidden states there alone; a
block's own K/V are never stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx

from mlxspec.kernels.reference import Blocks, block_array, gather
from mlxspec.model.batch import fill_view
from mlxspec.model.pages import Pages
from mlxspec.speculate.chain import NextLogits
from mlxspec.speculate.heads.model import HeadModel, Pass, Rows
from mlxspec.types import Plan


@dataclass(slots=True)
class BlockCache:
    """What a layer sees as its cache in a block's pass: K/V of the context from `pages` at `blocks`
    [n, W], and behind them the block's own. `offset` int32 [n]: the newest tokens' positions.
    """

    pages: Pages
    blocks: Blocks
    offset: mx.array

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        size = self.pages.view.block_size
        whole = slice(None)
        keys = gather(self.pages.keys, self.blocks, size, whole)
        values = gather(self.pages.values, self.blocks, size, whole)
        return mx.concatenate([keys, k], axis=2), mx.concatenate([values, v], axis=2)


class BlockPass(Pass):
    """`head.module` is a Block."""

    @staticmethod
    def fill(head: HeadModel, caches: Sequence[Any]) -> None:
        row = head.embed(mx.array([[0]]))
        for layer, cache in zip(head.module.layers, caches, strict=True):
            layer.self_attn(row, None, cache)

    def read(self, rows: Rows) -> None:
        if rows.entries:
            fill_view(self.view, rows.entries, None)
            self.head.module.store(rows.hidden, self.pages)
            self.submit()

    def start(
        self,
        rows: Rows,
        drafting: Plan,
        tokens: mx.array,
        shift: mx.array | None,
    ) -> NextLogits:
        self.read(rows)
        hidden = self._block(drafting, tokens, shift)
        logits = self.head.lm_head(hidden)
        row = count()

        def next_logits(
            entries: Plan,
            last: mx.array | None,
            shift: mx.array | None,
        ) -> mx.array:
            at = slice(len(entries)), next(row)
            before = tokens if last is None else last
            scores: mx.array = self.head.module.scores(logits[at], hidden[at], before)
            return scores

        return next_logits

    def _block(
        self,
        drafting: Plan,
        tokens: mx.array,
        shift: mx.array | None,
    ) -> mx.array:
        """The head's output [n, depth, D] in the rows that predict."""
        module = self.head.module
        extra = 0 if module.from_anchor else 1
        rows = drafting[0].depth + extra
        masks = mx.full((len(drafting), rows - 1), module.mask, mx.int32)
        starts = mx.array([e.start for e in drafting])
        if shift is not None:
            starts = starts + shift
        seen: dict[object, tuple[Blocks, mx.array]] = {}
        caches = []
        for layer, pages in zip(module.layers, self.pages, strict=True):
            kind = layer.window, layer.causal
            if kind not in seen:
                seen[kind] = self._context(drafting, starts, rows, *kind)
            blocks, mask = seen[kind]
            caches.append((mask, BlockCache(pages, blocks, starts)))
        block = self.head.embed(mx.concatenate([tokens[:, None], masks], axis=1))
        out: mx.array = module(block, caches)[:, extra:]
        mx.async_eval(out)
        return out

    def _context(
        self,
        drafting: Plan,
        starts: mx.array,
        rows: int,
        window: int | None,
        causal: bool,
    ) -> tuple[Blocks, mx.array]:
        """The blocks [n, W] whose K and V a layer reads, and the mask of these and of the block."""
        size = self.view.block_size
        low = max(0, min(e.start for e in drafting) - window) // size if window else 0
        high = -(-max(e.start + e.inflight_drafts for e in drafting) // size)
        width = max(1, high - low)
        blocks = Blocks(block_array([e.seq.table[low : low + width] for e in drafting], width))
        slots = low * size + mx.arange(width * size)
        return blocks, block_mask(slots, starts, rows, window, causal)


def block_mask(
    slots: mx.array,
    starts: mx.array,
    rows: int,
    window: int | None,
    causal: bool,
) -> mx.array:
    """Bool [n, 1, rows, S + rows]: what each row of a block sees of the context's `slots` [S] and
    of the block. `starts` int32 [n] are the newest tokens' positions."""
    first = starts[:, None, None]
    row = mx.arange(rows)
    last = row[:, None] if causal else mx.full((rows, 1), rows - 1)  # that each row sees
    seen = slots < first
    if window:
        seen = seen & (slots > first + (last if causal else 0) - window)
    context = mx.broadcast_to(seen, (len(starts), rows, len(slots)))
    own = mx.broadcast_to(row <= last, (len(starts), rows, rows))
    return mx.concatenate([context, own], axis=-1)[:, None]

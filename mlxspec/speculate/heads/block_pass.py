"""A head that computes a block in one pass, whose tokens are sampled one after the other.

Rule: the context row of position p is a function of the target's hidden states there alone; a
block's own K/V are never stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx

from mlxspec.kernels.inputs import Blocks, block_array, gather
from mlxspec.model.batch import fill_view
from mlxspec.model.pages import Pages
from mlxspec.sequences import Spans
from mlxspec.speculate.chain import Chain
from mlxspec.speculate.heads.model import HeadInput, HeadModel, Pass

NEVER = 1 << 30  # a position that no row sees


@dataclass(slots=True)
class BlockCache:
    """What a layer sees as its cache in a block's pass: K/V of the context from `pages` at `blocks`
    [n, W], followed by the block's own. `offset` int32 [n]: the newest tokens' positions.
    """

    pages: Pages
    blocks: Blocks
    offset: mx.array

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        size = self.pages.view.block_size
        pools = self.pages.pools()
        keys, values = [gather(pool, self.blocks, size, keep=slice(None)) for pool in pools]
        return mx.concatenate([keys, k], axis=2), mx.concatenate([values, v], axis=2)


class BlockPass(Pass):
    """`head.module` is a Block."""

    @staticmethod
    def fill(head: HeadModel, caches: Sequence[Any]) -> None:
        row = head.embed(mx.array([[0]]))
        for layer, kv in zip(head.module.layers, caches, strict=True):
            layer.self_attn(row, None, kv)

    def write(self, rows: HeadInput) -> None:
        if rows.spans:
            fill_view(self.view, rows.spans, None)
            self.head.module.store(rows.hidden, self.pages)
            self.submit()

    def draft(self, rows: HeadInput, chain: Chain) -> None:
        self.write(rows)
        depth = chain.depths[0]
        hidden = self._block(chain, depth)
        logits = self.head.lm_head(hidden)
        for token in range(depth):
            at = slice(len(chain.spans)), token
            chain.sample_next(self.head.module.scores(logits[at], hidden[at], chain.tokens))

    def _block(self, chain: Chain, depth: int) -> mx.array:
        """The head's output [n, depth, D] in the rows that predict."""
        module, drafting = self.head.module, chain.spans
        extra = 0 if module.from_anchor else 1
        rows = depth + extra
        masks = mx.full((len(drafting), rows - 1), module.mask, mx.int32)
        starts = mx.array([e.start for e in drafting])
        if chain.shift is not None:
            starts = starts + chain.shift
        context = cache(partial(self._context, drafting, starts, rows))
        caches = []
        for layer, pages in zip(module.layers, self.pages, strict=True):
            blocks, mask = context(layer.window, layer.causal)
            caches.append((mask, BlockCache(pages, blocks, starts)))
        block = self.head.embed(mx.concatenate([chain.tokens[:, None], masks], axis=1))
        out: mx.array = module(block, caches)[:, extra:]
        mx.async_eval(out)
        return out

    def _context(
        self,
        drafting: Spans,
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
        blocks = Blocks(block_array([e.tables[0][low : low + width] for e in drafting], width))
        slots = low * size + mx.arange(width * size)
        return blocks, block_mask(slots, starts, rows, window=window, causal=causal)


def block_mask(
    slots: mx.array,
    starts: mx.array,
    rows: int,
    window: int | None,
    causal: bool,
) -> mx.array:
    """Bool [n, 1, rows, S + rows], 1 for `rows` if they see the same: what each row of a block sees
    of the context's `slots` [S] and of the block. `starts` int32 [n] are the newest tokens'
    positions."""
    first = starts[:, None, None]
    row = first + mx.arange(rows)[:, None]  # positions
    context = mx.where(slots < first, slots, NEVER)
    keys = mx.concatenate([context, row.swapaxes(1, 2)], axis=-1)
    seen = keys <= (row if causal else row[:, -1:])
    if window:
        seen &= keys > (row if causal else first) - window
    return seen[:, None]

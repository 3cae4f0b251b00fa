"""All kinds of heads as the drafter sees them: a loaded head, and how it is run and drafts.

Rule: a kind is a loader, which returns a HeadModel, and a Pass; everything else is the drafter's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.model import attention
from mlxspec.model.batch import Shift
from mlxspec.model.pages import Pages, View, pools_of
from mlxspec.model.runner import Runner
from mlxspec.model.vision.seam import Eyes, turn
from mlxspec.sequences import Seq, Spans
from mlxspec.speculate.chain import MAX_CHAIN, Chain
from mlxspec.types import FINAL_NORM, CacheBytes, Tap


@dataclass(slots=True)
class HeadInput:
    """Input rows of a head, one run per span. `tokens` int32 [T]; `hidden` [T, D]: for each token,
    the prepared hidden state `slot_offset` positions earlier. With drafts in flight, a run has the
    rows of all samples, one of which is the newest token's."""

    spans: Spans
    tokens: Array
    hidden: Array

    def newest(self, shift: Shift) -> Array:
        """int32 [spans]: the newest tokens' rows."""
        ends = accumulate(e.rows for e in self.spans)
        rows = [end - e.num_sampled for e, end in zip(self.spans, ends, strict=True)]
        newest = mx.array(rows)
        return newest if shift is None else newest + shift


class Pass:
    """How a kind of head is run over rows, and computes the logits of what it drafts. It submits
    what it computes before it returns, so that the next pass may write the pages in place. `pages`
    are the head's own, `runner` the target's."""

    pages: list[Pages]

    def __init__(self, head: "HeadModel", runner: Runner) -> None:
        target = runner.view
        blocks: dict[int | None, int] = {None: target.num_blocks[None]}
        self.head = head
        self.runner = runner
        self._eyes: Eyes | None = None  # that its layers turn as
        first = head.slot_offset
        self.view = View(
            target.block_size, blocks, target.allocated, dense=target.dense, first=first
        )
        self.pages = [Pages(self.view, None) for _ in range(head.kv_layers)]
        attention.install(head.module)

    @staticmethod
    def fill(head: "HeadModel", caches: Sequence[Any]) -> None:
        """Build a pass on mlx-lm's caches, one for each of the head's own layers."""

    def can_draft(self, seq: Seq) -> bool:
        """Whether it can draft after this sequence's newest token."""
        return True

    def turn(self, spans: Spans, shift: Shift) -> None:
        """Give rows behind images, once they are in the view, the target's positions."""
        self.view.rope = None
        eyes = self.runner.eyes
        if not (eyes and eyes.sections):
            return
        if eyes is not self._eyes:
            eyes.attach_head(self.view, self.head.module.layers)
            self._eyes = eyes
        if any(span.state.images for span in spans):
            turn(self.view, spans, [span.rows for span in spans], shift)

    def write(self, rows: HeadInput) -> None:
        """Write K and V of final rows."""

    def draft(self, rows: HeadInput, chain: Chain) -> None:
        """Run over `rows`, up to the newest token's of each sequence of the chain, and sample all
        its tokens."""
        raise NotImplementedError

    def submit(self, out: Array | tuple[()] = ()) -> None:
        """Start to compute the output of a pass; where there is none, its K and V."""
        self.view.last_keys = None
        # The next pass would copy a pool that is passed here.
        pools = pools_of(self.pages)
        mx.async_eval(out if len(out) else [pool.flatten()[:1] + 0 for pool in pools])


def unchanged(hidden: Array) -> Array:
    return hidden


@dataclass(slots=True)
class HeadModel:
    """A loaded head. `pass_type` says how it works. `prepare` computes its input from the target's
    `taps` side by side, [T, width]; `embed` and `lm_head` are those that it drafts with, usually
    the target's own.

    It has K and V of its own in `kv_layers` layers, whose row in slot p is made of the hidden state
    at p - `slot_offset`, 0 or 1. `depth`: its longest draft. `tap_unknown`: trials must show
    whether it reads the hidden state before or after the final norm."""

    name: str
    pass_type: type[Pass]
    module: Any
    embed: Callable[[Array], Array]
    lm_head: Callable[[Array], Array]
    width: int
    taps: tuple[Tap, ...] = (FINAL_NORM,)
    prepare: Callable[[Array], Array] = unchanged
    kv_layers: int = 1
    slot_offset: int = 1
    depth: int = MAX_CHAIN
    tap_unknown: bool = False
    cached: CacheBytes = field(default_factory=CacheBytes)  # once it is loaded

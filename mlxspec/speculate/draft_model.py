"""A small model of the same vocabulary that drafts for a large one. For the drafter it is a head
that reads tokens and no hidden states.

Rule: its KV is under the target's block ids, in pools of its own, so that a prefix hit serves both.
Tokens of a step in flight are taken lazily from it.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.model.batch import Shift, build_inputs, starts_of
from mlxspec.model.pages import flat_caches
from mlxspec.model.runner import Runner
from mlxspec.sequences import Seq, Spans
from mlxspec.speculate.chain import MAX_CHAIN, Chain
from mlxspec.speculate.heads.model import HeadInput, HeadModel, Pass, unchanged
from mlxspec.types import UNLIMITED


@dataclass(frozen=True, slots=True)
class DraftModel:
    """`runner` runs the draft model over as many blocks as the target has; `vocab` is the width of
    the target's logits. `draft_vocab` and `context` are the draft model's: higher ids are read as
    its last one, longer sequences get no draft."""

    runner: Runner
    vocab: int
    draft_vocab: int = UNLIMITED
    context: int = UNLIMITED

    def __call__(self, spans: Spans, ids: Array, shift: Shift) -> Array:
        """Logits [n, vocab] of the sampled rows: -inf for tokens that the draft model lacks."""
        ids = mx.minimum(ids, self.draft_vocab - 1)
        logits = self.runner.forward_rows(spans, ids, shift)[:, : self.vocab]
        lacking = self.vocab - logits.shape[-1]
        return mx.pad(logits, [(0, 0), (0, lacking)], constant_values=-mx.inf)

    def head(self) -> HeadModel:
        """The head that drafts with it."""
        return HeadModel(
            "model",
            DraftPass,
            self,
            embed=unchanged,
            lm_head=unchanged,
            width=0,
            taps=(),
            slot_offset=0,
        )


class DraftPass(Pass):
    """`head.module` is a DraftModel."""

    def __init__(self, head: HeadModel, runner: Runner) -> None:
        self.model: DraftModel = head.module
        draft_runner = self.model.runner
        draft_runner.view.allocated = runner.view.allocated  # the target's runner grows its pools
        self.pages = flat_caches(draft_runner.caches)

    def can_draft(self, seq: Seq) -> bool:
        """Not after another drafter's drafts in flight, which it would have to be run over."""
        if seq.inflight_drafts and seq.flight[-1].draft.source != "model":
            return False
        return seq.known + seq.inflight_drafts + MAX_CHAIN <= self.model.context

    def write(self, rows: HeadInput) -> None:
        context = self.model.context
        spans = []
        for e in rows.spans:
            if e.start < context:
                spans.append(replace(e, count=min(e.end, context) - e.start))
        if spans:
            self.model(spans, build_inputs(spans, None, None), None)

    def draft(self, rows: HeadInput, chain: Chain) -> None:
        first = starts_of(rows.spans)
        unread = {run.state: run for run in rows.spans}
        spans = []
        places: list[int] = []  # among the unread tokens, and after them the newest ones
        shifted: list[tuple[int, int]] = []  # places that shift, each with its span's number
        for n, e in enumerate(chain.spans):
            count = 0  # rows before the newest token's
            if run := unread.get(e.state):
                count, start = run.rows, first[run]
                if e.inflight_drafts and chain.shift is not None:
                    count = 1  # it drafted them: of those accepted, only the last may be unread
                    start += run.count - 1
                    shifted.append((len(places), n))
                places += range(start, start + count)
            places.append(len(rows.tokens) + n)
            spans.append(replace(e, start=e.start - count, count=1 + count))
        at = mx.array(places)
        if shifted and chain.shift is not None:
            where, owners = mx.array(shifted).T
            at = at.at[where].add(chain.shift[owners])
        ids = mx.concatenate([rows.tokens, chain.tokens])[at]
        chain.sample_next(self.model(spans, ids, chain.shift))
        while chain.spans:
            chain.sample_next(self.model(chain.spans, chain.tokens, chain.shift))

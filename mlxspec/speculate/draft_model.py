"""A small model of the same vocabulary that drafts for a large one.

Rule: its KV lies under the target's block ids, in pools of its own, so that a prefix hit serves
both. It draws with the target's noise, and never waits for the device: what a step in flight will
bring is taken lazily from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
from mlx.core import array as Array
from mlx.nn import Module

from mlxspec.model.batch import Shift, Step, build_inputs, starts_of
from mlxspec.model.layout import LayoutChoice, context_of, find_layout
from mlxspec.model.runner import Runner
from mlxspec.speculate import Drafter, Proposals
from mlxspec.speculate.chain import (
    MAX_DEPTH,
    MAX_LAG,
    Chain,
    DraftCosts,
    deepest_first,
    proposals,
    shift_after,
)
from mlxspec.speculate.controller import Proposal
from mlxspec.speculate.heads.followers import Follower
from mlxspec.types import (
    Accepted,
    Entry,
    Json,
    Plan,
    Seq,
    UnsupportedModel,
    UserError,
)

CATCH_UP = 256  # rows that it reads in one step, besides a prompt's own


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A draft model that is loaded and runs in the rows layout; `context` in tokens."""

    model: Module
    fit: LayoutChoice
    context: int


def fit_small(path: Path, model: Module, config: Json, target: LayoutChoice) -> SmallModel:
    """The loaded model of `path` with its layout. Raises UnsupportedModel where it cannot draft, or
    where `target` cannot roll drafts back."""
    if not target.can_draft:
        raise UnsupportedModel(
            f"--draft: rejected drafts cannot be rolled back in the {target.layout} layout of this"
            " model; leave --draft out"
        )
    try:
        fit = find_layout(model, "rows")
    except UserError as error:
        raise UnsupportedModel(f"{path} cannot draft: {error}; give another --draft") from error
    return SmallModel(model, fit, context_of(config))


@dataclass(slots=True)
class DraftModel(Drafter):
    """`runner` runs the draft model over as many blocks as the target has; `vocab` is the width of
    the target's logits. `own_vocab` and `context` are the draft model's: ids beyond are read as its
    last, longer sequences get no draft."""

    runner: Runner
    vocab: int
    costs: DraftCosts
    own_vocab: int = 1 << 31
    context: int = 1 << 31
    name: str = "model"
    lazy: bool = True
    # Without hidden states: the KV of the first `read` positions is written.
    _live: dict[Seq, Follower] = field(default_factory=dict)
    _filled: dict[int, bytes] = field(default_factory=dict)  # block -> key of what was read into it

    def begin(self, seq: Seq) -> None:
        self._live[seq] = Follower()

    def end(self, seq: Seq) -> None:
        del self._live[seq]

    def close(self) -> None:
        self._live.clear()

    def learn_seconds(self, seconds: float, depth: int) -> None:
        self.costs.learn(seconds, depth)

    def options(self, seq: Seq) -> list[Proposal]:
        """None where it has yet to read more than the last few tokens."""
        if seq.known + seq.inflight_drafts + MAX_DEPTH > self.context:
            return []
        if seq.inflight_drafts:
            ready = seq.flight[-1].draft.source == self.name
        else:
            ready = seq.computed - self._follower(seq).read <= MAX_LAG
        return proposals(self.name, seq, MAX_DEPTH, self.costs) if ready else []

    # ---- drafting ----------------------------------------------------------------------------

    def draft(
        self,
        plan: Plan,
        previous: Step | None,
        chosen: Proposals,
    ) -> None:
        """Read what is new, then fill the drafts, one pass for each further token. The deepest
        drafts come first, so that each pass has the first entries of the one before it."""
        drafting = deepest_first(plan, chosen)
        reading = list(self._catch_up([e for e in plan if e not in drafting]))
        entries = [self._unread(e) for e in drafting] + reading
        if not entries:
            return
        shift = shift_after(previous, entries)
        ids = self._inputs(entries, previous, shift)
        logits = self._forward(entries, ids, shift)
        for e in reading:
            self._live[e.seq].read = e.end
        if not drafting:
            return
        part = None if shift is None else shift[: len(drafting)]
        chain = Chain(drafting, chosen, self.name, part, ids)
        chain.draw(logits)
        while chain.entries:
            chain.draw(self._forward(chain.entries, chain.tokens, chain.shift))

    def _forward(
        self,
        plan: Plan,
        ids: Array,
        shift: Shift,
    ) -> Array:
        """Logits [n, vocab] of the sampled rows: -inf for tokens that the draft model lacks."""
        ids = mx.minimum(ids, self.own_vocab - 1)
        logits = self.runner.forward_rows(plan, ids, shift)[:, : self.vocab]
        lacking = self.vocab - logits.shape[-1]
        return mx.pad(logits, [(0, 0), (0, lacking)], constant_values=-mx.inf)

    def _unread(self, e: Entry) -> Entry:
        """The rows to read before the first token is drafted. With a draft in flight, its last
        token was not read if all of it is accepted: the row before the last known one is then read
        once more."""
        start = e.start - 1 if e.inflight_drafts else self._live[e.seq].read
        return replace(e, start=start, count=e.start + e.count - start)

    def _catch_up(self, plan: Plan) -> Iterator[Entry]:
        """Prompts as the target reads them, and sequences that lag far behind; read tokens only."""
        left = CATCH_UP
        for e in plan:
            read = self._follower(e.seq).read
            prompt = e.count if e.count > 1 else 0
            known = min(len(e.seq.tokens) - 1, e.start + prompt)
            lag = min(known, self.context) - read
            count = min(lag, left + prompt)
            if count > 0 and (prompt or lag >= MAX_LAG):
                left = max(0, left - count)
                yield Entry(e.seq, read, count, False)

    def _inputs(
        self,
        entries: Plan,
        previous: Step | None,
        shift: Shift,
    ) -> Array:
        """Input tokens int32 [T]; those in flight are taken lazily from `previous`."""
        ids = build_inputs(entries, previous, shift)
        if previous is None or shift is None:
            return ids
        starts = starts_of(entries)
        unread, inputs, owners = [], [], []
        for n, e in enumerate(entries):
            if e.inflight_drafts:
                unread.append(starts[e] + e.count - 2)
                first = previous.rows[previous.first_row[e.seq]]
                inputs.append(first.first_input)
                owners.append(n)
        rows = mx.array(inputs) + shift[mx.array(owners)]
        ids[mx.array(unread)] = previous.ids[rows]
        return ids

    # ---- what its blocks hold ----------------------------------------------------------------

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        """Of what it wrote ahead, the accepted part stands."""
        for e, new in zip(step.plan, accepted, strict=True):
            if e.seq.finish is not None:
                continue
            live = self._follower(e.seq)
            if e.draft.source == self.name:
                right = min(len(e.draft), len(new.tokens))
                live.read = e.start + right
            full = live.read // self.runner.view.block_size
            blocks = zip(e.seq.table[:full], e.seq.block_hashes, strict=False)
            self._filled.update(blocks)

    def _follower(self, seq: Seq) -> Follower:
        """How far the sequence was read. Where it has new blocks, those from the prefix cache may
        have been read before."""
        live = self._live[seq]
        if live.table is not seq.table:
            live.table, live.read = seq.table, 0
            for block, key in zip(seq.table, seq.block_hashes, strict=False):
                if self._filled.get(block) != key:
                    break
                live.read += self.runner.view.block_size
            live.read = min(live.read, max(0, seq.computed - 1))
        return live

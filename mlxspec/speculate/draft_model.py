"""A small model of the same vocabulary that drafts for a large one.

Rule: its KV lies under the target's block ids, in pools of its own, so that a prefix hit serves
both. It draws with the target's noise, and never waits for the device: what a step in flight will
bring is taken lazily from it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxspec.model.batch import Step
from mlxspec.model.layout import LayoutChoice, context_of, find_layout, weights
from mlxspec.model.runner import Runner
from mlxspec.model.sampler import Row, sample
from mlxspec.speculate.controller import Key, Proposal, corrected
from mlxspec.types import Accepted, Draft, Entry, Sampling, Tap, UnsupportedModel, UserError
from mlxspec.types import Sequence as Seq

MAX_DEPTH = 8  # tokens that it drafts at most: each takes a pass
MAX_LAG = 32  # tokens that it may fall behind a sequence for which it does not draft
CATCH_UP = 256  # rows that it reads in one step, besides a prompt's own


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A draft model that is loaded and runs in the rows layout; `weights` in bytes, `context` in
    tokens."""

    model: Module
    fit: LayoutChoice
    weights: int
    context: int


def fit_small(
    path: Path, model: Module, config: dict[str, Any], target: LayoutChoice
) -> SmallModel:
    """The loaded model of `path`, ready to draft. Raises UnsupportedModel where one of the two
    models cannot."""
    if not target.drafts:
        raise UnsupportedModel(
            f"--draft: rejected drafts cannot be rolled back in the {target.layout} layout of this"
            " model; leave --draft out"
        )
    size = weights(model)
    try:
        return SmallModel(model, find_layout(model, "rows"), size, context_of(config))
    except UserError as error:
        raise UnsupportedModel(f"{path} cannot draft: {error}; give another --draft") from error


@dataclass(slots=True, eq=False)
class Follower:
    """How far the model has read a sequence: the KV of the first `read` positions is there."""

    sampling: Sampling
    read: int = 0
    table: list[int] | None = None


@dataclass(slots=True)
class DraftModel:
    """`runner` runs the draft model over as many blocks as the target has; `vocab` is the width of
    the target's logits; `seconds` is the cost of a drafted token. `own_vocab` and `context` are the
    draft model's: ids beyond are read as its last, longer sequences get no draft."""

    runner: Runner
    vocab: int
    seconds: float
    own_vocab: int = 1 << 31
    context: int = 1 << 31
    name: str = "model"
    taps: tuple[Tap, ...] = ()
    lazy: bool = True
    _live: dict[Seq, Follower] = field(default_factory=dict)
    _filled: dict[int, bytes] = field(default_factory=dict)  # block -> key of what was read into it

    def begin(self, seq: Seq) -> None:
        # Penalties need counts of tokens that the host has not read; the target applies them.
        plain = replace(
            seq.request.sampling,
            logprobs=None,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )
        self._live[seq] = Follower(plain)

    def end(self, seq: Seq) -> None:
        self._live.pop(seq, None)

    def clear(self) -> None:
        """Its blocks go with the prefix cache's."""

    def learn_seconds(self, seconds: float, depth: int) -> None:
        self.seconds *= corrected(seconds / depth / self.seconds)

    def options(self, seq: Seq) -> list[Proposal]:
        most = min(MAX_DEPTH, seq.room - 1)
        if most < 1 or not self._ready(seq):
            return []
        keys: list[Key] = [(self.name, i) for i in range(1, most + 1)]
        return [Proposal(self.name, seconds=self.seconds, keys=keys)]

    def _ready(self, seq: Seq) -> bool:
        """Whether it can draft in the next step: it has read all but the last few tokens."""
        live = self._live.get(seq)
        if live is None or live.table is not seq.table or seq.remaining != 1:
            return False
        if seq.known + seq.inflight_drafts + MAX_DEPTH > self.context:
            return False
        if seq.inflight_drafts:
            return seq.flight[-1].draft.source == self.name
        return seq.computed - live.read <= MAX_LAG

    # ---- drafting ----------------------------------------------------------------------------

    def draft(
        self, plan: Sequence[Entry], previous: Step | None, chosen: Mapping[Seq, Proposal]
    ) -> None:
        """Read what is new, then fill the drafts, one pass for each further token."""
        drafting = [e for e in plan if e.seq in chosen and self._ready(e.seq)]
        entries = [self._unread(e) for e in drafting]
        reading = list(self._catching_up(e for e in plan if e not in drafting))
        if not entries and not reading:
            return
        offsets = None
        if previous is not None and any(e.inflight_drafts for e in entries):
            offsets = previous.offsets(entries)
        ids = self._inputs([*entries, *reading], drafting, previous, offsets)
        padded = offsets
        if offsets is not None:
            padded = mx.concatenate([offsets, mx.zeros((len(reading),), mx.int32)])
        logits = self._forward([*entries, *reading], ids, padded)
        for e in reading:
            self._live[e.seq].read = e.end
        drafts = self._chain(drafting, entries, logits, offsets)
        for e, tokens in zip(drafting, drafts, strict=True):
            keys = chosen[e.seq].keys
            e.draft = Draft(mx.concatenate(tokens), self.name, keys)

    def _chain(
        self,
        drafting: Sequence[Entry],
        entries: Sequence[Entry],
        logits: mx.array,
        offsets: mx.array | None,
    ) -> list[list[mx.array]]:
        """The drafted tokens [1] of each entry, up to its depth; every pass adds one to those that
        want more. `logits` are behind the rows of `entries`."""
        drafts: list[list[mx.array]] = [[] for _ in entries]
        active = list(range(len(entries)))
        while active:
            tokens = self._sample(logits, [entries[i] for i in active], offsets)
            for n, i in enumerate(active):
                drafts[i].append(tokens[n : n + 1])
            more = [n for n, i in enumerate(active) if len(drafts[i]) < drafting[i].depth]
            active = [active[n] for n in more]
            if active:
                index = mx.array(more)
                if offsets is not None:
                    offsets = offsets[index]
                entries = [
                    Entry(e.seq, e.end, 1, True, inflight_drafts=e.inflight_drafts) for e in entries
                ]
                logits = self._forward([entries[i] for i in active], tokens[index], offsets)
        return drafts

    def _forward(self, plan: Sequence[Entry], ids: mx.array, offsets: mx.array | None) -> mx.array:
        return self.runner.forward_rows(plan, mx.minimum(ids, self.own_vocab - 1), offsets)

    def _unread(self, e: Entry) -> Entry:
        """The rows to read before the first token is drafted. With a draft in flight, its last
        token was not read if all of it is accepted: the row before the last known one is then read
        once more."""
        start = e.start - 1 if e.inflight_drafts else self._live[e.seq].read
        count = e.start + e.count - start
        return Entry(e.seq, start, count, True, inflight_drafts=e.inflight_drafts)

    def _catching_up(self, plan: Iterable[Entry]) -> Iterator[Entry]:
        """Prompts as the target reads them, and sequences that lag far behind; read tokens only."""
        left = CATCH_UP
        for e in plan:
            live = self._live.get(e.seq)
            if live is None:
                continue
            if live.table is not e.seq.table:
                self._start(live, e.seq)
            prompt = e.count if e.count > 1 else 0
            known = min(len(e.seq.tokens) - 1, e.start + prompt, self.context)
            count = min(known - live.read, left + prompt)
            if count > 0 and (prompt or known - live.read >= MAX_LAG):
                left = max(0, left - count)
                yield Entry(e.seq, live.read, count, False)

    def _inputs(
        self,
        entries: Sequence[Entry],
        drafting: Sequence[Entry],
        previous: Step | None,
        offsets: mx.array | None,
    ) -> mx.array:
        """Input tokens int32 [T] of `entries`, the first of which belong to `drafting`."""
        host: list[int] = []
        ends = []
        for e in entries:
            known = [] if e.inflight_drafts else e.seq.tokens[e.start : e.start + e.count]
            host += known
            host += [0] * (e.count - len(known))
            ends.append(len(host) - 1)
            self._forget_blocks(e)
        ids = mx.array(host, mx.int32)
        pending = [i for i, e in enumerate(drafting) if e.pending]
        if not pending or previous is None or previous.sampled is None:
            return ids
        seqs = [drafting[i].seq for i in pending]
        accepted = mx.zeros((len(pending),), mx.int32)
        if offsets is not None:
            accepted = offsets[mx.array(pending)]
        rows = mx.array([previous.first_row[s] for s in seqs]) + accepted
        ids[mx.array([ends[i] for i in pending])] = previous.sampled.tokens[rows]
        overlapped = [n for n, i in enumerate(pending) if drafting[i].inflight_drafts]
        if overlapped:
            spans = mx.array([previous.spans[seqs[n]] for n in overlapped])
            spans = spans + accepted[mx.array(overlapped)]
            ids[mx.array([ends[pending[n]] - 1 for n in overlapped])] = previous.ids[spans]
        return ids

    def _sample(
        self, logits: mx.array, entries: Sequence[Entry], offsets: mx.array | None
    ) -> mx.array:
        """The next token of each entry, int32 [entries], drawn as the target would."""
        width = logits.shape[-1]
        if width < self.vocab:
            logits = mx.pad(logits, [(0, 0), (0, self.vocab - width)], constant_values=-mx.inf)
        rows = [Row(e, self._live[e.seq].sampling, e.end, 1) for e in entries]
        none = mx.zeros((0,), mx.int32)
        return sample(logits[:, : self.vocab], rows, none, [0 for _ in rows], offsets).tokens

    # ---- what its blocks hold ----------------------------------------------------------------

    def observe(self, step: Step, accepted: Sequence[Accepted]) -> None:
        """Of what it wrote ahead, the accepted part stands."""
        size = self.runner.view.block_size
        for e, new in zip(step.plan, accepted, strict=True):
            live = self._live.get(e.seq)
            if live is None or e.seq.finish is not None:
                continue
            if live.table is not e.seq.table:
                self._start(live, e.seq)
            if e.draft.source == self.name:
                live.read = e.start + min(len(e.draft), len(new.tokens))
            for i in range(min(len(e.seq.keys), live.read // size)):
                self._filled[e.seq.table[i]] = e.seq.keys[i]

    def _start(self, live: Follower, seq: Seq) -> None:
        """The sequence has new blocks: those from the prefix cache may have been read before."""
        size = self.runner.view.block_size
        live.table, live.read = seq.table, 0
        for block, key in zip(seq.table, seq.keys, strict=False):
            if self._filled.get(block) != key:
                break
            live.read += size
        live.read = min(live.read, max(0, seq.computed - 1))

    def _forget_blocks(self, e: Entry) -> None:
        """Blocks that are written to hold nothing known until they are full."""
        size = self.runner.view.block_size
        for block in e.seq.table[e.start // size : -(-e.end // size)]:
            self._filled.pop(block, None)

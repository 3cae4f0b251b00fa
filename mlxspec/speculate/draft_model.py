"""A small model of the same vocabulary that drafts for a large one.

Rule: its KV lies under the same block ids as the target's, in pools of its own, so that a prefix
hit serves both. It draws with the target's noise, and nothing here waits for the device: where a
step is in flight, what it brought is taken lazily from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxspec.model.layout import LayoutChoice, context_of, find_layout, weights
from mlxspec.model.runner import Runner, Step
from mlxspec.model.sampler import Row, sample
from mlxspec.types import Draft, Entry, Sampling, UnsupportedModel, UserError
from mlxspec.types import Sequence as Seq

SOURCE = "model"
MODEL_DEPTH = 8  # tokens that it drafts at most: it has to be run for each
LAG = 32  # tokens that it may fall behind a sequence for which it does not draft
CATCH_UP = 256  # rows that it reads in one step, besides a prompt's own


@dataclass(frozen=True, slots=True)
class Small:
    """A draft model that is loaded and runs in the rows layout."""

    model: Module
    fit: LayoutChoice
    weights: int  # bytes
    context: int  # tokens


def fit_small(path: Path, model: Module, config: dict[str, Any], target: LayoutChoice) -> Small:
    """The loaded model of `path`, ready to draft. Raises UnsupportedModel where either model cannot
    run a draft."""
    if not target.drafts:
        raise UnsupportedModel(
            f"--draft: no draft can be taken back in the {target.layout} layout; leave it out"
        )
    held = weights(model)
    try:
        return Small(model, find_layout(model, "rows"), held, context_of(config))
    except UserError as error:
        raise UnsupportedModel(f"{path} cannot draft: {error}; give another --draft") from error


@dataclass(slots=True, eq=False)
class Follower:
    """How far the model has read a sequence: the KV of the first `seen` positions is there."""

    sampling: Sampling
    seen: int = 0
    table: list[int] | None = None


@dataclass(slots=True)
class DraftModel:
    """`runner` runs the draft model in the rows layout over as many blocks as the target has;
    `vocab` is the width of the target's logits; `seconds` is what one more drafted token costs.
    `own_vocab` and `context` are the draft model's: ids beyond are read as its last, longer
    sequences get no draft."""

    runner: Runner
    vocab: int
    seconds: float
    own_vocab: int = 1 << 31
    context: int = 1 << 31
    _live: dict[Seq, Follower] = field(default_factory=dict)
    _filled: dict[int, bytes] = field(
        default_factory=dict
    )  # block -> key of the content that was read

    def begin(self, seq: Seq) -> None:
        # What the host has not read cannot be counted, so penalties wait for the target's own rows.
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

    def ready(self, seq: Seq) -> bool:
        """Whether it can draft in the next step: it has read all but the last few tokens."""
        live = self._live.get(seq)
        if live is None or live.table is not seq.table or seq.remaining != 1:
            return False
        if seq.known + seq.spread + MODEL_DEPTH > self.context:
            return False
        if seq.spread:
            return seq.flight[-1].draft.source == SOURCE
        return seq.computed - live.seen <= LAG

    def draft(self, plan: Sequence[Entry], before: Step | None, depths: Mapping[Seq, int]) -> None:
        """Read what is new, then fill the draft of each entry with its depth in `depths`."""
        drafting = [e for e in plan if depths.get(e.seq) and self.ready(e.seq)]
        entries = [self._next(e) for e in drafting]
        reading = list(self._reading(e for e in plan if e not in drafting))
        if not entries and not reading:
            return
        late = (
            before.late(entries) if before is not None and any(e.spread for e in entries) else None
        )
        ids = self._ids([*entries, *reading], drafting, before, late)
        ahead = (
            late if late is None else mx.concatenate([late, mx.zeros((len(reading),), mx.int32)])
        )
        last = self.own_vocab - 1
        logits = self.runner.forward([*entries, *reading], mx.minimum(ids, last), ahead)
        for e in reading:
            self._live[e.seq].seen = e.end
        made: list[list[mx.array]] = [[] for _ in entries]
        active = list(range(len(entries)))
        while active:
            tokens = self._sample(logits, [entries[i] for i in active], late)
            for n, i in enumerate(active):
                made[i].append(tokens[n : n + 1])
            kept = [n for n, i in enumerate(active) if len(made[i]) < depths[entries[i].seq]]
            active = [active[n] for n in kept]
            if active:
                entries = [Entry(e.seq, e.end, 1, True, spread=e.spread) for e in entries]
                index = mx.array(kept)
                late = late if late is None else late[index]
                logits = self.runner.forward(
                    [entries[i] for i in active], mx.minimum(tokens[index], last), late
                )
        for e, some in zip(drafting, made, strict=True):
            e.draft = Draft(mx.concatenate(some), SOURCE)

    def observe(self, entries: Iterable[Entry], accepted: Iterable[list[int]]) -> None:
        """After the commit: of what it wrote ahead, the part that was accepted stands."""
        for e, new in zip(entries, accepted, strict=True):
            live = self._live.get(e.seq)
            if live is None or e.seq.finish is not None:
                continue
            if live.table is not e.seq.table:
                self._start(live, e.seq)
            if e.draft.source == SOURCE:
                live.seen = e.start + min(len(e.draft), len(new))
            size = self.runner.view.block_size
            for i in range(min(len(e.seq.keys), live.seen // size)):
                self._filled[live.table[i]] = e.seq.keys[i]  # type: ignore[index]

    def _start(self, live: Follower, seq: Seq) -> None:
        """The sequence has new blocks: those from the prefix cache may have been read before."""
        size = self.runner.view.block_size
        live.table, live.seen = seq.table, 0
        for block, key in zip(seq.table, seq.keys, strict=False):
            if self._filled.get(block) != key:
                break
            live.seen += size
        live.seen = min(live.seen, max(0, seq.computed - 1))

    def _next(self, e: Entry) -> Entry:
        """The rows to read before the first token is drafted. Where a draft is in flight, its last
        token was not read if all of it stands: the row before the last known one is read once more
        then."""
        start = e.start - 1 if e.spread else self._live[e.seq].seen
        return Entry(e.seq, start, e.start + e.count - start, True, spread=e.spread)

    def _reading(self, plan: Iterable[Entry]) -> Iterable[Entry]:
        """Prompts as the target reads them, and what lags too far behind; only tokens that the host
        knows."""
        left = CATCH_UP
        for e in plan:
            live = self._live.get(e.seq)
            if live is None:
                continue
            if live.table is not e.seq.table:
                self._start(live, e.seq)
            fresh = e.count if e.count > 1 else 0
            known = min(len(e.seq.tokens) - 1, e.start + fresh, self.context)
            count = min(known - live.seen, left + fresh)
            if count > 0 and (fresh or known - live.seen >= LAG):
                left = max(0, left - count)
                yield Entry(e.seq, live.seen, count, False)

    def _ids(
        self,
        entries: Sequence[Entry],
        drafting: Sequence[Entry],
        before: Step | None,
        late: mx.array | None,
    ) -> mx.array:
        """Input tokens int32 [T] of `entries`, the first of which belong to `drafting`."""
        host: list[int] = []
        ends = []
        for e in entries:
            known = [] if e.spread else e.seq.tokens[e.start : e.start + e.count]
            host += known + [0] * (e.count - len(known))
            ends.append(len(host) - 1)
            self._touch(e)
        ids = mx.array(host, mx.int32)
        pending = [i for i, e in enumerate(drafting) if e.pending]
        if not pending or before is None or before.sampled is None:
            return ids
        seqs = [drafting[i].seq for i in pending]
        kept = mx.zeros((len(pending),), mx.int32) if late is None else late[mx.array(pending)]
        ids[mx.array([ends[i] for i in pending])] = before.sampled.tokens[
            mx.array([before.at[s] for s in seqs]) + kept
        ]
        blind = [n for n, i in enumerate(pending) if drafting[i].spread]
        if blind:
            spans = mx.array([before.spans[seqs[n]] for n in blind]) + kept[mx.array(blind)]
            ids[mx.array([ends[pending[n]] - 1 for n in blind])] = before.ids[spans]
        return ids

    def _touch(self, e: Entry) -> None:
        """Blocks that are written are not known any more, until they are full."""
        size = self.runner.view.block_size
        for block in e.seq.table[e.start // size : -(-e.end // size)]:
            self._filled.pop(block, None)

    def _sample(
        self, logits: mx.array, entries: Sequence[Entry], late: mx.array | None
    ) -> mx.array:
        """The next token of each entry, int32 [entries], drawn as the target would."""
        width = logits.shape[-1]
        if width < self.vocab:
            logits = mx.pad(logits, [(0, 0), (0, self.vocab - width)], constant_values=-mx.inf)
        rows = [Row(e, self._live[e.seq].sampling, e.end, 1) for e in entries]
        empty = mx.zeros((0,), mx.int32)
        return sample(logits[:, : self.vocab], rows, empty, [0] * len(rows), late).tokens

"""The proof that a row's bits depend on no other row of its step: a sequence is computed a row at a
time, and then in other steps, whose logits are compared bit for bit.

Rule: steps do what serving does: they have drafts of which some are accepted, neighbours, prompts
that are cut elsewhere, and cached prefixes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.kernels.invariant import PART
from mlxspec.model.batch import starts_of
from mlxspec.model.invariant import ROWS, Invariance, chunk_rows
from mlxspec.model.runner import Runner
from mlxspec.model.trunk import layers_in
from mlxspec.sequences import Draft, SeqState, Span
from mlxspec.types import Tap

STEPS = (1, 2, 5, 6, 13, ROWS)  # rows of a step
TAIL = 9  # tokens of the prompt after its whole chunks
CONTEXT = 3 * PART  # tokens of these at least: attention adds several parts
ROOM = TAIL + 2 * ROWS  # tokens of a sequence after its whole chunks
SHORT = TAIL + 2 * len(STEPS)  # tokens of a sequence without

Step = dict[Span, "ProofSequence"]  # its spans, of which the first is the sequence's own
Prepare = Callable[[], tuple[int, Step]]  # a step, and the number of the row with which it begins


def blocks_needed(block_size: int) -> int:
    """Of a sequence, two neighbours of which one is short, the sequence again, and of those that
    begin with one row each."""
    tokens = CONTEXT + 5 * chunk_rows(block_size) + 4 * ROOM
    return 6 + ceil(tokens / block_size) + ROWS * ceil(SHORT / block_size)


def some_tokens(count: int, shift: int = 0) -> list[int]:
    """Tokens that every model has."""
    return [(7 * i + 3 + shift) % 97 for i in range(count)]


@dataclass(slots=True, eq=False)
class ProofSequence:
    """A sequence of the proof: its tokens, the blocks of these, how many are in whole chunks, and
    how many are computed."""

    tokens: list[int]
    table: list[int]
    kept: SeqState
    whole: int
    computed: int = 0

    def span(
        self,
        start: int,
        count: int,
        samples: bool,
        drafted: Sequence[int] = (),
    ) -> Span:
        """Its rows from `start` on, with the drafts after them."""
        return Span(
            self.kept,
            [self.table],
            self.tokens,
            start=start,
            count=count,
            samples=samples,
            draft=Draft(drafted),
        )

    def drafted(self, at: int, rows: int) -> Span:
        """A row of it, and the others as drafts that are right."""
        return self.span(at, 1, samples=True, drafted=self.tokens[at + 1 : at + rows])

    def next_rows(self, count: int = 1) -> Span:
        return self.span(self.computed, count, samples=True)


class Proof:
    """One sequence in many steps, in blocks of its own."""

    def __init__(self, runner: Runner, invariance: Invariance, can_draft: bool) -> None:
        self.runner = runner
        self.can_draft = can_draft
        self.chunk = invariance.chunk or chunk_rows(runner.view.block_size)
        self.whole = ceil(CONTEXT / self.chunk) * self.chunk
        self.end = self.whole + TAIL - 1  # its first row that is compared
        self.alone: list[Array] = []  # logits of the rows after the prompt, one at a time
        self.held: list[ProofSequence] = []  # the sequence that was computed so, and its neighbours
        self.crowd: list[ProofSequence] = []  # short neighbours of one row
        self.states: dict[int, Any] = {}  # of recurrent layers, by the tokens of whole chunks

    def differs(self, rows: int) -> str:
        """How the logits of a step of `rows` rows differ from those of the same rows computed
        alone, and in which layer this begins; "" if they do not."""
        if not self.held:
            self._begin()
        for how, prepare in self._steps(rows):
            first, step = prepare()
            logits = self._logits(step)[0]
            want = mx.concatenate(self.alone[first : first + len(logits)])
            if not mx.array_equal(logits, want):
                origin = self._origin(prepare)
                origin = f", as the output of {origin} does" if origin else ""
                some = "one row" if rows == 1 else f"{rows} rows"
                return f"logits differ in steps of {some}{how}{origin}"
        return ""

    def _steps(self, rows: int) -> Iterator[tuple[str, Prepare]]:
        """Steps of so many rows: of the sequence where it can have drafts, and of sequences."""
        ends = rows in (STEPS[0], STEPS[-1])
        shared = self.whole - self.chunk * ends
        recurrent = bool(self.runner.states.layers)
        if rows == 1 or self.can_draft:
            if ends:
                yield "", partial(self._drafted, rows, shared, TAIL)
            beside = partial(
                self._drafted,
                rows,
                shared,
                cut=3,
                beside=True,
            )
            yield " beside others", beside
            if not recurrent:
                yield " after a cached prefix", partial(self._cached, rows)
        if rows > 1:
            if self.can_draft:
                yield ", of whose drafts some are accepted", partial(self._accepted, rows)
            yield " of a sequence each", partial(self._crowded, rows)

    def _drafted(self, rows: int, shared: int, cut: int, beside: bool = False) -> tuple[int, Step]:
        """The sequence with a prompt that is cut in another way, and neighbours if wanted."""
        seq = self._seq(shared)
        self._read(seq, self.end, cut)
        spans = {seq.drafted(self.end, rows): seq}
        for n, other in enumerate(self.held[1:] if beside else []):
            spans[other.next_rows(1 + n)] = other
        return 0, spans

    def _cached(self, rows: int) -> tuple[int, Step]:
        """All but the rows that are compared is cached."""
        first = self.held[0]
        hit = ProofSequence(
            first.tokens,
            first.table,
            SeqState(prompt_len=self.end + 1),
            whole=self.end,
        )
        return 0, {hit.drafted(self.end, rows): hit}

    def _accepted(self, rows: int) -> tuple[int, Step]:
        """The row after a step of so many, half of whose drafts are rejected."""
        _, spans = self._drafted(rows, self.whole, TAIL, beside=True)
        done = self.runner.forward(list(spans), None)
        (mine, seq), *_ = spans.items()
        some = (rows - 1) // 2
        accepted = [some if kept is mine.kept else 0 for kept in done.first_row]
        self.runner.states.keep_accepted(mx.array(accepted), done.first_row)
        for span, other in spans.items():
            other.computed = span.end
        return 1 + some, {seq.drafted(self.end + 1 + some, 1): seq}

    def _crowded(self, rows: int) -> tuple[int, Step]:
        """The sequence's row beside one row each of others."""
        _, spans = self._drafted(1, self.whole, TAIL)
        return 0, spans | {other.next_rows(): other for other in self.crowd[: rows - 1]}

    def beginning(self) -> str:
        """How a sequence's logits differ where another begins with it; "" if they do not.
        Overwrites what is held."""

        def begun(*seqs: ProofSequence) -> Array:
            new = [replace(seq, kept=SeqState(prompt_len=1)) for seq in seqs]
            logits = []
            for at, rows in ((0, 1), (1, ROOM), (1 + ROOM, 2)):
                logits += self._logits({seq.span(at, rows, samples=True): seq for seq in new})
            return mx.stack(logits[:: len(seqs)])

        _, one, other = self.held
        if mx.array_equal(begun(one, other), begun(one)):
            return ""
        return "logits differ where sequences begin together"

    def _origin(self, prepare: Prepare) -> str:
        """The first layer whose output differs in such a step, by what mixes its tokens; "" where
        none does."""
        runner = self.runner
        if not runner.trunk:
            return ""
        layers = layers_in(runner.trunk)
        runner.tap(range(len(layers)))
        try:
            first, step = prepare()
            together = self._hidden(step)
            count = next(iter(step)).rows
            seq = self._seq(self.whole)
            self._read(seq, self.end, 1)
            at = range(self.end, self.end + first + count)
            apart = [self._hidden({seq.drafted(i, 1): seq}) for i in at][first:]
        finally:
            runner.tap(())
        for i, hidden in together.items():
            if not mx.array_equal(mx.concatenate([each[i] for each in apart]), hidden):
                layer = layers[i]
                mixers = [name for name in layer.children() if re.search("attn|mixer|conv", name)]
                return f"layer {i}'s {mixers[0] if mixers else type(layer).__name__}"
        return ""

    # ---- sequences and steps -----------------------------------------------------------------

    def _seq(self, shared: int = 0, shift: int = 0, whole: int | None = None) -> ProofSequence:
        """The sequence, or another, with so many tokens in whole chunks; in blocks after those that
        are held. The first `shared` tokens are the first one's, already computed."""
        size = self.runner.view.block_size
        whole = self.whole if whole is None else whole
        tokens = some_tokens(whole + ROOM if whole else SHORT, shift)
        held = [*self.held, *self.crowd]
        free = 1 + max((block for seq in held for block in seq.table), default=0)
        table = list(range(free, free + ceil(len(tokens) / size) - shared // size))
        seq = ProofSequence(
            tokens,
            table,
            SeqState(prompt_len=whole + TAIL),
            whole=whole,
        )
        if shared:
            first = self.held[0]
            seq.tokens[:shared] = first.tokens[:shared]
            seq.table = first.table[: shared // size] + table
            seq.computed, seq.kept.recurrent = shared, self.states[shared]
        return seq

    def _begin(self) -> None:
        """Compute the sequence a row at a time, and then its neighbours: a short one, a longer one
        that begins as it does, and those of one row."""
        first = self._seq()
        self.held.append(first)
        for upto in (self.whole - self.chunk, self.whole):
            self._read(first, upto, 1)
            self.states[upto] = first.kept.recurrent
        self._read(first, self.end, 1)
        for at in range(self.end, self.end + ROWS):
            self.alone += self._logits({first.drafted(at, 1): first})
        longer = self.whole + 2 * self.chunk
        for shared, whole in ((0, self.chunk), (self.whole, longer)):
            other = self._seq(shared, len(self.held), whole)
            self.held.append(other)
            self._read(other, whole + TAIL - 1, TAIL)
        for n in range(1, ROWS):
            self.crowd.append(self._seq(shift=n, whole=0))
        self._logits({seq.span(0, TAIL - 1, samples=False): seq for seq in self.crowd})

    def _read(self, seq: ProofSequence, upto: int, rows: int) -> None:
        """Compute a sequence's tokens, so many at a time after its whole chunks."""
        while seq.computed < upto:
            count = self.chunk if seq.computed < seq.whole else min(rows, upto - seq.computed)
            self._logits({seq.span(seq.computed, count, samples=False): seq})

    def _logits(self, step: Step) -> list[Array]:
        """The logits of the sampled rows of a step [rows, vocab], by span."""
        done = self.runner.forward(list(step), None)
        mx.eval(done.logits)
        logits = []
        for span, seq in step.items():
            seq.computed = span.end
            first = done.first_row.get(span.kept, 0)
            logits.append(done.logits[first : first + span.sampled])
        return logits

    def _hidden(self, step: Step) -> dict[Tap, Array]:
        """The outputs [rows, D] of each layer, of a step's first span."""
        done = self.runner.forward(list(step), None)
        mx.eval(done.taps)
        span = next(iter(step))
        first = starts_of(done.plan)[span]
        return {tap: hidden[first : first + span.rows] for tap, hidden in done.taps.items()}

"""The proof that a row's bits depend on no other row of its step: a sequence is computed a row at a
time, and then in other steps, whose logits are compared bit for bit.

Rule: steps do what serving does: they have drafts of which some are accepted, neighbours, prompts
that are cut elsewhere, and cached prefixes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.kernels.invariant import PART
from mlxspec.model.batch import starts_of
from mlxspec.model.invariant import Invariance, chunk_rows
from mlxspec.model.runner import Runner
from mlxspec.model.trunk import layers_in, watched
from mlxspec.sequences import Draft, SeqState, Span
from mlxspec.types import MAX_DEPTH

MOST = 1 + MAX_DEPTH  # rows of a sequence in a step
STEPS = (1, 2, 5, 6, 13, 17, MOST)  # rows of a step
TAIL = 9  # tokens of the prompt after its whole chunks
CONTEXT = 3 * PART  # tokens of these at least: attention adds several parts
SHORT = TAIL + 2 * len(STEPS)  # tokens of a sequence without whole chunks

Rows = dict[Any, Array]  # of a step's first span [rows, D], by layer or by part of a layer
Step = dict[Span, "ProofSequence"]  # its spans, of which the first is compared
# A step, and the number of the row with which it begins.
Prepare = Callable[[], tuple[int, Step]]


def blocks_needed(block_size: int) -> int:
    """Of a sequence, two neighbours of which one is short, the sequence again, and of those that
    begin with one row each."""
    chunk = chunk_rows(block_size)
    tokens = CONTEXT + 5 * chunk + 4 * _room(chunk)
    return 6 + ceil(tokens / block_size) + MOST * ceil(SHORT / block_size)


def _room(chunk: int) -> int:
    """Tokens of a sequence after its whole chunks."""
    return 2 * TAIL + max(MOST, chunk)


def some_tokens(count: int, shift: int = 0) -> list[int]:
    """Tokens that every model has."""
    return [(7 * i + 3 + shift) % 97 for i in range(count)]


@dataclass(slots=True, eq=False)
class ProofSequence:
    """A sequence of the proof: its tokens, the blocks of these, how many are in whole chunks, and
    how many are computed."""

    tokens: list[int]
    table: list[int]
    state: SeqState
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
            self.state,
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

    def again(self) -> "ProofSequence":
        """The same sequence, whose steps do not move this one on; both write the same blocks."""
        state = SeqState(prompt_len=self.state.prompt_len, recurrent=self.state.recurrent)
        return replace(self, state=state)


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
        alone, and in what this begins; "" if they do not."""
        if not self.held:
            self._begin()
        some = "one row" if rows == 1 else f"{rows} rows"
        for how, prepare in self._steps(rows):
            if not self._equal(prepare):
                return f"logits differ in steps of {some}{how}{self._origin(prepare)}"
        if rows > 1 and self.can_draft and not self._neighbour_is_equal(rows):
            return f"logits of a neighbour differ after a step of {some}"
        return ""

    def read_differs(self) -> str:
        """How logits differ where all rows of a prompt that are in no whole chunk are computed in
        one step, as many as can be; "" if they do not."""
        if self._equal(self._tail):
            return ""
        return f"logits differ after a step of {self.chunk + 1} rows of a prompt"

    def _equal(self, prepare: Prepare) -> bool:
        first, step = prepare()
        logits = self._logits(step)[0]
        want = mx.concatenate(self.alone[first : first + len(logits)])
        return bool(mx.array_equal(logits, want))

    def _steps(self, rows: int) -> Iterator[tuple[str, Prepare]]:
        """Steps of so many rows: of the sequence where it can have drafts, and of sequences."""
        if rows == 1 or self.can_draft:
            yield "", partial(self._drafted, rows)
            beside = partial(
                self._drafted,
                rows,
                cut=3,
                beside=True,
            )
            yield " beside others", beside
        if rows > 1 and self.can_draft:
            yield ", of whose drafts some are accepted", partial(self._accepted, rows)
        if rows > 1:
            yield " of a sequence each", partial(self._crowded, rows)

    def _drafted(self, rows: int, cut: int = TAIL, beside: bool = False) -> tuple[int, Step]:
        """The sequence after a cached prefix, with a prompt that is cut in another way, and
        neighbours if wanted."""
        ends = rows in (STEPS[0], STEPS[-1])
        seq = self._seq(self.whole - self.chunk * ends)
        self._read(seq, self.end, cut)
        spans = {seq.drafted(self.end, rows): seq}
        for n, other in enumerate(self.held[1:] if beside else []):
            spans[other.next_rows(1 + n)] = other
        return 0, spans

    def _accepted(self, rows: int) -> tuple[int, Step]:
        """The row after a step of so many, half of whose drafts are rejected."""
        _, spans = self._drafted(rows, beside=True)
        some = self._accept_some(spans)
        (mine, seq), *_ = spans.items()
        return 1 + some, {seq.drafted(mine.start + 1 + some, 1): seq}

    def _accept_some(self, spans: Step) -> int:
        """Compute a step, half of whose first span's drafts are accepted; returns how many."""
        done = self.runner.forward(list(spans), None)
        mine = next(iter(spans))
        some = mine.draft.size // 2
        accepted = [some if state is mine.state else 0 for state in done.first_row]
        self.runner.states.keep_accepted(mx.array(accepted), done.first_row)
        for span, seq in spans.items():
            seq.computed = span.end
        return some

    def _neighbour_is_equal(self, rows: int) -> bool:
        """Whether a sequence without drafts goes on as alone after a step with another's."""
        _, spans = self._drafted(rows)
        alone, beside = self.held[1].again(), self.held[1].again()
        want = self._logits({alone.next_rows(2): alone})[0]
        spans[beside.next_rows()] = beside
        self._accept_some(spans)
        logits = self._logits({beside.next_rows(): beside})[0]
        return bool(mx.array_equal(logits, want))

    def _crowded(self, rows: int) -> tuple[int, Step]:
        """The sequence's row beside one row each of others."""
        _, spans = self._drafted(1)
        return 0, spans | {other.next_rows(): other for other in self.crowd[: rows - 1]}

    def _tail(self) -> tuple[int, Step]:
        seq = self._seq(self.whole)
        seq.state.prompt_len = self.whole + self.chunk + 1
        return self.chunk + 1 - TAIL, {seq.span(self.whole, self.chunk + 1, samples=True): seq}

    def beginning(self) -> str:
        """How a sequence's logits differ where another begins with it; "" if they do not.
        Overwrites what is held."""

        def begun(*seqs: ProofSequence) -> Array:
            new = [replace(seq, state=SeqState(prompt_len=1)) for seq in seqs]
            logits = []
            for at, rows in ((0, 1), (1, MOST), (1 + MOST, 2)):
                logits += self._logits({seq.span(at, rows, samples=True): seq for seq in new})
            return mx.stack(logits[:: len(seqs)])

        _, one, other = self.held
        if mx.array_equal(begun(one, other), begun(one)):
            return ""
        return "logits differ where sequences begin together"

    # ---- where a difference begins -----------------------------------------------------------

    def _origin(self, prepare: Prepare) -> str:
        """The first layer whose output differs in such a step, and in the rows layout the part of
        it, in words; "" where hidden states cannot be had."""
        runner = self.runner
        if not runner.trunk:
            return ""
        layers = layers_in(runner.trunk)
        runner.tap(range(len(layers)))
        try:
            i = self._first_difference(prepare, lambda taps: taps)
        finally:
            runner.tap(())
        if i is None:
            return ", not in the layers but in the lm_head"
        name = f"layer {i}"
        if runner.layout == "rows" and (part := self._part(layers[i], prepare)):
            name += f"'s {part}"
        return f", as the output of {name} does"

    def _part(self, layer: Any, prepare: Prepare) -> Any:
        """The part of a layer whose output differs first."""
        parts = {name: part for name, part in layer.children().items() if callable(part)}
        with watched(parts) as seen:
            return self._first_difference(prepare, lambda _: seen)

    def _first_difference(self, prepare: Prepare, outputs: Callable[[Any], Any]) -> Any:
        """Of the outputs of a step's forward, which one differs first from those of the same rows
        computed alone; None where none does."""
        first, step = prepare()
        together = self._rows(step, outputs)
        seq = self._seq(self.whole)
        self._read(seq, self.end, 1)
        count = len(next(iter(together.values()), ()))
        at = range(self.end, self.end + first + count)
        apart = [self._rows({seq.drafted(i, 1): seq}, outputs) for i in at][first:]
        for name, rows in together.items():
            if not mx.array_equal(mx.concatenate([each[name] for each in apart]), rows):
                return name
        return None

    def _rows(self, step: Step, outputs: Callable[[Any], Any]) -> Rows:
        """What a step's forward makes of its first span's rows."""
        done = self.runner.forward(list(step), None)
        mx.eval(done.logits)
        span = next(iter(step))
        first = starts_of(done.plan)[span]
        rows = {}
        for name, made in outputs(done.taps).items():
            array = made[0] if isinstance(made, tuple) else made
            rows[name] = array.reshape(-1, array.shape[-1])[first : first + span.rows]
        mx.eval(rows)
        return rows

    # ---- sequences and steps -----------------------------------------------------------------

    def _seq(self, shared: int = 0, shift: int = 0, whole: int | None = None) -> ProofSequence:
        """The sequence, or another, with so many tokens in whole chunks; in blocks after those that
        are held. The first `shared` tokens are the first one's, already computed."""
        size = self.runner.view.block_size
        whole = self.whole if whole is None else whole
        tokens = some_tokens(whole + _room(self.chunk) if whole else SHORT, shift)
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
            seq.computed, seq.state.recurrent = shared, self.states[shared]
        return seq

    def _begin(self) -> None:
        """Compute the sequence a row at a time, and then its neighbours: a short one, a longer one
        that begins as it does, and those of one row."""
        first = self._seq()
        self.held.append(first)
        for upto in (self.whole - self.chunk, self.whole):
            self._read(first, upto, 1)
            self.states[upto] = first.state.recurrent
        self._read(first, self.end, 1)
        for at in range(self.end, self.end + max(MOST, self.chunk + 2 - TAIL)):
            self.alone += self._logits({first.drafted(at, 1): first})
        longer = self.whole + 2 * self.chunk
        for shared, whole in ((0, self.chunk), (self.whole, longer)):
            other = self._seq(shared, len(self.held), whole)
            self.held.append(other)
            self._read(other, whole + TAIL - 1, TAIL)
        for n in range(1, MOST):
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
            first = done.first_row.get(span.state, 0)
            logits.append(done.logits[first : first + span.num_sampled])
        return logits

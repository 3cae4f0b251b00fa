"""Finds out, at a model's first start, whether a row's bits depend on the other rows of its step.

Rule: nothing is assumed. Each layer's calls are tried; then logits computed one row at a time are
compared bit for bit with larger steps, beside other sequences, with the prompt split elsewhere, and
after a cached prefix.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx.core import array as Array
from mlx.nn import Module

from mlxspec.kernels.attention import is_correct
from mlxspec.kernels.invariant import PART, Calls
from mlxspec.model import recurrent
from mlxspec.model.batch import starts_of
from mlxspec.model.invariant import ROWS, Invariance, Recorded, chunk_rows, find_invariance
from mlxspec.model.layout import LayoutChoice
from mlxspec.model.runner import Runner
from mlxspec.model.trunk import layers_in
from mlxspec.sequences import Draft, SeqState, Span
from mlxspec.speculate.calibrate import time_step, unused_span
from mlxspec.types import Check, Tap, line_of

STEPS = (1, 2, 5, 6, 13, ROWS)  # rows of a step
TAIL = 9  # tokens of the prompt after its whole chunks
CONTEXT = 3 * PART  # tokens of these at least: attention adds several parts
ROOM = TAIL + 2 * ROWS  # rows of the step whose calls are tried
AUTO = 0.05  # of a step's time: what `exact = auto` pays
UNPROVEN = -1
TURNS = 5  # of a measurement; the best counts
TIMED = (1, 5, 96)  # rows: plain decoding, with drafts, and of a prompt


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was found: how to compute rows (None: not looked for yet), and up to how many of a step
    a row's bits are its own, or UNPROVEN; `why` not for more. `cost`: by how much of its time a
    step is longer, of one row or with drafts, and of a prompt; None: not measured yet."""

    invariance: Invariance | None = None
    rows: int = UNPROVEN
    why: str = ""
    cost: tuple[float, float] | None = None

    @property
    def pays(self) -> bool:
        """Whether it costs little enough for `auto`."""
        return self.cost is not None and max(self.cost) <= AUTO

    def used(self, wanted: str) -> bool:
        """Whether it is used under the setting `exact`."""
        return self.rows > 0 and (wanted == "on" or (wanted == "auto" and self.pays))

    def describe(self, wanted: str) -> str:
        """The verdict in a line."""
        cost = ""
        if self.cost:
            cost = "{:.0%} of a step's time and {:.0%} of a prompt's".format(*self.cost)
        if not self.rows:
            return f"not exact: {self.why}"
        if self.used(wanted):
            found = f"exact up to {self.rows} rows"
            found += f", for {cost}" if cost else ""
            return f"{found}; not beyond: {self.why}" if self.why else found
        if not cost:
            return "not exact yet: how, and what it costs, is found out when idle"
        if wanted == "auto" and self.pays:
            return f"not exact yet: from the next start on, for {cost}"
        return f"not exact: it takes {cost}, which --exact on pays"


def unsupported(layout: LayoutChoice) -> str:
    """Why rows cannot be exact in a layout; "" where they can."""
    if layout.layout in ("gather", "solo"):
        return f"in the {layout.layout} layout attention is mlx-lm's own"
    return ""


def examine(
    model: Module,
    layout: LayoutChoice,
    block_size: int,
    known: Invariance | None = None,
    kv_bits: int = 0,
) -> Exactness:
    """Find a model's Exactness, without its cost, and prove it, on a runner that is made for it.
    `known`: how rows are to be computed, if it was found before. `kv_bits`: of its pools."""
    if why := unsupported(layout):
        return Exactness(rows=0, why=why)
    # Of the sequence, two neighbours of which one is short, and the sequence again.
    tokens = CONTEXT + 5 * chunk_rows(block_size) + 4 * ROOM
    blocks = 6 + ceil(tokens / block_size)
    try:
        runner = layout.runner(model, block_size, blocks, kv_bits=kv_bits)
        search = Search(runner, list(range(1, blocks)))
        invariance = known or search.run()
        runner.set_invariance(invariance)
        return _proven(Proof(runner, invariance, layout))
    except Exception as failed:  # the model's own code
        return Exactness(rows=0, why=line_of(failed))


@dataclass(slots=True, eq=False)
class Search:
    """Finds how a runner's rows are to be computed. It can be interrupted between two products and
    goes on there."""

    runner: Runner
    table: list[int]  # unused blocks for ROOM tokens
    found: dict[str, Calls | None] = field(default_factory=dict)

    def run(self, check: Check = lambda: None) -> Invariance:
        """Go on. Calls `check` before each product, and raises what it raises."""
        runner = self.runner
        found = find_invariance(
            record(runner, self.table),
            runner.view.block_size,
            recurrent.by_rows(runner.model),
            found=self.found,
            check=check,
        )
        shapes = {pages.shape for pages in runner.pages()}
        by_kernel = all(shape is not None and is_correct(shape) for shape in shapes)
        return replace(found, by_kernel=by_kernel)


def record(runner: Runner, table: list[int]) -> Recorded:
    """What a step of ROOM rows calls the layers with, in blocks that nobody uses."""
    usual = runner.invariance
    recorded: Recorded = {}
    runner.set_invariance(Invariance())
    runner.view.recorded = recorded
    try:
        span = unused_span(runner, table, 0)
        span.tokens = some_tokens(ROOM)
        span.kept.prompt_len = TAIL
        if runner.states.rollback_supported:
            span.draft = Draft(span.tokens[1:])
        else:
            span.count = ROOM
        mx.eval(runner.forward([span], None).logits)
    finally:
        runner.view.recorded = None
        runner.set_invariance(usual)
    return recorded


def some_tokens(count: int, shift: int = 0) -> list[int]:
    """Tokens that every model has."""
    return [(7 * i + 3 + shift) % 97 for i in range(count)]


def _proven(proof: "Proof") -> Exactness:
    invariance = proof.invariance
    rows = 0
    why = ""
    for step in STEPS:
        why = proof.differs(step)
        if why:
            break
        rows = step
    if rows and (begun := proof.beginning()):
        rows, why = 0, begun
    if why and invariance.failed:
        why = f"{invariance.failed[0]} has no order of its own for a row"
    elif why and (origin := proof.origin(step)):
        why += f", as the output of {origin} does"
    return Exactness(invariance, rows, why)


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
        span = Span(self.kept, [self.table], self.tokens, start=start, count=count, samples=samples)
        span.draft = Draft(drafted)
        return span


class Proof:
    """One sequence in many steps, in blocks of its own."""

    def __init__(
        self,
        runner: Runner,
        invariance: Invariance,
        layout: LayoutChoice,
    ) -> None:
        self.runner = runner
        self.invariance = invariance
        self.chunk = invariance.chunk or chunk_rows(runner.view.block_size)
        self.whole = ceil(CONTEXT / self.chunk) * self.chunk
        self.can_draft = layout.can_draft
        self.alone: list[Array] = []  # logits of the rows after the prompt, one at a time
        self.held: list[ProofSequence] = []  # the sequence that was computed so, and its neighbours
        self.states: dict[int, Any] = {}  # of recurrent layers, by the tokens of whole chunks

    def seq(self, shared: int = 0, shift: int = 0, whole: int = 0) -> ProofSequence:
        """The sequence, or another, with so many tokens in whole chunks; in blocks after those that
        are held. The first `shared` tokens are the first one's, already computed."""
        size, whole = self.runner.view.block_size, whole or self.whole
        tokens = some_tokens(whole + ROOM, shift)
        free = 1 + max((block for seq in self.held for block in seq.table), default=0)
        table = list(range(free, free + ceil(len(tokens) / size) - shared // size))
        seq = ProofSequence(tokens, table, SeqState(prompt_len=whole + TAIL), whole)
        if shared:
            first = self.held[0]
            seq.tokens[:shared] = first.tokens[:shared]
            seq.table = first.table[: shared // size] + table
            seq.computed, seq.kept.recurrent = shared, self.states[shared]
        return seq

    def step(self, spans: dict[Span, ProofSequence]) -> list[Array]:
        """The logits of the sampled rows of a step [rows, vocab], by span."""
        done = self.runner.forward(list(spans), None)
        mx.eval(done.logits)
        logits = []
        for span, seq in spans.items():
            seq.computed = span.end
            first = done.first_row.get(span.kept, 0)
            logits.append(done.logits[first : first + span.sampled])
        return logits

    def read(self, seq: ProofSequence, upto: int, rows: int) -> None:
        """Compute a sequence's tokens, so many at a time after its whole chunks."""
        while seq.computed < upto:
            count = self.chunk if seq.computed < seq.whole else min(rows, upto - seq.computed)
            self.step({seq.span(seq.computed, count, samples=False): seq})

    def differs(self, rows: int) -> str:
        """How the logits of a step of `rows` rows differ from those of the same rows computed
        alone; "" if they do not."""
        end = self.whole + TAIL - 1
        if not self.held:
            self._begin(end)
        if rows > 1 and not self.can_draft:
            return "drafts cannot be rolled back"
        want = mx.concatenate(self.alone[:rows])
        first, *others = self.held
        for cut, beside in ((TAIL, []), (3, others)):
            ends = rows in (STEPS[0], STEPS[-1])
            if not (beside or ends):
                continue
            seq = self.seq(self.whole - self.chunk * ends)
            self.read(seq, end, cut)
            spans = {self._drafted(seq, end, rows): seq}
            for n, other in enumerate(beside):
                spans[other.span(other.computed, 1 + n, samples=True)] = other
            if not mx.array_equal(self.step(spans)[0], want):
                where = " beside others" if beside else ""
                return f"logits differ in steps of {rows} rows{where}"
        if not self.runner.states.layers:
            hit = ProofSequence(first.tokens, first.table, SeqState(prompt_len=end + 1), end)
            if not mx.array_equal(self.step({self._drafted(hit, end, rows): hit})[0], want):
                return f"logits differ after a cached prefix in steps of {rows} rows"
        return ""

    def beginning(self) -> str:
        """How a sequence's logits differ where another begins with it; "" if they do not.
        Overwrites what is held."""

        def begun(*seqs: ProofSequence) -> Array:
            new = [replace(seq, kept=SeqState(prompt_len=1)) for seq in seqs]
            logits = []
            for at, rows in ((0, 1), (1, ROOM), (1 + ROOM, 2)):
                logits += self.step({seq.span(at, rows, samples=True): seq for seq in new})
            return mx.stack(logits[:: len(seqs)])

        _, one, other = self.held
        if mx.array_equal(begun(one, other), begun(one)):
            return ""
        return "logits differ where sequences begin together"

    def origin(self, rows: int) -> str:
        """The first layer whose output differs in a step of `rows` rows beside others, by what
        mixes its tokens; "" where none does."""
        runner = self.runner
        if not runner.trunk:
            return ""
        layers = layers_in(runner.trunk)
        end = self.whole + TAIL - 1
        runner.tap(range(len(layers)))
        try:
            seq = self.seq(self.whole)
            self.read(seq, end, 1)
            apart = [self._hidden(seq, end + n, 1) for n in range(rows)]
            seq = self.seq(self.whole)
            self.read(seq, end, 1)
            together = self._hidden(seq, end, rows, self.held[1:])
        finally:
            runner.tap(())
        for i, layer in enumerate(layers):
            if not mx.array_equal(mx.concatenate([each[i] for each in apart]), together[i]):
                mixers = [name for name in layer.children() if re.search("attn|mixer|conv", name)]
                return f"layer {i}'s {mixers[0] if mixers else type(layer).__name__}"
        return ""

    def _hidden(
        self,
        seq: ProofSequence,
        at: int,
        rows: int,
        beside: Sequence[ProofSequence] = (),
    ) -> dict[Tap, Array]:
        """The outputs [rows, D] of each layer in a step of these rows and of its neighbours'."""
        spans = [self._drafted(seq, at, rows)]
        spans += [other.span(other.computed, 1, samples=True) for other in beside]
        done = self.runner.forward(spans, None)
        mx.eval(done.taps)
        first = starts_of(done.plan)[spans[0]]
        return {tap: hidden[first : first + rows] for tap, hidden in done.taps.items()}

    def _begin(self, end: int) -> None:
        """Compute the sequence a row at a time, and two that are its neighbours later: a short one,
        and a longer one that begins as it does."""
        first = self.seq()
        self.held.append(first)
        for upto in (self.whole - self.chunk, self.whole):
            self.read(first, upto, 1)
            self.states[upto] = first.kept.recurrent
        self.read(first, end, 1)
        for at in range(end, end + ROWS):
            self.alone += self.step({first.span(at, 1, samples=True): first})
        longer = self.whole + 2 * self.chunk
        for shared, whole in ((0, self.chunk), (self.whole, longer)):
            other = self.seq(shared, len(self.held), whole)
            self.held.append(other)
            self.read(other, whole + TAIL - 1, TAIL)

    def _drafted(self, seq: ProofSequence, at: int, rows: int) -> Span:
        """A row of a sequence, and the others as drafts that are right."""
        return seq.span(at, 1, samples=True, drafted=seq.tokens[at + 1 : at + rows])


def measure_cost(
    runner: Runner,
    invariance: Invariance,
    table: list[int],
    check: Check,
) -> tuple[float, float]:
    """By which part of its time a step is longer, of few rows at most and of a prompt. Calls
    `check` before each step, and raises what it raises."""
    usual = runner.invariance
    best = {(rows, kept): float("inf") for rows in TIMED for kept in (False, True)}
    try:
        for _ in range(TURNS):
            for rows, kept in best:
                check()
                runner.set_invariance(invariance if kept else None)
                took = _seconds(runner, table, rows)
                best[rows, kept] = min(best[rows, kept], took)
    finally:
        runner.set_invariance(usual)
    few, drafts, prompt = (max(0.0, best[n, True] / best[n, False] - 1) for n in TIMED)
    return max(few, drafts), prompt


def _seconds(runner: Runner, table: list[int], rows: int) -> float:
    if rows != TIMED[-1]:
        return time_step(runner, table, rows, rows)
    chunk = runner.invariance.chunk if runner.invariance else 0
    last = unused_span(runner, table, rows)
    last.kept.prompt_len = len(last.tokens)
    parts = [chunk, rows - chunk] if chunk else [rows]
    start = 0
    began = perf_counter()
    for count in parts:
        span = replace(last, start=start, count=count)
        mx.eval(runner.forward([span], None).logits)
        start += count
    return perf_counter() - began

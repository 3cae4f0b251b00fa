"""Finds out, at a model's first start, whether a row's bits depend on the other rows of its step.

Rule: nothing is assumed. Each layer's calls are tried; then load/exact_proof.py compares what steps
compute.
"""

from dataclasses import dataclass, field, replace
from itertools import product
from time import perf_counter

import mlx.core as mx
from mlx.nn import Module

from mlxspec.kernels.attention import is_correct
from mlxspec.kernels.invariant import Calls
from mlxspec.load.exact_proof import (
    STEPS,
    TAIL,
    Proof,
    blocks_needed,
    some_tokens,
)
from mlxspec.model import recurrent
from mlxspec.model.call_search import ROWS, Tries
from mlxspec.model.invariant import Invariance, Recorded, find_invariance
from mlxspec.model.layout import LayoutChoice
from mlxspec.model.runner import Runner
from mlxspec.sequences import Draft
from mlxspec.speculate.calibrate import time_step, unused_span
from mlxspec.types import Check, UnsupportedModel, line_of

RECORDED = TAIL + 2 * ROWS  # rows of the step whose calls are tried
AUTO = 0.05  # of a step's time: what `exact = auto` pays
UNPROVEN = -1
TURNS = 5  # of a measurement; the best counts
TIMED = (1, 5, 96)  # rows: plain decoding, with drafts, and of a prompt


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was found: how to compute rows (None: not looked for yet), and `rows`: how many one
    sequence may have in a step, beside any others, with each row's bits its own, or UNPROVEN; where
    a model takes no drafts, how many sequences. `why`: what is against more. `cost`: by what part
    of its time a step is longer, of one row or with drafts, and of a prompt; None: not measured
    yet."""

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
    blocks = blocks_needed(block_size)
    try:
        runner = layout.runner(model, block_size, blocks, kv_bits=kv_bits)
        search = Search(runner, list(range(1, blocks)))
        invariance = known or search.run()
        runner.set_invariance(invariance)
        return _proven(Proof(runner, invariance, layout.can_draft), invariance)
    except Exception as failed:  # the model's own code
        return Exactness(rows=0, why=line_of(failed))


@dataclass(slots=True, eq=False)
class Search:
    """Finds how a runner's rows are to be computed. It can be interrupted between two products and
    goes on there."""

    runner: Runner
    table: list[int]  # unused blocks for RECORDED tokens
    recorded: Recorded = field(default_factory=dict)
    found: dict[str, Calls | Tries] = field(default_factory=dict)

    def run(self, check: Check = lambda: None) -> Invariance:
        """Go on. Calls `check` before each product, and raises what it raises. Raises
        UnsupportedModel."""
        runner = self.runner
        self.recorded = self.recorded or record(runner, self.table)
        found = find_invariance(
            self.recorded,
            runner.view.block_size,
            recurrent.by_rows(runner.model),
            found=self.found,
            check=check,
        )
        shapes = {pages.shape for pages in runner.pages()}
        by_kernel = all(shape is not None and is_correct(shape) for shape in shapes)
        return replace(found, by_kernel=by_kernel)


def record(runner: Runner, table: list[int]) -> Recorded:
    """What a step of RECORDED rows calls the layers with, in blocks that nobody uses. Raises
    UnsupportedModel."""
    usual = runner.invariance
    recorded: Recorded = {}
    runner.set_invariance(Invariance())
    runner.view.recorded = recorded
    try:
        span = unused_span(runner, table, 0)
        span.tokens = some_tokens(RECORDED)
        span.state.prompt_len = TAIL
        if runner.states.rollback_supported:
            span.draft = Draft(span.tokens[1:])
        else:
            span.count = RECORDED
        logits = runner.forward([span], None).logits
        mx.eval(logits)
    finally:
        runner.view.recorded = None
        runner.set_invariance(usual)
    outputs = [layer.weight.shape[0] for layer, _ in recorded.values() if "weight" in layer]
    if max(outputs, default=0) < logits.shape[-1]:
        raise UnsupportedModel("its lm_head is no layer: a product of its own")
    return recorded


def _proven(proof: Proof, invariance: Invariance) -> Exactness:
    rows = 0
    why = ""
    for step in STEPS:
        why = proof.differs(step)
        if why:
            break
        rows = step
    if rows and (differs := proof.read_differs() or proof.beginning()):
        rows, why = 0, differs
    return Exactness(invariance, rows, why)


def measure_cost(
    runner: Runner,
    invariance: Invariance,
    table: list[int],
    check: Check,
    took: dict[tuple[int, bool], list[float]] | None = None,
) -> tuple[float, float]:
    """By what part of its time a step is longer, of few rows at most and of a prompt. Calls
    `check` before each step, and raises what it raises; with the same `took`, the seconds of steps
    by their rows, with the invariance or without, it goes on there."""
    usual = runner.invariance
    took = {} if took is None else took
    try:
        for turn, rows, kept in product(range(TURNS), TIMED, (False, True)):
            seconds = took.setdefault((rows, kept), [])
            if len(seconds) > turn:
                continue
            check()
            runner.set_invariance(invariance if kept else None)
            seconds.append(_seconds(runner, table, rows))
    finally:
        runner.set_invariance(usual)
    few, drafts, prompt = (max(0.0, min(took[n, True]) / min(took[n, False]) - 1) for n in TIMED)
    return max(few, drafts), prompt


def _seconds(runner: Runner, table: list[int], rows: int) -> float:
    if rows != TIMED[-1]:
        return time_step(runner, table, rows, rows)
    chunk = runner.invariance.chunk if runner.invariance else 0
    last = unused_span(runner, table, rows)
    last.state.prompt_len = len(last.tokens)
    parts = [chunk, rows - chunk] if chunk else [rows]
    start = 0
    began = perf_counter()
    for count in parts:
        span = replace(last, start=start, count=count)
        mx.eval(runner.forward([span], None).logits)
        start += count
    return perf_counter() - began

"""Taps: a drafter gets the target's own hidden states, of every row, in every layout; a model that
nobody taps computes what it did before."""

import io
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.model.runner import Runner
from mlxspec.sequences import Accepted, Entry, Seq
from mlxspec.speculate.controller import Proposal
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import FINAL_NORM, Request, Tap
from tests.support import tiny
from tests.support.drafters import costs
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import diagonal
from tests.support.spans import span

PROMPTS = {"long": tuple(range(40, 75)), "fork": (*range(40, 60), 3, 4, 5), "one": (7,)}
N = 12
LAYOUTS = [("qwen3", "rows"), ("gemma3_text", "rows"), ("qwen3_next", "rect"), ("llama", "gather")]


class Recorded:
    """A layer that keeps its output: the test's own way to the truth."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.out = layer, None

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        self.out = self.layer(*args, **kwargs)
        return self.out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def truth(kind: str, tokens: Sequence[int], taps: Sequence[Tap]) -> dict[Tap, np.ndarray]:
    """mlx-lm's hidden states [tokens, D] of a fresh model."""
    model = tiny.model(kind)
    inner = model.model
    layers = {tap: Recorded(inner.layers[tap]) for tap in taps if tap != FINAL_NORM}
    for tap, layer in layers.items():
        inner.layers[tap] = layer
    found = {FINAL_NORM: np.array(inner(mx.array([list(tokens)]))[0])}
    return {tap: np.array(layers[tap].out[0]) if tap in layers else found[tap] for tap in taps}


class TapReader:
    """A drafter that never drafts, and keeps each hidden state by (request, position)."""

    name, lazy = "reader", True

    def __init__(self, taps: tuple[Tap, ...]) -> None:
        self.taps = taps
        self.seen: dict[tuple[str, int], dict[Tap, np.ndarray]] = {}
        self.rows = 0

    def begin(self, seq: Seq) -> None: ...
    def end(self, seq: Seq) -> None: ...
    def clear(self) -> None: ...
    def learn_seconds(self, seconds: float, depth: int) -> None: ...
    def options(self, seq: Seq) -> list[Proposal]:
        return []

    def draft(self, plan: Sequence[Entry], previous: Any) -> None:
        """What a lazy drafter would read: every row of the step in flight, before it is read."""
        if previous is not None:
            self.rows += sum(tap.shape[0] for tap in previous.taps.values())

    def observe(self, step: Any, accepted: Sequence[Accepted]) -> None:
        row = 0
        for e, new in zip(step.plan, accepted, strict=True):
            for i in range(e.count + new.drafts):
                key = e.seq.request.id, e.start + i
                self.seen[key] = {t: np.array(step.taps[t][row + i]) for t in self.taps}
            row += e.rows
        assert all(tap.shape[0] == row for tap in step.taps.values()) and len(step.taps) == len(
            self.taps
        )


class ReadingOracle(NoisyOracle):
    """Drafts that are wrong now and then, and hidden states read behind them."""

    reader: TapReader

    def observe(self, step: Any, accepted: Sequence[Accepted], seconds: float) -> None:
        super().observe(step, accepted, seconds)
        self.reader.observe(step, accepted)


def last_layer(kind: str) -> int:
    return len(tiny.model(kind).model.layers) - 1


@pytest.mark.parametrize("kind, layout, drafts", diagonal(LAYOUTS, [True, False], every=2))
def test_every_row_is_handed_out(kind: str, layout: Any, drafts: bool) -> None:
    """Chunked prefill, neighbours that join, overlap, drafts, and a hit at the end."""
    taps = (0, last_layer(kind), FINAL_NORM)
    reader = TapReader(taps)
    e = tiny.engine(tiny.model(kind), layout=layout, block=8, budget=7)
    plain = tiny.Plain(tiny.model(kind))
    answers = {name: plain(p, N) for name, p in PROMPTS.items()}
    e.runner.tap(taps)
    e.proposer = Proposer(costs(), [reader], padded=layout != "rows")
    if drafts:
        oracle = ReadingOracle({(p, 0): answers[name] for name, p in PROMPTS.items()})
        oracle.reader = reader
        e.proposer = oracle
    requests = [Request(name, p, N, tiny.request("", [1]).sampling) for name, p in PROMPTS.items()]
    for r in requests[:2]:
        e.add(r)
    out = tiny.run(e, lambda i: e.add(requests[2]) if i == 4 else None, last=4)
    for name, prompt in PROMPTS.items():
        assert tiny.tokens(out, name) == answers[name]
        want = truth(kind, [*prompt, *answers[name]], taps)
        positions = sorted(at for request, at in reader.seen if request == name)
        assert positions == list(range(len(prompt) + N - 1)) or name == "fork"
        for at in positions:
            for tap in taps:
                got = reader.seen[name, at][tap]
                assert got == pytest.approx(want[tap][at], rel=2e-3, abs=2e-3), (name, at, tap)
    assert drafts or layout != "rows" or reader.rows > 0, "no step was in flight while planning"
    reader.seen.clear()
    e.add(Request("again", PROMPTS["long"], 2, tiny.request("", [1]).sampling))
    if drafts:
        e.proposer.truth[PROMPTS["long"], 0] = answers["long"][:2]
    hit = tiny.run(e)
    assert hit[-1].cached > 0
    first = min(at for _, at in reader.seen)
    assert first == hit[-1].cached, "rows that were cached are not computed, so not handed out"


def nodes(array: mx.array) -> int:
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue().count("rectangle")


@pytest.mark.parametrize("kind, layout", LAYOUTS)
def test_no_cost_where_nobody_asks(kind: str, layout: Any) -> None:
    """The same graph before anybody tapped and after; a tap adds no operation to the logits."""
    model = tiny.model(kind)

    def graph(taps: tuple[Tap, ...]) -> tuple[int, set[Tap]]:
        runner = Runner(model, layout, 8, 8)
        runner.forward([span([1], [1, 2, 3], 0, 1)], None)  # makes the pools
        runner.tap(taps)
        tokens = mx.array([[2]])
        step = runner.forward([span([1], [1, 2, 3], 0, 1)], None)
        del tokens
        return nodes(step.logits), set(step.taps)

    untapped = graph(())
    tapped = graph((0, FINAL_NORM))
    assert tapped == (untapped[0], {0, FINAL_NORM}) and untapped[1] == set()
    assert graph(()) == untapped

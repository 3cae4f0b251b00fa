"""Drafters for tests: the real ones over tiny models, with costs under which a row costs next to
nothing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlxspec.engine.engine import Engine
from mlxspec.model.runner import Runner
from mlxspec.speculate.controller import Costs
from mlxspec.speculate.draft_model import DraftModel
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import Entry, Request
from tests import tiny

KINDS = ["lookup", "suffix", "model", "chain"]


class Silent:
    """A source with nothing to say, in the place of one that a test leaves out."""

    def __init__(self, *_: Any) -> None:
        self.capacity = 0

    def add(self, *_: Any) -> None: ...
    def advance(self, *_: Any) -> None: ...
    def index(self, *_: Any) -> int:
        return 0

    def feed(self, *_: Any) -> int:
        return 0

    def propose(self, *_: Any) -> None: ...


class KnownAnswers:
    """In the place of a small model's runner: it was told the answers, and gets every seventh token
    wrong. For targets that no model in the rows layout is like."""

    def __init__(self, answers: Callable[[Request, int], list[int]], block_size: int) -> None:
        self.answers, self.view = answers, SimpleNamespace(block_size=block_size)

    def forward_rows(self, plan: list[Entry], ids: mx.array, shift: mx.array | None) -> mx.array:
        assert ids.size == sum(e.rows for e in plan)
        next_ = []
        for n, e in enumerate(plan):
            if e.samples:
                answer = self.answers(e.seq.request, e.seq.index)
                told = [(t + (i % 7 == 5)) % tiny.VOCAB for i, t in enumerate(answer)]
                told += [0 for _ in range(64)]  # it may draft beyond the answer's end
                at = mx.array(e.end - e.seq.prompt_len)
                next_.append(mx.array(told)[at if shift is None else at + shift[n]])
        if not next_:
            return mx.zeros((0, tiny.VOCAB))
        return 1e4 * (mx.arange(tiny.VOCAB) == mx.stack(next_)[:, None])


def costs(row: float = 1e-6) -> Costs:
    return Costs((64, 128), (1, 32), ((1.0, 1.0 + 31 * row), (1.0, 1.0 + 31 * row)))


def like(model: Any, kind: str, noise: float) -> Any:
    """A model that mostly agrees with `model`: the same weights, each off by `noise`."""
    small = tiny.model(kind)
    mx.random.seed(9)
    small.update(
        tree_map(
            lambda x: x * (1 + noise * mx.random.normal(x.shape)) if x.ndim > 1 else x,
            small.parameters(),
        )
    )
    mx.eval(small.parameters())
    return small


def attach(e: Engine, kind: str, small: Any = None, row: float = 1e-6) -> Proposer:
    """Give the engine a proposer with the sources that `kind` names."""
    model = None
    if kind in ("model", "chain"):
        own = small
        if not isinstance(small, KnownAnswers):
            own = Runner(small, "rows", e.runner.view.block_size, e.scheduler.pool.size)
        model = DraftModel(own, tiny.VOCAB, row)
    copying = NgramDrafter()
    if kind not in ("suffix", "chain"):
        copying.corpus = Silent()  # type: ignore[assignment]
    if kind not in ("lookup", "chain"):
        copying.lookup = Silent  # type: ignore[assignment]
    drafters: list[Any] = [copying, model] if model else [copying]
    e.proposer = Proposer(costs(row), drafters, overlap=e.runner.layout != "solo")
    return e.proposer


def copies(proposer: Proposer) -> Any:
    """The copying drafter of a proposer."""
    return proposer.drafters[0]


def small_model(proposer: Proposer) -> Any:
    """The draft model of a proposer, if it has one."""
    return proposer.drafters[1] if len(proposer.drafters) > 1 else None

"""Tiny engines with a head, and what it reads and drafts."""

import random
from typing import Any

import mlx.core as mx

from mlxspec.engine.engine import Engine
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import Output, Request
from tests.support import tiny
from tests.support.drafters import attach_head
from tests.support.expected_drafts import Drafted, recorded
from tests.support.parameter_rows import only

BLOCK = 8


K = 4


LAYOUTS = [("qwen3_5", "rect"), ("qwen3", "rows"), ("qwen3_next", "rect"), ("llama", "gather")]


LAYOUTS.append(("gemma4_text", "rows"))  # whose head reads the target's own K/V


OWN = {"gemma4_text": "assistant"}  # the kind of a model's head, where it is not "mtp"


# One hybrid and one model of attention alone in `make test`, all in `make test-slow`.
SOME = only(LAYOUTS, 0, 1)
ATTENTION_ALONE = only(LAYOUTS, 1)  # where the row of a hybrid takes seconds


def some(n: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(tiny.VOCAB) for _ in range(n)]


def start(
    kind: str, layout: Any, depth: int = K, parked: bool = False, **kw: Any
) -> tuple[Engine, list[Drafted]]:
    """An engine with a head, and the drafts to come. `parked`: a row costs so much that no draft
    ever pays."""
    kw = dict(block=BLOCK, blocks=128, budget=16) | kw
    e = tiny.engine(tiny.model(kind), layout=layout, **kw)
    depth, row = (0, 1e6) if parked else (depth, 1e-6)
    head = attach_head(e, depth=depth, row=row, kind=OWN.get(kind, "mtp"))
    return e, recorded(e, head)


def loud(e: Engine) -> None:
    """From now on, K tokens are drafted always."""
    e.proposer.fixed_depth = K  # type: ignore[attr-defined]


def head_of(e: Engine) -> HeadDrafter:
    found = e.proposer.drafters[-1]  # type: ignore[attr-defined]
    assert isinstance(found, HeadDrafter)
    return found


def counted(e: Engine) -> list[int]:
    """The rows of each pass of the head from now on."""
    head, rows = head_of(e).head, []
    module = head.module

    def run(embedded: mx.array, hidden: mx.array, caches: Any) -> mx.array:
        assert embedded.shape == hidden.shape
        rows.append(embedded.size // embedded.shape[-1])
        return module(embedded, hidden, caches)

    head.module = run
    return rows


def ask(e: Engine, *requests: Request) -> list[Output]:
    for r in requests:
        e.add(r)
    outputs = tiny.run(e)
    if isinstance(e.proposer, Proposer):
        assert head_of(e), "the head failed"
    return outputs

"""Heads of models whose positions have three axes: behind an image a row turns as the model's own
row does, however a prompt is cut."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlxspec.engine.engine import Engine
from mlxspec.model.pages import View
from mlxspec.model.vision.seam import axes_of, positions_of
from mlxspec.sequences import SeqState, Span
from mlxspec.types import Request
from tests.support import tiny
from tests.support.drafters import attach_head
from tests.support.engine_with_head import head_of
from tests.support.parameter_rows import only
from tests.test_lossless_images import engine, requests

Rows = list[tuple[int, tuple[int, ...]]]  # slots, and positions by time, height and width


def rows_of(view: View, rows: int) -> Rows:
    """The rows of a pass that sees this view."""
    slots: list[int] = []
    for group in view.groups:
        shifts = [0 for _ in group.starts] if group.shift is None else group.shift.tolist()
        for start, shift in zip(group.starts, shifts, strict=True):
            slots += range(start + shift, start + shift + group.length)
    assert len(slots) == rows
    if view.rope is not None:
        return list(zip(slots, map(tuple, view.rope.T.tolist()), strict=True))
    firsts = np.array(view.positions)
    along = np.arange(rows // len(firsts))  # layers are given the first position of a sequence
    found = (firsts[:, None] + along).flatten().tolist()
    return [(slot, (at, at, at)) for slot, at in zip(slots, found, strict=True)]


def turned(layer: Any, shape: tuple[int, ...], view: View) -> mx.array:
    """[rows, D]: ones in a pass of a shape, turned by a layer of the head."""
    rope = layer["self_attn"]["rope"]
    ones = mx.ones((shape[0], 1, shape[1], 16))
    return rope(ones, offset=view.positions).reshape(-1, 16)


def as_rows_are(layer: Any, rows: Rows, sections: Any) -> mx.array:
    """The same by the rows' positions."""
    rope = layer["self_attn"]["rope"]
    plain = nn.RoPE(rope.dims, traditional=rope.traditional, base=rope.base, scale=rope.scale)
    ones = mx.ones((len(rows), 1, 1, 16))
    positions = mx.array([at for _, at in rows]).T
    time, height, width = [plain(ones, offset=axis).reshape(-1, 16) for axis in positions]
    axes = axes_of(sections, rope.dims, 16)
    return mx.where(axes == 1, height, mx.where(axes == 2, width, time))


def answered(request: Request, e: Engine) -> tuple[list[int], Rows]:
    """The answer, and the rows of the head's passes."""
    drafter = head_of(e)
    module, seen = drafter.head.module, list[Any]()

    def run(embedded: mx.array, hidden: mx.array, caches: Any) -> mx.array:
        view, shape, layer = caches[0].view, embedded.shape, module.layers[0]
        rows = rows_of(view, shape[0] * shape[1])
        right = as_rows_are(layer, rows, e.runner.eyes.sections)
        assert mx.allclose(turned(layer, shape, view), right, atol=1e-5)
        seen.extend(rows)
        return module(embedded, hidden, caches)

    run.layers = module.layers  # type: ignore[attr-defined]
    drafter.head.module = run
    e.add(request)
    return tiny.tokens(tiny.run(e), request.id), seen


@pytest.mark.parametrize(
    ("kind", "layout", "budget", "head"),
    only(
        [
            (*model, budget, head)
            for model in (("qwen3_vl", "rows"), ("qwen3_5", "rect"))
            for budget in (7, 64)
            for head in ("mtp", "eagle3")
        ],
        0,
        4,
    ),
)
def test_heads_turn_as_the_model_does(kind: str, layout: str, budget: int, head: str) -> None:
    for name, request in requests(kind, 0.0).items():
        e = engine(kind, layout, budget=budget)
        attach_head(e, depth=3, kind=head)
        answer, seen = answered(request, e)
        tokens = [*request.prompt, *answer, *range(8)]  # drafts go beyond the answer
        state = SeqState(images=request.images)
        whole = Span(state, [], tokens, start=0, count=len(tokens), samples=False)
        right = positions_of(whole, len(tokens)).T.tolist()
        assert {slot for slot, _ in seen} >= set(range(1, len(request.prompt)))
        assert all(list(at) == right[slot] for slot, at in seen), name

"""Rows keep their bits where some of a model's products are by our kernel, for some numbers of rows,
and others by MLX's (tests/support/dispatch.py): which of them runs is decided by shape."""

from collections.abc import Iterator
from itertools import cycle

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxspec.kernels.trial import Verdict
from mlxspec.kernels.verify import KERNELS
from mlxspec.load import exact, exact_proof
from mlxspec.load.exact_proof import MOST
from mlxspec.load.warmup import kernels_in_use
from mlxspec.model import invariant, quantized
from mlxspec.model.invariant import Invariance
from mlxspec.model.layout import LayoutChoice
from mlxspec.types import CacheBytes
from tests import metalsim
from tests.support import dispatch, tiny
from tests.support.parameter_rows import only
from tests.test_exact import in_numbers

BLOCK = 8
# By shape: for all rows that it takes, for some from the second on, for few, never.
WON = [(1, 16), (3, 9), (1, 2), (0, 0)]


@pytest.fixture(autouse=True)
def short_proof(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(invariant, "CHUNK", 16)
    monkeypatch.setattr(exact_proof, "CONTEXT", 16)
    monkeypatch.setattr(KERNELS, "verdicts", {})
    with metalsim.patch(checked=False):
        yield


def model() -> nn.Module:
    """With kernels for a part of its shapes and of their rows."""
    made = in_numbers(tiny.model("llama"), "affine")
    quantized.install(made)
    names = {case.name: case for case in quantized.linear_cases(made, lambda: None)}
    for name, (least, most) in zip(names, cycle(WON), strict=False):
        KERNELS.verdicts[name] = Verdict("plain" if most else "", least, most)
    assert len(names) >= len(WON)
    mx.eval(made.parameters())
    return made


def proven(made: nn.Module, known: Invariance | None = None) -> exact.Exactness:
    layout = LayoutChoice("rows", True, False, CacheBytes(), tiny.VOCAB)
    return exact.examine(made, layout, BLOCK, known)


@pytest.mark.parametrize("chip", only(["M2", "M4"], 1))
def test_kernels_for_some_shapes_and_rows_keep_bits(chip: str) -> None:
    with dispatch.on(dispatch.CHIPS[chip]):
        made = model()
        found = proven(made)
        assert found.rows == MOST and not found.why
        assert found.invariance
        most = {calls.most for calls in found.invariance.calls.values()}
        assert len(most) > 1, "each shape has calls of its own"
        assert proven(made, Invariance()).rows < MOST, "without them rows differ"


def test_other_kernels_are_found_and_proven_anew() -> None:
    """What is known of rows is kept with the kernels for which it was found."""
    model()
    before = kernels_in_use()
    for verdict in KERNELS.verdicts.values():
        verdict.most = min(verdict.most, 5)
    assert kernels_in_use() != before

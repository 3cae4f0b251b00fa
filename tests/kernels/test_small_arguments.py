"""Every kernel compiles whatever the sizes of its arguments are: MLX passes one of fewer than 8
elements in another address space. Shapes are generated; nothing runs, each instance is compiled."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.kernels import matmul, sampling
from mlxspec.kernels.inputs import Draws
from mlxspec.kernels.metal import SMALLEST
from mlxspec.kernels.reference_matmul import Weights
from tests import metalsim
from tests.kernels.test_attention import Step, kernel
from tests.metalsim.codegen import FEWEST_DEVICE
from tests.metalsim.report import Report

counts = st.integers(1, 9)
few = st.integers(1, 3)


class Compiled(metalsim.Kernel):
    """Compiles an instance for each choice of arguments that are small, and runs none."""

    seen: set[tuple[Any, ...]]

    def __call__(self, *, inputs: Any, template: Any = (), **rest: Any) -> list[mx.array]:
        sizes = dict(zip(self.input_names, (mx.array(x).size for x in inputs), strict=True))
        small = frozenset(name for name, size in sizes.items() if size < FEWEST_DEVICE)
        flags = tuple(value for _, value in template or () if isinstance(value, bool))
        if (self.name, small, flags) in self.seen:
            made = zip(rest["output_shapes"], rest["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in made]
        out = super().__call__(inputs=inputs, template=template, **rest)
        self.seen.add((self.name, small, flags))
        return out

    def launch(self, *_: Any) -> Report:
        return Report(self.name)


@pytest.fixture(scope="module")
def seen() -> Iterator[set[tuple[Any, ...]]]:
    """The choices that were compiled: kernel, small arguments, switches."""
    Compiled.seen = set()
    with metalsim.patch(checked=False):
        mx.fast.metal_kernel = Compiled
        yield Compiled.seen


def choices(seen: set[tuple[Any, ...]], kernel: str) -> list[frozenset[str]]:
    return [small for name, small, _ in seen if name == kernel]


@given(few, few, few, st.sampled_from([0, 3, 40, 300]), st.booleans(), st.sampled_from([0, 8]))
@settings(max_examples=60)
def attends(seen: Any, kv: int, gqa: int, rows: int, start: int, sinks: bool, bits: int) -> None:
    heads = kv * gqa
    kernel(*Step(((rows, (start,)),), heads=heads, kv=kv, sinks=sinks, bits=bits).make())


def test_attention_of_few_heads(seen: Any) -> None:
    attends(seen)
    small = choices(seen, "paged_merge")
    assert {"sinks" in each for each in small} == {True, False}
    assert choices(seen, "paged_attention")


@given(counts, counts, st.sampled_from([32, 64]), st.sampled_from([4, 8]), st.booleans())
@settings(max_examples=60)
def multiplies(seen: Any, rows: int, n: int, k: int, bits: int, matrix: bool) -> None:
    w, scales, biases = mx.quantize(mx.zeros((n, k)), 32, bits)
    if scales.size >= SMALLEST:  # as for a model's layers
        variant = "matrix" if matrix else "plain"
        matmul.small_qmm(mx.zeros((rows, k)), Weights(w, scales, biases, 32, bits), variant)


def test_products_of_few_rows_and_columns(seen: Any) -> None:
    multiplies(seen)
    assert choices(seen, "small_qmm") and choices(seen, "small_qmm_matrix")


# No model has fewer tokens than 8; its trial of one row would keep the kernel from it.
@given(counts, st.integers(8, 40), st.booleans(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=100)
def draws(
    seen: Any, rows: int, vocab: int, masked: bool, floor: bool, shifted: bool, drafted: bool
) -> None:
    drawn = Draws(
        [0.5 for _ in range(rows)],
        list(range(rows)),
        list(range(rows)),
        [bytes([255]) if masked else b"" for _ in range(rows)],
        mx.zeros(rows, mx.int32) if shifted else None,
        mx.zeros(rows) if floor else None,
    )
    inputs = mx.zeros(rows, mx.int32) if drafted else None
    drafts = [(0, rows - 1)] if drafted else ()
    logits = mx.zeros((rows, vocab))
    sampling.sample_accept(logits, drawn, inputs, drafts, unproven=True)


def test_samples_of_few_rows_and_tokens(seen: Any) -> None:
    draws(seen)
    small = choices(seen, "sample_accept_part")
    for argument in ("min_logits", "shift"):
        assert {argument in each for each in small} == {True, False}, argument
    merged = choices(seen, "sample_accept_merge")
    for argument in ("entries", "inputs"):
        assert {argument in each for each in merged} == {True, False}, argument

"""Quantized products of few rows by metal/small_qmm.metal.

Rule: a function has the signature of its reference; `verify` decides whether it runs.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.kernels import reference
from mlxspec.kernels.metal import MetalKernel, dtype_name
from mlxspec.kernels.reference import Weights
from mlxspec.kernels.trial import Call, Case, Inputs

ROWS = 16  # small_qmm takes at most
RACED = (1, 2, 3, 5, 8, 9, 16)  # the fewest and the most rows of each instance
COLUMNS = 4  # of a SIMD-group; as in small_qmm.metal
SPAN = 256  # values of K that a SIMD-group reads at once; as in small_qmm.metal
MAX_SPLIT = 8  # SIMD-groups that share K
FILL = 2048  # SIMD-groups that keep a GPU busy: 25 for each core of the largest, not measured
MAX_CASE_BYTES = 96 << 20  # of the weights in a case
MATRIX_SIMDS = 4  # of a threadgroup with simdgroup_matrix
MATRIX_COLUMNS = 16  # of such a threadgroup
TOLERANCE = 1e-5  # for another order of summing
# FORMAT in small_qmm.metal, and bits and group sizes of weights, by mx.quantize's mode
FORMATS = {
    "affine": (0, (2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": (1, (4,), (32,)),
    "mxfp8": (1, (8,), (32,)),
    "nvfp4": (2, (4,), (16,)),
}
LIKELY = {1: (123, 129), 2: (24, 72)}  # scales of a case: powers of two, and floats, as their codes

_PLACE = (
    "threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
)
_PARTIAL = "threadgroup float partial[SPLIT * M * QMM_COLUMNS]; "
_OPERANDS = "(x, x_shape[0], w, scales, biases, y, w_shape[0], x_shape[1], partial, "

SMALL_QMM = MetalKernel(
    "small_qmm",
    "small_qmm",
    "x w scales biases",
    outputs="y",
    body=_PARTIAL + "small_qmm<M, BITS, GROUP, FORMAT, SPLIT>" + _OPERANDS + _PLACE,
)
SMALL_QMM_MATRIX = MetalKernel(
    "small_qmm_matrix",
    "small_qmm",
    "x w scales biases",
    outputs="y",
    body="threadgroup float partial[QMM_SPLIT * M * QMM_WIDTH]; "
    + "small_qmm_matrix<M, BITS, GROUP, FORMAT>"
    + _OPERANDS
    + _PLACE,
)


def _split(n: int, k: int) -> int:
    """How many SIMD-groups share K: by the shape alone, because it sets the order of summing."""
    split = 1
    while split < MAX_SPLIT and 2 * split * SPAN <= k and split * ceil(n / COLUMNS) < FILL:
        split *= 2
    return split


def _capacity(rows: int) -> int:
    """Rows of an instance: a power of two, because each instance is compiled and verified."""
    return 1 << (rows - 1).bit_length()


def small_qmm(x: Array, weights: Weights, matrix: bool = False) -> Array:
    """As reference.small_qmm in x's dtype, for 1 to ROWS rows; `matrix`: by simdgroup_matrix."""
    rows, k = x.shape
    columns = len(weights.weight)
    if matrix:
        kernel = SMALL_QMM_MATRIX
        threads = 32 * MATRIX_SIMDS
        width = MATRIX_COLUMNS  # of a threadgroup
        template = {"M": _capacity(max(8, rows))}
    else:
        kernel = SMALL_QMM
        split = _split(columns, k)
        threads = 32 * max(2, split)
        width = COLUMNS if split > 1 else 2 * COLUMNS
        template = {"M": _capacity(rows), "SPLIT": split}
    # Without biases the kernel reads none; an argument it must have.
    biases = weights.scales if weights.biases is None else weights.biases
    return kernel(
        [x, weights.weight, weights.scales, biases],
        (threads * ceil(columns / width), 1, 1),
        (threads, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[x.dtype],
        BITS=weights.bits,
        GROUP=weights.group_size,
        FORMAT=FORMATS[weights.mode][0],
        **template,
    )[0]


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are quantized, and the dtype of rows and results. `numbers`: the dtypes of scales
    and biases of affine ones, where they are others."""

    bits: int
    group_size: int
    mode: str
    dtype: mx.Dtype
    numbers: tuple[mx.Dtype, mx.Dtype] | None = None

    @property
    def supported(self) -> bool:
        _, bits, groups = FORMATS.get(self.mode, (0, (), ()))
        return self.bits in bits and self.group_size in groups

    @property
    def name(self) -> str:
        form = self.mode
        if form == "affine":
            form = f"{self.bits} bits, group {self.group_size}"
        of = "".join(f" {dtype_name(dtype)}" for dtype in self.numbers or ())
        return f"{form}, {dtype_name(self.dtype)}{of and f' of{of}'}"


def format_of(layer: Any, dtype: mx.Dtype) -> Format:
    """The Format of a quantized layer. `dtype`: of its rows, where its scales are no floats."""
    numbers = None
    if layer.mode == "affine":
        numbers = layer.scales.dtype, layer.biases.dtype
        # MLX's result type, as x is of one of them.
        dtype = numbers[0] if numbers[0] == numbers[1] else mx.float32
        if numbers == (dtype, dtype):
            numbers = None
    return Format(layer.bits, layer.group_size, layer.mode, dtype, numbers)


def small_qmm_case(n: int, k: int, form: Format) -> Case:
    """For weights [n, k] of this format. Columns beyond MAX_CASE_BYTES are left out, as far as this
    does not change the others' order of summing."""
    columns = min(n, max(FILL * COLUMNS, MAX_CASE_BYTES * 8 // (k * form.bits)))
    how: Any = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}

    def run(multiply: Call, *arrays: Array) -> Array:
        x, w, scales, *biases = arrays
        return multiply(x, Weights(w, scales, biases[0] if biases else None, **how))

    return Case(
        name=f"small_qmm {n}x{k} of {form.name}",
        rows=tuple(range(1, 1 + ROWS)),
        raced=RACED,
        inputs=partial(_inputs, form, columns, k),
        stock=partial(mx.quantized_matmul, transpose=True, **how),
        reference=partial(run, reference.small_qmm),
        variants={
            "plain": partial(run, small_qmm),
            "matrix": partial(run, partial(small_qmm, matrix=True)),
        },
        tolerance=TOLERANCE,
    )


def _inputs(form: Format, columns: int, k: int, seed: int) -> Inputs:
    """x [ROWS, k], and the arrays of weights [columns, k]."""
    of_x, of_w, of_scales = mx.random.split(mx.random.key(seed), 3)
    x = mx.random.normal((ROWS, k), key=of_x).astype(form.dtype)
    # Random bits: quantizing random weights would take eight times their memory.
    words = columns * k * form.bits // 32
    w = mx.random.split(of_w, ceil(words / 2)).flatten()[:words].reshape(columns, -1)  # keys
    shape = columns, k // form.group_size
    if form.mode == "affine":
        of_scale, of_bias = form.numbers or (form.dtype, form.dtype)
        scales = mx.random.uniform(0.5, 1.5, shape, key=of_scales) / 2**form.bits
        biases = -scales * 2 ** (form.bits - 1)
        return x, w, scales.astype(of_scale), biases.astype(of_bias)
    if form.bits == 8:
        w = w & 0xBFBFBFBF  # no code that is no number
    low, high = LIKELY[FORMATS[form.mode][0]]
    return x, w, mx.random.randint(low, high, shape, mx.uint8, key=of_scales)

"""Quantized products of few rows by metal/small_qmm.metal.

Rule: a function has the signature of its reference; `verify` decides whether it runs.
"""

from functools import partial
from math import ceil

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

_PLACE = (
    "threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
)
_PARTIAL = "threadgroup float partial[SPLIT * M * QMM_COLUMNS]; "
_OPERANDS = "(x, x_shape[0], w, scales, biases, y, w_shape[0], x_shape[1], partial, "

SMALL_QMM = MetalKernel(
    "small_qmm",
    "small_qmm",
    "x w scales biases",
    "y",
    _PARTIAL + "small_qmm<M, BITS, GROUP, SPLIT>" + _OPERANDS + _PLACE,
)
SMALL_QMM_MATRIX = MetalKernel(
    "small_qmm_matrix",
    "small_qmm",
    "x w scales biases",
    "y",
    "threadgroup float partial[QMM_SPLIT * M * QMM_WIDTH]; small_qmm_matrix<M, BITS, GROUP>"
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
    return kernel(
        [x, weights.weight, weights.scales, weights.biases],
        (threads * ceil(columns / width), 1, 1),
        (threads, 1, 1),
        [(rows, columns)],
        [x.dtype],
        BITS=weights.bits,
        GROUP=weights.group_size,
        **template,
    )[0]


def small_qmm_case(n: int, k: int, bits: int, group: int, dtype: mx.Dtype) -> Case:
    """For weights [n, k] whose scales, like the rows, are `dtype`. Columns beyond MAX_CASE_BYTES
    are left out, as far as this does not change the others' order of summing."""
    columns = min(n, max(FILL * COLUMNS, MAX_CASE_BYTES * 8 // (k * bits)))

    def inputs(seed: int) -> Inputs:
        of_x, of_w, of_scales = mx.random.split(mx.random.key(seed), 3)
        x = mx.random.normal((ROWS, k), key=of_x).astype(dtype)
        # Random bits: quantizing random weights would take eight times their memory.
        words = columns * k * bits // 32
        w = mx.random.split(of_w, words // 2).reshape(columns, -1)  # a key is a pair of words
        scales = mx.random.uniform(0.5, 1.5, (columns, k // group), key=of_scales) / 2**bits
        return x, w, scales.astype(dtype), (-scales * 2 ** (bits - 1)).astype(dtype)

    def run(multiply: Call, *arrays: Array) -> Array:
        x, w, scales, biases = arrays
        return multiply(x, Weights(w, scales, biases, group, bits))

    return Case(
        name=f"small_qmm {n}x{k} of {bits} bits, group {group}, {dtype_name(dtype)}",
        rows=tuple(range(1, 1 + ROWS)),
        raced=RACED,
        inputs=inputs,
        stock=partial(mx.quantized_matmul, transpose=True, group_size=group, bits=bits),
        reference=partial(run, reference.small_qmm),
        variants={
            "plain": partial(run, small_qmm),
            "matrix": partial(run, partial(small_qmm, matrix=True)),
        },
        tolerance=TOLERANCE,
    )

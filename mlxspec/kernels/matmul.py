"""Quantized products of few rows by metal/small_qmm.metal, also with the weights of experts.

Rule: a function has the signature of its reference; `verify` decides whether it runs.
"""

from functools import cache, partial
from math import ceil, prod

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from mlxspec.kernels import reference
from mlxspec.kernels.metal import MetalKernel, dtype_name
from mlxspec.kernels.reference import Weights
from mlxspec.kernels.trial import Call, Case, Inputs

ROWS = 16  # small_qmm takes at most
MAX_PAIRS = 128  # (token, expert) pairs that gather_small_qmm takes at most
RACED = (1, 2, 3, 5, 8, 9, 16)  # the fewest and the most rows of each instance
SORTED = 64  # pairs from which on mlx-lm sorts them by expert
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
GATHER_SMALL_QMM = MetalKernel(
    "gather_small_qmm",
    "small_qmm",
    "x experts w scales biases",
    "y",
    _PARTIAL + "gather_small_qmm<M, BITS, GROUP, SPLIT>(x, experts, w, scales, biases, y,"
    " experts_shape[0], experts_shape[0] / x_shape[0], w_shape[1], x_shape[1], partial,"
    " threadgroup_position_in_grid.y, " + _PLACE,
)


def _split(n: int, k: int) -> int:
    """How many SIMD-groups share K: by the shape alone, because it is an order of summing."""
    split = 1
    while split < MAX_SPLIT and 2 * split * SPAN <= k and split * ceil(n / COLUMNS) < FILL:
        split *= 2
    return split


def _plain(n: int, k: int) -> tuple[int, int, int]:
    """SPLIT, threads of a threadgroup, and threads in x."""
    split = _split(n, k)
    threads = 32 * max(2, split)
    columns = COLUMNS if split > 1 else 2 * COLUMNS
    return split, threads, threads * ceil(n / columns)


def _capacity(rows: int) -> int:
    """Rows of an instance: a power of two, because each instance is compiled and verified."""
    return 1 << (rows - 1).bit_length()


def small_qmm(x: Array, weights: Weights, matrix: bool = False) -> Array:
    """As reference.small_qmm in x's dtype, for 1 to ROWS rows; `matrix`: by simdgroup_matrix."""
    rows, k = x.shape
    columns = len(weights.w)
    if matrix:
        threads = 32 * MATRIX_SIMDS
        grid = threads * ceil(columns / MATRIX_COLUMNS)
        kernel = SMALL_QMM_MATRIX
        template = {"M": _capacity(max(8, rows))}
    else:
        split, threads, grid = _plain(columns, k)
        kernel = SMALL_QMM
        template = {"M": _capacity(rows), "SPLIT": split}
    return kernel(
        [x, weights.w, weights.scales, weights.biases],
        (grid, 1, 1),
        (threads, 1, 1),
        [(rows, columns)],
        [x.dtype],
        BITS=weights.bits,
        GROUP=weights.group_size,
        **template,
    )[0]


def gather_small_qmm(
    x: Array,
    weights: Weights,
    experts: Array,
    tokens: int = ROWS,
) -> Array:
    """As reference.gather_small_qmm in x's dtype, for at most MAX_PAIRS pairs. An expert's weights
    are read again after `tokens` of its pairs."""
    pairs = experts.size
    columns = weights.w.shape[1]
    split, threads, grid = _plain(columns, x.shape[1])
    return GATHER_SMALL_QMM(
        [x, experts.astype(mx.uint32), weights.w, weights.scales, weights.biases],
        (grid, pairs, 1),
        (threads, 1, 1),
        [(pairs, columns)],
        [x.dtype],
        M=_capacity(min(tokens, ROWS, pairs)),
        BITS=weights.bits,
        GROUP=weights.group_size,
        SPLIT=split,
    )[0]


def _random_weights(
    shape: tuple[int, ...],
    k: int,
    bits: int,
    group: int,
    dtype: mx.Dtype,
    key: Array,
) -> Inputs:
    """Arrays of weights [*shape, k] made of random bits: quantizing random weights would take eight
    times their memory."""
    of_w, of_scales = mx.random.split(key)
    words = prod(shape) * k * bits // 32
    w = mx.random.split(of_w, words // 2).reshape(*shape, -1)  # a key is a pair of random words
    scales = mx.random.uniform(0.5, 1.5, (*shape, k // group), key=of_scales) / 2**bits
    return w, scales.astype(dtype), (-scales * 2 ** (bits - 1)).astype(dtype)


def small_qmm_case(n: int, k: int, bits: int, group: int, dtype: mx.Dtype) -> Case:
    """For weights [n, k] whose scales, like the rows, are `dtype`. Columns beyond MAX_CASE_BYTES
    are left out, as far as this changes nothing in the others' order of summing."""
    columns = min(n, max(FILL * COLUMNS, MAX_CASE_BYTES * 8 // (k * bits)))

    def inputs(seed: int) -> Inputs:
        key, of_x = mx.random.split(mx.random.key(seed))
        x = mx.random.normal((ROWS, k), key=of_x).astype(dtype)
        return x, *_random_weights((columns,), k, bits, group, dtype, key)

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


@cache
def gather_small_qmm_case(
    e: int, n: int, k: int, bits: int, group: int, dtype: mx.Dtype, top: int, apart: bool
) -> Case:
    """For e experts of weights [n, k], `top` of them for a token.

    The case's rows are tokens, each with one row of x, or if `apart` one for each of its experts.
    Weights are made only for the experts that some token has.
    """
    most = max(1, min(ROWS, MAX_PAIRS // top))

    def inputs(seed: int) -> Inputs:
        rng = np.random.default_rng(seed)
        key, of_x = mx.random.split(mx.random.key(seed))
        drawn = [rng.choice(e, top, replace=False) for _ in range(most)]
        used, at = np.unique(drawn, return_inverse=True)
        x = mx.random.normal((most, top if apart else 1, k), key=of_x).astype(dtype)
        experts = mx.array(at.reshape(most, top).astype(np.uint32))
        return x, experts, *_random_weights((len(used), n), k, bits, group, dtype, key)

    def run(multiply: Call, *arrays: Array) -> Array:
        """Many pairs are sorted by expert, as in mlx-lm."""
        x, indices, w, scales, biases = arrays
        rows, experts = x.flatten(0, 1), indices.flatten()
        weights = Weights(w, scales, biases, group, bits)
        if experts.size < SORTED:
            return multiply(rows, weights, experts)
        order = mx.argsort(experts)
        rows = rows[order // (experts.size // len(rows))]
        return multiply(rows, weights, experts[order])[mx.argsort(order)]

    def stock(x: Array, weights: Weights, experts: Array) -> Array:
        return reference.gather_small_qmm(x, weights, experts, x.dtype, experts.size >= SORTED)

    def kernel(x: Array, weights: Weights, experts: Array) -> Array:
        return gather_small_qmm(x, weights, experts, tokens=experts.size // top)

    shape = f"{e}x{n}x{k} of {bits} bits, group {group}, {dtype_name(dtype)}, top {top}"
    return Case(
        name=f"gather_small_qmm {shape}{' apart' if apart else ''}",
        rows=tuple(range(1, 1 + most)),
        raced=(*(rows for rows in RACED if rows < most), most),
        inputs=inputs,
        by_row=2,
        stock=partial(run, stock),
        reference=partial(run, reference.gather_small_qmm),
        variants={"plain": partial(run, kernel)},
        tolerance=TOLERANCE,
    )

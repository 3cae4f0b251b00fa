"""metal/small_qmm.metal: quantized products of few rows, also with the weights of experts.

Rule: a function has the signature of its reference; `verify` decides whether it runs.
"""

from collections.abc import Callable
from functools import cache, partial
from math import ceil, prod
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import reference
from mlxspec.kernels.metal import SMALLEST, MetalKernel, dtype_name
from mlxspec.kernels.verify import Case
from mlxspec.types import UnsupportedModel

ROWS = 16  # small_qmm takes at most
MAX_PAIRS = 128  # (token, expert) pairs that gather_small_qmm takes at most
RACED = (1, 2, 3, 5, 8, 9, 16)  # the fewest and the most rows of each instance
SORTED = 64  # pairs from which on mlx-lm sorts them by expert
COLUMNS, SPAN = 4, 256  # columns, and values at once, of a SIMD-group; as in small_qmm.metal
MAX_SPLIT = 8  # SIMD-groups that share K
FILL = 2048  # SIMD-groups that keep a GPU busy: 25 for each core of the largest, not measured
MATRIX_SIMDS, MATRIX_COLUMNS = 4, 16  # of a threadgroup with simdgroup_matrix
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
    return split, threads, threads * -(-n // (COLUMNS if split > 1 else 2 * COLUMNS))


def _capacity(rows: int) -> int:
    """Rows of an instance: a power of two, because each instance is compiled and verified."""
    return 1 << (rows - 1).bit_length()


def _check(rows: int, most: int, k: int, scales: mx.array, group_size: int, bits: int) -> None:
    fits = bits in (4, 8) and group_size in (32, 64, 128) and scales.shape[-1] * group_size == k
    if not fits or not 1 <= rows <= most or scales.size < SMALLEST:
        raise UnsupportedModel(
            f"small_qmm takes 1 to {most} rows, 4 or 8 bits, groups of 32, 64 or 128 that divide K,"
            f" and {SMALLEST} scales or more; not rows = {rows}, bits = {bits},"
            f" group_size = {group_size}, K = {k}, {scales.size} scales; use MLX's own operation"
        )


def small_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    group_size: int,
    bits: int,
    matrix: bool = False,
) -> mx.array:
    """As reference.small_qmm, with `matrix` by simdgroup_matrix. Raises UnsupportedModel."""
    rows, k = x.shape
    columns = len(w)
    _check(rows, ROWS, k, scales, group_size, bits)
    if matrix:
        threads = 32 * MATRIX_SIMDS
        grid = threads * ceil(columns / MATRIX_COLUMNS)
        kernel, template = SMALL_QMM_MATRIX, {"M": _capacity(max(8, rows))}
    else:
        split, threads, grid = _plain(columns, k)
        kernel, template = SMALL_QMM, {"M": _capacity(rows), "SPLIT": split}
    return kernel(
        [x, w, scales, biases],
        (grid, 1, 1),
        (threads, 1, 1),
        [(rows, columns)],
        [x.dtype],
        BITS=bits,
        GROUP=group_size,
        **template,
    )[0]


def gather_small_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    experts: mx.array,
    group_size: int,
    bits: int,
    tokens: int = ROWS,
) -> mx.array:
    """As reference.gather_small_qmm, for at most MAX_PAIRS pairs. An expert's weights are read
    again after `tokens` of its pairs. Raises UnsupportedModel."""
    pairs, columns, k = experts.size, w.shape[1], x.shape[1]
    _check(pairs, MAX_PAIRS, k, scales, group_size, bits)
    split, threads, grid = _plain(columns, k)
    return GATHER_SMALL_QMM(
        [x, experts.astype(mx.uint32), w, scales, biases],
        (grid, pairs, 1),
        (threads, 1, 1),
        [(pairs, columns)],
        [x.dtype],
        M=_capacity(min(tokens, ROWS, pairs)),
        BITS=bits,
        GROUP=group_size,
        SPLIT=split,
    )[0]


def _weights(
    shape: tuple[int, ...], k: int, bits: int, group: int, dtype: mx.Dtype, key: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Arrays of weights [*shape, k] made of random bits: quantizing random weights would take eight
    times their memory."""
    of_w, of_scales, of_biases = mx.random.split(key, 3)
    words = prod(shape) * k * bits // 32
    w = mx.random.split(of_w, words // 2).reshape(*shape, -1)  # a key is a pair of random words
    scales = mx.random.uniform(0.5, 1.5, (*shape, k // group), key=of_scales) / 2**bits
    offsets = mx.random.uniform(0.45, 0.55, scales.shape, key=of_biases) * 2**bits
    return w, scales.astype(dtype), (-scales * offsets).astype(dtype)


def small_qmm_case(n: int, k: int, bits: int, group: int, dtype: mx.Dtype) -> Case:
    """For weights [n, k] whose scales, like the rows, are `dtype`."""
    how: dict[str, Any] = {"group_size": group, "bits": bits}

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        key, of_x = mx.random.split(mx.random.key(seed))
        x = mx.random.normal((ROWS, k), key=of_x).astype(dtype)
        return x[:rows], *_weights((n,), k, bits, group, dtype, key)

    def row_by_row(x: mx.array, *weights: Any) -> mx.array:
        """In fp32; on an M5 MLX may compute several rows of that by TF32."""
        rows = x.astype(mx.float32)[:, None]
        return mx.concatenate([reference.small_qmm(row, *weights, **how) for row in rows])

    return Case(
        name=f"small_qmm {n}x{k} of {bits} bits, group {group}, {dtype_name(dtype)}",
        rows=tuple(range(1, 1 + ROWS)),
        raced=RACED,
        inputs=inputs,
        stock=partial(mx.quantized_matmul, transpose=True, **how),
        reference=row_by_row,
        variants={
            "plain": partial(small_qmm, **how),
            "matrix": partial(small_qmm, matrix=True, **how),
        },
        tolerance=TOLERANCE,
        nested=True,
    )


@cache
def gather_small_qmm_case(
    e: int, n: int, k: int, bits: int, group: int, dtype: mx.Dtype, top: int, apart: bool
) -> Case:
    """For e experts of weights [n, k], `top` of them for a token.

    The case's rows are tokens, each with one row of x, or if `apart` one for each of its experts.
    Experts without a token are not made because nothing reads them.
    """
    how: dict[str, Any] = {"group_size": group, "bits": bits}
    gather: Any = partial(mx.gather_qmm, **how)
    most = max(1, min(ROWS, MAX_PAIRS // top))

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        rng = np.random.default_rng(seed)
        key, of_x = mx.random.split(mx.random.key(seed))
        drawn = [rng.choice(e, top, replace=False) for _ in range(most)]
        used, at = np.unique(drawn, return_inverse=True)
        x = mx.random.normal((most, top if apart else 1, k), key=of_x).astype(dtype)
        experts = mx.array(at.reshape(most, top).astype(np.uint32))
        return x[:rows], experts[:rows], *_weights((len(used), n), k, bits, group, dtype, key)

    def stock(tokens: int, x: Any, experts: Any, w: Any, scales: Any, biases: Any) -> mx.array:
        """As mlx-lm calls MLX's own operation."""
        ordered = experts.size >= SORTED
        if len(x) < experts.size:
            x, experts = x[:, None], experts.reshape(tokens, -1)
        rows = x[..., None, :]
        y = gather(rows, w, scales, biases, rhs_indices=experts, sorted_indices=ordered)
        return y.reshape(-1, n)  # type: ignore[no-any-return]

    def exact(tokens: int, x: Any, experts: Any, w: Any, scales: Any, biases: Any) -> mx.array:
        return reference.gather_small_qmm(x.astype(mx.float32), w, scales, biases, experts, **how)

    def kernel(tokens: int, x: Any, experts: Any, w: Any, scales: Any, biases: Any) -> mx.array:
        return gather_small_qmm(x, w, scales, biases, experts, **how, tokens=tokens)

    shape = f"{e}x{n}x{k} of {bits} bits, group {group}, {dtype_name(dtype)}, top {top}"
    if apart:
        shape += " apart"
    return Case(
        name=f"gather_small_qmm {shape}",
        rows=tuple(range(1, 1 + most)),
        raced=(*(rows for rows in RACED if rows < most), most),
        inputs=inputs,
        stock=partial(_sorted_by_expert, stock),
        reference=partial(_sorted_by_expert, exact),
        variants={"plain": partial(_sorted_by_expert, kernel)},
        tolerance=TOLERANCE,
        nested=True,
    )


def _sorted_by_expert(
    run: Callable[..., mx.array], x: mx.array, experts: mx.array, *weights: mx.array
) -> mx.array:
    """`run` with the rows and pairs of x [tokens, 1 or top, K] and experts [tokens, top]; many
    pairs are sorted by expert, as mlx-lm does."""
    rows, pairs = x.reshape(-1, x.shape[-1]), experts.flatten()
    if pairs.size < SORTED:
        return run(len(x), rows, pairs, *weights)
    order = mx.argsort(pairs)
    rows = rows[order // (pairs.size // len(rows))]
    return run(len(x), rows, pairs[order], *weights)[mx.argsort(order)]

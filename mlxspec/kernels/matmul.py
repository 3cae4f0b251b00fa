"""Kernels of metal/*.metal as MLX calls: a file is the header, the body is one line that calls its
function.

Rule: same signature as the reference; whether a kernel may be used on a machine is not decided
here.
"""

from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.config import data_dir
from mlxspec.kernels import reference
from mlxspec.kernels.proven import Case
from mlxspec.types import UnsupportedModel

ROWS = 16  # that small_qmm takes
MOST_PAIRS = 128  # of a token and an expert, that gather_small_qmm takes
RACED = (1, 2, 3, 5, 8, 9, 16)  # rows: the fewest and the most that an instance is for
SORTED = 64  # pairs from which on mlx-lm sorts them by expert
SMALLEST = 8  # elements; MLX gives a kernel smaller arrays in another address space
COLUMNS, SPAN = 4, 256  # of a SIMD-group, as in small_qmm.metal: columns, and values of one at once
SPLIT = 8  # SIMD-groups that may share K
# SIMD-groups that keep a GPU busy: 25 for each core of the largest; a guess, measured nowhere
FILL = 2048
MATRIX_SIMDS, MATRIX_COLUMNS = 4, 16  # of a threadgroup with simdgroup_matrix

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
TOLERANCE = (
    1e-5  # of the largest value, before a result is rounded: what another order of a sum may change
)

_WEIGHTS = ["w", "scales", "biases"]
_PLACE = (
    "threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
)
_PARTIAL = "threadgroup float partial[SPLIT * M * QMM_COLUMNS]; "
_MATRIX = "threadgroup float partial[QMM_SPLIT * M * QMM_WIDTH]; small_qmm_matrix<M, BITS, GROUP>"
_OPERANDS = "(x, x_shape[0], w, scales, biases, y, w_shape[0], x_shape[1], partial, "
BODIES = {
    "small_qmm": _PARTIAL + "small_qmm<M, BITS, GROUP, SPLIT>" + _OPERANDS + _PLACE,
    "small_qmm_matrix": _MATRIX + _OPERANDS + _PLACE,
    "gather_small_qmm": _PARTIAL
    + "gather_small_qmm<M, BITS, GROUP, SPLIT>(x, experts, w, scales, biases, y,"
    " experts_shape[0], experts_shape[0] / x_shape[0], w_shape[1], x_shape[1], partial,"
    " threadgroup_position_in_grid.y, " + _PLACE,
}


@cache
def source(name: str) -> str:
    """The text of metal/<name>.metal."""
    return (data_dir("metal") / f"{name}.metal").read_text("utf-8")


@cache
def _qmm(make: Callable[..., Any], name: str) -> Callable[..., list[mx.array]]:
    """By `make`, so that a kernel made by a simulator is not kept for the device."""
    names = ["x", *(["experts"] if name == "gather_small_qmm" else []), *_WEIGHTS]
    kernel: Callable[..., list[mx.array]] = make(
        name, names, ["y"], BODIES[name], source("small_qmm")
    )
    return kernel


def _split(n: int, k: int) -> int:
    """How many SIMD-groups share K: by the shape alone, since it is an order of summing."""
    split = 1
    while split < SPLIT and 2 * split * SPAN <= k and split * -(-n // COLUMNS) < FILL:
        split *= 2
    return split


def _plain(n: int, k: int) -> tuple[int, int, int]:
    """SPLIT, threads of a threadgroup, and of them all in a row."""
    split = _split(n, k)
    threads = 32 * max(2, split)
    return split, threads, threads * -(-n // (COLUMNS if split > 1 else 2 * COLUMNS))


def _seats(rows: int, least: int = 1) -> int:
    """M, how many rows an instance has room for: few sizes, since each is compiled and proven on
    its own."""
    return max(least, 1 << (rows - 1).bit_length())


def _refuse(
    name: str, rows: int, most: int, k: int, scales: mx.array, group_size: int, bits: int
) -> None:
    fits = bits in (4, 8) and group_size in (32, 64, 128) and scales.shape[-1] * group_size == k
    if not fits or not 1 <= rows <= most:
        raise UnsupportedModel(
            f"{name} takes 1 to {most} rows, 4 or 8 bits and groups of 32, 64 or 128 that divide K; here"
            f" are {rows} rows, bits = {bits}, group_size = {group_size}, K = {k}; use MLX's own operation"
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
    """As reference.small_qmm, by simdgroup_matrix or not. Raises UnsupportedModel for what the
    kernel does not do."""
    rows, columns, k = x.shape[0], w.shape[0], x.shape[1]
    _refuse("small_qmm", rows, ROWS, k, scales, group_size, bits)
    if scales.size < SMALLEST:
        more = [(0, SMALLEST - columns), (0, 0)]
        w, scales, biases = (mx.pad(a, more) for a in (w, scales, biases))
        return small_qmm(x, w, scales, biases, group_size, bits, matrix)[:, :columns]
    template = [("M", _seats(rows, 8 if matrix else 1)), ("BITS", bits), ("GROUP", group_size)]
    if matrix:
        threads = 32 * MATRIX_SIMDS
        grid = threads * -(-columns // MATRIX_COLUMNS)
    else:
        split, threads, grid = _plain(columns, k)
        template.append(("SPLIT", split))
    return _qmm(mx.fast.metal_kernel, "small_qmm_matrix" if matrix else "small_qmm")(
        inputs=[x, w, scales, biases],
        template=template,
        grid=(grid, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[x.dtype],
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
    """As reference.gather_small_qmm, for at most MOST_PAIRS pairs; each row to the bit as small_qmm
    has it. Of one expert there should be no more than `tokens` pairs: where there are, its weights
    are read again. Raises UnsupportedModel for what the kernel does not do."""
    pairs, columns, k = experts.size, w.shape[1], x.shape[1]
    _refuse("gather_small_qmm", pairs, MOST_PAIRS, k, scales, group_size, bits)
    if scales.size < SMALLEST or pairs % x.shape[0]:
        raise UnsupportedModel(
            f"gather_small_qmm takes {SMALLEST} scales or more and pairs that the rows of x divide; here are"
            f" {scales.size}, {pairs} and {x.shape[0]}; use mx.gather_qmm"
        )
    split, threads, grid = _plain(columns, k)
    rows = _seats(min(tokens, ROWS, pairs))
    return _qmm(mx.fast.metal_kernel, "gather_small_qmm")(
        inputs=[x, experts.astype(mx.uint32), w, scales, biases],
        template=[("M", rows), ("BITS", bits), ("GROUP", group_size), ("SPLIT", split)],
        grid=(grid, pairs, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(pairs, columns)],
        output_dtypes=[x.dtype],
    )[0]


def _weights(
    shape: tuple[int, ...], k: int, bits: int, group: int, dtype: mx.Dtype, key: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """The arrays of weights [*shape, k], of random bits: to quantize random weights would take
    eight times their memory, and to draw them as numbers four times."""
    keys = mx.random.split(key, 3)
    words = prod(shape) * k * bits // 32
    scales = mx.random.uniform(0.5, 1.5, (*shape, k // group), key=keys[1]) * 2.0**-bits
    biases = scales * -(2.0 ** (bits - 1)) * mx.random.uniform(0.9, 1.1, scales.shape, key=keys[2])
    w = mx.random.split(keys[0], words // 2).reshape(
        *shape, -1
    )  # a split key is a pair of random words
    return w, scales.astype(dtype), biases.astype(dtype)


def small_qmm_case(n: int, k: int, bits: int, group: int, dtype: mx.Dtype) -> Case:
    """For weights [n, k] and rows of `dtype`, which is that of the scales too."""
    how: dict[str, Any] = dict(group_size=group, bits=bits)

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        key, of_x = mx.random.split(mx.random.key(seed))
        x = mx.random.normal((ROWS, k), key=of_x).astype(dtype)
        return x[:rows], *_weights((n,), k, bits, group, dtype, key)

    def one_by_one(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """In fp32. MLX may take more rows of that by TF32, on an M5."""
        rows, s, b = (array.astype(mx.float32) for array in (x, scales, biases))
        return mx.concatenate([reference.small_qmm(row[None], w, s, b, **how) for row in rows])

    return Case(
        kernel="small_qmm",
        shape=f"{n}x{k} of {bits} bits, group {group}, {named(dtype)}",
        rows=tuple(range(1, 1 + ROWS)),
        raced=RACED,
        inputs=inputs,
        stock=partial(mx.quantized_matmul, transpose=True, **how),
        reference=one_by_one,
        ways={
            way: partial(small_qmm, **how, matrix=way == "matrix") for way in ("plain", "matrix")
        },
        tolerance=TOLERANCE,
        nested=1,
    )


def gather_small_qmm_case(
    e: int, n: int, k: int, bits: int, group: int, dtype: mx.Dtype, top: int, apart: bool
) -> Case:
    """For e experts of weights [n, k], `top` of them for a token. Its rows are tokens, each with a
    row of x, or if `apart` with one for each of its experts; many are sorted by expert, as mlx-lm
    does it. Experts that no token goes to are not made: nobody reads them."""
    how: dict[str, Any] = dict(group_size=group, bits=bits)
    counts = tuple(range(1, 1 + max(1, min(ROWS, MOST_PAIRS // top))))

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        rng, (key, of_x) = np.random.default_rng(seed), mx.random.split(mx.random.key(seed))
        drawn = [rng.choice(e, top, replace=False) for _ in counts]
        met, experts = np.unique(drawn, return_inverse=True)
        x = mx.random.normal((len(counts), top if apart else 1, k), key=of_x).astype(dtype)
        of = mx.array(experts.reshape(len(counts), top).astype(np.uint32))
        return x[:rows], of[:rows], *_weights((len(met), n), k, bits, group, dtype, key)

    def exact(x: mx.array, *rest: Any) -> mx.array:
        """In fp32."""
        *operands, _ = rest
        return reference.gather_small_qmm(x.astype(mx.float32), *operands, **how)

    def plain(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, of: mx.array, tokens: int
    ) -> mx.array:
        return gather_small_qmm(x, w, scales, biases, of, group, bits, tokens)

    return Case(
        kernel="gather_small_qmm",
        shape=f"{e}x{n}x{k} of {bits} bits, group {group}, {named(dtype)}, top {top}{' apart' * apart}",
        rows=counts,
        raced=tuple(count for count in RACED if count < counts[-1]) + counts[-1:],
        inputs=inputs,
        stock=_as_called(partial(_gather, **how)),
        reference=_as_called(exact),
        ways={"plain": _as_called(plain)},
        tolerance=TOLERANCE,
        nested=2,
    )


def _as_called(run: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Of x [tokens, 1 or top, K] and experts [tokens, top], what `run` makes of x [R, K], weights
    and experts [P] in the order in which mlx-lm has them, and the count of tokens."""

    def result(x: mx.array, experts: mx.array, *weights: mx.array) -> mx.array:
        rows, of = x.reshape(-1, x.shape[-1]), experts.flatten()
        if of.size < SORTED:
            return run(rows, *weights, of, len(x))
        order = mx.argsort(of)
        rows = rows[order // (of.size // len(rows))]
        return run(rows, *weights, of[order], len(x))[mx.argsort(order)]

    return result


def _gather(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    of: mx.array,
    tokens: int,
    **how: Any,
) -> mx.array:
    """By MLX's own operation, called as mlx-lm calls it."""
    sort = of.size >= SORTED
    if len(x) < of.size:
        x, of = x[:, None], of.reshape(tokens, -1)
    y = mx.gather_qmm(
        x[..., None, :], w, scales, biases, rhs_indices=of, sorted_indices=sort, **how
    )
    return y.reshape(of.size, -1)


def named(dtype: mx.Dtype) -> str:
    """As in a case's name."""
    return str(dtype).rpartition(".")[2]

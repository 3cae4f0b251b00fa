"""Kernels of metal/*.metal as MLX calls: a file is the header, the body is one line that calls its function.

Rule: same signature as the reference; whether a kernel may be used on a machine is not decided here.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx

from mlxspec.config import data_dir
from mlxspec.kernels import reference
from mlxspec.kernels.proven import Case
from mlxspec.types import Unfit

ROWS, PAIRS = 16, 128  # that small_qmm takes, and gather_small_qmm
SMALLEST = 8  # elements; MLX gives a kernel smaller arrays in another address space
COLUMNS, SPAN = 4, 256  # of a SIMD-group, as in small_qmm.metal: columns, and values of one at once
SPLIT = 8  # SIMD-groups that may share K
FILL = 2048  # SIMD-groups that keep a GPU busy: 25 for each core of the largest; a guess, measured nowhere
MATRIX_SIMDS, MATRIX_COLUMNS = 4, 16  # of a threadgroup with simdgroup_matrix

# One step of the result where both round once; in fp32 what another order of a sum may change.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2**-10, mx.bfloat16: 2**-7}

_WEIGHTS = ["w", "scales", "biases"]
_PLACE = "threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
_PARTIAL = "threadgroup float partial[SPLIT * M * QMM_COLUMNS]; "
_MATRIX = (
    "threadgroup float partial[QMM_SPLIT * ((M + 7) / 8 * 8) * QMM_WIDTH]; small_qmm_matrix<M, BITS, GROUP>"
)
_OPERANDS = "(x, w, scales, biases, y, w_shape[0], x_shape[1], partial, "
BODIES = {
    "small_qmm": _PARTIAL + "small_qmm<M, BITS, GROUP, SPLIT>" + _OPERANDS + _PLACE,
    "small_qmm_matrix": _MATRIX + _OPERANDS + _PLACE,
    "gather_small_qmm": _PARTIAL + "gather_small_qmm<M, BITS, GROUP, SPLIT>(x, experts, w, scales, biases, y,"
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
    kernel: Callable[..., list[mx.array]] = make(name, names, ["y"], BODIES[name], source("small_qmm"))
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


def _refuse(name: str, rows: int, most: int, k: int, scales: mx.array, group_size: int, bits: int) -> None:
    fits = bits in (4, 8) and group_size in (32, 64, 128) and scales.shape[-1] * group_size == k
    if not fits or not 1 <= rows <= most:
        raise Unfit(
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
    """As reference.small_qmm, by simdgroup_matrix or not. Raises Unfit for what the kernel does not do."""
    rows, columns, k = x.shape[0], w.shape[0], x.shape[1]
    _refuse("small_qmm", rows, ROWS, k, scales, group_size, bits)
    if scales.size < SMALLEST:
        more = [(0, SMALLEST - columns), (0, 0)]
        w, scales, biases = (mx.pad(a, more) for a in (w, scales, biases))
        return small_qmm(x, w, scales, biases, group_size, bits, matrix)[:, :columns]
    template = [("M", rows), ("BITS", bits), ("GROUP", group_size)]
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
    """As reference.gather_small_qmm, for at most PAIRS pairs; each row to the bit as small_qmm has it. Of one
    expert there should be no more than `tokens` pairs: where there are, its weights are read again. Raises
    Unfit for what the kernel does not do."""
    pairs, columns, k = experts.size, w.shape[1], x.shape[1]
    _refuse("gather_small_qmm", pairs, PAIRS, k, scales, group_size, bits)
    if scales.size < SMALLEST or pairs % x.shape[0]:
        raise Unfit(
            f"gather_small_qmm takes {SMALLEST} scales or more and pairs that the rows of x divide; here are"
            f" {scales.size}, {pairs} and {x.shape[0]}; use mx.gather_qmm"
        )
    split, threads, grid = _plain(columns, k)
    rows = 1 << (min(tokens, ROWS, pairs) - 1).bit_length()  # a power of two: each is compiled on its own
    return _qmm(mx.fast.metal_kernel, "gather_small_qmm")(
        inputs=[x, experts.astype(mx.uint32), w, scales, biases],
        template=[("M", rows), ("BITS", bits), ("GROUP", group_size), ("SPLIT", split)],
        grid=(grid, pairs, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(pairs, columns)],
        output_dtypes=[x.dtype],
    )[0]


def _random(
    rows: int, shape: tuple[int, ...], k: int, bits: int, group: int, dtype: mx.Dtype, seed: int
) -> tuple[mx.array, ...]:
    """x [rows, k] and the arrays of weights [*shape, k], of random bits: to quantize random weights would
    take eight times their memory."""
    keys = mx.random.split(mx.random.key(seed), 5)
    high, low = (mx.random.randint(0, 1 << 16, (*shape, k * bits // 32), mx.uint32, key) for key in keys[:2])
    scales = mx.random.uniform(0.5, 1.5, (*shape, k // group), key=keys[2]) * 2.0**-bits
    biases = scales * -(2.0 ** (bits - 1)) * mx.random.uniform(0.9, 1.1, scales.shape, key=keys[3])
    x = mx.random.normal((max(rows, ROWS), k), key=keys[4])[:rows]
    return x.astype(dtype), high << 16 | low, scales.astype(dtype), biases.astype(dtype)


def small_qmm_case(n: int, k: int, bits: int, group: int, dtype: mx.Dtype) -> Case:
    """For weights [n, k] and rows of `dtype`, which is that of the scales too."""
    how: dict[str, Any] = dict(group_size=group, bits=bits)

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        return _random(rows, (n,), k, bits, group, dtype, seed)

    def one_by_one(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """MLX may take more rows of fp32 by TF32, on an M5."""
        return mx.concatenate([reference.small_qmm(row[None], w, scales, biases, **how) for row in x])

    return Case(
        kernel="small_qmm",
        shape=f"{n}x{k} of {bits} bits, group {group}, {_named(dtype)}",
        rows=(1, 2, 4, 6, 8, 12, 16),
        inputs=inputs,
        stock=partial(mx.quantized_matmul, transpose=True, **how),
        reference=one_by_one,
        ways={way: partial(small_qmm, **how, matrix=way == "matrix") for way in ("plain", "matrix")},
        tolerance=TOLERANCE[dtype],
        nested=True,
    )


def gather_small_qmm_case(e: int, n: int, k: int, bits: int, group: int, dtype: mx.Dtype) -> Case:
    """For e experts of weights [n, k]. Its rows are pairs of a token and an expert, each with a row of x; the
    experts are drawn evenly, and sorted from as many pairs on as mlx-lm sorts them."""
    how: dict[str, Any] = dict(group_size=group, bits=bits)
    sort = 64

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        x, *weights = _random(rows, (e, n), k, bits, group, dtype, seed)
        experts = mx.random.randint(0, e, (rows,), mx.uint32, mx.random.key(seed + 1))
        return x, *weights, mx.sort(experts) if rows >= sort else experts

    def stock(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, experts: mx.array) -> mx.array:
        of: dict[str, Any] = dict(rhs_indices=experts, sorted_indices=experts.size >= sort)
        return mx.gather_qmm(x[:, None], w, scales, biases, **of, **how)[:, 0]

    return Case(
        kernel="gather_small_qmm",
        shape=f"{e}x{n}x{k} of {bits} bits, group {group}, {_named(dtype)}",
        rows=(1, 2, 4, 8, 16, 32, 64, PAIRS),
        inputs=inputs,
        stock=stock,
        reference=partial(reference.gather_small_qmm, **how),
        ways={"plain": partial(gather_small_qmm, **how)},
        tolerance=TOLERANCE[dtype],
    )


def _named(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]

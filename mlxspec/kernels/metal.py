"""Kernels of metal/*.metal as MLX calls: a file is the header, the body is one line that calls its function.

Rule: same signature as the reference; whether a kernel may be used on a machine is not decided here.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from mlxspec.config import data_dir
from mlxspec.types import Unfit

ROWS = 16  # that small_qmm takes
SHAPES = {
    False: (2, 8),
    True: (4, 16),
}  # SIMD-groups and columns of a threadgroup: without matrices, with them


@cache
def source(name: str) -> str:
    """The text of metal/<name>.metal."""
    return (data_dir("metal") / f"{name}.metal").read_text("utf-8")


@cache
def _small_qmm(make: Callable[..., Any], matrix: bool) -> Callable[..., list[mx.array]]:
    """By `make`, so that a kernel made by a simulator is not kept for the device."""
    tile, simd = "threadgroup_position_in_grid.x", "simdgroup_index_in_threadgroup"
    body = (
        "{}<M, BITS, GROUP>(x, w, scales, biases, y, w_shape[0], x_shape[1], {}, thread_index_in_simdgroup);"
    )
    if matrix:
        memory = "threadgroup float partial[QMM_SPLIT * ((M + 7) / 8 * 8) * QMM_WIDTH]; "
        name, body = "small_qmm_matrix", memory + body.format("small_qmm_matrix", f"partial, {tile}, {simd}")
    else:
        name, body = "small_qmm", body.format("small_qmm", f"{SHAPES[False][0]} * {tile} + {simd}")
    kernel: Callable[..., list[mx.array]] = make(
        name, ["x", "w", "scales", "biases"], ["y"], body, source("small_qmm")
    )
    return kernel


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
    if not 1 <= rows <= ROWS or bits not in (4, 8) or group_size not in (32, 64, 128) or k % group_size:
        raise Unfit(
            f"small_qmm takes 1 to {ROWS} rows, 4 or 8 bits and groups of 32, 64 or 128 that divide K; here"
            f" are {rows} rows, bits = {bits}, group_size = {group_size}, K = {k}; use mx.quantized_matmul"
        )
    if columns < 8:  # MLX gives the kernel arrays of fewer than 8 elements in another address space
        raise Unfit(f"small_qmm takes 8 columns or more, here are {columns}; use mx.quantized_matmul")
    simds, width = SHAPES[matrix]
    return _small_qmm(mx.fast.metal_kernel, matrix)(
        inputs=[x, w, scales, biases],
        template=[("M", rows), ("BITS", bits), ("GROUP", group_size)],
        grid=(32 * simds * -(-columns // width), 1, 1),
        threadgroup=(32 * simds, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[x.dtype],
    )[0]

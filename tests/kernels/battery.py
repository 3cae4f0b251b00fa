"""Small runs of every kernel that together leave no token of its source without a test.

Rule: a trial makes all its calls first and checks them then, so that scripts/metal can take the
sources that are asked for without running them; it raises AssertionError, or what the simulator
raises.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx

from mlxspec.kernels import matmul
from tests import metalsim
from tests.kernels import test_attention as attention
from tests.kernels import test_sampling as draw
from tests.kernels import test_small_qmm as qmm
from tests.kernels import test_tensor_qmm as tensor

Trial = Callable[[], None]
STRICT = dict.fromkeys(["shift", "float-to-int-overflow", "benign-race"], "error")


class FewerThreadgroups(metalsim.Kernel):
    """Runs a kernel on all threadgroups but the last ones of a grid's x."""

    def __call__(self, *, grid: Any, threadgroup: Any, **rest: Any) -> list[mx.array]:
        fewer = (grid[0] - threadgroup[0], *grid[1:])
        return super().__call__(grid=fewer, threadgroup=threadgroup, **rest)


def all_are_needed(call: Callable[[], mx.array]) -> None:
    """The last threadgroups have something to do: a grid that is too large is right, and slow."""
    with metalsim.patch():
        mx.fast.metal_kernel = FewerThreadgroups
        call()
    assert "output-not-written" in metalsim.last().kinds, "the last threadgroups do nothing"


def nothing_is_past_the_end(matrix: bool) -> None:
    """A last span or block that is full costs no turn of the loop more than one that is not."""
    counts = []
    for k in (480, 512) if matrix else (736, 768):
        x, weights = qmm.some(3, 16, k, 32, 4, mx.float16)
        qmm.simulated(x, weights, matrix)
        counts.append(metalsim.last().counts["simd"])
    assert counts[0] == counts[1], f"SIMD functions by K: {counts}"


def small_qmm_trial(
    counts: tuple[int, ...],
    columns: int,
    k: int,
    group: int,
    bits: int,
    dtype: mx.Dtype,
    matrix: bool,
    mode: str = "affine",
) -> None:
    """The first count of rows against the reference and its traffic, the others to the bit."""
    x, weights = qmm.some(counts[0], columns, k, group, bits, dtype, mode)
    fewer = [qmm.simulated(x[:count], weights, matrix) for count in counts[1:]]
    whole = qmm.simulated(x, weights, matrix, order=3)
    read = {name: each.read for name, each in metalsim.last().traffic.items()}
    qmm.check(whole, x, weights)
    for count, rows in zip(counts[1:], fewer, strict=True):
        assert mx.array_equal(rows, whole[:count]), f"rows of {count} are not those of {counts[0]}"
    for name, array in qmm.arrays_of(weights).items():
        assert read[name] == array.nbytes, f"{name}: {read[name]} bytes read of {array.nbytes}"


def small_qmm() -> Iterator[Trial]:
    for matrix in (False, True):
        for case in (
            ((9, 3), 13, 640, 128, 4, mx.bfloat16),
            ((3, 1), 33, 288, 32, 8, mx.float32),
            ((16, 2), 15, 96, 32, 4, mx.float16),
            ((5,), 21, 1216, 64, 8, mx.bfloat16),
            ((4, 3), 13, 2112, 64, 4, mx.float16),
        ):
            yield partial(small_qmm_trial, *case, matrix)
        for group, bits, mode in qmm.OTHERS:
            case = (5, 2), 13, 4 * max(group, 32), group, bits, mx.bfloat16
            yield partial(small_qmm_trial, *case, matrix, mode)
        if not matrix:
            for case in (
                (5, 96, 32, 4, "mxfp4"),
                (9, 544, 32, 5, "affine"),
                (6, 552, 1, 16, "none"),
            ):
                yield partial(qmm.test_experts, *case, mx.bfloat16, own=case[0] == 9)
            yield partial(qmm.test_weights_that_are_not_quantized, 5, 1160, mx.float16)
            for form in (("mxfp8", 8, 32), ("nvfp4", 4, 16)):
                yield partial(qmm.test_a_lane_has_what_mlx_dequantizes, *form)
            yield partial(qmm.test_a_product_is_added_before_it_is_rounded, 2, "affine")
            yield qmm.test_an_expert_of_more_rows_than_a_launch_holds
        x, weights = qmm.some(3, 33, 288, 32, 8, mx.float32)
        yield partial(all_are_needed, partial(qmm.multiply, x, weights, matrix))
        yield partial(nothing_is_past_the_end, matrix)


def tensor_qmm() -> Iterator[Trial]:
    for columns, k, form, dtype, order, counts in (
        (70, 640, (128, 4, "affine"), mx.bfloat16, 3, (5, 1)),
        (33, 288, (32, 8, "affine"), mx.float16, 6, (16, 3)),
        (13, 1216, (64, 5, "affine"), mx.bfloat16, 0, (9,)),
        (32, 96, (32, 4, "mxfp4"), mx.float16, 4, (2,)),
        (13, 352, (16, 4, "nvfp4"), mx.bfloat16, 1, (7,)),
    ):
        yield partial(tensor.rows_and_bytes, columns, k, form, dtype, order, counts)
    x, weights = qmm.some(3, 33, 288, 32, 8, mx.float16)
    yield partial(all_are_needed, partial(matmul.small_qmm, x, weights, "tensor"))


def paged_attention() -> Iterator[Trial]:
    step = attention.Step
    for case in (
        step(window=20, sinks=True, shapes=((1, (0, 37)), (5, (290,)))),
        step(((1, (3, 270)), (2, (40,))), mx.bfloat16, 7, 1, (96, 96), 260, True, 8),
        step(((3, (300,)),), mx.float16, 8, 1, (64, 160), None, False, 4),
        step(((2, (40,)),), heads=4, dims=(32, 64)),  # heads of V lie elsewhere
        # K comes in two parts, and a SIMD-group has two tiles of rows.
        step(((8, (40,)),), heads=8, kv=1, dims=(128, 64)),
    ):
        yield partial(attention.check, case)
    for alone in (attention.ALONE[1], attention.ALONE[3], attention.ALONE[4]):
        yield partial(attention.test_a_row_does_not_depend_on_what_runs_beside_it, alone)
    yield from (partial(attention.check, far) for far in attention.FAR)
    once = attention.test_k_and_v_are_read_once_for_all_rows_and_heads
    yield partial(once, mx.bfloat16, 128, 8, 100)
    yield partial(once, mx.float32, 64, 0, None)
    yield partial(
        attention.test_a_part_costs_its_sums_once_and_its_rows_of_q_once, mx.bfloat16, 16, 128
    )
    yield partial(attention.test_starts_that_only_the_device_knows, 257)
    unlike = attention.test_what_is_not_finite_stays_with_the_rows_that_see_it
    yield from (partial(unlike, dtype, bits) for dtype, bits in ((mx.float16, 0), (mx.bfloat16, 8)))
    yield partial(attention.check, step(window=1))
    yield attention.test_nothing_is_read_of_a_sum_that_nobody_wrote


def sample_accept() -> Iterator[Trial]:
    yield partial(draw.test_tokens_of_greedy_and_hot_rows, 1023, mx.bfloat16)
    yield partial(draw.test_tokens_of_greedy_and_hot_rows, 2500, mx.float32)
    yield partial(
        draw.test_tokens_of_greedy_and_hot_rows, 65_537, mx.float16
    )  # more parts than lanes
    yield partial(draw.test_ties_go_to_the_lowest_token, 7)
    yield draw.test_a_tie_between_the_parts_that_a_lane_joins_goes_to_the_lowest_token
    yield draw.test_ties_that_swallow_the_noise_go_to_the_lowest_token
    yield draw.test_a_floor_keeps_what_equals_it
    yield partial(draw.test_masks_and_floors, 1001)
    yield partial(draw.test_what_is_not_a_number_or_overflows, 0.5, float("nan"))
    yield from (partial(draw.test_ragged_drafts, seed) for seed in range(3))
    yield draw.test_a_row_does_not_depend_on_its_neighbours
    yield draw.test_the_ends_of_the_noise
    yield partial(draw.test_each_logit_is_read_once_and_no_noise_is_written, 16, 4097, mx.float16)


# By the name in metal/.
BATTERY: dict[str, Callable[[], Iterator[Trial]]] = {
    "paged_attention": paged_attention,
    "sample_accept": sample_accept,
    "qmm_weights": small_qmm,
    "small_qmm": small_qmm,
    "tensor_qmm": tensor_qmm,
}

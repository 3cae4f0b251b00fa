"""Products of few rows with experts, by metal/small_qmm.metal: each expert that rows have chosen is
read once for up to ROWS of its choices.

Rule: as in matmul.py. A case is made as the layer gets its rows: many choices come sorted.
"""

from dataclasses import dataclass
from functools import partial

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.kernels import reference_matmul
from mlxspec.kernels.matmul import (
    ARRAYS,
    COLUMNS,
    FILL,
    MAX_CASE_BYTES,
    PLAIN,
    QUANTIZED,
    RACED,
    ROWS,
    TOLERANCE,
    Format,
    arrays_of,
    lanes_kernel,
    over_lanes,
    random_inputs,
    template_of,
)
from mlxspec.kernels.metal import SMALLEST
from mlxspec.kernels.reference_matmul import Weights
from mlxspec.kernels.trial import Call, Case, Inputs

SORTED = 64  # choices from which on mlx-lm sorts them by expert, and rows of x with them
SHARED = 2  # choices of an expert in a race, at most, where the case has fewer experts


def _over_choices(weights: str) -> str:
    return (
        f"small_qmm_experts<M, SPLIT>({weights}, x, experts, order, x_shape[0] * PER_ROW, PER_ROW,"
        " y, w_shape[1], partial, threadgroup_position_in_grid"
    )


SMALL_QMM_EXPERTS = lanes_kernel(
    "small_qmm_experts",
    f"experts order {ARRAYS}",
    _over_choices(QUANTIZED),
)
SMALL_MM_EXPERTS = lanes_kernel("small_mm_experts", "experts order w", _over_choices(PLAIN))


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The `count` experts that rows have chosen, uint32 rising, and the order that sorts them; both
    arrays have some more elements where these are too few for a kernel."""

    experts: Array
    order: Array
    count: int


def sorted_choices(chosen: Array, is_sorted: bool = False) -> Choices:
    """Of `chosen` experts [R]."""
    count = len(chosen)
    if is_sorted:
        experts, order = chosen, mx.arange(count, dtype=mx.uint32)
    else:
        order = mx.argsort(chosen)
        experts = chosen[order]
    if count < SMALLEST:
        experts, order = (mx.pad(array, (0, SMALLEST - count)) for array in (experts, order))
    return Choices(experts, order, count)


def small_qmm_experts(x: Array, weights: Weights, choices: Choices, rows: int) -> Array:
    """As reference_matmul.small_qmm_experts in x's dtype. `rows`: no expert is chosen more often;
    beyond ROWS times, its weights are read again."""
    template = template_of(weights)
    return over_lanes(
        SMALL_QMM_EXPERTS if template else SMALL_MM_EXPERTS,
        [x, choices.experts, choices.order, *arrays_of(weights)],
        (choices.count, weights.weight.shape[1]),
        rows=rows,
        PER_ROW=choices.count // len(x),
        **template,
    )


def experts_case(experts: int, n: int, k: int, top: int, form: Format, shared: bool) -> Case:
    """For weights [experts, n, k], of which each row chooses `top`. `shared`: these choices share
    a row of K, else each has its own. Columns beyond MAX_CASE_BYTES are left out as far as this
    does not change the others' order of summing, then experts, beyond those that ROWS rows can
    choose. Where rows would share experts more than in the model, no more rows are raced."""
    most = MAX_CASE_BYTES * 8 // (k * form.bits)  # columns of all experts
    least = min(n, FILL * COLUMNS // top)
    wanted = min(experts, ROWS * top)
    some = min(wanted, max(top, most // least))
    columns = min(n, max(least, most // some))

    def inputs(seed: int) -> Inputs:
        count = 1 if shared else top
        x, *weights = random_inputs(
            form,
            (some, columns),
            k,
            seed=seed,
            rows=ROWS * count,
        )
        order = mx.random.uniform(shape=(ROWS, some), key=mx.random.key(seed))
        chosen = mx.argsort(order, axis=-1)[:, :top]
        return x.reshape(ROWS, count, k), chosen, *weights

    def run(multiply: Call, x: Array, chosen: Array, *arrays: Array) -> Array:
        rows, flat, weights = len(x), chosen.flatten(), form.weights(arrays)
        if chosen.size < SORTED:
            y = multiply(x.flatten(0, 1), weights, flat, rows, False)
        else:
            order = mx.argsort(flat)
            each = mx.broadcast_to(x, (rows, top, k)).reshape(-1, k)[order]
            y = multiply(each, weights, flat[order], rows, True)[mx.argsort(order)]
        return y.reshape(rows, top, -1)

    kind = "one row" if shared else "own rows"
    return Case(
        name=f"small_qmm_experts {top} of {experts}x{n}x{k} of {form.name}, {kind}",
        rows=tuple(range(1, 1 + ROWS)),
        raced=tuple(rows for rows in RACED if some == wanted or rows * top <= SHARED * some),
        inputs=inputs,
        stock=partial(run, partial(_by_mlx, form)),
        reference=partial(run, reference_matmul.small_qmm_experts),
        variants={"plain": partial(run, _by_kernel)},
        tolerance=TOLERANCE,
        by_row=2,
        exchangeable=True,
    )


def _by_kernel(x: Array, weights: Weights, chosen: Array, rows: int, is_sorted: bool) -> Array:
    return small_qmm_experts(x, weights, sorted_choices(chosen, is_sorted), rows)


def _by_mlx(
    form: Format,
    x: Array,
    weights: Weights,
    chosen: Array,
    rows: int,
    is_sorted: bool,
) -> Array:
    """As mlx-lm's layers."""
    count = len(chosen)
    if not is_sorted:  # choices that share a row of x do not copy it
        x, chosen = x.reshape(rows, -1, 1, x.shape[-1]), chosen.reshape(rows, -1)
    else:
        x = x[:, None]
    if weights.scales is None:
        w = weights.weight.swapaxes(-1, -2)
        y = mx.gather_mm(x, w, rhs_indices=chosen, sorted_indices=is_sorted)
    else:
        y = mx.gather_qmm(
            x,
            weights.weight,
            weights.scales,
            weights.biases,
            rhs_indices=chosen,
            sorted_indices=is_sorted,
            **form.how,
        )
    return y.reshape(count, -1)

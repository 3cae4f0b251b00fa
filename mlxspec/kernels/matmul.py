"""Products of few rows by metal/small_qmm.metal, of weights that are quantized or not.

Rule: a function has the signature of its reference; `verify` decides whether it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.kernels import reference
from mlxspec.kernels.metal import SMALLEST, MetalKernel, dtype_name, has_tensors
from mlxspec.kernels.reference import Weights
from mlxspec.kernels.trial import Call, Case, Inputs

ROWS = 16  # small_qmm takes at most
RACED = (1, 2, 3, 5, 8, 9, 16)  # the fewest and the most rows of each instance
COLUMNS = 4  # of a SIMD-group; as in small_qmm.metal
RUN = 8  # values of K that a lane reads at once; as in qmm_weights.metal
WORDS = 32  # values of K that fill whole words in each format
SPAN = 256  # values of K that a SIMD-group reads at once; as in qmm_weights.metal
MAX_SPLIT = 8  # SIMD-groups that share K
FILL = 2048  # SIMD-groups that keep a GPU busy: 25 for each core of the largest, not measured
MAX_CASE_BYTES = 96 << 20  # of the weights in a case
TOLERANCE = 1e-5  # for another order of summing
# FORMAT in small_qmm.metal, and bits and group sizes of weights, by mx.quantize's mode
FORMATS = {
    "affine": (0, (2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": (1, (4,), (32,)),
    "mxfp8": (1, (8,), (32,)),
    "nvfp4": (2, (4,), (16,)),
}
SORTED = 64  # choices from which on mlx-lm sorts them by expert
LIKELY = {1: (123, 129), 2: (24, 72)}  # scales of a case: powers of two, and floats, as their codes

FILES = "qmm_weights small_qmm"
_PARTIAL = "threadgroup float partial[SPLIT * M * QMM_COLUMNS]; "
_QUANTIZED = "qmm_quantized<BITS, GROUP, FORMAT>(w, scales, biases, x_shape[1])"
_LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
_TILE = "partial, threadgroup_position_in_grid.x, " + _LANE


def _over_rows(name: str, inputs: str, weights: str) -> MetalKernel:
    return MetalKernel(
        name,
        FILES,
        inputs=f"x {inputs}",
        outputs="y",
        body=f"{_PARTIAL} small_qmm<M, SPLIT>(QmmRows(), {weights}, x, x_shape[0], y, w_shape[0], "
        + _TILE,
    )


def _over_choices(name: str, inputs: str, weights: str) -> MetalKernel:
    return MetalKernel(
        name,
        FILES,
        inputs=f"x experts order {inputs}",
        outputs="y",
        body=f"{_PARTIAL} small_qmm_experts<M, SPLIT>({weights}, x, experts, order, "
        + "x_shape[0] * PER_ROW, PER_ROW, y, w_shape[1], partial, threadgroup_position_in_grid, "
        + _LANE,
    )


_ARRAYS = "w scales biases"
_PLAIN = "qmm_plain(w, x_shape[1])"
SMALL_QMM = _over_rows("small_qmm", _ARRAYS, _QUANTIZED)
SMALL_MM = _over_rows("small_mm", "w", _PLAIN)
SMALL_QMM_EXPERTS = _over_choices("small_qmm_experts", _ARRAYS, _QUANTIZED)
SMALL_MM_EXPERTS = _over_choices("small_mm_experts", "w", _PLAIN)
SMALL_QMM_MATRIX = MetalKernel(
    "small_qmm_matrix",
    FILES,
    f"x {_ARRAYS}",
    outputs="y",
    body="threadgroup float partial[QMM_SPLIT * M * QMM_WIDTH]; "
    + "small_qmm_matrix<M, BITS, GROUP, FORMAT>(x, x_shape[0], w, scales, biases, y, w_shape[0], "
    + "x_shape[1], "
    + _TILE,
)

SMALL_QMM_TENSOR = MetalKernel(
    "small_qmm_tensor",
    "qmm_weights tensor_qmm",
    f"x {_ARRAYS}",
    outputs="y",
    body="threadgroup float shared[TENSOR_SPLIT * TENSOR_TILE]; "
    + f"tensor_qmm({_QUANTIZED}, x, x_shape[0], y, w_shape[0], shared, "
    + "threadgroup_position_in_grid.x, "
    + _LANE,
)
# By the variant: a kernel, SIMD-groups and columns of a threadgroup, rows of the smallest instance
TILED = {"matrix": (SMALL_QMM_MATRIX, 4, 16, 8), "tensor": (SMALL_QMM_TENSOR, 8, 32, 16)}


def _split(n: int, k: int) -> int:
    """How many SIMD-groups share K: by the shape alone, because it sets the order of summing."""
    split = 1
    while split < MAX_SPLIT and 2 * split * SPAN <= k and split * ceil(n / COLUMNS) < FILL:
        split *= 2
    return split


def _capacity(rows: int) -> int:
    """Rows of an instance: a power of two, because each instance is compiled and verified."""
    return 1 << (rows - 1).bit_length()


def small_qmm(x: Array, weights: Weights, variant: str = "plain") -> Array:
    """As reference.small_qmm in x's dtype, for 1 to ROWS rows; a `variant` of its case."""
    rows, columns = len(x), len(weights.weight)
    arrays, template = [x, *_arrays(weights)], _template(weights)
    if variant == "plain":
        kernel = SMALL_QMM if template else SMALL_MM
        return _over_lanes(kernel, arrays, (rows, columns), **template)
    kernel, simds, width, least = TILED[variant]
    threads = 32 * simds
    return kernel(
        arrays,
        (threads * ceil(columns / width), 1, 1),
        (threads, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[x.dtype],
        M=_capacity(max(least, rows)),
        **template,
    )[0]


def _over_lanes(
    kernel: MetalKernel,
    arrays: list[Array],
    shape: tuple[int, int],
    rows: int = 0,
    **template: int,
) -> Array:
    """y of this shape by a kernel that sums over the lanes of SIMD-groups; x is the first of the
    arrays. `rows`: of the step, where y has several for each, which other threadgroups compute."""
    x, (count, columns) = arrays[0], shape
    split = _split(columns * count // rows if rows else columns, x.shape[1])
    threads = 32 * max(2, split)
    width = COLUMNS if split > 1 else 2 * COLUMNS
    return kernel(
        arrays,
        (threads * ceil(columns / width), count if rows else 1, 1),
        (threads, 1, 1),
        output_shapes=[shape],
        output_dtypes=[x.dtype],
        M=_capacity(min(rows or count, ROWS)),
        SPLIT=split,
        **template,
    )[0]


def _arrays(weights: Weights) -> list[Array]:
    """Of the kernel, which reads no biases where there are none, but must be given some."""
    if weights.scales is None:
        return [weights.weight]
    scales, biases = weights.scales, weights.biases
    return [weights.weight, scales, scales if biases is None else biases]


def _template(weights: Weights) -> dict[str, int]:
    """Constants of an instance for quantized weights; for others there are none."""
    if weights.scales is None:
        return {}
    return {
        "BITS": weights.bits,
        "GROUP": weights.group_size,
        "FORMAT": FORMATS[weights.mode][0],
    }


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The `count` experts that rows have chosen, uint32 rising, and the order that sorts them; both
    arrays have some more elements where these are too few for a kernel."""

    experts: Array
    order: Array
    count: int


def sorted_choices(chosen: Array) -> Choices:
    order = mx.argsort(chosen)
    count = len(order)
    experts = chosen[order]
    if count < SMALLEST:
        experts, order = (mx.pad(array, (0, SMALLEST - count)) for array in (experts, order))
    return Choices(experts, order, count)


def small_qmm_experts(
    x: Array,
    weights: Weights,
    chosen: Array | Choices,
    rows: int,
) -> Array:
    """As reference.small_qmm_experts in x's dtype. `rows`: no expert is chosen more often; beyond
    ROWS times, its weights are read again."""
    choices = chosen if isinstance(chosen, Choices) else sorted_choices(chosen)
    template = _template(weights)
    return _over_lanes(
        SMALL_QMM_EXPERTS if template else SMALL_MM_EXPERTS,
        [x, choices.experts, choices.order, *_arrays(weights)],
        (choices.count, weights.weight.shape[1]),
        rows=rows,
        PER_ROW=choices.count // len(x),
        **template,
    )


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are quantized, if their mode is not "none", and the dtype of rows and results.
    `numbers`: the dtypes of scales and biases of affine ones, where they are others."""

    bits: int
    group_size: int
    mode: str
    dtype: mx.Dtype
    numbers: tuple[mx.Dtype, mx.Dtype] | None = None

    @property
    def quantized(self) -> bool:
        return self.mode != "none"

    def supports(self, k: int) -> bool:
        """Whether there are kernels for weights with this K."""
        if not self.quantized:
            return self.dtype.size == 2 and k % RUN == 0
        _, bits, groups = FORMATS.get(self.mode, (0, (), ()))
        return self.bits in bits and self.group_size in groups and k % WORDS == 0

    @property
    def how(self) -> Any:
        """MLX's arguments."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def weights(self, arrays: Sequence[Array]) -> Weights:
        """Of weight, scales and biases, as far as it has these."""
        weight, *others = arrays
        scales, biases = (*others, None, None)[:2]
        return Weights(weight, scales, biases, **self.how)

    @property
    def name(self) -> str:
        if not self.quantized:
            return dtype_name(self.dtype)
        form = self.mode
        if form == "affine":
            form = f"{self.bits} bits, group {self.group_size}"
        of = "".join(f" {dtype_name(dtype)}" for dtype in self.numbers or ())
        return f"{form}, {dtype_name(self.dtype)}{of and f' of{of}'}"


def format_of(layer: Any, dtype: mx.Dtype) -> Format:
    """The Format of a layer. `dtype`: of its rows, where its scales are no floats."""
    if "scales" not in layer:
        dtype = layer.weight.dtype
        return Format(8 * dtype.size, 1, "none", dtype)
    numbers = None
    if layer.mode == "affine":
        numbers = layer.scales.dtype, layer.biases.dtype
        # MLX's result type, as x is of one of them.
        dtype = numbers[0] if numbers[0] == numbers[1] else mx.float32
        if numbers == (dtype, dtype):
            numbers = None
    return Format(layer.bits, layer.group_size, layer.mode, dtype, numbers)


def _variants(form: Format) -> list[str]:
    """By which kernels a layer may be multiplied here."""
    if not form.quantized:
        return ["plain"]
    tensors = form.dtype != mx.float32 and has_tensors()
    return ["plain", *(name for name in TILED if name != "tensor" or tensors)]


def small_qmm_case(n: int, k: int, form: Format) -> Case:
    """For weights [n, k] of this format. Columns beyond MAX_CASE_BYTES are left out, as far as this
    does not change the others' order of summing."""
    columns = min(n, max(FILL * COLUMNS, MAX_CASE_BYTES * 8 // (k * form.bits)))

    def run(multiply: Call, *arrays: Array) -> Array:
        x, *weights = arrays
        return multiply(x, form.weights(weights))

    return Case(
        name=f"small_qmm {n}x{k} of {form.name}",
        rows=tuple(range(1, 1 + ROWS)),
        raced=RACED,
        inputs=partial(
            _inputs,
            form,
            (columns,),
            k,
        ),
        stock=partial(_layer_by_mlx, form),
        reference=partial(run, reference.small_qmm),
        variants={way: partial(run, partial(small_qmm, variant=way)) for way in _variants(form)},
        tolerance=TOLERANCE,
        exchangeable=True,
    )


def experts_case(experts: int, n: int, k: int, top: int, form: Format, shared: bool) -> Case:
    """For weights [experts, n, k], of which each row chooses `top`. `shared`: these choices share
    a row of K, else each has its own. Columns beyond MAX_CASE_BYTES are left out as above, and
    experts beyond that, or that ROWS rows cannot all choose."""
    most = MAX_CASE_BYTES * 8 // (k * form.bits)  # columns of all experts
    columns = min(n, max(FILL * COLUMNS // top, most // top))
    some = min(experts, ROWS * top, max(top, most // columns))

    def inputs(seed: int) -> Inputs:
        count = 1 if shared else top
        x, *weights = _inputs(
            form,
            (some, columns),
            k,
            seed=seed,
            rows=ROWS * count,
        )
        order = mx.random.uniform(shape=(ROWS, some), key=mx.random.key(seed))
        chosen = mx.argsort(order, axis=-1)[:, :top]
        return x.reshape(ROWS, count, k), chosen, *weights

    def run(multiply: Call, x: Array, chosen: Array, *weights: Array) -> Array:
        y = multiply(x.flatten(0, 1), form.weights(weights), chosen.flatten(), len(x))
        return y.reshape(len(x), top, -1)

    return Case(
        name=f"small_qmm_experts {top} of {experts}x{n}x{k} of {form.name}",
        rows=tuple(range(1, 1 + ROWS)),
        raced=RACED,
        inputs=inputs,
        stock=partial(_experts_by_mlx, form),
        reference=partial(run, reference.small_qmm_experts),
        variants={"plain": partial(run, small_qmm_experts)},
        tolerance=TOLERANCE,
        by_row=2,
        exchangeable=True,
    )


def _layer_by_mlx(form: Format, x: Array, *weights: Array) -> Array:
    """As mlx.nn's layers."""
    if not form.quantized:
        return x @ weights[0].T
    multiply: Call = partial(mx.quantized_matmul, transpose=True, **form.how)
    return multiply(x, *weights)


def _experts_by_mlx(form: Format, x: Array, chosen: Array, *weights: Array) -> Array:
    """As mlx-lm's experts: many choices are sorted before."""
    count = chosen.size
    x = mx.broadcast_to(x, (*chosen.shape, x.shape[-1])).reshape(count, 1, -1)
    flat = chosen.flatten()
    multiply: Call = partial(mx.gather_qmm, transpose=True, **form.how)
    if not form.quantized:
        multiply, weights = mx.gather_mm, (weights[0].swapaxes(-1, -2),)
    if count < SORTED:
        y = multiply(x, *weights, rhs_indices=flat)
    else:
        order = mx.argsort(flat)
        y = multiply(x[order], *weights, rhs_indices=flat[order], sorted_indices=True)
        y = y[mx.argsort(order)]
    return y.reshape(*chosen.shape, -1)


def _inputs(
    form: Format,
    columns: tuple[int, ...],
    k: int,
    seed: int,
    rows: int = ROWS,
) -> Inputs:
    """x [rows, k], and the arrays of weights [*columns, k]."""
    of_x, of_w, of_scales = mx.random.split(mx.random.key(seed), 3)
    x = mx.random.normal((rows, k), key=of_x).astype(form.dtype)
    if not form.quantized:
        return x, mx.random.normal((*columns, k), form.dtype, scale=k**-0.5, key=of_w)
    # Random bits: quantizing random weights would take eight times their memory.
    words = prod(columns) * k * form.bits // 32
    w = mx.random.split(of_w, ceil(words / 2)).flatten()[:words].reshape(*columns, -1)  # keys
    shape = *columns, k // form.group_size
    if form.mode == "affine":
        of_scale, of_bias = form.numbers or (form.dtype, form.dtype)
        scales = mx.random.uniform(0.5, 1.5, shape, key=of_scales) / 2**form.bits
        biases = -scales * 2 ** (form.bits - 1)
        return x, w, scales.astype(of_scale), biases.astype(of_bias)
    if form.bits == 8:
        w = w & 0xBFBFBFBF  # no code that is no number
    low, high = LIKELY[FORMATS[form.mode][0]]
    return x, w, mx.random.randint(low, high, shape, mx.uint8, key=of_scales)

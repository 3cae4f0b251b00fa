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

from mlxspec.kernels import reference_matmul
from mlxspec.kernels.metal import MetalKernel, dtype_name, has_tensors
from mlxspec.kernels.reference_matmul import Weights
from mlxspec.kernels.trial import Call, Case, Inputs

ROWS = 16  # small_qmm takes at most
RACED = (1, 2, 3, 4, 5, 8, 9, 16)  # the fewest and the most rows of each instance
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
LIKELY = {1: (123, 129), 2: (24, 72)}  # scales of a case: powers of two, and floats, as their codes

FILES = "qmm_weights small_qmm"
QUANTIZED = "qmm_quantized<BITS, GROUP, FORMAT>(w, scales, biases, x_shape[1])"
_LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
_TILE = "threadgroup_position_in_grid.x, " + _LANE


def lanes_kernel(name: str, inputs: str, call: str) -> MetalKernel:
    """A kernel that sums over the lanes of SIMD-groups; `call`: a function of small_qmm.metal and
    its arguments, but for the last two."""
    return MetalKernel(
        name,
        FILES,
        inputs=f"x {inputs}",
        outputs="y",
        body=f"threadgroup float partial[SPLIT * M * QMM_COLUMNS]; {call}, {_LANE}",
    )


def _over_rows(weights: str) -> str:
    return (
        f"small_qmm<M, SPLIT>(QmmRows(), {weights}, x, x_shape[0], y, w_shape[0], partial,"
        " threadgroup_position_in_grid.x"
    )


ARRAYS = "w scales biases"
PLAIN = "qmm_plain(w, x_shape[1])"
SMALL_QMM = lanes_kernel("small_qmm", ARRAYS, _over_rows(QUANTIZED))
SMALL_MM = lanes_kernel("small_mm", "w", _over_rows(PLAIN))
SMALL_QMM_MATRIX = MetalKernel(
    "small_qmm_matrix",
    FILES,
    f"x {ARRAYS}",
    outputs="y",
    body="threadgroup float partial[QMM_SPLIT * M * QMM_WIDTH]; "
    + "small_qmm_matrix<M, BITS, GROUP, FORMAT>(x, x_shape[0], w, scales, biases, y, w_shape[0], "
    + "x_shape[1], partial, "
    + _TILE,
)

SMALL_QMM_TENSOR = MetalKernel(
    "small_qmm_tensor",
    "qmm_weights tensor_qmm",
    f"x {ARRAYS}",
    outputs="y",
    body="threadgroup float shared[TENSOR_SPLIT * TENSOR_TILE]; "
    + f"tensor_qmm({QUANTIZED}, x, x_shape[0], y, w_shape[0], shared, "
    + _TILE,
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
    """As reference_matmul.small_qmm in x's dtype, for 1 to ROWS rows; a `variant` of its case."""
    rows, columns = len(x), len(weights.weight)
    arrays, template = [x, *arrays_of(weights)], template_of(weights)
    if variant == "plain":
        kernel = SMALL_QMM if template else SMALL_MM
        return over_lanes(kernel, arrays, (rows, columns), **template)
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


def over_lanes(
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


def arrays_of(weights: Weights) -> list[Array]:
    """Of the kernel, which reads no biases where there are none, but must be given some."""
    if weights.scales is None:
        return [weights.weight]
    scales, biases = weights.scales, weights.biases
    return [weights.weight, scales, scales if biases is None else biases]


def template_of(weights: Weights) -> dict[str, int]:
    """Constants of an instance for quantized weights; for others there are none."""
    if weights.scales is None:
        return {}
    return {
        "BITS": weights.bits,
        "GROUP": weights.group_size,
        "FORMAT": FORMATS[weights.mode][0],
    }


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
            return self.dtype in (mx.float16, mx.bfloat16) and k % RUN == 0
        _, bits, groups = FORMATS.get(self.mode, (0, (), ()))
        return self.bits in bits and self.group_size in groups and k % WORDS == 0

    @property
    def how(self) -> Any:
        """MLX's arguments."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def weights(self, arrays: Sequence[Any]) -> Weights:
        """Of weight, scales and biases, as far as it has these."""
        return Weights(*arrays, **self.how)

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
        dtype = mx.result_type(*numbers)  # of MLX's result, as x is of one of them
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

    def run(multiply: Call, x: Array, *weights: Array) -> Array:
        return multiply(x, form.weights(weights))

    return Case(
        name=f"small_qmm {n}x{k} of {form.name}",
        rows=tuple(range(1, 1 + ROWS)),
        raced=RACED,
        inputs=partial(
            random_inputs,
            form,
            (columns,),
            k,
        ),
        stock=partial(_layer_by_mlx, form),
        reference=partial(run, reference_matmul.small_qmm),
        variants={way: partial(run, partial(small_qmm, variant=way)) for way in _variants(form)},
        tolerance=TOLERANCE,
        exchangeable=True,
    )


def _layer_by_mlx(form: Format, x: Array, *weights: Array) -> Array:
    """As mlx.nn's layers."""
    if not form.quantized:
        return x @ weights[0].T
    multiply: Call = partial(mx.quantized_matmul, transpose=True, **form.how)
    return multiply(x, *weights)


def random_inputs(
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

"""Metal kernels in a loaded model's layers, and the cases to verify for a model.

Rule: a layer's kernel runs for the rows that its verdict names, looked up at each call, else MLX's
own operation. Layers only change their class, so that arrays, names and other models stay the same.
"""

from collections.abc import Callable
from math import ceil, prod
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxspec.kernels import experts, matmul
from mlxspec.kernels.experts import Choices
from mlxspec.kernels.matmul import Format
from mlxspec.kernels.metal import SMALLEST
from mlxspec.kernels.reference import Weights
from mlxspec.kernels.sampling import sample_accept_case
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import KERNELS
from mlxspec.model.runner import Runner
from mlxspec.sequences import SeqState, Span

TOKENS = (0,)  # of the step whose cases are recorded: of more rows, experts may come sorted
CASE_BLOCKS = 1 + len(TOKENS)  # enough for blocks of one token


def _multiply(layer: Any, x: Array, otherwise: Callable[[Array], Any]) -> Any:
    """x [..., K] times the layer's weights, [..., N]; `otherwise` is MLX's own operation."""
    if KERNELS.recorded is not None:
        KERNELS.recorded.append(layer.case)
    *batch, k = x.shape
    variant = KERNELS.variant(layer.case.name, prod(batch))
    if not (variant and _fits(layer, x)):
        return otherwise(x)
    rows = x.reshape(-1, k).astype(layer.form.dtype)
    y = matmul.small_qmm(rows, _weights(layer), variant).reshape(*batch, -1)
    return y + layer["bias"] if "bias" in layer else y


def _fits(layer: Any, x: Array) -> bool:
    """Whether MLX's result has the dtype of the layer's case."""
    form: Format = layer.form
    if form.mode == "affine":  # scales and biases count in it
        return bool(mx.result_type(x.dtype, form.dtype) == form.dtype)
    return bool(x.dtype == form.dtype)


def _weights(layer: Any) -> Any:
    return layer if layer.form.quantized else Weights(layer.weight)


class _Linear:
    def __call__(self, x: Array) -> Any:
        return _multiply(self, x, super().__call__)  # type: ignore[misc]


class _Tied:
    def as_linear(self, x: Array) -> Any:
        return _multiply(self, x, super().as_linear)  # type: ignore[misc]


class KernelLinear(_Linear, nn.QuantizedLinear):
    pass


class KernelEmbedding(_Tied, nn.QuantizedEmbedding):
    pass


class KernelDense(_Linear, nn.Linear):
    pass


class KernelDenseEmbedding(_Tied, nn.Embedding):
    pass


class _Experts:
    """A product of experts. `case`: None until a step of a few rows is recorded, which shows how
    many experts a row chooses, `top`. `shape`: of the weights as floats."""

    form: Format
    shape: tuple[int, int, int]
    case: Case | None
    top: int
    _last: ClassVar[tuple[Array, Choices] | None] = None  # the layer's other products have the same

    def __call__(self, x: Array, indices: Array, sorted_indices: bool = False) -> Any:
        """x [*rows, top or 1, 1, K] with indices [*rows, top]; or sorted by expert, [R, 1, K] with
        [R]."""
        if KERNELS.recorded is not None and not sorted_indices:
            self.top = indices.shape[-1]
            self.case = experts.experts_case(
                *self.shape,
                top=self.top,
                form=self.form,
                shared=x.shape[-3] == 1,
            )
            KERNELS.recorded.append(self.case)
        rows = ceil(indices.size / self.top)
        ours = self.case and KERNELS.variant(self.case.name, rows)
        if not (ours and _fits(self, x)):
            return super().__call__(x, indices, sorted_indices)  # type: ignore[misc]
        last = _Experts._last
        if last is None or last[0] is not indices:
            last = indices, experts.sorted_choices(indices.flatten(), sorted_indices)
            _Experts._last = last
        flat = x.reshape(-1, x.shape[-1]).astype(self.form.dtype)
        y = experts.small_qmm_experts(flat, _weights(self), last[1], rows)
        y = y.reshape(*indices.shape, 1, -1)
        layer: Any = self
        return y + layer["bias"][indices][..., None, :] if "bias" in layer else y


class KernelSwitchLinear(_Experts, QuantizedSwitchLinear):
    pass


class KernelDenseSwitchLinear(_Experts, SwitchLinear):
    pass


CLASSES: dict[Any, Any] = {
    nn.QuantizedLinear: KernelLinear,
    nn.QuantizedEmbedding: KernelEmbedding,
    QuantizedSwitchLinear: KernelSwitchLinear,
    SwitchLinear: KernelDenseSwitchLinear,
    nn.Linear: KernelDense,
    nn.Embedding: KernelDenseEmbedding,
}


def install(model: nn.Module) -> None:
    """Let the model's layers use kernels. Idempotent; changes nothing until kernels are proven."""
    dtype = coarsest_dtype(model)
    for layer in model.modules():
        if type(layer) in CLASSES:
            _install(layer, dtype)


def _install(layer: Any, dtype: mx.Dtype) -> None:
    form = matmul.format_of(layer, dtype)
    last = layer.get("scales", layer.weight)
    *lead, n, groups = last.shape
    k = groups * form.group_size
    if not form.supports(k) or last.size < SMALLEST or layer.get("global_scale") is not None:
        return
    layer.__class__ = CLASSES[type(layer)]
    layer.form = form
    if lead:
        layer.shape, layer.case, layer.top = (*lead, n, k), None, 1
    else:
        layer.case = matmul.small_qmm_case(n, k, form)


def coarsest_dtype(model: nn.Module) -> mx.Dtype:
    """What a model computes in: the smallest of its floating weights."""
    arrays: Any = tree_flatten(model.parameters())
    found = {x.dtype for _, x in arrays}
    floats = [dtype for dtype in found if mx.issubdtype(dtype, mx.floating)]
    return min(floats, key=lambda dtype: dtype.size, default=mx.float32)


def linear_cases(model: nn.Module) -> list[Case]:
    """The cases of an installed model's linear layers."""
    kinds = KernelLinear, KernelDense
    return [layer.case for layer in model.modules() if isinstance(layer, kinds)]


def kernel_cases(runner: Runner) -> list[Case]:
    """The cases of all kernels that a step of an installed model calls. The runner has CASE_BLOCKS
    blocks and no other use."""
    span = Span(
        SeqState(),
        tables=[[*range(1, CASE_BLOCKS)]],
        tokens=[*TOKENS],
        start=0,
        count=len(TOKENS),
        samples=True,
    )
    KERNELS.recorded = cases = list[Case]()
    try:
        logits = runner.forward([span], None).logits
    finally:
        KERNELS.recorded = None
    for dtype in (logits.dtype, mx.float32):  # the latter with a bias or penalty
        cases.append(sample_accept_case(logits.shape[-1], dtype))
    return cases

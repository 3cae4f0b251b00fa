"""Metal kernels in a loaded model's layers, and the cases to verify for a model.

Rule: a layer's kernel runs for the rows that its verdict names, looked up at each call, else MLX's
own operation. Layers only change their class, so that arrays, names and other models stay the same.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import ceil, prod
from typing import Any
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxspec.kernels import experts, matmul
from mlxspec.kernels.experts import Choices
from mlxspec.kernels.metal import SMALLEST
from mlxspec.kernels.reference_matmul import Weights
from mlxspec.kernels.sampling import sample_accept_case
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import KERNELS
from mlxspec.model.runner import Runner
from mlxspec.sequences import SeqState, Span

SORTED: dict[int, Choices] = {}  # by the id of the chosen indices, as long as these live
CASE_BLOCKS = 2  # of the step whose cases are recorded: of more rows, experts may come sorted


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


def _fits(layer: Any, x: Array) -> Any:
    """Whether the layer has the size that was installed, and MLX's result the dtype of its case."""
    last = layer.get("scales", layer["weight"])  # codes of 8 bits change no dtype
    dtype = mx.result_type(x, last, layer.get("biases", last))
    return dtype == layer.form.dtype and last.shape == layer.size


def _weights(layer: Any) -> Any:
    return layer if "scales" in layer else Weights(layer.weight)


class _Linear:
    def __call__(self, x: Array) -> Any:
        return _multiply(self, x, super().__call__)  # type: ignore[misc]


class _Tied:
    def as_linear(self, x: Array) -> Any:
        return _multiply(self, x, super().as_linear)  # type: ignore[misc]


class _Experts:
    """A product of experts. `case`: None until a step of a few rows is recorded, which shows how
    many experts a row chooses, `top`."""

    def __call__(self: Any, x: Array, indices: Array, sorted_indices: bool = False) -> Any:
        """x [*rows, top or 1, 1, K] with indices [*rows, top]; or sorted by expert, [R, 1, K] with
        [R]."""
        if KERNELS.recorded is not None and not sorted_indices:
            self.top = indices.shape[-1]
            self.case = self.make_case(top=self.top, shared=x.shape[-3] == 1)
            KERNELS.recorded.append(self.case)
        rows = ceil(indices.size / self.top)
        ours = self.case and KERNELS.variant(self.case.name, rows) and _fits(self, x)
        if not ours:
            return super().__call__(x, indices, sorted_indices)  # type: ignore[misc]
        choices = SORTED.get(id(indices))
        if choices is None:
            choices = SORTED[id(indices)] = experts.sorted_choices(
                indices.flatten(), sorted_indices
            )
            finalize(indices, SORTED.pop, id(indices))
        flat = x.reshape(-1, x.shape[-1]).astype(self.form.dtype)
        y = experts.small_qmm_experts(flat, _weights(self), choices, rows).reshape(
            *indices.shape, 1, -1
        )
        return y + self["bias"][indices][..., None, :] if "bias" in self else y


CLASSES: dict[Any, Any] = {
    kind: type(f"Kernel{kind.__name__}", (ours, kind), {})
    for ours, *kinds in (
        (_Linear, nn.QuantizedLinear, nn.Linear),
        (_Tied, nn.QuantizedEmbedding, nn.Embedding),
        (_Experts, QuantizedSwitchLinear, SwitchLinear),
    )
    for kind in kinds
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
    if not form.supports(k) or last.size < SMALLEST or "global_scale" in layer:
        return
    layer.__class__ = CLASSES[type(layer)]
    layer.form, layer.size = form, last.shape
    if lead:
        layer.make_case = partial(experts.experts_case, lead[0], n, k, form=form)
        layer.case, layer.top = None, 1
    else:
        layer.case = matmul.small_qmm_case(n, k, form)


def coarsest_dtype(model: nn.Module) -> mx.Dtype:
    """What a model computes in: the smallest of its floating weights, of two the more frequent."""
    arrays: Any = tree_flatten(model.parameters())
    found = Counter(x.dtype for _, x in arrays if mx.issubdtype(x.dtype, mx.floating))
    return min(found, key=lambda dtype: (dtype.size, -found[dtype]), default=mx.float32)


def linear_cases(model: nn.Module, run: Callable[[], Any]) -> list[Case]:
    """The cases of an installed model's linear layers, and of the experts that `run` calls."""
    _recorded(run)
    layers: Any = model.modules()
    kinds: Any = _Linear, _Experts
    return [layer.case for layer in layers if isinstance(layer, kinds) and layer.case]


def kernel_cases(runner: Runner) -> list[Case]:
    """The cases of all kernels that a step of an installed model calls. The runner has CASE_BLOCKS
    blocks and no other use."""
    span = Span(
        SeqState(),
        tables=[[1]],
        tokens=[0],
        start=0,
        count=1,
        samples=True,
    )
    cases, step = _recorded(lambda: runner.forward([span], None))
    logits = step.logits
    for dtype in (logits.dtype, mx.float32):  # the latter with a bias or penalty
        cases.append(sample_accept_case(logits.shape[-1], dtype))
    return cases


def _recorded(run: Callable[[], Any]) -> tuple[list[Case], Any]:
    """The cases of what `run` calls, and its result."""
    KERNELS.recorded = cases = list[Case]()
    try:
        return cases, run()
    finally:
        KERNELS.recorded = None

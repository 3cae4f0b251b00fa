"""Metal kernels in a loaded model's quantized layers, and the cases to verify for a model.

Rule: a layer's kernel runs for the rows that its verdict names, looked up at each call, else MLX's
own operation. Layers only change their class, so that arrays, names and other models stay the same.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array

from mlxspec.kernels import matmul
from mlxspec.kernels.metal import SMALLEST
from mlxspec.kernels.sampling import sample_accept_case
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import KERNELS
from mlxspec.model.runner import Runner
from mlxspec.sequences import SeqState, Span

TOKENS = (0, 0, 0)  # of the step whose cases are recorded
CASE_BLOCKS = 1 + len(TOKENS)  # enough for blocks of one token


def _multiply(layer: Any, x: Array, otherwise: Callable[[Array], Any]) -> Any:
    """x [..., K] times the layer's weights, [..., N]; `otherwise` is MLX's own operation."""
    if KERNELS.recorded is not None:
        KERNELS.recorded.append(layer.case)
    *batch, k = x.shape
    variant = KERNELS.variant(layer.case.name, prod(batch))
    if not variant or x.dtype != layer.scales.dtype:
        return otherwise(x)
    rows = x.reshape(-1, k)
    y = matmul.small_qmm(rows, layer, variant == "matrix")
    y = y.reshape(*batch, -1)
    return y + layer["bias"] if "bias" in layer else y


class KernelLinear(nn.QuantizedLinear):
    def __call__(self, x: Array) -> Any:
        return _multiply(self, x, super().__call__)


class KernelEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: Array) -> Any:
        return _multiply(self, x, super().as_linear)


CLASSES: dict[Any, Any] = {nn.QuantizedLinear: KernelLinear, nn.QuantizedEmbedding: KernelEmbedding}


def install(model: nn.Module) -> None:
    """Let the model's layers use kernels. Idempotent; changes nothing until kernels are proven."""
    for layer in model.modules():
        if type(layer) in CLASSES and _supported(layer):
            layer.__class__ = CLASSES[type(layer)]
            n, groups = layer.scales.shape
            layer.case = matmul.small_qmm_case(
                n,
                groups * layer.group_size,
                layer.bits,
                layer.group_size,
                layer.scales.dtype,
            )


def linear_cases(model: nn.Module) -> list[Case]:
    """The cases of an installed model's linear layers."""
    return [layer.case for layer in model.modules() if isinstance(layer, KernelLinear)]


def _supported(layer: Any) -> bool:
    if layer.mode != "affine" or layer.bits not in (4, 8):
        return False
    return bool(layer.scales.size >= SMALLEST and layer.scales.dtype == layer.biases.dtype)


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

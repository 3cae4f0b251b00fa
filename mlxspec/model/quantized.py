"""Metal kernels in a loaded model's quantized layers, and the cases to verify for a model.

Rule: a layer's kernel runs for the rows that its verdict names, looked up at each call, else MLX's
own operation. Layers only change their class, so that arrays, names and other models stay.
"""

from collections.abc import Callable
from math import prod
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array

from mlxspec import log
from mlxspec.kernels import matmul
from mlxspec.kernels.metal import SMALLEST
from mlxspec.kernels.sampling import sample_accept_case
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import KERNELS
from mlxspec.model.runner import Layout, Runner
from mlxspec.types import Entry, Request, Seq

TOKENS = (0, 0, 0)  # of the step whose cases are recorded


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


CLASSES: dict[Any, Any] = {
    nn.QuantizedLinear: KernelLinear,
    nn.QuantizedEmbedding: KernelEmbedding,
}


def install(model: nn.Module) -> None:
    """Let the model's layers use kernels. Idempotent; changes nothing until kernels are proven."""
    for layer in model.modules():
        if type(layer) in CLASSES and _supported(layer):
            layer.__class__ = CLASSES[type(layer)]
            layer.case = _case(layer)


def linear_cases(model: nn.Module) -> list[Case]:
    """The cases of an installed model's linear layers, each once."""
    layers = [layer for layer in model.modules() if isinstance(layer, KernelLinear)]
    return list({layer.case.name: layer.case for layer in layers}.values())


def _supported(layer: Any) -> bool:
    if layer.mode != "affine" or layer.bits not in (4, 8):
        return False
    return bool(layer.scales.size >= SMALLEST and layer.scales.dtype == layer.biases.dtype)


def _case(layer: Any) -> Case:
    n, groups = layer.scales.shape
    return matmul.small_qmm_case(
        n,
        groups * layer.group_size,
        layer.bits,
        layer.group_size,
        layer.scales.dtype,
    )


def kernel_cases(
    model: nn.Module,
    block_size: int,
    kv_bits: int = 0,
) -> list[Case]:
    """The cases of all kernels that a step of an installed model calls, each once, before a runner
    replaces the model's trunk. The step is built and never computed: no weight is read."""
    table = list(range(1, 1 + len(TOKENS)))  # enough for blocks of one token
    seq = Seq(Request("shapes", TOKENS, 1), tokens=list(TOKENS), table=table)
    for layout in get_args(Layout):
        found: list[Case] = []
        KERNELS.recorded = found
        try:
            size = 1 + len(table)
            runner = Runner(model, layout, block_size, size, trunk=False, kv_bits=kv_bits)
            logits = runner.forward([Entry(seq, 0, len(TOKENS), True)], None).logits
        except Exception as failed:  # of the model's own code; another layout may fit
            log.debug("no shapes in the %s layout: %s", layout, failed)
            continue
        finally:
            KERNELS.recorded = None
        vocab = logits.shape[-1]
        for dtype in (logits.dtype, mx.float32):  # the latter of a bias or penalty
            found.append(sample_accept_case(vocab, dtype))
        return list({case.name: case for case in found}.values())
    return []

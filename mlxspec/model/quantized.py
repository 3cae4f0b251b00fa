"""Metal kernels in a loaded model's quantized layers, and the cases to verify for a model.

Rule: a layer's kernel runs for the rows that its verdict names, looked up at each call, else MLX's
own operation. Layers only change their class, so that arrays, names and other models stay.
"""

import logging
from math import ceil, prod
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlxspec.kernels import matmul
from mlxspec.kernels.metal import FLOATS, SMALLEST
from mlxspec.kernels.reference import Weights
from mlxspec.kernels.sampling import sample_accept_case
from mlxspec.kernels.trial import Case
from mlxspec.kernels.verify import KERNELS
from mlxspec.model.runner import Layout, Runner
from mlxspec.types import Entry, Request, Sequence

log = logging.getLogger("mlxspec")

ROWS = 3  # of the step whose cases are recorded


def _variant(layer: Any, x: mx.array, rows: int) -> str:
    """The variant of the layer's kernel that runs for `rows` rows; "": MLX's own operation."""
    if KERNELS.recorded is not None:
        KERNELS.recorded.append(layer.case)
    if x.dtype != layer.scales.dtype:
        return ""
    return KERNELS.variant(layer.case.name, rows)


def _multiply(layer: Any, x: mx.array) -> mx.array | None:
    """x [..., K] times the layer's weights, [..., N]; None where MLX's own operation is to run."""
    *batch, k = x.shape
    variant = _variant(layer, x, prod(batch))
    if not variant:
        return None
    rows = x.reshape(-1, k)
    y = matmul.small_qmm(rows, _weights(layer), variant == "matrix")
    return y.reshape(*batch, -1)


class KernelLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> Any:
        y = _multiply(self, x)
        if y is None:
            return super().__call__(x)  # type: ignore[no-untyped-call]
        return y + self["bias"] if "bias" in self else y


class KernelEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> Any:
        y = _multiply(self, x)
        return super().as_linear(x) if y is None else y  # type: ignore[no-untyped-call]


class KernelSwitchLinear(QuantizedSwitchLinear):
    """Experts; the rows of its verdict are tokens.

    mlx-lm calls it with indices [..., top] and x [..., 1, 1, K], or `apart` x [..., top, 1, K]; or,
    for many tokens, with sorted indices [P] and x [P, 1, K], whose case is that of the call before
    it.
    """

    case: Case | None = None
    top = 0

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        *batch, rows, k = x.shape
        *tokens, top = indices.shape
        known = rows == 1
        if tokens:
            apart = batch == [*tokens, top]
            known = known and (apart or batch == [*tokens, 1])
            self.top = top
            self.case = matmul.gather_small_qmm_case(*_shape(self), top, apart)
        count = indices.size // max(1, self.top)
        if not known or self.case is None or not _variant(self, x, count):
            return super().__call__(x, indices, sorted_indices)  # type: ignore[no-untyped-call]
        flat = x.reshape(-1, k)
        pairs = indices.flatten()
        y = matmul.gather_small_qmm(flat, _weights(self), pairs, count)
        y = y.reshape(*indices.shape, 1, -1)
        if "bias" in self:
            y += mx.expand_dims(self["bias"][indices], -2)
        return y


CLASSES: dict[Any, Any] = {
    nn.QuantizedLinear: KernelLinear,
    nn.QuantizedEmbedding: KernelEmbedding,
    QuantizedSwitchLinear: KernelSwitchLinear,
}


def install(model: nn.Module) -> None:
    """Let the model's layers use kernels. Idempotent; changes nothing until kernels are proven."""
    for layer in model.modules():
        if type(layer) in CLASSES and _supported(layer):
            layer.__class__ = CLASSES[type(layer)]
            if not isinstance(layer, KernelSwitchLinear):
                layer.case = matmul.small_qmm_case(*_shape(layer))


def _supported(layer: Any) -> bool:
    if layer.mode != "affine" or layer.bits not in (4, 8):
        return False
    weights = _weights(layer)
    dtype = weights.scales.dtype
    same = dtype in FLOATS and weights.biases.dtype == dtype
    return same and layer.group_size in (32, 64, 128) and weights.scales.size >= SMALLEST


def _weights(layer: Any) -> Weights:
    return Weights(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)


def _shape(layer: Any) -> tuple[Any, ...]:
    """Experts if any, N, K, bits, group and dtype: what a case is made for."""
    *experts_and_n, groups = layer.scales.shape
    k = groups * layer.group_size
    return *experts_and_n, k, layer.bits, layer.group_size, layer.scales.dtype


def cases_of(model: nn.Module, block_size: int, kv_bits: int = 0) -> list[Case]:
    """The cases of all kernels that a step of an installed model calls, each once, before a runner
    replaces the model's trunk. The step is built and never computed: no weight is read."""
    table = [1 + i for i in range(ceil(ROWS / block_size))]
    tokens = [0 for _ in range(ROWS)]
    seq = Sequence(Request("shapes", tuple(tokens), 1), tokens=tokens, table=table)
    for layout in get_args(Layout):
        found: list[Case] = []
        KERNELS.recorded = found
        try:
            runner = Runner(model, layout, block_size, 1 + len(table), trunk=False, kv_bits=kv_bits)
            logits = runner.logits([Entry(seq, 0, ROWS, True)])
        except Exception as failed:  # of the model's own code; another layout may fit
            log.debug("no shapes in the %s layout: %s", layout, failed)
            continue
        finally:
            KERNELS.recorded = None
        vocab = logits.shape[-1]
        found.append(sample_accept_case(vocab, logits.dtype))
        found.append(sample_accept_case(vocab, mx.float32))  # of a bias or penalty
        return list({case.name: case for case in found}.values())
    return []

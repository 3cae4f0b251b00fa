"""Metal kernels in a loaded model's quantized layers, and the cases to verify for a model.

Rule: a layer's kernel runs for the rows that its verdict names, looked up at each call, else MLX's
own operation. Layers only change their class, so that arrays, names and other models stay.
"""

import logging
from collections.abc import Iterator
from math import prod
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlxspec.kernels import attention, matmul, sampling
from mlxspec.kernels.verify import KERNELS, Case
from mlxspec.model.attention import Trunk
from mlxspec.model.runner import Layout, Runner
from mlxspec.types import Entry, Request, Sequence

log = logging.getLogger("mlxspec")

ROWS = 3  # of the step whose shapes are recorded


def _multiply(layer: Any, x: mx.array) -> mx.array | None:
    """x [..., K] times the layer's weights, [..., N]; None where MLX's own operation is to run."""
    rows = prod(x.shape[:-1])
    variant = KERNELS.variant(layer.case, rows)
    if not variant or x.dtype != layer.scales.dtype:
        return None
    how = (layer.group_size, layer.bits, variant == "matrix")
    return matmul.small_qmm(x.reshape(rows, -1), *_weights(layer), *how).reshape(*x.shape[:-1], -1)


class KernelLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        y = _multiply(self, x)
        if y is None:
            y = super().__call__(x)  # type: ignore[no-untyped-call]
        elif "bias" in self:
            y = y + self["bias"]
        return y


class KernelEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        y = _multiply(self, x)
        if y is None:
            y = super().as_linear(x)  # type: ignore[no-untyped-call]
        return y


class KernelSwitchLinear(QuantizedSwitchLinear):
    """Experts; the rows of its verdict are tokens.

    mlx-lm calls it with indices [..., top] and x [..., 1, 1, K], or `apart` x [..., top, 1, K]; or,
    for many tokens, with sorted indices [P] and x [P, 1, K]. Which of the first two is known, and
    with it the case, after the first call.
    """

    case, top, apart = "", 0, False

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        *batch, rows, k = x.shape
        *tokens, top = indices.shape
        apart = batch == [*tokens, top]
        if tokens and not self.top:
            self.top, self.apart = top, apart
            self.case = _case(self).name
        expected = rows == 1 and (apart or batch == [*tokens, 1])
        if tokens:
            expected = expected and (top, apart) == (self.top, self.apart)
        count = indices.size // max(1, self.top)
        if not expected or x.dtype != self.scales.dtype or not KERNELS.variant(self.case, count):
            y: mx.array = super().__call__(x, indices, sorted_indices)  # type: ignore[no-untyped-call]
            return y
        how = (self.group_size, self.bits, count)
        y = matmul.gather_small_qmm(x.reshape(-1, k), *_weights(self), indices.flatten(), *how)
        y = y.reshape(*indices.shape, 1, -1)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


CLASSES: dict[Any, Any] = {
    nn.QuantizedLinear: KernelLinear,
    nn.QuantizedEmbedding: KernelEmbedding,
    QuantizedSwitchLinear: KernelSwitchLinear,
}


def install(model: nn.Module) -> None:
    """Let the model's layers use kernels. Idempotent; changes nothing until kernels are proven."""
    for layer in _layers(model):
        if type(layer) in CLASSES:
            layer.__class__ = CLASSES[type(layer)]
            if not isinstance(layer, KernelSwitchLinear):
                layer.case = _case(layer).name


def cases(model: nn.Module) -> list[Case]:
    """One for each shape of layer that a kernel supports; for experts after `install` and a step,
    which may be lazy."""
    known = [x for x in _layers(model) if x.weight.ndim == 2 or getattr(x, "top", 0)]
    return list({case.name: case for case in map(_case, known)}.values())


def cases_of(model: nn.Module, block_size: int, kv_bits: int = 0) -> list[Case]:
    """The cases of all kernels, for a model before a runner replaces its trunk. Needs shapes and
    dtypes only: no weight is read."""
    step = list(_step_cases(model, block_size, kv_bits))  # also tells how experts are called
    return list({case.name: case for case in [*cases(model), *step]}.values())


def _step_cases(model: nn.Module, block_size: int, kv_bits: int) -> Iterator[Case]:
    """Of attention and sampling: what a step calls that is built and never computed."""
    table = list(range(1, 1 + -(-ROWS // block_size)))
    seq = Sequence(Request("shapes", (0,) * ROWS, 1), tokens=[0] * ROWS, table=table)
    for layout in get_args(Layout):
        shapes: list[attention.Shape] = []
        KERNELS.shapes = shapes
        try:
            runner = Runner(model, layout, block_size, 1 + len(table), trunk=False, kv_bits=kv_bits)
            logits = runner.logits([Entry(seq, 0, ROWS, True)])
        except Exception as failed:  # of the model's own code; another layout may fit
            log.debug("no shapes in the %s layout: %s", layout, failed)
            continue
        finally:
            KERNELS.shapes = None
        for shape in dict.fromkeys(shapes):
            yield from attention.paged_attention_cases(shape)
        for dtype in dict.fromkeys((logits.dtype, mx.float32)):  # a bias or penalty makes it fp32
            yield sampling.sample_accept_case(logits.shape[-1], dtype)
        return


def _layers(model: nn.Module) -> list[Any]:
    """The layers that multiply rows with weights and that a kernel supports."""
    modules = _modules(model)
    linear = [m for m in modules if isinstance(m, nn.Linear | nn.QuantizedLinear)]
    outputs, inputs = {m.weight.shape[0] for m in linear}, {_width(m) for m in linear}
    found = [m for m in modules if type(m) in (*CLASSES, *CLASSES.values()) and _supported(m)]
    return [
        m
        for m in found
        # An embedding is the lm_head too if no other layer can be and it reads what layers read.
        if not isinstance(m, nn.QuantizedEmbedding)
        or (m.weight.shape[0] not in outputs and _width(m) in inputs)
    ]


def _modules(model: nn.Module) -> list[Any]:
    """All modules, each once, those inside a Trunk too."""
    found = {id(m): m for m in model.modules()}
    for m in list(found.values()):
        for trunk in vars(m).values():
            if isinstance(trunk, Trunk):
                found |= {id(x): x for x in _modules(trunk._inner)}
    return list(found.values())


def _supported(layer: Any) -> bool:
    _, scales, biases = _weights(layer)
    return (
        layer.mode == "affine"
        and layer.bits in (4, 8)
        and layer.group_size in (32, 64, 128)
        and scales.dtype == biases.dtype
        and scales.dtype in matmul.FLOATS
        and scales.size >= matmul.SMALLEST
    )


def _case(layer: Any) -> Case:
    w, scales, _ = _weights(layer)
    *experts, n, _ = w.shape
    how = (n, _width(layer), layer.bits, layer.group_size, scales.dtype)
    if experts:
        return matmul.gather_small_qmm_case(experts[0], *how, layer.top, layer.apart)
    return matmul.small_qmm_case(*how)


def _weights(layer: Any) -> tuple[mx.array, mx.array, mx.array]:
    return layer["weight"], layer["scales"], layer.get("biases")


def _width(layer: Any) -> int:
    """K, the values of a row that the layer multiplies."""
    packed = 32 // layer.bits if "scales" in layer else 1
    return int(layer.weight.shape[-1] * packed)

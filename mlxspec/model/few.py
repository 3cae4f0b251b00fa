"""The kernels for few rows in a loaded model's quantized layers.

Rule: a layer's kernel runs for as many rows as its verdict takes, asked at each call; all else is MLX's own.
Layers get another class: their arrays and names stay, where modules put in their place would change these,
and other models' layers stay, where a patched class would change those.
"""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxspec.kernels import metal
from mlxspec.kernels.proven import VERDICTS, Case
from mlxspec.model.attention import Trunk


def _product(layer: Any, x: mx.array) -> mx.array | None:
    """x [..., K] times the layer's weights, [..., N], where a kernel is to do it."""
    verdict, weights = VERDICTS.get(layer.case), _weights(layer)
    rows = prod(x.shape[:-1])
    if verdict is None or not verdict.takes(rows) or x.dtype != weights[1].dtype:
        return None
    how = layer.group_size, layer.bits, verdict.way == "matrix"
    return metal.small_qmm(x.reshape(rows, -1), *weights, *how).reshape(*x.shape[:-1], -1)


class FewLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        if y is None:
            y = super().__call__(x)  # type: ignore[no-untyped-call]
        elif "bias" in self:
            y = y + self["bias"]
        return y


class FewEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        if y is None:
            y = super().as_linear(x)  # type: ignore[no-untyped-call]
        return y


class FewSwitch(QuantizedSwitchLinear):
    """Its verdict counts pairs. mlx-lm gives it x [..., 1, 1, K] and indices [..., top_k], a row for all
    experts of a token; or x [..., top_k, 1, K]; or, from 64 pairs on, [P, 1, K] and [P], sorted by expert."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        verdict, (w, scales, biases) = VERDICTS.get(self.case), _weights(self)
        *batch, rows, k = x.shape
        if (
            verdict is None
            or not verdict.takes(indices.size)
            or x.dtype != scales.dtype
            or rows != 1
            or tuple(batch) not in (indices.shape, (*indices.shape[:-1], 1))
        ):
            mlx: mx.array = super().__call__(x, indices, sorted_indices)  # type: ignore[no-untyped-call]
            return mlx
        tokens = metal.ROWS if indices.ndim == 1 else prod(indices.shape[:-1])  # each goes to other experts
        how = self.group_size, self.bits, tokens
        y = metal.gather_small_qmm(x.reshape(-1, k), w, scales, biases, indices.flatten(), *how)
        y = y.reshape(*indices.shape, 1, -1)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


KINDS: dict[Any, Any] = {
    nn.QuantizedLinear: FewLinear,
    nn.QuantizedEmbedding: FewEmbedding,
    QuantizedSwitchLinear: FewSwitch,
}


def install(model: nn.Module) -> None:
    """Let the model's layers use kernels. Idempotent; changes nothing until there are verdicts."""
    for layer, case in _seats(model):
        if type(layer) in KINDS and isinstance(case, Case):
            layer.case = case.name
            layer.__class__ = KINDS[type(layer)]


def cases(model: nn.Module) -> list[Case]:
    """One for each kind of layer that a kernel could serve, before or after `install`."""
    return list({case.name: case for _, case in _seats(model) if isinstance(case, Case)}.values())


def left_out(model: nn.Module) -> dict[str, int]:
    """Why layers that multiply keep MLX's own, and how many of them."""
    return Counter(why for _, why in _seats(model) if isinstance(why, str))


def _seats(model: nn.Module) -> Iterator[tuple[Any, Case | str]]:
    """Each layer that multiplies rows with weights, and its case, or why it has none."""
    layers = _layers(model)
    linear = [x for x in layers if isinstance(x, nn.Linear | nn.QuantizedLinear)]
    outputs, inputs = {x.weight.shape[0] for x in linear}, {_inputs(x) for x in linear}
    for layer in layers:
        if isinstance(layer, nn.QuantizedEmbedding):
            # It is the lm_head too where no other layer could be, and reads what the layers read.
            if layer.weight.shape[0] not in outputs and _inputs(layer) in inputs:
                yield layer, _case(layer)
        elif isinstance(layer, nn.QuantizedLinear | QuantizedSwitchLinear):
            yield layer, _case(layer)
        elif isinstance(layer, nn.Linear | SwitchLinear):
            yield layer, "not quantized"


def _layers(model: nn.Module) -> list[Any]:
    """All modules, each once, those behind a Trunk too."""
    found = {id(m): m for m in model.modules()}
    for m in list(found.values()):
        for trunk in vars(m).values():
            if isinstance(trunk, Trunk):
                found |= {id(x): x for x in _layers(trunk._inner)}
    return list(found.values())


def _case(layer: Any) -> Case | str:
    if type(layer) not in (*KINDS, *KINDS.values()):
        return f"a {type(layer).__name__}, not MLX's own class"
    if layer.mode != "affine":
        return f"quantized as {layer.mode}"
    if layer.bits not in (4, 8) or layer.group_size not in (32, 64, 128):
        return f"{layer.bits} bits in groups of {layer.group_size}"
    w, scales, biases = _weights(layer)
    if scales.dtype != biases.dtype or scales.dtype not in metal.TOLERANCE:
        return f"scales of {scales.dtype}, biases of {biases.dtype}"
    how = _inputs(layer), layer.bits, layer.group_size, scales.dtype
    if w.ndim == 3:
        return metal.gather_small_qmm_case(w.shape[0], w.shape[1], *how)
    return metal.small_qmm_case(w.shape[0], *how)


def _weights(layer: Any) -> tuple[mx.array, mx.array, mx.array]:
    return layer["weight"], layer["scales"], layer["biases"]


def _inputs(layer: Any) -> int:
    return int(layer.weight.shape[-1] * (32 // layer.bits if "scales" in layer else 1))

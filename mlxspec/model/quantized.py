"""The kernels for few rows in a loaded model's quantized layers.

Rule: a layer's kernel runs for as many rows as its verdict takes, asked when it is called; else
MLX's own. Layers get another class: their arrays and names stay, where modules put in their place
would change these, and other models' layers stay, where a patched class would change those.
"""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxspec.kernels import matmul
from mlxspec.kernels.proven import VERDICTS, Case
from mlxspec.model.attention import Trunk


def _product(layer: Any, x: mx.array) -> mx.array | None:
    """x [..., K] times the layer's weights, [..., N], where a kernel is to do it."""
    verdict = VERDICTS.get(layer.case)
    if (
        verdict is None
        or not verdict.takes(rows := prod(x.shape[:-1]))
        or x.dtype != layer.scales.dtype
    ):
        return None
    how = layer.group_size, layer.bits, verdict.way == "matrix"
    return matmul.small_qmm(x.reshape(rows, -1), *_weights(layer), *how).reshape(*x.shape[:-1], -1)


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
    """Its verdict counts tokens. mlx-lm gives it x [..., 1, 1, K] and indices [..., top], a row for
    all `top` experts of a token; or x [..., top, 1, K], then its rows are `apart`; or, of many
    tokens, a row for each pair of a token and an expert, [P, 1, K] and [P], sorted by expert. The
    first call tells which it is to be proven for; before, it has no case."""

    case, top, apart = "", 0, False

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        *batch, rows, k = x.shape
        apart = tuple(batch) == indices.shape
        alike = apart
        if indices.ndim > 1:
            *of, top = indices.shape
            if not self.top:
                self.top, self.apart = top, apart
                self.case = _case(self).name
            alike = (top, apart) == (self.top, self.apart) and (apart or batch == [*of, 1])
        verdict, tokens = VERDICTS.get(self.case), indices.size // (self.top or 1)
        if (
            verdict is None
            or not verdict.takes(tokens)
            or x.dtype != self.scales.dtype
            or rows != 1
            or not alike
        ):
            mlx: mx.array = super().__call__(x, indices, sorted_indices)  # type: ignore[no-untyped-call]
            return mlx
        how = self.group_size, self.bits, tokens
        y = matmul.gather_small_qmm(x.reshape(-1, k), *_weights(self), indices.flatten(), *how)
        y = y.reshape(*indices.shape, 1, -1)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


KINDS: dict[Any, Any] = {
    nn.QuantizedLinear: FewLinear,
    nn.QuantizedEmbedding: FewEmbedding,
    QuantizedSwitchLinear: FewSwitch,
}


def install(model: nn.Module) -> None:
    """Let the model's layers use kernels. Idempotent; changes nothing until there are verdicts."""
    for layer in _multiplying(model):
        if type(layer) in KINDS and not _unfit(layer):
            layer.__class__ = KINDS[type(layer)]
            if not isinstance(layer, FewSwitch):
                layer.case = _case(layer).name


def cases(model: nn.Module) -> list[Case]:
    """One for each kind of layer that a kernel could serve, before or after `install`; of experts
    after it, once a step has called them, be it one that is never computed."""
    fit = [layer for layer in _multiplying(model) if not _unfit(layer)]
    known = [
        x
        for x in fit
        if type(x) is not QuantizedSwitchLinear and (type(x) is not FewSwitch or x.top)
    ]
    return list({case.name: case for case in map(_case, known)}.values())


def left_out(model: nn.Module) -> dict[str, int]:
    """Why layers that multiply keep MLX's own, and how many of them."""
    return Counter(why for layer in _multiplying(model) if (why := _unfit(layer)))


def _multiplying(model: nn.Module) -> Iterator[Any]:
    """The layers that multiply rows with weights."""
    layers = _layers(model)
    linear = [x for x in layers if isinstance(x, nn.Linear | nn.QuantizedLinear)]
    outputs, inputs = {x.weight.shape[0] for x in linear}, {_inputs(x) for x in linear}
    for layer in layers:
        if isinstance(layer, nn.QuantizedEmbedding):
            # It is the lm_head too where no other layer could be, and reads what the layers read.
            if layer.weight.shape[0] not in outputs and _inputs(layer) in inputs:
                yield layer
        elif isinstance(
            layer, nn.Linear | nn.QuantizedLinear | SwitchLinear | QuantizedSwitchLinear
        ):
            yield layer


def _layers(model: nn.Module) -> list[Any]:
    """All modules, each once, those behind a Trunk too."""
    found = {id(m): m for m in model.modules()}
    for m in list(found.values()):
        for trunk in vars(m).values():
            if isinstance(trunk, Trunk):
                found |= {id(x): x for x in _layers(trunk._inner)}
    return list(found.values())


def _unfit(layer: Any) -> str:
    """Why no kernel could serve it; "": one could."""
    if isinstance(layer, nn.Linear | SwitchLinear):
        return "not quantized"
    if type(layer) not in (*KINDS, *KINDS.values()):
        return f"a {type(layer).__name__}, not MLX's own class"
    if layer.mode != "affine":
        return f"quantized as {layer.mode}"
    if layer.bits not in (4, 8) or layer.group_size not in (32, 64, 128):
        return f"{layer.bits} bits in groups of {layer.group_size}"
    _, scales, biases = _weights(layer)
    if scales.dtype != biases.dtype or scales.dtype not in matmul.FLOATS:
        return f"scales of {scales.dtype}, biases of {biases.dtype}"
    return ""


def _case(layer: Any) -> Case:
    w, scales, _ = _weights(layer)
    *e, n, _ = w.shape
    how = n, _inputs(layer), layer.bits, layer.group_size, scales.dtype
    if e:
        return matmul.gather_small_qmm_case(e[0], *how, layer.top, layer.apart)
    return matmul.small_qmm_case(*how)


def _weights(layer: Any) -> tuple[mx.array, mx.array, mx.array]:
    return layer["weight"], layer["scales"], layer["biases"]


def _inputs(layer: Any) -> int:
    return int(layer.weight.shape[-1] * (32 // layer.bits if "scales" in layer else 1))

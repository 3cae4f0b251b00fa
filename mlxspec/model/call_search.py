"""The search for a layer's calls: how many rows an operation may have so that each keeps its bits.

Rule: two kernels add the same products in another order, which a result of 16 bits shows once in
some thousand values. So each row that is tried cancels: one of its outputs is the rounding of a sum
whose exact value is 0, and nearly every order rounds otherwise.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.core import array as Array
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlxspec.kernels import cpu
from mlxspec.kernels.invariant import Calls, route
from mlxspec.model.trunk import watched

DENSE = (nn.Linear, nn.Embedding)
TIED = (nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchGLU, SwitchMLP)
FIRST = ("gate_proj", "up_proj", "fc1")  # products of experts that take the layer's input
ROWS = 17  # that differ from each other
MANY = 64  # rows of a call with which a prompt is read fast without chunks
# Of a call, tried one after the other; MLX changes kernels beyond these too, so none has more.
MORE_ROWS = (24, 33, MANY, 129, 256)
LEAST = (1, 2)  # rows of a call
ENOUGH = 7  # rows of a call: others are not tried
FITTED = 5  # values of a row that make it cancel; each takes 7 bits or more off what remains
# Values of a row are random with sizes of LARGE / 2**RANGE to LARGE: products with weights of 4
# bits would else be so much alike that all orders add them without rounding.
LARGE, RANGE = 2.0**6, 16

Outputs = tuple[Array, ...]  # [rows, ...] each
Operation = Callable[..., Outputs]
Tries = Generator[None, None, Calls]  # one product between two yields


def try_calls(layer: Any, arrays: list[Array]) -> Tries:
    """Find the calls of most rows that keep a row's bits. `arrays`: what the layer was called with,
    [n, K], and the choices [n, k] of experts. Between two products the layer is as it was built."""
    best = Calls(1, 1)
    for turned, op in _operations(layer, arrays[0].dtype).items():
        for least in LEAST:
            most = yield from _most(Trial(layer, op, least, arrays))
            if most >= least and most > best.most:
                best = Calls(least, most, turned)
            if best.most >= ENOUGH:
                return best
    return best


def _most(trial: "Trial") -> Generator[None, None, int]:
    """Up to how many rows a call keeps the bits of each row, wherever it is among them; -1: none.
    It is never more than was tried."""
    rows = yield from trial.cancelling()
    singles = yield from trial.alone(rows)
    most = -1
    for count in (*range(trial.least, ROWS + 1), *MORE_ROWS):
        for at in _places(count):
            yield
            if not _same(trial.op(*(x[at] for x in rows)), singles, at):
                return most if most >= MANY else min(most, ROWS)
        most = count
    return most


def _places(count: int) -> Iterator[Array]:
    """Of calls of so many rows, which of the ROWS rows are in each: together all, and some in
    reverse."""
    yield mx.arange(count)[::-1] % ROWS
    for start in range(0, ROWS, count):
        yield mx.arange(start, start + count) % ROWS


def _same(outputs: Outputs, singles: Outputs, at: Array) -> bool:
    """Whether outputs are those of the rows `at`; some at a time, as a vocabulary is wide."""
    for y, single in zip(outputs, singles, strict=True):
        for first in range(0, len(at), ROWS):
            some = slice(first, first + ROWS)
            if not mx.array_equal(y[some], single[at[some]], equal_nan=True):
                return False
    return True


# ---- what is compared of a layer -------------------------------------------------------------


def _operations(layer: Any, dtype: mx.Dtype) -> dict[bool, Operation]:
    """A layer's operation, and before it the transposed one where there is one."""
    if isinstance(layer, EXPERTS):
        return {False: partial(_experts, layer)}
    if not isinstance(layer, (nn.Linear, nn.QuantizedLinear, *TIED)):
        return {False: partial(_routed, layer)}
    usual = layer.as_linear if isinstance(layer, TIED) else layer
    ops = {False: usual}
    if isinstance(layer, DENSE) and cpu.in_use() and dtype == mx.float32:
        ops = {True: partial(cpu.transposed, layer)} | ops
    return {turned: partial(_multiplied, layer, op) for turned, op in ops.items()}


def _multiplied(layer: Any, op: Callable[[Array], Array], x: Array) -> Outputs:
    with _without_biases(layer):
        return (op(x),)


def _routed(router: Any, x: Array) -> Outputs:
    """Its scores, of which few show a sum's rounding, and its product."""
    y = route(router, x)
    return (y[-1] if isinstance(y, tuple) else y), x @ router.weight.T


def _experts(layer: Any, x: Array, chosen: Array) -> Outputs:
    """What each of a layer's products makes, and the layer."""
    products = _products(layer)
    with watched(products) as seen, _without_biases(*products.values()):
        y = layer(x, chosen)
    place = mx.argsort(mx.argsort(chosen.flatten()))
    # Sorted by expert, products have one row for each choice of each row.
    made = (seen[name] if seen[name].ndim > 3 else seen[name][place] for name in products)
    return *(part.reshape(len(x), -1) for part in made), y


def _products(layer: Any) -> dict[str, Any]:
    return {name: part for name, part in layer.children().items() if "weight" in part}


@contextmanager
def _without_biases(*layers: Any) -> Iterator[None]:
    """With biases of 0, which hide no rounding."""
    held = [(layer, layer.bias) for layer in layers if "bias" in layer]
    for layer, bias in held:
        layer.bias = mx.zeros_like(bias)
    try:
        yield
    finally:
        for layer, bias in held:
            layer.bias = bias


# ---- rows that cancel ------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """A layer's operation in calls of `least` rows or more, and what the layer was called with."""

    layer: Any
    op: Operation
    least: int
    arrays: list[Array]

    def alone(self, rows: list[Array]) -> Generator[None, None, Outputs]:
        """What the operation makes of each row in a call of its own."""
        calls = Calls(self.least, self.least)
        each = []
        for i in range(len(rows[0])):
            yield
            each.append(calls.apply(self.op, *(x[i : i + 1] for x in rows)))
            mx.eval(each[-1])
        return tuple(mx.concatenate(list(same)) for same in zip(*each, strict=True))

    def cancelling(self) -> Generator[None, None, list[Array]]:
        """ROWS rows for the operation, random but for some values, by which one output of row i is
        as good as 0 when it is alone: each takes off what remains, as the operation itself has it.
        The outputs lie all over the layer."""
        x, *others = self.arrays
        noise = np.random.default_rng(0)
        rows = noise.standard_normal((ROWS, x.shape[-1])) * LARGE
        rows *= 2.0 ** -noise.uniform(0, RANGE, rows.shape)
        chosen = [array[mx.arange(ROWS) % len(array)] for array in others]
        targets = [self._target(i, chosen) for i in range(ROWS)]
        count = min(FITTED, max(1, x.shape[-1] // 2))
        fitted = [np.argsort(-abs(weights))[:count] for _, _, weights in targets]
        for row, places in zip(rows, fitted, strict=True):
            row[places] = 0
        for n in range(FITTED):
            outputs = yield from self.alone([self._made(rows), *chosen])
            for i, (part, column, weights) in enumerate(targets):
                rest = float(outputs[part][i].flatten()[column])
                place = fitted[i][n % count]
                if weights[place] and isfinite(rest):
                    rows[i, place] -= rest / weights[place]
        return [self._made(rows), *chosen]

    def _made(self, rows: np.ndarray) -> Array:
        return mx.array(rows.astype(np.float32)).astype(self.arrays[0].dtype)

    def _target(self, i: int, chosen: list[Array]) -> tuple[int, int, np.ndarray]:
        """The output of row i that cancels: which of the operation's, its column, and its weights,
        float32 [K]."""
        product: Any = self.layer
        at: tuple[int, ...] = ()
        part = -1
        if chosen:
            names = [name for name in FIRST if name in self.layer]
            name = names[i % len(names)]
            product, part = self.layer[name], list(_products(self.layer)).index(name)
            at = (int(chosen[0][i, 0]),)
        column = i * (product.weight.shape[-2] - 1) // (ROWS - 1)
        return part, column, _weights_of(product, (*at, column))


def _weights_of(layer: Any, at: tuple[int, ...]) -> np.ndarray:
    """float32 [K] of one output."""
    weights = layer.weight[at][None]
    if "scales" in layer:
        biases = layer.get("biases")
        weights = mx.dequantize(
            weights,
            layer.scales[at][None],
            biases if biases is None else biases[at][None],
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
        if (scale := layer.get("global_scale")) is not None:
            weights = weights * scale[at[0]]
    return np.array(weights[0].astype(mx.float32))

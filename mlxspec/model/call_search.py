"""The search for a layer's calls: how many rows an operation may have so that each keeps its bits.

Rule: two kernels add the same products in another order, which a result of 16 bits shows once in
some thousand values. So each row that is tried cancels: one of its outputs is the rounding of a sum
whose exact value is 0, and nearly every order rounds otherwise.
"""

from collections.abc import Callable, Iterator
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
from mlxspec.kernels.invariant import Calls
from mlxspec.model.trunk import mix_in
from mlxspec.types import Check

DENSE = (nn.Linear, nn.Embedding)
TIED = (nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchGLU, SwitchMLP)
FIRST = ("gate_proj", "up_proj", "fc1")  # products of experts that take the layer's input
ROWS = 17  # of a step, in which a row's bits are compared with those of the row alone
MANY = 64  # rows of a call with which a prompt is read fast without chunks
# Of a call, tried one after the other; MLX changes kernels beyond these too, so none has more.
MORE_ROWS = (24, 33, MANY, 129, 256)
LEAST = (1, 2)  # rows of a call
ENOUGH = 7  # rows of a call: others are not tried
FITTED = 5  # values of a row that make it cancel; each takes 7 bits or more off what remains
# Size of a row's values: what remains of a sum is then no smaller than a bias.
LARGE = {mx.float16: 2.0**6, mx.bfloat16: 2.0**24, mx.float32: 2.0**24}

Outputs = tuple[Array, ...]  # [rows, ...] each
Operation = Callable[..., Outputs]


def find_calls(
    layer: Any,
    arrays: list[Array],
    check: Check = lambda: None,
) -> Calls | None:
    """The calls of most rows that keep a row's bits; None: there are none. `arrays`: what the layer
    was called with, [n, K], and the choices [n, k] of experts. The layer is as it was built.
    Calls `check` before each product, and raises what it raises."""
    best: Calls | None = None
    with _operations(layer, arrays[0].dtype) as operations:
        for turned, op in operations.items():
            for least in LEAST:
                most = _most(Trial(layer, op, least, arrays), check)
                if most >= least and (best is None or most > best.most):
                    best = Calls(least, most, turned)
                if best and best.most >= ENOUGH:
                    return best
    return best


def _most(trial: "Trial", check: Check) -> int:
    """Up to how many rows a call keeps the bits of each row, wherever it is among them; -1: none.
    It is never more than was tried."""
    rows = trial.cancelling(check)
    singles = trial.alone(rows, check)
    most = -1
    for count in (*range(trial.least, ROWS + 1), *MORE_ROWS):
        for at in _places(count):
            check()
            outputs = zip(trial.op(*(x[at] for x in rows)), singles, strict=True)
            if not all(mx.array_equal(y, single[at], equal_nan=True) for y, single in outputs):
                return most if most >= MANY else min(most, ROWS)
        most = count
    return most


def _places(count: int) -> Iterator[Array]:
    """Of calls of so many rows, which of the ROWS rows are in each: together all, and some in
    reverse."""
    yield mx.arange(count)[::-1] % ROWS
    for start in range(0, ROWS, count):
        yield mx.arange(start, start + count) % ROWS


def transposed(layer: Any, x: Array) -> Any:
    """x [..., K] times a dense layer's weights, as columns."""
    y = (layer.weight @ x.reshape(-1, x.shape[-1]).T).T
    y = y.reshape(*x.shape[:-1], -1)
    if "bias" in layer:
        y = y + layer.bias
    return y


def route(router: Callable[[Array], Any], x: Array) -> Any:
    """What a router makes of x [n, K]; some of mlx-lm's take [B, L, K] only."""
    y = router(x[:, None])
    return tuple(part[:, 0] for part in y) if isinstance(y, tuple) else y[:, 0]


# ---- what is compared of a layer -------------------------------------------------------------


@contextmanager
def _operations(layer: Any, dtype: mx.Dtype) -> Iterator[dict[bool, Operation]]:
    """A layer's operation, and before it the transposed one where there is one."""
    if isinstance(layer, EXPERTS):
        with _watched(layer) as op:
            yield {False: op}
    elif isinstance(layer, (nn.Linear, nn.QuantizedLinear, *TIED)):
        usual = layer.as_linear if isinstance(layer, TIED) else layer
        ops = {False: usual}
        if isinstance(layer, DENSE) and cpu.in_use() and dtype == mx.float32:
            ops = {True: partial(transposed, layer)} | ops
        yield {turned: partial(_only, op) for turned, op in ops.items()}
    else:
        yield {False: partial(_routed, layer)}


def _only(op: Callable[[Array], Array], x: Array) -> Outputs:
    return (op(x),)


def _routed(router: Any, x: Array) -> Outputs:
    """Its scores, of which few show a sum's rounding, and its product."""
    y = route(router, x)
    return (y[-1] if isinstance(y, tuple) else y), x @ router.weight.T


class Watched:
    """Mixed into the class of an expert product while its layer is tried: keeps what it makes."""

    _seen: dict[str, Array]
    _name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y: Array = super().__call__(*args, **kwargs)  # type: ignore[misc]
        self._seen[self._name] = y
        return y


@contextmanager
def _watched(layer: Any) -> Iterator[Operation]:
    """An operation that makes a layer's output and, before it, what each of its products makes."""
    seen: dict[str, Array] = {}
    products = _products(layer)
    for name, product in products.items():
        mix_in(product, Watched)
        product._seen, product._name = seen, name

    def op(x: Array, chosen: Array) -> Outputs:
        y = layer(x, chosen)
        place = mx.argsort(mx.argsort(chosen.flatten()))
        # Sorted by expert, products have one row for each choice of each row.
        made = (seen[name] if seen[name].ndim > 3 else seen[name][place] for name in products)
        return *(part.reshape(len(x), -1) for part in made), y

    try:
        yield op
    finally:
        for product in products.values():
            product.__class__ = type(product).__bases__[1]
            del product._seen, product._name


def _products(layer: Any) -> dict[str, Any]:
    return {name: part for name, part in layer.children().items() if "weight" in part}


# ---- rows that cancel ------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """A layer's operation in calls of `least` rows or more, and what the layer was called with."""

    layer: Any
    op: Operation
    least: int
    arrays: list[Array]

    def alone(self, rows: list[Array], check: Check) -> Outputs:
        """What the operation makes of each row in a call of its own."""
        calls = Calls(self.least, self.least)
        each = []
        for i in range(len(rows[0])):
            check()
            each.append(calls.apply(self.op, *(x[i : i + 1] for x in rows)))
            mx.eval(each[-1])
        return tuple(mx.concatenate(list(same)) for same in zip(*each, strict=True))

    def cancelling(self, check: Check) -> list[Array]:
        """ROWS rows for the operation, random but for some values, by which one output of row i is
        as good as 0 when it is alone: each takes off what remains, as the operation itself has it.
        The outputs lie all over the layer."""
        x, *others = self.arrays
        noise = np.random.default_rng(0)
        rows = noise.standard_normal((ROWS, x.shape[-1])) * LARGE[x.dtype]
        chosen = [array[mx.arange(ROWS) % len(array)] for array in others]
        targets = [self._target(i, chosen) for i in range(ROWS)]
        count = min(FITTED, max(1, x.shape[-1] // 2))
        fitted = [np.argsort(-abs(weights))[:count] for _, _, weights in targets]
        for row, places in zip(rows, fitted, strict=True):
            row[places] = 0
        for n in range(FITTED):
            outputs = self.alone([self._made(rows), *chosen], check)
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
    return np.array(weights[0].astype(mx.float32))

"""Batch invariance of a loaded model: for each layer, how many rows a call may have so that each
row keeps its bits (found by trial), and which part of a prompt is computed in whole chunks.

Rule: a prompt's whole chunks, at fixed positions, each get their own forward, all of one shape; all
other rows share forwards, in which the layers make the calls that were found.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlxspec.kernels import cpu
from mlxspec.kernels.invariant import Calls
from mlxspec.model.trunk import mix_in
from mlxspec.types import Check

DENSE = (nn.Linear, nn.Embedding)
TIED = (nn.Embedding, nn.QuantizedEmbedding)
KINDS = (
    nn.Linear,
    nn.QuantizedLinear,
    *TIED,
    SwitchGLU,
    SwitchMLP,
)
CHUNK = 64  # rows of a chunk, or a block if that is longer: near a product's best rate on a GPU
ROWS = 17  # of a step, in which a row's bits are compared with those of the row alone
MANY = 64  # rows of a call with which a prompt is read fast without chunks
# Of a call, tried one after the other; MLX changes kernels beyond these too, so none has more.
MORE_ROWS = (24, 33, MANY, 129, 256)
LEAST = (1, 2)  # rows of a call
ENOUGH = 7  # rows of a call: others are not tried

Recorded = dict[str, tuple[Any, list[Array]]]  # by key: a layer, and arrays that it was called with


@dataclass(frozen=True, slots=True)
class Invariance:
    """How a model's rows are computed. `calls` by the layers' `key_of`; others are called as they
    are. `chunk`: rows of a chunk of a prompt, a multiple of the block size; 0: no chunks. `failed`:
    the layers for which no calls were found. `by_kernel`: attention goes by our kernel, else by
    products of one shape."""

    calls: Mapping[str, Calls] = field(default_factory=dict)
    chunk: int = 0
    by_kernel: bool = False
    failed: tuple[str, ...] = ()


class InCalls:
    """Mixed into the class of a layer: makes its calls, but in a forward of a whole chunk."""

    _calls: Calls | None = None
    _view: Any = None

    def __call__(self, *arrays: Array) -> Any:
        if isinstance(self, TIED):
            return super().__call__(*arrays)  # type: ignore[misc]
        return self._multiply(*arrays)

    def as_linear(self, x: Array) -> Any:
        return self._multiply(x)

    def _multiply(self, *arrays: Array) -> Any:
        view = self._view
        op: Any = super().as_linear if isinstance(self, TIED) else super().__call__  # type: ignore[misc]
        if view.recorded is not None:
            view.recorded.setdefault(key_of(self), (self, list(arrays)))
        if self._calls is None or not view.invariant or not arrays[0].size:
            return op(*arrays)
        if self._calls.transposed:
            op = partial(_transposed, self)
        return self._calls.apply(op, *arrays)


def _transposed(layer: Any, x: Array) -> Any:
    """x [..., K] times a dense layer's weights."""
    y = (layer.weight @ x.reshape(-1, x.shape[-1]).T).T
    y = y.reshape(*x.shape[:-1], -1)
    if "bias" in layer:
        y = y + layer.bias
    return y


def layers_of(model: nn.Module) -> Iterator[Any]:
    """The layers of a model that multiply rows by weights."""
    return (layer for layer in model.modules() if isinstance(layer, KINDS) or _is_gate(layer))


def _is_gate(layer: nn.Module) -> bool:
    """Whether it is a router with weights of its own, which mlx-lm's models name so."""
    named = type(layer).__name__.endswith("Gate")
    return named and "weight" in layer and layer.weight.ndim == 2


def key_of(layer: Any) -> str:
    """What the kernels that MLX chooses depend on: a layer's kind, shapes and numbers."""
    kind = next((kind for kind in KINDS if isinstance(layer, kind)), type(layer))
    shapes = []
    for part in (layer, *layer.children().values()):
        if isinstance(part, nn.Module) and "weight" in part:
            shape = "x".join(map(str, part.weight.shape))
            numbers = part.weight.dtype
            if "scales" in part:
                shape += f" {part.bits} bits {part.mode} {part.group_size}"
                numbers = part.scales.dtype
            shapes.append(f"{shape} {numbers}")
    return f"{kind.__name__} {', '.join(dict.fromkeys(shapes))}"


def install(model: nn.Module, view: Any, invariance: Invariance | None) -> None:
    """Let the model's layers make these calls from now on; None: no others than their own."""
    for layer in layers_of(model):
        if invariance:
            mix_in(layer, InCalls)
            layer._view = view
            layer._calls = invariance.calls.get(key_of(layer))
        elif isinstance(layer, InCalls):
            layer.__class__ = type(layer).__bases__[1]
            layer._view = layer._calls = None


def chunk_rows(block_size: int) -> int:
    """The rows of a chunk in whole blocks."""
    return max(1, CHUNK // block_size) * block_size


def find_invariance(
    recorded: Recorded,
    block_size: int,
    chunks: bool = False,
    *,
    found: dict[str, Calls | None] | None = None,
    check: Check = lambda: None,
) -> Invariance:
    """The calls of these layers in which a row's bits depend on no other row. `chunks`: of a prompt
    in any case, else where calls of few rows would make it slow to read. Calls `check` before each
    product, and raises what it raises; what is in `found` then is not tried again."""
    found = {} if found is None else found
    for key, (layer, arrays) in recorded.items():
        if key not in found:
            rows = [x.reshape(-1, x.shape[-1]) for x in arrays]
            found[key] = find_calls(layer, rows, check)
    calls = {key: each for key, each in found.items() if each}
    chunk = 0
    if chunks or any(each.most < MANY for each in calls.values()):
        chunk = chunk_rows(block_size)
    return Invariance(
        calls,
        chunk,
        failed=tuple(key for key, each in found.items() if each is None),
    )


def find_calls(
    layer: Any,
    arrays: list[Array],
    check: Check = lambda: None,
) -> Calls | None:
    """The calls of most rows that keep a row's bits; of a few rows `arrays` [n, K]. None: there are
    none. The layer is as it was built."""
    best: Calls | None = None
    ops = {False: layer.as_linear if isinstance(layer, TIED) else layer}
    if isinstance(layer, DENSE) and cpu.in_use() and arrays[0].dtype == mx.float32:
        ops = {True: partial(_transposed, layer)} | ops
    for transposed, op in ops.items():
        for least in LEAST:
            most = _most(op, least, arrays, check)
            if most >= least and (best is None or most > best.most):
                best = Calls(least, most, transposed)
            if best and best.most >= ENOUGH:
                return best
    return best


def _most(op: Callable[..., Any], least: int, arrays: list[Array], check: Check) -> int:
    """Up to how many rows a call keeps the bits of each row, wherever it is among them; -1: none.
    It is never more than was tried."""
    alone = Calls(least, least)
    rows = [x[mx.arange(ROWS) % len(x)] for x in arrays]
    one = [_first_of(alone.apply(op, *(x[i : i + 1] for x in rows))) for i in range(ROWS)]
    singles = mx.concatenate(one)
    most = -1
    for count in (*range(least, ROWS + 1), *MORE_ROWS):
        for order in (1, -1):
            check()
            at = mx.arange(count)[::order] % ROWS
            if not mx.array_equal(_first_of(op(*(x[at] for x in rows))), singles[at]):
                return most if most >= MANY else min(most, ROWS)
        most = count
    return most


def _first_of(y: Any) -> Any:
    """What an operation makes, of a router the scores."""
    return y[-1] if isinstance(y, tuple) else y

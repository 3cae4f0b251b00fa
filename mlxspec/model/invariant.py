"""Batch invariance of a loaded model: for each layer, how many rows a call may have so that each
row keeps its bits (found by trial), and which part of a prompt is computed in whole chunks.

Rule: a prompt's whole chunks, at fixed positions, each get their own forward, all of one shape; all
other rows share forwards, in which the layers make the calls that were found.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx.core import array as Array

from mlxspec.kernels import cpu
from mlxspec.kernels.invariant import Calls, route
from mlxspec.model.call_search import (
    EXPERTS,
    MANY,
    TIED,
    Tries,
    try_calls,
)
from mlxspec.model.trunk import mix_in, mix_out
from mlxspec.types import Check

KINDS = (nn.Linear, nn.QuantizedLinear, *TIED, *EXPERTS)
CHUNK = 64  # rows of a chunk, or a block if that is longer: near a product's best rate on a GPU

Recorded = dict[str, tuple[Any, list[Array]]]  # by key: a layer, and arrays that it was called with


@dataclass(frozen=True, slots=True)
class Invariance:
    """How a model's rows are computed. `calls` by the layers' `key_of`; others are called as they
    are. `chunk`: rows of a chunk of a prompt, a multiple of the block size; 0: no chunks.
    `by_kernel`: attention goes by our kernel, else by products of one shape."""

    calls: Mapping[str, Calls] = field(default_factory=dict)
    chunk: int = 0
    by_kernel: bool = False


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
            op = partial(cpu.transposed, self)
        elif not isinstance(self, KINDS):
            op = partial(route, op)
        return self._calls.apply(op, *arrays)


def layers_of(model: nn.Module) -> Iterator[Any]:
    """The layers of a model that multiply rows by weights: linear ones, experts, and beside experts
    the routers that have weights of their own."""
    for owner in model.modules():
        if isinstance(owner, KINDS):
            yield owner
        elif any(isinstance(part, EXPERTS) for part in owner.values()):
            yield from filter(_is_router, owner.values())


def _is_router(part: Any) -> bool:
    return (
        isinstance(part, nn.Module)
        and not isinstance(part, KINDS)
        and "weight" in part
        and part.weight.ndim == 2
    )


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
            shapes.append(f"{shape} {numbers}{' with a bias' if 'bias' in part else ''}")
    return f"{kind.__name__} {', '.join(dict.fromkeys(shapes))}"


def install(model: nn.Module, view: Any, invariance: Invariance | None) -> None:
    """Let the model's layers make these calls from now on; None: no others than their own."""
    for layer in layers_of(model):
        if invariance:
            mix_in(layer, InCalls)
            layer._view = view
            layer._calls = invariance.calls.get(key_of(layer))
        elif isinstance(layer, InCalls):
            mix_out(layer, InCalls)
            del layer._view, layer._calls


def chunk_rows(block_size: int) -> int:
    """The rows of a chunk in whole blocks."""
    return max(1, CHUNK // block_size) * block_size


def find_invariance(
    recorded: Recorded,
    block_size: int,
    chunks: bool = False,
    *,
    found: dict[str, Calls | Tries] | None = None,
    check: Check = lambda: None,
) -> Invariance:
    """The calls of these layers in which a row's bits depend on no other row. `chunks`: of a prompt
    in any case, else where calls of few rows would make it slow to read. Calls `check` before each
    product, and raises what it raises; with the same `found` it goes on there."""
    found = {} if found is None else found
    calls: dict[str, Calls] = {}
    for key, (layer, arrays) in recorded.items():
        if key not in found:
            found[key] = try_calls(layer, [x.reshape(-1, x.shape[-1]) for x in arrays])
        while not isinstance(tries := found[key], Calls):
            check()
            try:
                next(tries)
            except StopIteration as done:
                found[key] = done.value
        calls[key] = tries
    chunk = 0
    if chunks or any(each.most < MANY for each in calls.values()):
        chunk = chunk_rows(block_size)
    return Invariance(calls, chunk)

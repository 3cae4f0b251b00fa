"""The seam to mlx-lm: its attention function and its lm_head, rebound on a loaded model.

Rule: dispatch is per handle. Ours is called for our pages only; everything else goes to mlx-lm's
own, so a target, a draft model and plain mlx-lm live in one process.
"""

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base

from mlxspec.kernels import Attention, paged_attention
from mlxspec.model.pages import Pages, View
from mlxspec.types import FINAL_NORM, Tap, UnsupportedModel

_NAME = "scaled_dot_product_attention"
TRUNK_NAMES = ("model", "backbone", "transformer")  # mlx-lm's, of the module with the layers


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """queries [B, heads, L, D] and a Pages handle -> [B, heads, L, Dv], for the view's B * L rows;
    arrays go to mlx-lm's function."""
    if not isinstance(keys, Pages):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    batch, heads, length, dim = queries.shape
    if length > 1:
        queries = queries.swapaxes(1, 2)
    inputs = Attention(
        queries.reshape(-1, heads, dim),
        keys.keys,
        keys.values,
        keys.view.groups,
        scale,
        keys.window,
        sinks,
        keys.packings,
    )
    out = paged_attention(inputs)
    if length == 1:
        return out[:, :, None]
    out = out.reshape(batch, length, heads, -1)
    return out.swapaxes(1, 2)


def install(model: Module) -> None:
    """Rebind attention in the modules that the model's layers come from. Idempotent."""
    for layer in model.modules():
        source = sys.modules[type(layer).__module__]
        if hasattr(source, _NAME) and source is not base:
            setattr(source, _NAME, attention)


class Tapped:
    """Stands in for a decoder layer, or for the module that holds them: hands out its output
    [B, L, D] where `tap` is asked for. All else is looked up on the inner module."""

    def __init__(self, inner: Module, tap: Tap, view: View) -> None:
        self._inner, self._tap, self._view = inner, tap, view

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._inner(*args, **kwargs)
        view = self._view
        if self._tap in view.taps:
            hidden = out[0] if isinstance(out, tuple) else out
            view.tapped[self._tap] = hidden
        if self._tap == FINAL_NORM and view.sampled is not None:
            rows = out.flatten(0, 1)[view.sampled]
            return rows[:, None]  # only sampled rows go on to lm_head
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def graft(model: Module, view: View) -> Module | None:
    """Make the module that holds the layers a Tapped one with this view, and return it. None where
    there is none."""
    for owner in (model, getattr(model, "language_model", None)):
        if not isinstance(owner, Module):
            continue
        for name in TRUNK_NAMES:
            # Not by getattr, which finds properties too: they cannot be set.
            inner = owner.get(name) or vars(owner).get(name)
            if isinstance(inner, Tapped):  # of a runner that was tried before
                inner = inner._inner
            if isinstance(inner, Module) and _has_layers(inner):
                setattr(owner, name, Tapped(inner, FINAL_NORM, view))
                tap(inner, view, ())
                return inner
    return None


def _has_layers(module: Module) -> bool:
    lists = [each for each in module.values() if isinstance(each, list)]
    return bool(lists) or "layers" in module


def tap(trunk: Module, view: View, taps: Sequence[Tap]) -> None:
    """Hand out these hidden states of a grafted model. Raises UnsupportedModel for a layer that the
    model does not have."""
    layers = trunk.get("layers", [])
    for i, layer in enumerate(layers):
        if isinstance(layer, Tapped):
            layers[i] = layer._inner
    for i in set(taps) - {FINAL_NORM}:
        if not 0 <= i < len(layers):
            raise UnsupportedModel(f"layer {i} is to be read; the model has {len(layers)}")
        layers[i] = Tapped(layers[i], i, view)
    view.taps, view.tapped = tuple(taps), {}

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
    if batch * length != keys.view.groups[-1].hi:
        raise TypeError(
            f"attention for {batch * length} rows in a step of {keys.view.groups[-1].hi}"
        )
    q = (queries if length == 1 else queries.transpose(0, 2, 1, 3)).reshape(-1, heads, dim)
    k, v = keys.pools()
    groups = keys.view.groups
    out = paged_attention(Attention(q, k, v, groups, scale, keys.window, sinks, keys.packings))
    if length == 1:
        return out[:, :, None]
    return out.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)


def install(model: Module) -> None:
    """Rebind attention in the modules that the model's layers come from. Idempotent."""
    for module in {sys.modules[type(m).__module__] for _, m in model.named_modules()}:
        if hasattr(module, _NAME) and module is not base:
            setattr(module, _NAME, attention)


class Trunk:
    """Stands in for a model's inner module: hands out the hidden states that were asked for, and
    only the sampled rows to lm_head.

    Everything else (layers, tied embeddings) is looked up on the inner module.
    """

    def __init__(self, inner: Module, view: View) -> None:
        self._inner, self._view = inner, view

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        hidden: mx.array = self._inner(*args, **kwargs)
        if FINAL_NORM in self._view.taps:
            self._view.tapped[FINAL_NORM] = hidden
        if self._view.sampled is not None:
            hidden = hidden[self._view.sampled]
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TappedLayer:
    """Stands in for a decoder layer whose output [B, L, D], the residual stream, is handed out."""

    def __init__(self, inner: Module, tap: Tap, view: View) -> None:
        self._inner, self._tap, self._view = inner, tap, view

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._inner(*args, **kwargs)
        self._view.tapped[self._tap] = out[0] if isinstance(out, tuple) else out
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def graft(model: Module, view: View) -> bool:
    """Put a Trunk round the module that holds the layers. False where there is none."""
    for owner, name in _seats(model):
        inner = getattr(owner, name)
        if isinstance(inner, Module) and (
            "layers" in inner or any(isinstance(x, list) for x in inner.values())
        ):
            setattr(owner, name, Trunk(inner, view))
            return True
    return False


def ungraft(model: Module) -> None:
    """Undo `graft` and `tap`."""
    for owner, name in _seats(model):
        trunk = getattr(owner, name)
        if isinstance(trunk, Trunk):
            _untap(trunk._inner)
            delattr(owner, name)
            setattr(owner, name, trunk._inner)


def tap(model: Module, view: View, taps: Sequence[Tap]) -> None:
    """Hand out these hidden states of a grafted model. Raises UnsupportedModel for a layer that the
    model does not have."""
    trunks = [getattr(owner, name) for owner, name in _seats(model)]
    for trunk in trunks:
        if not isinstance(trunk, Trunk):
            continue
        _untap(trunk._inner)
        layers = trunk._inner.get("layers", [])
        for i in taps:
            if i == FINAL_NORM:
                continue
            if not 0 <= i < len(layers):
                raise UnsupportedModel(f"layer {i} is to be read; the model has {len(layers)}")
            layers[i] = TappedLayer(layers[i], i, view)
    view.taps, view.tapped = tuple(taps), {}


def _untap(inner: Module) -> None:
    layers = inner.get("layers", [])
    for i, layer in enumerate(layers):
        if isinstance(layer, TappedLayer):
            layers[i] = layer._inner


def _seats(model: Module) -> list[tuple[Module, str]]:
    """Where mlx-lm's models keep the module with the layers."""
    owners = [o for o in (model, getattr(model, "language_model", None)) if isinstance(o, Module)]
    names = ("model", "backbone", "transformer")
    # A property cannot be set.
    return [(o, n) for o in owners for n in names if n in o or n in vars(o)]

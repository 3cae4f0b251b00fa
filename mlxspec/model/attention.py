"""The seam to mlx-lm: its attention function and its lm_head, rebound on a loaded model.

Rule: dispatch is per handle. Ours is called for our pages only; everything else goes to mlx-lm's
own, so a target, a draft model and plain mlx-lm live in one process.
"""

import sys
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base

from mlxspec.kernels import paged_attention
from mlxspec.model.pages import Pages, View

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
    out = paged_attention(q, k, v, keys.view.groups, scale, keys.window, sinks, keys.packings)
    if length == 1:
        return out[:, :, None]
    return out.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)


def install(model: Module) -> None:
    """Rebind attention in the modules that the model's layers come from. Idempotent."""
    for module in {sys.modules[type(m).__module__] for _, m in model.named_modules()}:
        if hasattr(module, _NAME) and module is not base:
            setattr(module, _NAME, attention)


class Trunk:
    """Stands in for a model's inner module: keeps the sampled rows before lm_head sees them.

    Everything else (layers, tied embeddings) is looked up on the inner module."""

    def __init__(self, inner: Module, view: View) -> None:
        self._inner, self._view = inner, view

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        hidden: mx.array = self._inner(*args, **kwargs)
        if self._view.sampled is not None:
            hidden = hidden[self._view.sampled]
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def graft(model: Module, view: View) -> bool:
    """Put a Trunk round the module that holds the layers. False where the model is not built that
    way."""
    for owner, name in _seats(model):
        inner = getattr(owner, name)
        if isinstance(inner, Module) and (
            "layers" in inner or any(isinstance(x, list) for x in inner.values())
        ):
            setattr(owner, name, Trunk(inner, view))
            return True
    return False


def ungraft(model: Module) -> None:
    """Undo `graft`."""
    for owner, name in _seats(model):
        if isinstance(trunk := getattr(owner, name), Trunk):
            delattr(owner, name)
            setattr(owner, name, trunk._inner)


def _seats(model: Module) -> list[tuple[Module, str]]:
    """Where mlx-lm's models keep the module with the layers."""
    owners = [o for o in (model, getattr(model, "language_model", None)) if isinstance(o, Module)]
    names = ("model", "backbone", "transformer")
    return [
        (o, n) for o in owners for n in names if n in o or n in vars(o)
    ]  # a property cannot be set

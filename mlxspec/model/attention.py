"""The seam to mlx-lm: its attention function, rebound in the modules of a loaded model.

Rule: dispatch is per handle. Only our pages go to our attention, everything else to mlx-lm's, so
that a target, a draft model and plain mlx-lm can share a process.
"""

import sys
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models import base

from mlxspec.kernels.attention import (
    attention_beside,
    invariant_attention,
    paged_attention,
    shape_of,
)
from mlxspec.kernels.inputs import Attention
from mlxspec.model.pages import Pages

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
        keys.clean,
    )
    keys.shape = shape = shape_of(inputs)
    beside = (keys.view.beside or {}).get(keys)
    if beside and shape:
        out = attention_beside(inputs, shape, beside)
    elif keys.view.invariant:
        out = invariant_attention(inputs, shape, keys.view.invariant_by_kernel)
    else:
        out = paged_attention(inputs, shape=shape)
    if length == 1:
        return out[:, :, None]
    out = out.reshape(batch, length, heads, -1)
    return out.swapaxes(1, 2)


def install(model: Module) -> None:
    """Rebind attention in the modules that define the model's layers. Idempotent."""
    for layer in model.modules():
        source = sys.modules[type(layer).__module__]
        if hasattr(source, _NAME) and source is not base:
            setattr(source, _NAME, attention)

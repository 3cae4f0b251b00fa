"""Models with numbers that are not finite."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.kernels import cpu
from mlxspec.model.trunk import trunk_of
from tests.support import tiny

NAN, INF = float("nan"), float("inf")


def spoilt_model(kind: str, bad: int, value: float = NAN, dtype: Any = mx.float32) -> nn.Module:
    """A tiny model with an embedding of the token `bad` that is `value`; its lm_head is not."""
    m = tiny.model(kind)
    m.set_dtype(dtype)
    return with_spoilt(m, bad, value)


def with_spoilt(m: nn.Module, bad: int, value: float = NAN) -> nn.Module:
    modules = trunk_of(m).modules()
    embedding = next(x for x in modules if isinstance(x, nn.Embedding) and "weight" in x)
    plain = type(embedding)

    def embed(self: Any, tokens: mx.array) -> Any:
        x = plain.__call__(self, tokens)
        return mx.where((tokens == bad)[..., None], mx.array(value, x.dtype), x)

    embedding.__class__ = type(plain.__name__, (plain,), {"__call__": embed})
    cpu.install(m)
    return m

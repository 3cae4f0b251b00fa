"""Catches code that waits for the device."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

READS = ("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__")
READS += ("__dlpack__", "__repr__", "__format__", "__getstate__")
CALLS = ("eval", "synchronize")
COPIES = ("array", "asarray", "ascontiguousarray", "stack", "concatenate")  # numpy's


def forbid(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, fail where an array is read on the host; memoryview() is not
    seen."""
    for name in READS:
        patch.setattr(mx.array, name, _failing(f"mx.array.{name}"))
    for name in CALLS:
        patch.setattr(mx, name, _failing(f"mx.{name}"))
    for name in COPIES:
        patch.setattr(np, name, _of_host_arrays(f"np.{name}", getattr(np, name)))


def _failing(name: str) -> Any:
    return lambda *args, **kw: pytest.fail(f"{name} waits for the device")


def _of_host_arrays(name: str, inner: Any) -> Any:
    def call(first: Any, *args: Any, **kw: Any) -> Any:
        parts = first if isinstance(first, list | tuple) else [first]
        if any(isinstance(part, mx.array) for part in parts):
            pytest.fail(f"{name} waits for the device")
        return inner(first, *args, **kw)

    return call

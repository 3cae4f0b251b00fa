"""Where the kernels of a test run: in the simulator, or with `-m metal` on this Mac's own GPU.

Rule: the bodies are the same; a module takes part by `pytestmark = pytest.mark.usefixtures("device")`.
"""

import sys
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import pytest

from tests import metalsim


@pytest.fixture(params=["simulator", pytest.param("gpu", marks=pytest.mark.metal)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `metalsim.patch` brings inside a test; on the GPU nothing, and mx.fast.metal_kernel is MLX's own."""
    if request.param == "simulator":
        if sys.platform != "linux":
            pytest.skip("the simulator runs on Linux; here `pytest -m metal` runs this on the GPU")
        return
    if not mx.metal.is_available():
        say: Any = pytest.fail if sys.platform == "darwin" else pytest.skip  # a run on a Mac must not be empty
        say("MLX finds no Metal GPU here")
    monkeypatch.setattr(metalsim, "patch", lambda **_: nullcontext())

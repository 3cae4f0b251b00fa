"""Where the kernels of a test run: in the simulator, or with `-m metal` on this Mac's own GPU.

Rule: the bodies are the same; a module takes part by `pytestmark =
pytest.mark.usefixtures("device")`.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests import metalsim
from tests.kernels.battery import STRICT


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but one of a test's simulated parameters as slow, which together take minutes: the
    first stays in one test, one of the middle in the next, so that a run of every day takes each
    code path in some."""
    tests = defaultdict(list)
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("metal"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for number, found in enumerate(tests.values()):
        kept = found[number % 2 * (len(found) // 2)]
        for item in found:
            if item is not kept:
                item.add_marker("slow")


@pytest.fixture(params=["simulator", pytest.param("gpu", marks=pytest.mark.metal)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `metalsim.patch` brings inside a test: the simulator, or nothing but MLX's own
    metal_kernel, and the GPU as MLX's device."""
    if request.param == "simulator":
        if sys.platform != "linux":
            pytest.skip("the simulator runs on Linux; here `pytest -m metal` runs this on the GPU")
        monkeypatch.setattr(metalsim.config, "severity", STRICT)
        yield
        return
    if not mx.metal.is_available():
        say: Any = pytest.fail if sys.platform == "darwin" else pytest.skip  # not an empty run
        say("MLX finds no Metal GPU here")
    real = mx.fast.metal_kernel

    @contextmanager
    def patch(**_: Any) -> Iterator[None]:
        yield
        mx.fast.metal_kernel = real

    monkeypatch.setattr(metalsim, "patch", patch)
    monkeypatch.setattr(metalsim, "metal_kernel", real)
    monkeypatch.setattr(metalsim, "last", lambda: metalsim.Report("not simulated"))
    monkeypatch.setattr(mx.fast, "metal_kernel", real)  # back at the end, whatever a test put there
    mx.set_default_device(mx.gpu)
    yield
    mx.set_default_device(mx.cpu)

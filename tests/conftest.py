"""OpenBLAS before mlx, as in the program itself, and the fixtures that several modules need."""

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mlxspec import blas

gc.disable()  # until all tests are collected: their modules are many objects, and all of them stay
blas.load()

import mlx.core as mx  # noqa: E402  after BLAS

# MLX on a CPU gives each operation to a thread, which woke at once and took the core of the one that
# goes on to the next operation. Threads inherit the policy.
if sys.platform == "linux":
    usual = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    mx.eval(mx.add(1, 1, stream=mx.cpu))
    os.sched_setscheduler(0, usual, os.sched_param(0))

# On a Mac too: exact tokens, peak memory and orders of summing are a CPU's here. Tests for the GPU
# take it by themselves.
mx.set_default_device(mx.cpu)

# How long an example takes is up to the machine. The plain profile tries the same examples each
# time; `make test-slow` tries others, and more, with --hypothesis-profile=random.
settings.register_profile("plain", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("random", deadline=None, derandomize=False, max_examples=1000)
settings.load_profile("plain")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--metal-order",
        type=int,
        default=0,
        help="order of lanes and threadgroups in simulated kernels: 0 up, 1 down, else a seed to shuffle by",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Ignored in what a shell runs in the background or under nohup, and then in all that a test
    # starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from tests.metalsim.settings import config as simulator

    simulator.order = config.getoption("metal_order")


def pytest_collection_finish() -> None:
    """No later collection of garbage walks what tests are made of."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _streams() -> Iterator[None]:
    """Threads that used MLX must not outlive the interpreter."""
    yield
    gc.collect()
    mx.clear_streams()


@pytest.fixture
def bare_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file, no variables: tests do not see the settings of the person who runs them."""
    for name in list(os.environ):
        if name.startswith("MLXSPEC_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in fp32, fetched and converted once per machine."""
    from mlxspec.files import default_cache_dir
    from mlxspec.model.hub import resolve

    return resolve("", default_cache_dir(), metal=False).path


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A hub that accepts connections and never answers; the directory of its cache."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        cache = tmp_path / "hub"
        cache.mkdir()
        for name, value in (("ENDPOINT", url), ("HF_HUB_ETAG_TIMEOUT", 0.2)):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        yield cache

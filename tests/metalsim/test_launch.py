"""What a launch counts, the order of its threads, and the mode that checks nothing."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests import metalsim
from tests.metalsim.trial import run

ROOT = Path(__file__).resolve().parents[2]


def moved(name: str) -> tuple[int, int, int, int]:
    traffic = metalsim.last().traffic[name]
    return traffic.read, traffic.read_unique, traffic.written, traffic.written_unique


def test_bytes_are_counted_as_asked_for_and_as_distinct_ones() -> None:
    run("o[i] = x[i / 32] + x[3];")
    assert moved("x") == (2 * 4 * 64, 12, 0, 0)
    assert moved("o") == (0, 0, 4 * 64, 4 * 64)
    assert np.flatnonzero(metalsim.last().traffic["x"].was_read).tolist() == [
        *range(8),
        *range(12, 16),
    ]
    assert metalsim.last().counts["tg"] == 1


def test_bytes_of_vectors_and_of_an_output_read_back() -> None:
    run(
        "if (i < 16) { float4 v = ((const device float4*)x)[i]; o[i] = v.x + v.w; o[i] = o[i] + 1; }"
    )
    assert moved("x") == (256, 256, 0, 0)
    assert moved("o") == (64, 64, 128, 64)


def test_atomics_read_and_write_and_strays_count_nowhere() -> None:
    run("atomic_fetch_add_explicit(&o[0], x[i], memory_order_relaxed);", out=2, init=0, atomic=True)
    assert moved("o") == (4 * 64, 4, 4 * 64, 4)
    with pytest.raises(metalsim.MetalSimError):
        run("o[i] = x[i + 1];")
    assert moved("x") == (4 * 63, 4 * 63, 0, 0)


def test_the_layout_of_an_input_is_counted_apart() -> None:
    run("o[i] = x[i] + x_shape[0];")
    assert moved("x") == (256, 256, 0, 0) and moved("x_shape") == (256, 4, 0, 0)


def test_no_bytes_are_counted_unchecked() -> None:
    run("o[i] = x[i];", checked=False)
    assert metalsim.last().traffic == {}


def test_unchecked_values_are_the_same_to_the_bit() -> None:
    body = "float s = 0; for (uint k = 0; k < 64; k++) s += exp(x[k]) * x[i]; o[i] = simd_sum(s) / 3.0;"
    x = mx.array(np.random.default_rng(0).normal(size=64).astype(np.float32))
    assert mx.array_equal(run(body, x=x), run(body, x=x, checked=False)).item()


@pytest.mark.parametrize("threadgroups", [4, 7, 12])
def test_the_order_of_threadgroups_and_lanes(threadgroups: int) -> None:
    """Each thread takes the next number: a seed gives one order, each number once."""
    kernel = metalsim.metal_kernel(
        "k",
        ["x"],
        ["n", "o"],
        "uint i = thread_position_in_grid.x;"
        "o[i].msim_v = atomic_fetch_add_explicit(&n[0], x[0], memory_order_relaxed);",
        atomic_outputs=True,
    )
    total = threadgroups * 64

    def ranks(order: int) -> list[int]:
        with metalsim.configure(order=order):
            _, o = kernel(
                inputs=[mx.array([1], mx.int32)],
                grid=(total, 1, 1),
                threadgroup=(64, 1, 1),
                output_shapes=[(1,), (total,)],
                output_dtypes=[mx.int32, mx.int32],
                init_value=0,
            )
        return o.tolist()

    assert ranks(0) == list(range(total))
    assert ranks(1) == list(range(total))[::-1]
    shuffled = {order: ranks(order) for order in (2, 3, 4)}
    assert len({tuple(found) for found in shuffled.values()}) == 3
    for order, found in shuffled.items():
        assert sorted(found) == list(range(total)) and found == ranks(order)
        starts = [min(found[k * 64 : k * 64 + 64]) // 64 for k in range(threadgroups)]
        assert sorted(starts) == list(range(threadgroups))


@pytest.mark.slow
def test_the_option_sets_the_order() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--metal-order", "1"]
    test = "tests/metalsim/test_launch.py::test_the_option_is_the_setting"
    done = subprocess.run([*command, test], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_option_is_the_setting(pytestconfig: pytest.Config) -> None:
    assert metalsim.config.order == pytestconfig.getoption("metal_order")


def test_settings_come_back() -> None:
    with pytest.raises(KeyError), metalsim.configure(order=3, races=False):
        assert (metalsim.config.order, metalsim.config.races) == (3, False)
        raise KeyError
    assert metalsim.config.races


def test_patch_takes_the_place_of_mlx() -> None:
    with metalsim.patch():
        assert mx.metal.is_available() and isinstance(
            mx.fast.metal_kernel("k", ["x"], ["o"], "o[0] = x[0];"), metalsim.Kernel
        )
    assert mx.fast.metal_kernel is not metalsim.metal_kernel

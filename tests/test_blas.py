"""OpenBLAS answers for the BLAS symbols that MLX calls, or the log says how to get it."""

import subprocess
import sys

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs a BLAS")

PROGRAM = """
import ctypes, logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from mlxspec import blas
{before}
print("loaded", blas.load(), blas.load())
import mlx.core as mx
a = mx.random.normal((64, 64)); mx.eval(a @ a)
everyone = ctypes.CDLL(None)  # what a symbol means to a library that is loaded from now on
print("openblas", hasattr(everyone, "openblas_get_config"), hasattr(everyone, "cblas_sgemm"))
"""


def run(before: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)], capture_output=True, text=True, check=True
    )
    return done.stdout


@linux
def test_it_comes_before_mlx_and_is_said_once() -> None:
    said = run()
    if "openblas" not in said.lower().partition("loaded")[0] or "not found" in said:
        pytest.skip("OpenBLAS is not installed here")
    assert "openblas True True" in said
    assert said.count("BLAS: ") == 1


@linux
def test_without_it_a_warning_says_what_to_install() -> None:
    said = run("blas.ctypes.util.find_library = lambda name: None; blas.PLACES = ()")
    assert "sudo apt-get install libopenblas0-pthread" in said and "loaded None None" in said
    assert said.count("OpenBLAS not found") == 1


@linux
def test_too_late_is_said() -> None:
    said = run("import mlx.core")
    assert "MLX was imported before it" in said and "loaded None None" in said


def test_elsewhere_nothing_is_needed() -> None:
    said = run("blas.sys = type('s', (), {'platform': 'darwin', 'modules': {}})")
    assert "loaded None None" in said and "OpenBLAS" not in said

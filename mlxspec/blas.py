"""A fast BLAS for MLX on Linux, and mlx-lm without its limit of open files.

Rule: call `load` before anything imports `mlx.core` or `mlx_lm`. MLX's CPU wheel carries a
reference BLAS that is 10 to 30 times slower; OpenBLAS, loaded with RTLD_GLOBAL, replaces its
symbols. On macOS MLX uses Accelerate and Metal.
"""

import ctypes
import ctypes.util
import functools
import glob
import importlib
import logging
import os
import resource
import sys

log = logging.getLogger("mlxspec")

PATHS = (
    "$CONDA_PREFIX/lib/libopenblas.so*",
    "/usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib*/libopenblasp.so.0",
    "/usr/lib*/libopenblas.so*",
    "/opt/*/lib/libopenblas.so*",
)
OPEN_FILES = 2048  # that the process may have open, where the user allows it
INSTALL = (
    "install it with one of: sudo apt-get install libopenblas0-pthread;"
    " sudo dnf install openblas-threads; sudo pacman -S openblas"
)


@functools.cache
def load() -> str | None:
    """The OpenBLAS that was loaded; None where there is none, or none is needed."""
    name = None
    if sys.platform == "linux":
        name = _load_openblas()
    _import_mlx_lm()
    return name


def _load_openblas() -> str | None:
    if "mlx.core" in sys.modules:
        log.warning("MLX was imported before OpenBLAS and keeps its slow reference BLAS")
        return None
    for name in _candidates():
        try:
            _ = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL).cblas_sgemm  # other libraries lack it
        except (OSError, AttributeError):
            continue
        log.info("BLAS: %s", name)
        return name
    log.warning("OpenBLAS not found: matrix products are 10 to 30 times slower. %s", INSTALL)
    return None


def _import_mlx_lm() -> None:
    """Import mlx-lm, whose import sets the limits of open files to (2048, 4096): that lowers a
    higher one for good, and fails where the hard limit is lower. So that call does nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = setrlimit


def _candidates() -> list[str]:
    """Names and paths to try, the best first."""
    found = [ctypes.util.find_library("openblas") or "libopenblas.so"]
    for path in PATHS:
        found += sorted(glob.glob(os.path.expandvars(path)))
    return found

"""A fast BLAS for MLX on Linux, and mlx-lm without its limit of open files.

Rule: call `load` before anything imports `mlx.core` or `mlx_lm`. MLX's CPU wheel carries a
reference BLAS that is 10 to 30 times slower; OpenBLAS, loaded with RTLD_GLOBAL, replaces its
symbols. On macOS MLX uses Accelerate and Metal.
"""

import ctypes
import functools
import importlib
import logging
import resource
import sys

log = logging.getLogger("mlxspec")

# Debian's and Arch's OpenBLAS; Fedora's with threads; any other. The linker finds them.
NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")
OPEN_FILES = 2048  # soft limit of open files, where the hard limit allows it
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
    for name in NAMES:
        try:
            _ = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL).cblas_sgemm  # other libraries lack it
        except (OSError, AttributeError):
            continue
        log.info("BLAS: %s", name)
        return name
    log.warning("OpenBLAS not found: matrix products are 10 to 30 times slower. %s", INSTALL)
    return None


def _import_mlx_lm() -> None:
    """Import mlx-lm without its call of `setrlimit(RLIMIT_NOFILE, (2048, 4096))`, which lowers a
    higher hard limit for good and fails where the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(OPEN_FILES, hard)), hard))
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = setrlimit

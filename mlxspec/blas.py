"""What must be so before MLX is imported: a fast BLAS on Linux, settings of Metal on macOS; and
mlx-lm without its limit of open files.

Rule: call `load` before anything imports `mlx.core` or `mlx_lm`. MLX's CPU wheel carries a
reference BLAS that is 10 to 30 times slower; OpenBLAS, loaded with RTLD_GLOBAL, replaces its
symbols. On macOS MLX uses Accelerate and Metal.
"""

import ctypes
import functools
import importlib
import os
import re
import resource
import subprocess
import sys

from mlxspec import log
from mlxspec.types import UserError

# Debian's and Arch's OpenBLAS; Fedora's with threads; any other. The linker finds them.
NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")
# Launches of a command buffer; MLX's own are 40 or 50. MLX submits up to 10 buffers ahead of the
# GPU, which hold what they read. A pool that is held when the next step writes it is copied, so
# these must be fewer launches than a step has (tests/metalsim/host.py).
BUFFER_LAUNCHES = "16"
OPEN_FILES = 2048  # soft limit of open files, where the hard limit allows it
INSTALL = (
    "install it with one of: sudo apt-get install libopenblas0-pthread;"
    " sudo dnf install openblas-threads; sudo pacman -S openblas"
)


@functools.cache
def load() -> str | None:
    """The OpenBLAS that was loaded; None where there is none, or none is needed. Raises UserError
    for a macOS on which MLX fails."""
    name = None
    if sys.platform == "linux":
        name = _load_openblas()
    if sys.platform == "darwin":
        _prepare_metal()
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


def _prepare_metal() -> None:
    """Settings that MLX reads when it opens the device."""
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", BUFFER_LAUNCHES)
    names = "kern.osproductversion", "machdep.cpu.brand_string"
    facts = subprocess.check_output(("/usr/sbin/sysctl", "-n", *names), text=True)
    # MLX takes any macOS 26 for 26.2: https://github.com/ml-explore/mlx/issues/4525.
    if re.match(r"26\.[01]\b.*\bM5\b", facts, re.S) and "MLX_METAL_GPU_ARCH" not in os.environ:
        raise UserError(f"macOS {facts.split()[0]} lacks what MLX uses on an M5; update to 26.2")


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

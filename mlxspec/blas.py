"""A fast BLAS for MLX on Linux, which must be in the process before `mlx.core` is, as must its
limits.

Rule: load it first. MLX's CPU wheel carries a reference BLAS that is 10 to 30 times slower;
OpenBLAS, loaded with RTLD_GLOBAL, answers for its symbols instead. macOS needs nothing: MLX uses
Accelerate and Metal there.
"""

import ctypes
import ctypes.util
import functools
import logging
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("mlxspec")

PLACES = (
    "/usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib*/libopenblasp.so.0",
    "/usr/lib*/libopenblas.so*",
    "/opt/*/lib/libopenblas.so*",
)
FILES = 2048  # that may be open, where the user allows so many
MEND = (
    "install it with one of: sudo apt-get install libopenblas0-pthread; sudo dnf install openblas-threads;"
    " sudo pacman -S openblas"
)


@functools.cache
def load() -> str | None:
    """The OpenBLAS that was loaded, or None where there is none or none is needed; said once in the
    log. How many files may be open is the user's affair from here on, whatever mlx-lm would set."""
    _keep_limits()
    if sys.platform != "linux":
        return None
    if "mlx.core" in sys.modules:
        log.warning(
            "OpenBLAS not loaded: MLX was imported before it, and keeps its slow reference BLAS"
        )
        return None
    for name in _candidates():
        try:
            _ = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL).cblas_sgemm  # another library has none
        except (OSError, AttributeError):
            continue
        log.info("BLAS: %s", name)
        return name
    log.warning("OpenBLAS not found; matrix products will be 10 to 30 times slower. %s", MEND)
    return None


def _keep_limits() -> None:
    """mlx-lm, when imported, sets (2048, 4096): that lowers a higher limit, and raises ValueError
    where the hard one is lower. So its one call does nothing, and what it is for is done here as
    far as allowed."""
    if "mlx_lm" in sys.modules:
        return
    setrlimit, (soft, hard) = resource.setrlimit, resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    def kept(which: int, limits: tuple[int, int]) -> None:
        if sys._getframe(1).f_globals.get("__name__") != "mlx_lm.utils":
            return setrlimit(which, limits)
        resource.setrlimit = setrlimit

    resource.setrlimit = kept


def _candidates() -> Iterator[str]:
    if found := ctypes.util.find_library("openblas"):
        yield found
    if prefix := os.environ.get("CONDA_PREFIX"):
        yield from map(str, Path(prefix).glob("lib/libopenblas.so*"))
    for place in PLACES:
        yield from sorted(map(str, Path("/").glob(place.removeprefix("/"))))

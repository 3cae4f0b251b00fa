"""The archives that a user installs from: the wheel, the source archive, and Homebrew's formula for it."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mlxspec import __version__

ROOT = Path(__file__).resolve().parents[1]
PLACES = {  # in the sources -> in the wheel
    "mlxspec": "mlxspec",
    "metal": "mlxspec/_data/metal",
    "models": "mlxspec/_data/models",
    "launchd": "mlxspec/_data/launchd",
}


def build(kind: str, sources: Path, out: Path) -> Path:
    """What pip and `python -m build` ask of the build backend."""
    command = f"import hatchling.build as b; print(b.build_{kind}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=sources, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The source archive, where it was unpacked, and a wheel that was built there."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    sdist = build("sdist", ROOT, out)
    with tarfile.open(sdist) as tar:
        tar.extractall(out, filter="data")
    unpacked = out / f"mlxspec-{__version__}"
    return sdist, unpacked, build("wheel", unpacked, out)


def files_below(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store"
    }


def test_a_wheel_holds_the_package_and_its_data_alone(archives: tuple[Path, Path, Path]) -> None:
    wheel = archives[2]
    assert wheel.name == f"mlxspec-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    wanted = {f"{to}/{name}" for at, to in PLACES.items() for name in files_below(ROOT / at)}
    assert names == wanted


def test_a_source_archive_holds_what_the_wheel_needs_and_the_guides(
    archives: tuple[Path, Path, Path],
) -> None:
    found = {name for name in files_below(archives[1]) if not name.startswith((*PLACES, "docs/"))}
    assert found == {
        "CHANGELOG.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        ".gitignore",
    }


def test_the_formula_names_the_archive_and_its_hash(archives: tuple[Path, Path, Path]) -> None:
    sdist = archives[0]
    command = [sys.executable, ROOT / "packaging/formula", sdist]
    formula = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f'  url "{sdist.as_uri()}"' in formula and sdist.name == f"mlxspec-{__version__}.tar.gz"
    assert f'  sha256 "{hashlib.sha256(sdist.read_bytes()).hexdigest()}"' in formula
    if ruby := shutil.which("ruby"):
        subprocess.run([ruby, "-c"], input=formula, text=True, check=True)

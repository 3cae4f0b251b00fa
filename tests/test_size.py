"""The budget of lines, and that the script which watches it does fail."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def size(*folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/size"), *map(str, folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_package_is_within_the_budget() -> None:
    done = size()
    assert done.returncode == 0, done.stderr
    assert "mlxspec/config.py" in done.stdout


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.py": "x = 1\n" * 401}, "the file has 401 lines, more than 400"),
        ({"a.py": "async def long():\n" + "    x = 1\n" * 60}, "long has 61 lines, more than 60"),
        ({f"{i}.py": "x = 1\n" * 400 for i in range(51)}, "20400 lines, more than 20100"),
    ],
)
def test_too_much_is_refused(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = size(tmp_path)
    assert done.returncode == 1
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_full_budget_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def long():\n" + "    x = 1\n" * 59 + "x = 1\n" * 340)
    assert size(tmp_path).returncode == 0


def test_scripts_are_short() -> None:
    for path in (ROOT / "scripts").iterdir():
        if path.suffix != ".md" and path.is_file():
            assert len(path.read_text().splitlines()) <= 30, path

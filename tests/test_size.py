"""The package is within its budget, and the script that says so fails over it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def size(*folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/size"), *map(str, folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_package_is_within_the_budget() -> None:
    done = size()
    assert done.returncode == 0 and "config.py" in done.stdout, done.stderr


def test_too_much_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("def f():\n" + "    x = 1\n" * 500)
    (tmp_path / "dense.py").write_text(f"x = [{'1, ' * 110_000}]\n")
    done = size(tmp_path)
    assert done.returncode == 1
    for reason in ("a function of 501", "501 lines", "tokens, more than", "tokens a code line"):
        assert reason in done.stderr, reason

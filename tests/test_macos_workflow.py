"""The steps for a Mac, as far as they can be read here."""

import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml

FILE = Path(__file__).resolve().parents[1] / ".github/workflows/macos.yml"


def steps() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(FILE.read_text("utf-8"))["jobs"]["macos"]["steps"]
    return found


@pytest.mark.parametrize("step", [s for s in steps() if "run" in s], ids=lambda s: s["run"][:20])
def test_a_step_is_right_bash(step: dict[str, Any]) -> None:
    done = subprocess.run(["bash", "-n"], input=step["run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("system", "languages"),
    [
        ("15.7.1", ["metal3.1", "metal3.2"]),
        ("26.2", ["metal3.1", "metal3.2", "metal4.0"]),
        ("27.0", ["metal3.1", "metal3.2", "metal4.0"]),
    ],
)
def test_each_kernel_is_compiled_in_the_languages_of_a_system(
    system: str, languages: list[str], tmp_path: Path
) -> None:
    """With stand-ins for Apple's tools; the step fails where the compiler does, after all kernels.
    Tensors are Metal 4's."""
    (script,) = (s["run"] for s in steps() if "languages" in s.get("run", ""))
    for name, text in {
        ".venv/bin/python": "mkdir -p build/metal; touch build/metal/a.metal build/metal/b.metal;"
        " echo '#include <MetalPerformancePrimitives/x.h>' > build/metal/c.metal",
        "bin/sw_vers": f"echo {system}",
        "bin/xcrun": 'echo "$@" >> calls; [ ! -e broken ] || { echo why >&2; exit 1; }',
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    (tmp_path / "build/report").mkdir(parents=True)
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    found = [word[5:] for line in calls for word in line.split() if word.startswith("-std=")]
    assert found == [*languages, *languages, *languages[2:]]
    (tmp_path / "broken").touch()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode and done.stdout == (tmp_path / "build/report/compiled.txt").read_text()
    assert done.stdout.count("FAILED") == done.stdout.count("why") == len(found)


@pytest.mark.parametrize(("downloads", "status"), [(0, 0), (1, 0), (2, 0), (9, 1)])
def test_the_compiler_is_downloaded_where_xcode_has_none(
    downloads: int, status: int, tmp_path: Path
) -> None:
    """Stand-ins again: the compiler is there after so many downloads."""
    (script,) = (s["run"] for s in steps() if "downloadComponent" in s.get("run", ""))
    for name, text in {
        "xcrun": f'[ "$(cat tries 2>/dev/null | wc -l)" -ge {downloads} ]',
        "xcodebuild": "echo >> tries",
        "sleep": "",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run(command, cwd=tmp_path, env=env).returncode == status


def test_a_step_that_hangs_ends_before_the_job_and_the_report_is_kept() -> None:
    job = yaml.safe_load(FILE.read_text("utf-8"))["jobs"]["macos"]
    assert sum(s["timeout-minutes"] for s in steps() if "run" in s) < job["timeout-minutes"]
    assert "always()" in steps()[-1]["if"] and "upload-artifact" in steps()[-1]["uses"]


def test_the_tests_compute_on_the_cpu() -> None:
    assert mx.default_device() == mx.Device(mx.cpu)

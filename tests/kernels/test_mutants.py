"""What the tests of the kernels are worth: most single-token changes of a kernel must be
noticed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests import metalsim
from tests.kernels import mutants
from tests.kernels.battery import BATTERY, STRICT
from tests.kernels.mutants import FILES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the simulator runs on Linux")


def test_every_kernel_has_a_battery() -> None:
    assert sorted(BATTERY) == FILES


@pytest.mark.slow
def test_the_battery_and_what_a_mac_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels as they are pass, and the sources that a Mac's compiler is to see are those that run
    here."""
    ran, call = set(), metalsim.Kernel.__call__

    def recorded(self: metalsim.Kernel, **named: Any) -> list[mx.array]:
        inputs = [mx.array(x) for x in named["inputs"]]
        ran.add(self.mlx_source(inputs, named["output_dtypes"], named.get("template")))
        return call(self, **named)

    monkeypatch.setattr(metalsim.Kernel, "__call__", recorded)
    monkeypatch.setattr(metalsim.config, "severity", STRICT)
    for trial in (trial for file in FILES for trial in BATTERY[file]()):
        trial()
    subprocess.run(
        [sys.executable, mutants.ROOT / "scripts/metal", tmp_path], check=True, timeout=600
    )
    written = {
        path.read_text("utf-8").split("using namespace metal;\n", 1)[1]
        for path in tmp_path.iterdir()
    }
    assert written == ran and len(written) > 2 * len(FILES)


@pytest.mark.slow
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """30 of all files, drawn by a seed that is not chosen: 0."""
    monkeypatch.setenv("METALSIM_CACHE", str(tmp_path))
    found = mutants.sample(30, 0, FILES)
    print(mutants.summary(found))
    counted = [m for m in found if m.outcome in ("caught", "survived", "error")]
    assert len(counted) == 30 and not any(m.outcome == "error" for m in counted), mutants.summary(
        found
    )
    assert sum(m.outcome == "caught" for m in counted) >= 0.95 * 30, mutants.summary(found)

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
KERNEL = """#include <metal_stdlib>  // 1 + 1
using namespace metal;
/* 2 < 3 */
template <int N>
void f(const device float* x, device float* y, int n, uint lane) {
  const int first = 2 + n;
  const int last = first;
  if (first < last && n != 0) {
    y[last] = max(x[first], 0.5f);  // 7
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
"""


def test_every_kernel_has_a_battery() -> None:
    assert sorted(BATTERY) == FILES


def test_one_token_is_another_and_comments_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "original", lambda file: KERNEL)
    found = [m for site in mutants.sites("k") for m in site]
    lines = KERNEL.splitlines()
    changed = {}
    for m in found:
        text = m.text().splitlines()
        (at,) = (i for i, (a, b) in enumerate(zip(lines, text, strict=True)) if a != b)
        changed.setdefault(at + 1, set()).add((m.old, m.new))
    assert sorted(changed) == [6, 7, 8, 9, 10]
    assert {("2", "3"), ("2", "1"), ("2", "0"), ("+", "-"), ("+", "*"), ("n", "N")} <= changed[6]
    assert changed[7] == {("first", "n"), ("first", "N")}
    assert {
        ("<", "<="),
        ("<", ">"),
        ("<", ">="),
        ("&&", "||"),
        ("!=", "=="),
        ("first", "last"),
    } <= changed[8]
    assert {("max", "min"), ("0.5f", "0.0f"), ("0.5f", "1.0f"), ("last", "first")} <= changed[9]
    assert changed[10] == {("threadgroup_barrier(mem_flags::mem_threadgroup)", "")}


def test_a_seed_gives_the_same_mutants() -> None:
    for file in FILES:
        first, again, other = (list(mutants.drawn(file, seed)) for seed in (0, 0, 1))
        assert first == again != other
        assert len({m.start for m in first}) == len(first)


def test_what_is_said_to_be_equivalent_is_a_mutant() -> None:
    for file, line, *tokens in mutants.EQUIVALENT:
        found = [m for site in mutants.sites(file) for m in site if m.line.startswith(line)]
        assert tokens in [[m.old, m.new] for m in found], line


@pytest.mark.parametrize("broken", ["/bin/false", "/bin/true"])
def test_without_python_there_is_no_rate(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants.sys, "executable", broken)
    assert mutants.judged(mutants.Mutant(FILES[0], 0, "", "")).outcome == "error"
    with pytest.raises(RuntimeError, match=f"{FILES[0]}.metal as it is: error"):
        mutants.sample(1, 0, FILES)


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [(AssertionError("off by 3"), "caught trial 0: off by 3"), (None, "survived all trials")],
)
def test_what_is_a_catch(
    raised: Exception | None, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial() -> None:
        if raised:
            raise raised

    monkeypatch.setattr("tests.kernels.battery.BATTERY", {FILES[0]: lambda: [trial]})
    for name in ("__init__", "launch"):  # the mutant's are taken back
        monkeypatch.setattr(metalsim.Kernel, name, getattr(metalsim.Kernel, name))
    for name in ("timeout", "severity"):
        monkeypatch.setattr(metalsim.config, name, getattr(metalsim.config, name))
    assert mutants.judge(mutants.Mutant(FILES[0], 0, "", "")) == outcome
    raised = OSError("no space left")
    with pytest.raises(OSError):
        mutants.judge(mutants.Mutant(FILES[0], 0, "", ""))


def test_a_loop_without_an_end_is_a_catch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The simulator's own clock is looked at where memory is used."""
    monkeypatch.setenv("METALSIM_CACHE", str(tmp_path))
    code = (
        "from tests.kernels import battery, mutants, test_draw; mutants.LAUNCH_S = 0.5;"
        "battery.BATTERY['sample_accept'] = lambda: [test_draw.test_drafts_that_are_all_empty];"
        "old, new = 'int stands = 0;', 'int stands = 0; for (;;) { asm volatile(\"\"); }';"
        "at = mutants.original('sample_accept').index(old);"
        "print(mutants.judge(mutants.Mutant('sample_accept', at, old, new)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "caught a launch without an end\n", done


def test_a_place_is_a_line_and_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "original", lambda file: KERNEL)
    at = KERNEL.index("2 + n")
    assert str(mutants.Mutant("k", at, "2", "3")).startswith("metal/k.metal:6:21: `2` -> `3`")


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

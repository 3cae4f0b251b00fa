"""When a kernel is used: fakes with their own clock, and small_qmm in the simulator."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxspec.files import lock
from mlxspec.kernels import trial
from mlxspec.kernels import verify as module
from mlxspec.kernels.trial import Case, Rejected, Verdict, judge, relative_error, winning_rows
from mlxspec.kernels.verify import (
    CRASHED,
    KERNELS,
    UNTRIED,
    VerdictFile,
    machine,
    verify,
)
from mlxspec.model import quantized
from tests import metalsim

FACTS = {"chip": "Apple M9", "system": "99.1", "mlx": "9.9", "code": "abc"}
ROWS = (1, 2, 4, 8, 16)


class Time:
    """A clock that only calls move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def takes(
        self, seconds: float | dict[int, float], what: Callable[[mx.array], mx.array]
    ) -> Callable[..., mx.array]:
        def call(x: mx.array, w: mx.array) -> mx.array:
            self.calls += 1
            self.now += seconds[len(x)] if isinstance(seconds, dict) else seconds
            return what(product(x, w))

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    for each in (trial, module):
        monkeypatch.setattr(each, "perf_counter", lambda: made.now)
    return made


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "unavailable", lambda: "")
    monkeypatch.setattr(trial, "ROTATED_BYTES", 1 << 12)
    yield
    KERNELS.verdicts.clear()
    mx.enable_compile()


def product(x: mx.array, w: mx.array) -> mx.array:
    """x @ w, each row as if alone: BLAS may have its bits depend on how many there are."""
    return (x[:, :, None] * w).sum(axis=1)


def same(y: mx.array) -> mx.array:
    return y


def refuse(y: mx.array) -> mx.array:
    raise RuntimeError("threadgroup size (1024) is greater than the maximum allowed (448)")


def case(clock: Time, name: str = "fake", **variants: object) -> Case:
    """Each variant is (seconds, what it does to the right result); MLX's own takes 1 ms."""

    def inputs(seed: int) -> tuple[mx.array, ...]:
        keys = mx.random.split(mx.random.key(seed))
        return mx.random.normal((16, 8), key=keys[0]), mx.random.normal((8, 8), key=keys[1])

    made = {variant: clock.takes(*how) for variant, how in variants.items()}  # type: ignore[misc]
    stock = clock.takes(1e-3, same)
    return Case(f"{name} 8x8", ROWS, inputs, stock, product, made, 1e-3)


def gains(*values: float) -> dict[int, float]:
    return dict(zip(ROWS, values, strict=True))


def test_a_right_and_faster_kernel_is_used(clock: Time) -> None:
    found = judge(case(clock, plain=(5e-4, same)))
    assert (found.variant, found.least, found.most, found.reason) == ("plain", 1, 16, "")
    assert found.gains == pytest.approx(dict.fromkeys(ROWS, 2.0))


def test_a_slower_kernel_is_not_used(clock: Time) -> None:
    found = judge(case(clock, plain=(9e-4, same)))
    assert not found.variant and "1.11 times" in found.reason
    assert found.gains[4] == pytest.approx(10 / 9)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y + 0.1,
        lambda y: mx.where(mx.arange(8) == 3, mx.nan, y),
        lambda y: y[:, :4],
        lambda y: y.astype(mx.float16),
        lambda y: y if len(y) != 2 else y * 2,
        lambda y: y * (1 + 1e-6 * len(y)),  # a row depends on the number of rows
        refuse,
    ],
)
def test_a_wrong_variant_is_rejected_and_the_other_wins(
    clock: Time, wrong: Callable[[mx.array], mx.array]
) -> None:
    found = judge(case(clock, matrix=(1e-5, wrong), plain=(5e-4, same)))
    assert found.variant == "plain" and found.reason.startswith("matrix: ")
    alone = judge(case(clock, matrix=(1e-5, wrong)))
    assert not alone.variant and alone.reason == found.reason and not alone.gains


def test_a_row_that_depends_on_its_place_is_wrong_where_rows_are_exchangeable(clock: Time) -> None:
    def places(y: mx.array) -> mx.array:
        return y * (1 + 1e-6 * mx.arange(len(y))[:, None])

    made = case(clock, matrix=(1e-5, places), plain=(5e-4, same))
    assert judge(made).variant == "matrix"
    found = judge(replace(made, exchangeable=True))
    assert found.variant == "plain" and found.reason.endswith("a row depends on its place")


def test_of_two_variants_the_faster_is_used(clock: Time) -> None:
    assert judge(case(clock, a=(5e-4, same), b=(3e-4, same))).variant == "b"
    assert judge(case(clock, a=(3e-4, same), b=(5e-4, same))).variant == "a"


def test_a_variant_runs_only_for_the_rows_that_it_wins(clock: Time) -> None:
    made = case(clock, plain=(gains(1.1e-3, 1e-3, 5e-4, 5e-4, 2e-3), same))
    KERNELS.verdicts[made.name] = judge(made)
    used = [KERNELS.variant(made.name, n) for n in (1, 3, 4, 5, 8, 9)]
    assert used == ["", "", "plain", "plain", "plain", ""]


@pytest.mark.parametrize(
    ("measured", "rows"),
    [
        (gains(0.98, 1.2, 1.2, 1.2, 1.2), (1, 16)),  # not slower with one row: it joins
        (gains(0.96, 1.2, 1.2, 1.2, 1.2), (2, 16)),
        (gains(0.98, 1.0, 1.2, 1.2, 1.0), (1, 8)),
        (gains(1.2, 0.9, 1.2, 1.2, 1.0), (4, 8)),
        (gains(1.2, 1.2, 1.0, 1.2, 1.2), (1, 16)),
        (gains(1.14, 1.14, 1.14, 1.14, 1.14), (0, 0)),
        (gains(3, 1, 1, 1, 1), (1, 1)),
    ],
)
def test_winning_rows(measured: dict[int, float], rows: tuple[int, int]) -> None:
    assert winning_rows(measured) == rows


def test_relative_error() -> None:
    ids = mx.array([1, 2, 3])
    assert relative_error(ids, ids, 0.0) == 0
    with pytest.raises(Rejected):
        relative_error(ids, mx.array([1, 2, 4]), 0.0)
    with pytest.raises(Rejected):
        relative_error(mx.ones(3), mx.zeros(3), 0.5)
    want = mx.array([1.0, 1 + 2**-9, -100.0, 0.0])
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        assert relative_error(want.astype(dtype), want, 1e-6, dtype) <= 1e-6
    twice = (want + mx.array([2**-7, 0, 0, 0])).astype(mx.bfloat16)
    with pytest.raises(Rejected):
        relative_error(twice, want, 1e-6, mx.bfloat16)


def start(folder: Path, *cases: Case, **facts: str) -> dict[str, Verdict]:
    """What a new process finds."""
    KERNELS.verdicts.clear()
    return verify(cases, VerdictFile(folder, FACTS | facts))


def test_a_verdict_is_reused_on_the_next_start(tmp_path: Path, clock: Time) -> None:
    made = case(clock, plain=(5e-4, same), matrix=(1e-4, refuse))
    first = start(tmp_path / "kernels", made, made)
    calls = clock.calls
    assert first["fake 8x8"].variant == "plain"
    assert start(tmp_path / "kernels", made) == first == KERNELS.verdicts and clock.calls == calls


@pytest.mark.parametrize("fact", list(FACTS))
def test_another_machine_or_version_verifies_again(tmp_path: Path, clock: Time, fact: str) -> None:
    made = case(clock, plain=(5e-4, same))
    start(tmp_path, made)
    calls = clock.calls
    start(tmp_path, made, **{fact: "other"})
    assert clock.calls > calls


@pytest.mark.parametrize(
    "text", ["", "[]", '{"fake 8x8": {"variant": 7}}', '{"fake 8x8": {"variant']
)
def test_a_broken_file_is_ignored(tmp_path: Path, clock: Time, text: str) -> None:
    made = case(clock, plain=(5e-4, same))
    start(tmp_path, made)
    VerdictFile(tmp_path, FACTS).path.write_text(text)
    assert start(tmp_path, made)[made.name].variant == "plain"
    assert VerdictFile(tmp_path, FACTS).load()[made.name].variant == "plain"


CHILD = """
import os, sys
from pathlib import Path
import mlx.core as mx
from mlxspec.kernels import trial, verify
verify.unavailable = lambda: ""
inputs = lambda seed: (mx.ones((2, 8)), mx.ones((8, 8)))
dies = {"plain": lambda *a: os._exit(3)}
case = trial.Case("fake 8x8", (1, 2), inputs, mx.matmul, mx.matmul, dies, 1.0)
verify.verify([case], verify.VerdictFile(Path(sys.argv[1]), eval(sys.argv[2])))
"""


def test_a_kernel_that_ended_the_process_is_off(tmp_path: Path, clock: Time) -> None:
    words = [sys.executable, "-c", CHILD, str(tmp_path), repr(FACTS)]
    assert subprocess.run(words, timeout=60).returncode == 3
    made, other = case(clock, plain=(5e-4, same)), case(clock, "other", plain=(5e-4, same))
    crashed = start(tmp_path, made)[made.name]
    assert (crashed.reason, crashed.variant, clock.calls) == (CRASHED, "", 0)
    found = start(tmp_path, made, other)
    assert found[made.name] == crashed and found[other.name].variant == "plain"
    assert start(tmp_path, made)[made.name] == crashed, "after another trial's marker too"


def test_being_stopped_is_no_crash(tmp_path: Path, clock: Time) -> None:
    def stop(y: mx.array) -> mx.array:
        assert VerdictFile(tmp_path, FACTS).load()["fake 8x8"].reason == CRASHED
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, case(clock, plain=(0.1, stop)))
    assert VerdictFile(tmp_path, FACTS).load() == {} and KERNELS.forget is None


def test_a_process_that_exits_on_purpose_abandons_its_trial(tmp_path: Path, clock: Time) -> None:
    file = VerdictFile(tmp_path, FACTS)
    left = []

    def leave(y: mx.array) -> mx.array:
        KERNELS.abandon_trial()
        left.append(file.load())
        file.save({"fake 8x8": Verdict(reason=CRASHED)})
        clock.now += 100.0
        KERNELS.abandon_trial()
        left.append(file.load()["fake 8x8"].reason)
        return y

    start(tmp_path, case(clock, plain=(1e-4, leave)))
    assert left[:2] == [{}, CRASHED], "a trial that hangs counts as a crash"
    KERNELS.abandon_trial()


def test_only_one_process_tries_kernels(tmp_path: Path, clock: Time) -> None:
    made = case(clock, plain=(5e-4, same))
    with lock(tmp_path / "lock"):
        assert start(tmp_path, made)[made.name].reason == UNTRIED and clock.calls == 0
    assert start(tmp_path, made)[made.name].variant == "plain"


def test_without_a_crash_marker_nothing_is_tried(tmp_path: Path, clock: Time) -> None:
    (tmp_path / "file").write_text("")
    found = start(tmp_path / "file", case(clock, plain=(1e-4, same)))
    assert not found["fake 8x8"].variant and clock.calls == 0


def test_a_case_that_fails_itself_is_a_verdict(tmp_path: Path, clock: Time) -> None:
    whole = case(clock, plain=(1e-4, same))
    broken = Case("broken 1", (1,), whole.inputs, refuse, refuse, whole.variants, 1.0)
    found = start(tmp_path, broken, whole)
    assert "plain: TypeError" in found["broken 1"].reason and found[whole.name].variant == "plain"


def test_a_lack_of_memory_is_not_kept(tmp_path: Path, clock: Time) -> None:
    def short(y: mx.array) -> mx.array:
        raise RuntimeError("[metal::malloc] Attempting to allocate 600 MB, which is too much now")

    assert not start(tmp_path, case(clock, plain=(5e-4, short)))["fake 8x8"].variant
    assert start(tmp_path, case(clock, plain=(5e-4, same)))["fake 8x8"].variant == "plain"


def test_seconds_are_bounded(tmp_path: Path, clock: Time) -> None:
    slow = [case(clock, f"slow{i}", plain=(1.0, same)) for i in range(9)]
    told: list[tuple[int, int]] = []
    found = verify(slow, VerdictFile(tmp_path, FACTS), report=lambda *what: told.append(what))
    assert clock.now <= 20 + len(ROWS) + 4 + 2, "one case beyond, and what it takes to compile"
    assert {v.reason for v in found.values()} == {UNTRIED}
    assert told == [(n, 9) for n in range(1, 10)]
    assert not VerdictFile(tmp_path, FACTS).load(), "lateness is not kept: the next start goes on"


def test_a_kernel_is_not_rejected_for_the_time_that_compiling_takes(
    tmp_path: Path, clock: Time
) -> None:
    compiled = set()

    def compiles(y: mx.array) -> mx.array:
        clock.now += 0.0 if len(y) in compiled else 11.0
        compiled.add(len(y))
        return y

    found = start(tmp_path, case(clock, plain=(5e-4, compiles)))
    assert found["fake 8x8"].variant == "plain"


def test_raced_calls_wait_for_each_other() -> None:
    sets = [(mx.ones(2),), (mx.ones(2),), (mx.ones(2),)]
    made = iter((mx.nan, 0.0, 0.0))  # a NaN reaches what reads it

    def call(x: mx.array) -> mx.array:
        return x + next(made)

    results, _ = trial.Timer(math.inf, lambda: None).run(call, sets, in_turn=True)
    assert mx.isnan(results[-1]).all()


def test_right_kernels_are_known_however_slow(clock: Time) -> None:
    slow = judge(case(clock, plain=(2e-3, same), wrong=(1e-5, lambda y: y + 1)))
    assert not slow.variant and slow.right == ("plain",)


def test_a_call_that_hangs_is_rejected(clock: Time) -> None:
    assert judge(case(clock, matrix=(105.0, same), plain=(5e-4, same))).variant == "plain"


def test_without_metal_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Time
) -> None:
    monkeypatch.setattr(module, "unavailable", lambda: "no Metal here")
    found = start(tmp_path / "none", case(clock, plain=(1e-4, same)))
    assert found == {"fake 8x8": Verdict(reason="no Metal here")} == KERNELS.verdicts
    assert clock.calls == 0 and not (tmp_path / "none").exists()


def test_the_facts_of_this_machine() -> None:
    assert set(machine()) == set(FACTS) and all(machine().values())


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_small_qmm_in_the_simulator(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator says nothing about speed, so the clock only counts."""
    ticks = count()
    monkeypatch.setattr(trial, "perf_counter", lambda: 1e-4 * next(ticks))
    for name in ("TURNS", "MIN_CALLS", "MAX_CALLS", "MAX_SETS", "SEEDS"):
        monkeypatch.setattr(trial, name, 1)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 32, 4)
    quantized.install(model)
    found = model.layers[0].case
    assert found.name == "small_qmm 32x64 of 4 bits, group 32, bfloat16"
    variants = {
        name: lambda x, w, scales, biases, run=run: run(x, w, scales, biases * factor)
        for name, run in found.variants.items()
    }
    rows = {"rows": (1, 5, 16), "raced": (1, 16)}
    given = {name: getattr(found, name) for name in Case.__slots__} | rows
    with metalsim.patch(checked=False):
        verdict = judge(Case(**given | {"variants": variants}))
    if factor == 1:
        assert set(verdict.gains) == {1, 16}
    else:
        assert not verdict.variant and verdict.reason.count("off by") == 2

"""What comes of trying kernels: fakes with a clock of their own, and small_qmm in the simulator."""

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxspec import files
from mlxspec.kernels import kept, verify
from mlxspec.kernels.kept import CRASHED, Shelf
from mlxspec.kernels.matmul import gather_small_qmm_case, small_qmm_case
from mlxspec.kernels.proven import VERDICTS, Case, Verdict
from mlxspec.kernels.sampling import sample_accept_case
from mlxspec.kernels.verify import Out, Prover, chain, differ, judge, wins
from mlxspec.model import quantized
from tests import metalsim

FACTS = {"chip": "Apple M9, applegpu_g99s", "system": "99.1", "mlx": "9.9", "code": "abc"}


class Time:
    """A clock that only calls move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        return self.now

    def takes(
        self, seconds: float, what: Callable[[mx.array], mx.array]
    ) -> Callable[..., mx.array]:
        def call(x: mx.array, w: mx.array) -> mx.array:
            self.calls += 1
            self.now += seconds if not isinstance(seconds, dict) else seconds[len(x)]
            return what(product(x, w))

        return call


def ticking() -> Callable[[], float]:
    """A clock by which everything takes as long."""
    ticks = count()
    return lambda: 1e-4 * next(ticks)


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verify, "missing", lambda: "")
    monkeypatch.setattr(verify, "ROTATED", 1 << 12)
    yield
    VERDICTS.clear()


def product(x: mx.array, w: mx.array) -> mx.array:
    """x @ w, each row as if alone: BLAS may have its bits depend on how many there are."""
    return (x[:, :, None] * w).sum(axis=1)


def same(y: mx.array) -> mx.array:
    return y


def refuse(y: mx.array) -> mx.array:
    raise RuntimeError(
        "threadgroup size (1024) is greater than the maximum allowed (448)\nand more"
    )


def shifting(y: mx.array) -> mx.array:
    return y * (1 + 1e-6 * len(y))


def case(
    clock: Time, name: str = "fake", *, stock: float = 1e-3, tolerance: float = 1e-3, **ways: object
) -> Case:
    """Each way is (seconds, what it does to the right result)."""

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        keys = mx.random.split(mx.random.key(seed))
        return mx.random.normal((16, 8), key=keys[0])[:rows], mx.random.normal((8, 8), key=keys[1])

    made = {way: clock.takes(*how) for way, how in ways.items()}  # type: ignore[misc]
    return Case(
        name,
        "8x8",
        (1, 2, 4, 8, 16),
        inputs,
        clock.takes(stock, same),
        product,
        made,
        tolerance,
        nested=True,
    )


def by_rows(*seconds: float) -> dict[int, float]:
    return dict(zip((1, 2, 4, 8, 16), seconds, strict=True))


def test_right_and_fast_is_used(clock: Time) -> None:
    found = judge(case(clock, plain=(5e-4, same)), clock=clock)
    assert (found.way, found.least, found.most, found.why, found.parked) == (
        "plain",
        1,
        16,
        "",
        False,
    )
    assert found.gains == pytest.approx(dict.fromkeys((1, 2, 4, 8, 16), 2.0)) and found.error == 0


def test_right_and_slow_is_not(clock: Time) -> None:
    found = judge(case(clock, plain=(9e-4, same)), clock=clock)
    assert not found.way and not found.takes(4) and not found.parked
    assert (
        found.why == "plain: right, and 1.11 times as fast as MLX's own at best; 1.15 is asked for"
    )
    assert found.gains[4] == pytest.approx(10 / 9)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda y: y + 0.1, "off by 0.0"),
        (lambda y: mx.where(mx.arange(8) == 3, math.nan, y), "not finite where the reference is"),
        (lambda y: y[:, :4], r"mlx.core.float32 (16, 4) instead of"),
        (lambda y: y.astype(mx.float16), "mlx.core.float16 (16, 8) instead of"),
        (lambda y: y if len(y) != 2 else y * 2, "(2 rows)"),
        (
            refuse,
            "RuntimeError: threadgroup size (1024) is greater than the maximum allowed (448) (16 rows)",
        ),
        (shifting, "a row depends on how many there are (8 rows)"),
    ],
)
def test_wrong_is_out_and_the_other_wins(
    clock: Time, what: Callable[[mx.array], mx.array], why: str
) -> None:
    found = judge(case(clock, matrix=(1e-5, what), plain=(5e-4, same)), clock=clock)
    assert found.way == "plain" and found.why.startswith("matrix: ") and why in found.why
    alone = judge(case(clock, matrix=(1e-5, what)), clock=clock)
    assert not alone.way and alone.why == found.why and not alone.gains


def test_of_two_the_one_that_brings_more(clock: Time) -> None:
    assert judge(case(clock, a=(5e-4, same), b=(3e-4, same)), clock=clock).way == "b"


def test_only_a_range_of_rows(clock: Time) -> None:
    found = judge(case(clock, plain=(by_rows(1.1e-3, 1e-3, 5e-4, 5e-4, 2e-3), same)), clock=clock)
    assert (found.least, found.most) == (4, 8)
    assert [found.takes(n) for n in (1, 3, 4, 5, 8, 9)] == [False, False, True, True, True, False]


@pytest.mark.parametrize(
    ("gains", "rows"),
    [
        (by_rows(0.98, 1.2, 1.2, 1.2, 1.2), (1, 16)),  # not slower with one row: it joins
        (by_rows(0.96, 1.2, 1.2, 1.2, 1.2), (2, 16)),
        (by_rows(0.98, 1.0, 1.2, 1.2, 1.0), (1, 8)),
        (by_rows(1.2, 0.9, 1.2, 1.2, 1.0), (4, 8)),  # what lies between must not be slower either
        (by_rows(1.2, 1.2, 1.0, 1.2, 1.2), (1, 16)),
        (by_rows(1.14, 1.14, 1.14, 1.14, 1.14), (0, 0)),
        (by_rows(3, 1, 1, 1, 1), (1, 1)),
    ],
)
def test_which_rows(gains: dict[int, float], rows: tuple[int, int]) -> None:
    assert wins(gains) == rows


def test_values_that_are_no_numbers() -> None:
    ids = mx.array([1, 2, 3])
    assert differ(ids, ids, 0.0) == 0
    with pytest.raises(Out, match="1 of 3 values differ"):
        differ(ids, mx.array([1, 2, 4]), 1.0)
    open_end = mx.array([1.0, -math.inf])
    assert differ(open_end, open_end, 0.0) == 0
    assert differ(mx.zeros(3), mx.zeros(3), 0.0) == 0
    with pytest.raises(Out, match="off by inf"):
        differ(mx.ones(3), mx.zeros(3), 0.5)


def test_each_call_of_a_chain_needs_the_one_before() -> None:
    """A result that is not finite reaches every later one; finite ones change nothing, and inputs
    rotate."""
    sets = [(mx.full((2, 3), float(i)), mx.array(float(i))) for i in range(4)]
    seen: list[float] = []

    def call(x: mx.array, w: mx.array) -> mx.array:
        seen.append(float(w.item()))
        return x if len(seen) != 2 else x * math.nan

    assert mx.isnan(chain(call, sets, 6, at=1)).all()
    assert seen == [1, 2, 3, 0, 1, 2]
    seen[:] = [0] * 9
    assert mx.array_equal(chain(call, sets, 3), sets[2][0])
    ids = chain(lambda x, w: mx.argmax(x, axis=-1), sets, 3)
    assert ids.shape == (2,)


def test_all_counts_match_and_some_are_raced(clock: Time) -> None:
    """Each seed's inputs and reference are made once; wins reach from one raced count to
    another."""
    whole = case(clock, plain=(by_rows(2e-3, 5e-4, 5e-4, 5e-4, 5e-4), same))
    made, compared, called = [], [], []

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        made.append((rows, seed))
        return whole.inputs(rows, seed)

    def plain(x: mx.array, w: mx.array) -> mx.array:
        called.append(len(x))
        clock.now += 5e-4
        return product(x, w)

    def exact(x: mx.array, w: mx.array) -> mx.array:
        compared.append(len(x))
        return product(x, w)

    of = replace(
        whole,
        rows=tuple(range(1, 17)),
        raced=(2, 8),
        inputs=inputs,
        reference=exact,
        ways={"plain": plain},
    )
    found = judge(of, clock=clock)
    assert (found.least, found.most) == (2, 8) and set(found.gains) == {2, 8}
    assert compared == [16] * verify.SEEDS and {rows for rows, _ in made} == {16}
    assert called[: 3 * 16] == [*range(16, 0, -1)] * 3 and set(called[3 * 16 :]) == {2, 8}
    wrong = replace(of, ways={"plain": lambda x, w: product(x, w) + (len(x) == 7)})
    assert judge(wrong, clock=clock).why.endswith("is allowed (7 rows)")


def test_a_result_is_rounded_once() -> None:
    want = mx.array([1.0, 1 + 2**-9, -100.0, 0.0])
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        assert differ(want.astype(dtype), want, 1e-6, dtype) <= 1e-6
    with pytest.raises(Out, match=r"off by 3\.9e-05"):  # of 100
        differ((want + mx.array([2**-7, 0, 0, 0])).astype(mx.bfloat16), want, 1e-6, mx.bfloat16)
    with pytest.raises(Out, match=r"float32 .* instead of mlx\.core\.float16"):
        differ(want, want, 1.0, mx.float16)


def test_so_many_inputs_that_no_cache_holds_them(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case(clock)
    monkeypatch.setattr(verify, "ROTATED", 10_000)
    assert len(verify._sets(one, 2)) == -(-10_000 // (2 * 8 * 4 + 8 * 8 * 4)) == 32
    monkeypatch.setattr(verify, "ROTATED", 1 << 30)
    assert len(verify._sets(one, 2)) == verify.SETS
    monkeypatch.setattr(verify, "ROTATED", 1)
    assert len(verify._sets(one, 2)) == 1


# ---- kept
# ------------------------------------------------------------------------------------------


def prover(folder: Path | None, clock: Time, again: bool = False, **facts: str) -> Prover:
    return Prover(Shelf(folder, FACTS | facts), again=again, clock=clock, rest=lambda seconds: None)


def test_a_verdict_is_kept_and_read_back(tmp_path: Path, clock: Time) -> None:
    made = case(clock, plain=(5e-4, same), matrix=(1e-4, refuse))
    first = prover(tmp_path / "kernels", clock).prove([made, made])
    calls, found = clock.calls, VERDICTS["fake 8x8"]
    assert first == {"fake 8x8": found} and found.takes(8) and "matrix" in found.why
    VERDICTS.clear()
    assert prover(tmp_path / "kernels", clock).prove([made]) == first and clock.calls == calls
    assert VERDICTS["fake 8x8"] == found and VERDICTS["fake 8x8"] is not found
    assert Shelf(tmp_path / "kernels", FACTS).all(True) == first
    prover(tmp_path / "kernels", clock, again=True).prove([made])
    assert clock.calls > calls


@pytest.mark.parametrize("fact", list(FACTS))
def test_another_machine_or_version_tries_again(tmp_path: Path, clock: Time, fact: str) -> None:
    made = case(clock, plain=(5e-4, same))
    prover(tmp_path, clock).prove([made])
    calls = clock.calls
    prover(tmp_path, clock, **{fact: "other"}).prove([made])
    assert clock.calls > calls and len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"chip"', '"chop"'),
        lambda text: text.replace("M9", "M8"),  # a file under another's name
        lambda text: text.replace('"way": "plain"', '"way": 7'),
        lambda text: text.replace('"least"', '"leased"'),
    ],
)
def test_a_file_that_is_torn_or_about_something_else_is_a_miss(
    tmp_path: Path, clock: Time, spoil: Callable[[str], str]
) -> None:
    made = case(clock, plain=(5e-4, same))
    prover(tmp_path, clock).prove([made])
    [file] = tmp_path.glob("*.json")
    whole = file.read_text()
    assert spoil(whole) != whole
    file.write_text(spoil(whole))
    VERDICTS.clear()
    assert prover(tmp_path, clock).prove([made])["fake 8x8"].way == "plain"
    assert json.loads(file.read_text())["facts"] == json.loads(whole)["facts"]


CHILD = """
import os, sys, time
from pathlib import Path
import mlx.core as mx
from mlxspec.kernels import verify as prove
from mlxspec.kernels.kept import Shelf
from mlxspec.kernels.proven import Case
prove.missing = lambda: ""
inputs = lambda rows, seed: (mx.ones((rows, 8)), mx.ones((8, 8)))
def slow(*args):
    print("in", flush=True)
    time.sleep(60)
ways = {"dies": lambda *a: os._exit(3), "slow": slow}
case = Case("fake", "8x8", (1, 2), inputs, mx.matmul, mx.matmul, {"plain": ways[sys.argv[3]]}, 1.0)
prove.Prover(Shelf(Path(sys.argv[1]), eval(sys.argv[2]))).prove([case])
"""


def child(folder: Path, way: str, *before: str) -> "subprocess.Popen[str]":
    """A process that tries a kernel, which ends it or takes long."""
    words = [*before, sys.executable, "-c", CHILD, str(folder), repr(FACTS), way]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_a_kernel_that_ended_the_process_is_parked(tmp_path: Path, clock: Time) -> None:
    """In a process of its own, which a kernel kills half way."""
    with child(tmp_path, "dies") as process:
        assert process.wait(60) == 3
    made = case(clock, plain=(5e-4, same))
    found = prover(tmp_path, clock).prove([made])["fake 8x8"]
    assert (found.parked, found.why, found.way, clock.calls) == (True, CRASHED, "", 0)
    again = prover(tmp_path, clock, again=True).prove([made])["fake 8x8"]
    assert again.way == "plain" and not again.parked


def test_another_process_that_tries_is_no_crash(tmp_path: Path, clock: Time) -> None:
    made, shelf = case(clock, plain=(5e-4, same)), Shelf(tmp_path, FACTS)
    shelf.mark(made.name)
    waited: list[float] = []
    one = prover(tmp_path, clock)
    one.rest = waited.append
    with shelf.alone(lambda: False) as alone:
        assert alone
        found = one.prove([made])[made.name]
        assert shelf.all(False)[made.name].why == kept.BUSY, "as mlxspec doctor shows it"
    assert not found.way and not found.parked and found.why == kept.BUSY and clock.calls == 0
    assert verify.AT_START[0] <= sum(waited) < verify.AT_START[0] + 1


def test_what_another_process_finds_meanwhile_is_used(
    tmp_path: Path, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    made, more = (case(clock, name, plain=(5e-4, same)) for name in ("fake", "more"))
    shelf, one = Shelf(tmp_path, FACTS), prover(tmp_path, clock)
    shelf.mark(made.name)
    other = shelf.alone(lambda: False)
    assert other.__enter__()

    def rest(seconds: float) -> None:
        shelf.save(made.name, Verdict("matrix", 1, 16))
        other.__exit__(None, None, None)

    one.rest = rest
    found = one.prove([made, more])
    assert found[made.name] == Verdict("matrix", 1, 16) and found[more.name].way == "plain"
    assert "waiting 20 s at most" in caplog.text


def test_who_knows_all_does_not_wait(tmp_path: Path, clock: Time) -> None:
    made, shelf = case(clock, plain=(5e-4, same)), Shelf(tmp_path, FACTS)
    shelf.save(made.name, Verdict("matrix", 1, 16))
    one = prover(tmp_path, clock)
    one.rest = lambda seconds: pytest.fail("it waits")
    with shelf.alone(lambda: False):
        assert one.prove([made])[made.name].way == "matrix"


def test_looking_makes_nothing_and_others_may_look(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FACTS)
    with shelf.alone() as alone:
        assert alone and list(tmp_path.iterdir()) == []
    with shelf.alone(lambda: False):
        pass
    with shelf.alone() as one, shelf.alone() as two:
        assert one and two
    with shelf.alone(lambda: False), shelf.alone() as one:
        assert not one


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_who_ends_it_in_order_leaves_no_mark(tmp_path: Path, number: int) -> None:
    """As one does with `mlxspec tune`. Nothing can be done about SIGKILL."""
    with child(tmp_path, "slow") as process:
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        assert len(list(tmp_path.glob("*.json"))) == 1
        process.send_signal(number)
        if number == signal.SIGHUP:
            process.send_signal(number)
        assert process.wait(60) != 0
    parked = [verdict.why for verdict in Shelf(tmp_path, FACTS).all(True).values()]
    assert parked == [CRASHED] * (number == signal.SIGKILL)


def test_what_is_ignored_stays_so(tmp_path: Path) -> None:
    with child(tmp_path, "slow", "nohup") as process:
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.kill()


def test_the_signals_are_as_before(tmp_path: Path, clock: Time) -> None:
    seen = []

    def look(y: mx.array) -> mx.array:
        seen.append(signal.getsignal(signal.SIGTERM))
        return y

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        prover(tmp_path, clock).prove([case(clock, plain=(1e-4, look))])
        assert signal.SIG_DFL not in seen and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        seen.clear()
        own = case(clock, "own", plain=(1e-4, look))
        thread = threading.Thread(target=lambda: prover(tmp_path, clock).prove([own]))
        thread.start()
        thread.join()
        assert set(seen) == {signal.SIG_DFL}
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_mark_is_on_the_disk_before_the_trial(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, str]] = []

    def flush(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        flushed.append((path.name, "" if path.is_dir() else path.read_text()))

    def look(y: mx.array) -> mx.array:
        [(new, text), folder] = flushed
        assert (
            new.endswith(f".json.{os.getpid()}")
            and "trying" in text
            and folder == (tmp_path.name, "")
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "flush_to_medium", flush)
    if Path("/proc/self/fd").exists():
        with pytest.raises(KeyboardInterrupt):
            prover(tmp_path, clock).prove([case(clock, plain=(1e-4, look))])


def test_a_full_disk_is_no_crash(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = case(clock, plain=(5e-4, same))

    real = kept.Shelf._write

    def write(self: Shelf, name: str, what: dict[str, object]) -> None:
        if "verdict" in what:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, name, what)

    monkeypatch.setattr(kept.Shelf, "_write", write)
    assert prover(tmp_path, clock).prove([made])[made.name].way == "plain"
    assert "is forgotten" in caplog.text and not list(tmp_path.glob("*.json"))


def test_what_a_killed_writer_left_is_no_verdict(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FACTS)
    shelf.mark("a 1")
    [file] = tmp_path.iterdir()
    file.with_name(f"{file.name}.1").write_text("torn" * 99)
    shelf.save("a 1", Verdict("plain"))
    assert shelf.load("a 1", True) == Verdict("plain") and [*shelf.all(True)] == ["a 1"]


def short(y: mx.array) -> mx.array:
    raise RuntimeError("[metal::malloc] Attempting to allocate 600 MB, which is too much now")


@pytest.mark.parametrize("how", ["inputs", "way", "time"])
def test_passing_trouble_is_tried_again_three_times(tmp_path: Path, clock: Time, how: str) -> None:
    good = case(clock, plain=(5e-4, same))
    inputs = (lambda rows, seed: short(mx.zeros(1))) if how == "inputs" else good.inputs
    way = clock.takes(2.5 if how == "time" else 5e-4, short if how == "way" else same)
    bad = Case("fake", "8x8", good.rows, inputs, good.stock, good.reference, {"plain": way}, 1e-3)
    assert not prover(tmp_path / "once", clock).prove([bad])["fake 8x8"].way
    assert prover(tmp_path / "once", clock).prove([good])["fake 8x8"].way == "plain"
    for start in range(1 + kept.AGAIN):
        shelf = Shelf(tmp_path, FACTS)
        assert shelf.load("fake 8x8", True) is None, start
        prover(tmp_path, clock).prove([bad])
        assert not shelf.all(True)["fake 8x8"].parked, "mlxspec doctor shows it"
        VERDICTS.clear()
    assert not prover(tmp_path, clock).prove([good])["fake 8x8"].way, "then it is believed"
    VERDICTS.clear()
    assert prover(tmp_path, clock, again=True).prove([good])["fake 8x8"].way == "plain"


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit])
def test_being_stopped_leaves_no_mark(
    tmp_path: Path, clock: Time, how: type[BaseException]
) -> None:
    def stop(y: mx.array) -> mx.array:
        raise how

    with pytest.raises(how):
        prover(tmp_path, clock).prove([case(clock, plain=(0.1, stop))])
    assert list(tmp_path.glob("*.json")) == []


def test_a_thread_that_ends_the_process_takes_the_mark_along(tmp_path: Path, clock: Time) -> None:
    left = []

    def give_up(y: mx.array) -> mx.array:
        verify.TRIAL.give_up()
        left.append(len(list(tmp_path.glob("*.json"))))
        assert verify.TRIAL.shelf is not None
        verify.TRIAL.shelf.mark("fake 8x8")
        verify.TRIAL.until = 0.0  # from here on it takes much too long
        return y

    assert (
        prover(tmp_path, clock).prove([case(clock, plain=(1e-4, give_up))])["fake 8x8"].way
        == "plain"
    )
    assert left[0] == 0 and set(left[1:]) == {1}
    verify.TRIAL.give_up()
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_what_cannot_be_marked_is_not_tried(tmp_path: Path, clock: Time) -> None:
    (tmp_path / "file").write_text("")
    found = prover(tmp_path / "file", clock).prove([case(clock, plain=(1e-4, same))])["fake 8x8"]
    assert not found.way and "not tried unmarked" in found.why and clock.calls == 0


def test_without_a_folder_nothing_is_kept(clock: Time) -> None:
    assert prover(None, clock).prove([case(clock, plain=(1e-4, same))])["fake 8x8"].way == "plain"


def test_a_case_that_fails_itself_is_a_verdict(tmp_path: Path, clock: Time) -> None:
    whole = case(clock, plain=(1e-4, same))
    broken = Case("broken", "1", (1,), whole.inputs, refuse, refuse, whole.ways, 1.0)
    found = prover(tmp_path, clock).prove([broken, whole])
    assert (
        found["broken 1"].why.startswith("it cannot be tried: TypeError") and found["fake 8x8"].way
    )
    odd = Case(
        "odd", "1", (1,), whole.inputs, lambda x, w: refuse(x), whole.reference, whole.ways, 1.0
    )
    assert "threadgroup size" in prover(tmp_path, clock).prove([odd])["odd 1"].why


def test_time_is_bounded(tmp_path: Path, clock: Time) -> None:
    slow = [case(clock, f"slow{i}", plain=(1.0, same)) for i in range(9)]
    told: list[tuple[int, ...]] = []
    one = prover(tmp_path, clock)
    one.tell = lambda *what: told.append(what)
    found = one.prove(slow)
    assert clock.now < verify.AT_START[0] + 9 * 2, "one call beyond each share"
    assert (
        "4.0 s were not enough" in found["slow0 8x8"].why
        and "no time was left" in found["slow8 8x8"].why
    )
    assert told[0] == (1, 9) and told[-1] == (9, 9)
    VERDICTS.clear()
    names = Shelf(tmp_path, FACTS).all(True)
    assert "slow0 8x8" in names and "slow8 8x8" not in names, "the next start goes on"


def test_a_call_that_hangs_parks_its_kernel(tmp_path: Path, clock: Time) -> None:
    found = judge(case(clock, matrix=(105.0, same), plain=(5e-4, same)), clock=clock)
    assert found.way == "plain" and "matrix: a call took 105 s" in found.why
    assert judge(case(clock, matrix=(105.0, same)), clock=clock).parked


def test_without_metal_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Time
) -> None:
    monkeypatch.undo()
    found = prover(tmp_path / "none", clock).prove([case(clock, plain=(1e-4, same))])
    assert found == {"fake 8x8": Verdict(why="no Metal here")} == VERDICTS
    assert clock.calls == 0 and not (tmp_path / "none").exists()


def test_the_facts_of_this_machine() -> None:
    facts = kept.machine()
    assert set(facts) == set(FACTS) and all(facts.values())
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("which", ["small_qmm", "experts", "drawing"])
def test_a_proof_takes_no_more_than_it_says(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "SEEDS", 2)
    monkeypatch.setattr(verify, "TURNS", 1)
    monkeypatch.setattr(verify, "CALLS", (1, 1))
    found = {
        "small_qmm": small_qmm_case(2048, 1024, 4, 32, mx.bfloat16),
        "experts": gather_small_qmm_case(64, 256, 512, 4, 64, mx.bfloat16, 4, False),
        "drawing": sample_accept_case(20_000, mx.float32),
    }[which]

    def rounded(*given: mx.array) -> mx.array:
        return found.reference(*given).astype(given[0].dtype)

    same = found.stock if which == "drawing" else rounded  # MLX's own takes seconds on a CPU
    few = replace(found, rows=found.rows[-1:], raced=(), stock=same, ways={"same": same})
    each = sum(array.nbytes for array in found.inputs(found.rows[-1], 0))
    monkeypatch.setattr(verify, "ROTATED", each)
    takes = verify._takes(found)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    one = Prover(Shelf(tmp_path, FACTS), clock=ticking(), room=takes)
    assert "right" in one.prove([few])[quantized.name].why
    assert each < mx.get_peak_memory() - before <= takes


def test_what_memory_has_no_room_for_is_not_tried(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "ROTATED", 1)
    made, one = case(clock, plain=(1e-4, same)), prover(tmp_path, clock)
    one.room = verify._takes(made) - 1
    found = one.prove([made])[made.name]
    assert found == Verdict(why="its proof takes 0 MiB, and 0 are free") and clock.calls == 0
    assert not list(tmp_path.glob("*.json")), "the next start tries it"
    VERDICTS.clear()
    again = prover(tmp_path, clock)
    again.room = one.room + 1
    assert again.prove([made])[made.name].way == "plain"


# ---- the real thing
# --------------------------------------------------------------------------------


def test_small_qmm_matches_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's own shapes. The simulator says nothing about speed, so the clock only
    counts."""
    monkeypatch.setattr(verify, "TURNS", 1)
    monkeypatch.setattr(verify, "CALLS", (1, 1))
    monkeypatch.setattr(verify, "SETS", 1)
    monkeypatch.setattr(verify, "SEEDS", 1)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 32, 4)
    [found] = quantized.cases(model)
    assert found.name == "small_qmm 32x64 of 4 bits, group 32, bfloat16"
    with metalsim.patch(checked=False):
        verdict = judge(found, clock=ticking())
    assert not verdict.way and verdict.error <= found.tolerance
    assert verdict.why.count("right, and 1.00") == 2 and set(verdict.gains) == set(found.raced)


def test_it_fails_where_small_qmm_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SEEDS", 1)
    model = nn.QuantizedLinear(64, 32, bias=False, group_size=32, bits=4)
    [found] = quantized.cases(nn.Sequential(model))
    right = found.ways["plain"]
    ways = {"plain": lambda x, w, scales, biases: right(x, w, scales, biases * 1.01)}
    wrong = Case(
        found.kernel, found.shape, (2,), found.inputs, found.stock, found.reference, ways, 1e-4
    )
    with metalsim.patch(checked=False):
        assert "off by" in judge(wrong).why

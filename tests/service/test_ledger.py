"""What follows from how the lives before ended."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mlxspec.service import ledger
from mlxspec.service.ledger import DOWN, SAFE, WINDOW_S, Ledger, begin


def life(past: Ledger, now: float, clean: bool, panics: list[str] | None = None) -> Ledger:
    found = begin(past, float(now), panics or [])
    if clean:
        found.open = False
    return found


def crash(times: list[float]) -> Ledger:
    """Lives that began at `times`, each but the last ended by a crash."""
    found = Ledger()
    for at in times:
        found = life(found, at, clean=False)
    return found


def test_crashes_bring_safe_mode_and_then_it_stays_down() -> None:
    seen = [crash([1000.0 + 10 * n for n in range(lives)]) for lives in range(1, DOWN + 2)]
    assert [len(one.crashes) for one in seen] == list(range(DOWN + 1))
    assert [one.safe for one in seen] == [SAFE <= n < DOWN for n in range(DOWN + 1)]
    assert [bool(one.held) for one in seen] == [n >= DOWN for n in range(DOWN + 1)]
    assert (
        "crashed 6 times in 10 minutes, also in safe mode; `mlxspec service start`" in seen[-1].held
    )
    assert not seen[-1].open  # to end is no crash of what does not serve
    again = life(seen[-1], 1000 + 60 + 2 * WINDOW_S, clean=True)
    assert not again.held and not again.safe and again.crashes == []


def test_crashes_that_are_far_apart_are_forgotten() -> None:
    found = crash([1000 + n * WINDOW_S * 0.6 for n in range(50)])
    assert not found.safe and len(found.crashes) <= 2


def test_clean_ends_are_no_crashes() -> None:
    found = Ledger()
    for n in range(20):
        found = life(found, 1000.0 + n, clean=True)
    assert found.crashes == [] and not found.safe


def test_a_clock_that_was_set_back_forgets() -> None:
    found = crash([5000, 5010, 5020, 5030])
    assert found.safe and not life(found, 100, clean=True).safe


def test_a_panic_holds_until_it_is_forgiven(tmp_path: Path) -> None:
    running = life(Ledger(), 1000, clean=False)
    report = ["panic-full-2026.panic"]
    held = life(running, 1600, False, report)
    assert (
        "panicked while it ran (panic-full-2026.panic); `mlxspec service start` starts it"
        in held.held
    )
    for later in (
        1700.0,
        1e6,
    ):  # however often it is started by a connection, and without the report too
        held = life(held, later, True, [])
        assert held.held and not held.open
    file = tmp_path / "service.json"
    ledger.forgive(file)
    assert not life(ledger.read(file), 2e9, False, report).held


def test_a_panic_of_before_does_not() -> None:
    assert not life(life(Ledger(), 1000, False, ["x.panic"]), 1600, False, ["x.panic"]).held


def test_a_panic_while_it_did_not_run_does_not() -> None:
    ended = life(Ledger(), 1000, clean=True)
    assert not life(ended, 1600, False, ["x.panic"]).held


@pytest.mark.parametrize("dated", [60.0, 4e9])
def test_no_date_of_a_report_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dated: float
) -> None:
    """One of the future hides none that comes later, and one of 1970, before the network told the
    time, is news; what was known when a life began is none, whatever its date."""
    monkeypatch.setattr(ledger, "PANICS", (str(tmp_path),))
    (tmp_path / "old.panic").write_text("")
    os.utime(tmp_path / "old.panic", (4e9, 4e9))
    ledger.forgive(tmp_path / "x")
    running = life(ledger.read(tmp_path / "x"), 70, False, ledger.panics())
    again = life(running, 1.8e9, False, ledger.panics())
    assert not again.held
    (tmp_path / "new.panic").write_text("")
    os.utime(tmp_path / "new.panic", (dated, dated))
    assert "new.panic" in life(again, 1.8e9, False, ledger.panics()).held


def test_no_more_reports_are_kept_than_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "PANICS", (str(tmp_path),))
    monkeypatch.setattr(ledger, "MOST", 3)
    for n in range(5):
        (tmp_path / f"{n}.panic").write_text("")
        os.utime(tmp_path / f"{n}.panic", (n, n))
    assert life(Ledger(), 10, True, ledger.panics()).reports == ["4.panic", "3.panic", "2.panic"]


@pytest.mark.parametrize("jump", [-86400.0, 365 * 86400.0])
def test_no_jump_of_the_clock_locks_it_down(jump: float) -> None:
    found = crash([1e9 + n for n in range(DOWN + 1)])
    assert found.held
    after = life(found, 1e9 + jump + 20, clean=False)
    assert not after.held and len(after.crashes) == 0


def test_reports_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "PANICS", (str(tmp_path), str(tmp_path / "gone")))
    for n, name in enumerate(
        ["a.panic", "Kernel_b.ips", "panic-full-c.ips", "python.crash", "d.ips"]
    ):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (100 + n, 100 + n))
    assert ledger.panics() == ["panic-full-c.ips", "Kernel_b.ips", "a.panic"]


def test_the_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "service.json"
    found = crash([1000, 1010, 1020])
    ledger.write(file, found)
    assert ledger.read(file) == found and os.listdir(file.parent) == ["service.json"]
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700 and file.stat().st_size < 1000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 10**6,
        '{"safe": 1}',
        "9" * 10**4,
        '{"reports": 1}',
        '{"reports": [1]}',
        '{"crashes": ["x"]}',
        '{"open": 1}',
        "\0",
        '{"held": null}',
    ],
)
def test_a_damaged_file_counts_as_none(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x").write_text(text)
    assert ledger.read(tmp_path / "x") == Ledger()
    assert "x is damaged" in caplog.text


def test_a_file_that_cannot_be_written_is_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x").write_text("")
    ledger.write(tmp_path / "x" / "service.json", Ledger())
    assert "crashes are not counted" in caplog.text


def test_who_runs(bare_settings: None) -> None:
    """Until the process has ended, however it does; looking takes the lock from nobody."""
    code = "from mlxspec.service import ledger; ledger.occupy(); print(1, flush=True); input()"
    assert not ledger.running()
    for _ in range(2):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:  # type: ignore[call-overload]
            assert child.stdout.readline() and ledger.running() and ledger.running()
            child.kill()
        assert not ledger.running()
    assert set(ledger.traces()) == {ledger.file().with_suffix(".lock"), ledger.file().parent}

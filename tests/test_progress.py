"""The progress of long work."""

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from mlxspec import progress

COLUMNS = 60
LONG = "word " * 20 + "end"


def test_without_a_terminal_progress_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    with progress.progress("Reading") as report:
        report(1, 4)
        assert not caplog.messages, "nothing is logged at once"
        monkeypatch.setattr(progress, "LOG_S", -1.0)
        report(2, 4)
    assert caplog.messages == ["Reading: 50 %"]
    assert capsys.readouterr().err == ""


WORK = f"""
import sys, threading
from mlxspec import log
from mlxspec.commands.options import log_to_stderr
from mlxspec.progress import progress

log_to_stderr("info")
log.info("before")
with progress("Measuring") as report:
    log.info("not shown yet")
    report(1, 4)
    sys.stdin.read()  # until the bar is on the screen
    log.info("%s", "{LONG}")
    report(2, 4)
    other = threading.Thread(target=log.warning, args=("of a thread: [bold] :warning: 10%",))
    other.start()
    other.join()
    print("printed", flush=True)
    print("an error", file=sys.stderr)
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("it failed")
    report(3, 4)
log.info("between")
with progress("Loading") as report:
    report(1, 2)
    log.info("of the second")
log.info("after")
"""


def on_terminal(program: str, stdout: int | None = None) -> str:
    """All that a program wrote to a terminal. Its stdin ends when it shows its first bar."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
        env=env | {"TERM": "xterm-256color"},
    )
    os.close(theirs)
    assert process.stdin
    written = b""
    while True:
        try:
            read = os.read(ours, 1 << 16)
        except OSError:  # on Linux the end of a terminal is an error
            break
        if not read:
            break
        written += read
        if b"Measuring" in written:
            process.stdin.close()
    os.close(ours)
    assert process.wait(60) == 0
    return written.decode()


def scrolled(written: str) -> list[str]:
    """The lines of a terminal that is wide and high enough for all. What was erased is gone."""
    lines, y, x = [""], 0, 0
    for each in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|[^\x1b]", written):
        if each == "\r":
            x = 0
        elif each == "\n":
            y += 1
            lines += [""] * (y == len(lines))
        elif each == "\x1b[2K":
            lines[y] = ""
        elif each.startswith("\x1b["):
            up = re.fullmatch(r"\x1b\[(\d*)A", each)
            y -= int(up[1] or 1) if up else 0
            assert up or each[-1] in "mhl", f"{each!r} is not known"
        else:
            lines[y] = lines[y][:x].ljust(x) + each + lines[y][x + 1 :]
            x += 1
    return [line.rstrip() for line in lines]


def test_what_is_logged_stands_above_the_bar() -> None:
    written = on_terminal(WORK)
    assert "Measuring" in written and "Loading" in written, "no bar was shown"
    lines = scrolled(written)
    texts = [re.sub(r"^\d\d:\d\d:\d\d (INFO|WARNING|ERROR) +", "", line) for line in lines]
    trace = texts.index("  Traceback (most recent call last):")
    assert texts[:trace] == [
        "before",
        "not shown yet",
        LONG,
        "of a thread: [bold] :warning: 10%",
        "printed",
        "an error",
        "it failed",
    ]
    end = texts.index("  ZeroDivisionError: division by zero")
    assert texts[end + 1 :] == ["between", "of the second", "after", ""]


def test_what_is_printed_goes_to_its_file_beside_a_bar(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        written = on_terminal(WORK, file.fileno())
    assert (tmp_path / "out").read_text() == "printed\n"
    assert "printed" not in written and "Measuring" in written

"""What a tree of processes uses is what the system says of each, added up."""

import os
import subprocess
import sys

import pytest

from bench.process import Usage, parsed, usage

CHILD = """
import subprocess, sys, time
block = bytearray(b"x" * (64 << 20))
if sys.argv[1] == "parent":
    again = [sys.executable, "-c", sys.argv[2], "child", ""]
    child = subprocess.Popen(again, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
until = time.process_time() + 0.2
while time.process_time() < until: pass
print("ready", flush=True)
sys.stdin.read()
"""


def test_children_count_with_their_parents() -> None:
    command = [sys.executable, "-c", CHILD, "parent", CHILD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        used = usage(process.pid)
        process.communicate(timeout=20)
    assert used.rss > 128 << 20 and used.cpu >= 0.3
    assert sys.platform != "linux" or used.peak >= used.rss
    assert usage(process.pid) == Usage(0, 0, 0)


def test_this_process_is_no_tree_of_others() -> None:
    assert 0 < usage(os.getpid()).rss < 64 << 30


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("0:01.50", 1.5), ("00:02:03", 123), ("1-00:00:01", 86401), ("12:00.00", 720)],
)
def test_lines_of_ps(time: str, seconds: float) -> None:
    assert parsed(f"  12     1   2048 {time}") == (12, (1, Usage(2 << 20, 0, seconds)))

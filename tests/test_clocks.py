"""The wall clock may jump: it stamps things, and measures nothing."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mlxspec

WALL = {
    "time",
    "time_ns",
    "now",
    "utcnow",
    "today",
    "localtime",
    "gmtime",
    "ctime",
    "clock_gettime",
}
STEADY = {
    "self.loop.time",
    "loop.time",
    "self.now",
}  # asyncio's clock, and names of ours
TOLD = ""  # to clients, and nothing follows from it
STAMPS = {  # how often a file asks for it, and the test that a jump does no harm there
    "chosen.py": (1, TOLD),
    "cache/disk.py": (1, "cache/test_disk.py::test_a_clock_that_is_set_back_makes_nothing_old"),
    "engine/start.py": (1, TOLD),
    "server/openai.py": (1, TOLD),
    "server/responses.py": (1, TOLD),
    "service/crashes.py": (1, "service/test_crashes.py::test_a_clock_that_was_set_forgets"),
}


def asked(text: str) -> Iterator[str]:
    """The wall clocks that a source asks for, under whatever name it has the module."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in WALL
            and ast.unparse(node) not in STEADY
        ):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            yield from (each.name for each in node.names if each.name in WALL)


def test_only_stamps_ask_for_it() -> None:
    root = Path(mlxspec.__file__).parent
    files = {
        file.relative_to(root).as_posix(): file.read_text("utf-8") for file in root.rglob("*.py")
    }
    found = {name: n for name, text in files.items() if (n := len(list(asked(text))))}
    assert {n: c for n, c in found.items() if not n.startswith("bench/")} == {
        name: count for name, (count, _) in STAMPS.items()
    }


def test_what_is_said_to_be_tested_is() -> None:
    for test in {test for _, test in STAMPS.values() if test != TOLD}:
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text("utf-8"), test


def test_no_spelling_escapes() -> None:
    spelled = (
        "import time\ntime.time()",
        "from time import time\ntime()",
        "import time as t\nt.time()",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime as d\nd.now()",
        "import datetime\ndatetime.date.today()",
    )
    assert Counter(len(list(asked(text))) for text in spelled) == {1: len(spelled)}
    assert not list(asked("import time\ntime.monotonic(); time.perf_counter(); time.thread_time()"))

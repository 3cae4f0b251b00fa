"""The wall clock may jump: it stamps things, and measures nothing."""

import ast
from pathlib import Path

import mlxspec

WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime"}
STAMPS = {  # who asks for it, and why a jump does no harm there
    "chosen.py": "ModelInfo.created",
    "engine/disk.py": "files of the future count as used now",
    "engine/runindex.py": "never runs backwards",
    "engine/start.py": "ModelInfo.created",
    "server/openai.py": "created",
    "server/responses.py": "created_at",
    "service/daemon.py": "crashes in the future are forgotten",
}


def test_only_stamps_ask_for_it() -> None:
    root, found = Path(mlxspec.__file__).parent, set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in WALL
                and isinstance(node.value, ast.Name)
                and node.value.id in ("time", "datetime", "date")
            ):
                found.add(file.relative_to(root).as_posix())
    assert {name for name in found if not name.startswith("bench/")} == STAMPS.keys()

"""Imports point down: which part of the package may import which, and which libraries.

The rule is the table below; a module of no row, or an import beyond its row, fails.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PLAIN = {"mlxspec", "types", "sequences", "settings", "profiles", "config", "files", "progress"}
MODEL = PLAIN | {"blas", "kernels", "model"}
ENGINE = MODEL | {"cache", "speculate", "engine"}
SERVER = ENGINE | {"metrics", "text", "load", "server", "training.recorder"}

# A row holds for the modules below it too, unless they have their own. `mlxspec` is the package.
MAY_IMPORT = {
    "mlxspec": set(),
    "types": set(),
    "sequences": {"types"},
    "settings": {"types"},
    "profiles": {"types", "settings"},
    "config": {"mlxspec", "types", "settings", "profiles", "files"},
    "files": set(),
    "progress": {"mlxspec"},
    "blas": PLAIN,
    "metrics": PLAIN,
    "kernels": PLAIN | {"kernels", "blas"},
    "model": MODEL,
    "speculate": MODEL | {"speculate"},
    "text": PLAIN | {"text"},
    "cache": PLAIN | {"cache"},
    "engine": ENGINE,
    "engine.scheduler": PLAIN | {"cache", "engine.budget"},
    "engine.budget": PLAIN,
    "engine.memory": PLAIN,
    "load": ENGINE | {"text", "load"},
    "load.plan": PLAIN | {"cache", "engine.budget", "engine.memory"},
    "training": ENGINE | {"training"},
    "training.samples": PLAIN,
    "training.recorder": PLAIN | {"model.hub", "training.samples"},
    "server": SERVER,
    "service": SERVER | {"service"},
    "service.client": PLAIN,
    "commands": SERVER | {"service", "commands", "training"},
    "cli": SERVER | {"service", "commands"},
    "__main__": {"cli"},
}

# Libraries that only some parts may import; every other library is free.
LIBRARIES = {
    "mlx": {"kernels", "model", "speculate", "engine", "load", "training"},
    "mlx_lm": {"model", "text"},
    "transformers": {"model", "text"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "prometheus_client": {"metrics", "server"},
    "typer": {"cli", "commands"},
}
# Pure Python, so that they can be read and tested without a model.
NO_MLX = ("engine.scheduler", "engine.budget", "engine.memory", "load.plan", "cache")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "mlxspec").rglob("*.py")):
        parts = path.relative_to(ROOT / "mlxspec").with_suffix("").parts
        yield ".".join(p for p in parts if p != "__init__") or "mlxspec", path


def row(module: str, table: dict[str, set[str]]) -> str | None:
    """The table's row for a module: its own name or the nearest name above it."""
    while module and module not in table:
        module = module.rpartition(".")[0]
    return module or None


def imports(module: str, package: bool, source: str) -> Iterator[str]:
    """Dotted names, lazy imports included; `from a import b` is `a.b` where that is a module of
    ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["mlxspec", *module.split(".")] if module != "mlxspec" else ["mlxspec"]
            base = here[: len(here) - node.level + package] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            inner = [f"{name}.{alias.name}" for alias in node.names]
            own = [x for x in inner if x.startswith("mlxspec.") and is_module(x)]
            yield from own if len(own) == len(inner) else [name, *own]


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def faults(module: str, source: str, package: bool = False) -> list[str]:
    found = []
    mine = row(module, MAY_IMPORT)
    if mine is None:
        return [f"{module} has no row in MAY_IMPORT"]
    for name in imports(module, package, source):
        top, _, rest = name.partition(".")
        if top == "mlx" and any(module == a or module.startswith(a + ".") for a in NO_MLX):
            found.append(f"{module} imports {name}")
            continue
        if top == "mlxspec":
            theirs = rest or "mlxspec"
            allowed = {*MAY_IMPORT[mine]}
            if theirs != module and not any(
                theirs == a or theirs.startswith(a + ".") for a in allowed
            ):
                found.append(f"{module} imports {name}")
        elif top in LIBRARIES and not any(
            module == a or module.startswith(a + ".") for a in LIBRARIES[top]
        ):
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize(
    ("module", "path"), list(modules()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_imports_point_down(module: str, path: Path) -> None:
    assert faults(module, path.read_text("utf-8"), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("types", "from mlxspec.config import Config"),
        ("text.chat", "import mlx.core as mx"),
        ("cache.blocks", "from mlx import core"),
        ("engine.scheduler", "from mlxspec.engine import engine"),
        ("engine.worker", "from mlxspec.text.chat import Prompt"),
        ("model.runner", "def f():\n    from mlxspec.cache.blocks import BlockPool"),
        ("server.app", "import mlx.core"),
        ("cli", "import starlette.applications"),
        ("service.client", "from mlxspec.server.app import create_app"),
        ("novelty", "import json"),
    ],
)
def test_the_rule_is_kept(module: str, source: str) -> None:
    assert len(faults(module, source)) == 1


HEAVY = "mlx mlx_lm numpy transformers starlette uvicorn pydantic prometheus_client huggingface_hub"


def test_the_command_starts_light() -> None:
    code = "import sys, mlxspec.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    assert "mlxspec" in done.stdout.split()
    assert set(done.stdout.split()) & set(HEAVY.split()) == set()

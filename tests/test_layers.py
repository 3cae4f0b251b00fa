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

PLAIN = {"mlxspec", "types", "config"}
MODEL = PLAIN | {"blas", "kernels", "model"}
STEP = MODEL | {"speculate", "engine.blocks", "engine.groups", "engine.pace", "engine.scheduler"}
ENGINE = MODEL | {"speculate", "engine"}
SERVER = ENGINE | {"metrics", "text", "server"}

# A row holds for the modules below it too, unless they have their own. `mlxspec` is the package itself.
MAY_IMPORT = {
    "mlxspec": set(),
    "types": set(),
    "config": set(),
    "blas": PLAIN,
    "metrics": PLAIN,
    "kernels": PLAIN | {"kernels", "blas"},
    "model": MODEL,
    "speculate": MODEL | {"speculate"},
    "text": PLAIN | {"text"},
    "engine": PLAIN | {"engine.blocks"},
    "engine.blocks": PLAIN,
    "engine.groups": PLAIN | {"engine.blocks", "engine.snapshots"},
    "engine.scheduler": PLAIN | {"engine.blocks", "engine.groups", "engine.pace"},
    "engine.constrain": PLAIN,
    "engine.disk": PLAIN | {"engine.runfile", "engine.runindex"},
    "engine.runindex": PLAIN | {"engine.runfile"},
    "engine.runfile": PLAIN,
    "engine.memory": PLAIN | {"engine.groups"},
    "engine.pressure": PLAIN | {"engine.memory"},
    "engine.tier": PLAIN | {"engine.blocks", "engine.disk", "engine.groups", "engine.runfile"},
    "engine.engine": STEP | {"engine.constrain", "engine.disk", "engine.pressure", "engine.tier"},
    "engine.start": STEP
    | {"engine.engine", "engine.memory", "engine.disk", "engine.runfile", "engine.snapshots", "engine.tier"}
    | {"engine.known"},
    "engine.known": MODEL | {"engine.runfile", "speculate.depth"},
    "engine.fleet": STEP | {"engine.engine", "engine.pressure"},
    "engine.worker": ENGINE,
    "server": SERVER | {"chosen"},
    "service": SERVER | {"service", "chat"},
    "stock": MODEL | {"chosen", "service.status"},
    "verbs": PLAIN | {"chat", "service", "stock"},
    "chat": PLAIN,
    "launch": PLAIN | {"chat"},
    "cache": PLAIN | {"engine.runfile"},
    "chosen": ENGINE | {"text"},
    "doctor": ENGINE | {"chosen", "server.run", "service", "stock"},
    "bench": ENGINE | {"text", "bench", "chosen"},
    "cli": SERVER | {"service", "chat", "launch", "bench", "cache", "doctor", "verbs"},
    "__main__": {"cli"},
}

# Libraries that only some parts may import; every other library is free.
LIBRARIES = {
    "mlx": {
        "kernels",
        "model",
        "speculate",
        "engine.engine",
        "engine.fleet",
        "engine.worker",
        "engine.start",
        "engine.known",
        "bench.trace",  # stands round mx.async_eval
    },
    "mlx_lm": {"model", "text"},
    "transformers": {"model", "text"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "prometheus_client": {"metrics", "server"},
    "typer": {"cli", "verbs"},
    "matplotlib": {"bench.plot", "bench.curves"},
}


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
    """Dotted names, lazy imports included; `from a import b` is `a.b` where that is a module of ours."""
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
        if top == "mlxspec":
            theirs = rest or "mlxspec"
            allowed = {*MAY_IMPORT[mine]}
            if theirs != module and not any(theirs == a or theirs.startswith(a + ".") for a in allowed):
                found.append(f"{module} imports {name}")
        elif top in LIBRARIES and not any(module == a or module.startswith(a + ".") for a in LIBRARIES[top]):
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda x: x if isinstance(x, str) else "")
def test_imports_point_down(module: str, path: Path) -> None:
    assert faults(module, path.read_text("utf-8"), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("types", "from mlxspec.config import Config"),
        ("text.prompt", "import mlx.core as mx"),
        ("engine.blocks", "from mlx import core"),
        ("engine.blocks", "from mlxspec.engine.scheduler import Scheduler"),
        ("engine.blocks", "from .scheduler import Scheduler"),
        ("engine.scheduler", "from mlxspec.engine import engine"),
        ("engine.scheduler", "from mlxspec import model"),
        ("engine.engine", "from mlxspec.engine.worker import Worker"),
        ("engine.start", "from mlxspec.engine.worker import Worker"),
        ("engine.worker", "from mlxspec.text.prompt import Prompt"),
        ("engine.worker", "import mlx_lm.utils"),
        ("model.runner", "def f():\n    from mlxspec.engine.blocks import BlockPool"),
        ("speculate.lookup", "import mlxspec.text"),
        ("server.app", "import mlx.core"),
        ("server.app", "from mlxspec.cli import main"),
        ("cli", "import starlette.applications"),
        ("chat", "from mlxspec.server.app import create_app"),
        ("bench.run", "from mlxspec.server.app import create_app"),
        ("bench.table", "import matplotlib"),
        ("novelty", "import json"),
    ],
)
def test_the_rule_is_kept(module: str, source: str) -> None:
    assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.engine", "from mlxspec.engine.scheduler import Scheduler\nimport mlx.core as mx"),
        ("engine.worker", "from mlxspec.engine.engine import Engine"),
        ("model.runner", "from mlxspec.kernels import attention\nfrom mlx_lm.utils import load_model"),
        ("server.app", "from mlxspec.engine.worker import Worker\nfrom starlette.routing import Route"),
        ("cli", "from mlxspec import __version__\nfrom mlxspec.server.run import serve_model"),
    ],
)
def test_the_rule_lets_the_rest_pass(module: str, source: str) -> None:
    assert faults(module, source) == []


HEAVY = (
    "mlx mlx_lm numpy transformers starlette uvicorn pydantic prometheus_client huggingface_hub sentencepiece"
    " matplotlib"
)


def test_the_command_starts_light() -> None:
    code = "import sys, mlxspec.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert "mlxspec" in done.stdout.split()
    assert set(done.stdout.split()) & set(HEAVY.split()) == set()

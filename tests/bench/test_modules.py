"""Every module of bench/ can be imported, so that a rename in the package is seen there."""

from importlib import import_module
from pathlib import Path

import pytest

MODULES = [p.stem for p in Path(__file__).parents[2].glob("bench/*.py") if p.stem != "__main__"]


@pytest.mark.parametrize("name", MODULES)
def test_it_imports(name: str) -> None:
    import_module(f"bench.{name}")

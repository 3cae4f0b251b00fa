"""mlx-lm's modules, loaded so that their Metal kernels are the simulator's.

Rule: what is loaded here is a private copy; every other test has mlx-lm as it is without Metal.
"""

import importlib
import sys
from types import ModuleType

from tests import metalsim


def loaded() -> dict[str, ModuleType]:
    return {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "mlx_lm"
    }


def load(*names: str) -> list[ModuleType]:
    """Modules below mlx_lm. They make their kernels when they are imported, if a GPU seems to be
    there."""
    before = loaded()
    for name in before:
        del sys.modules[name]
    try:
        with metalsim.patch():
            importlib.import_module("mlx_lm.utils").can_run_metal = lambda: True
            return [importlib.import_module(f"mlx_lm.{name}") for name in names]
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)

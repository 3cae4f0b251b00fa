"""A rank's part of a model's weights in files of its own, which later starts read in place of the
model's: of those MLX reads each array whole, however little of it a rank keeps.

Rule: a part appears complete or not at all. Of each model and rank only the last one is kept.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_flatten

from mlxspec import log
from mlxspec.files import flush_file, format_size
from mlxspec.model.layout import weights
from mlxspec.progress import progress

ARRAYS = 64  # in a file


def use_part(model: Module, folder: Path) -> bool:
    """Let the model read its weights from the part in `folder`, once they are evaluated; False
    where there is none."""
    if not folder.is_dir():
        return False
    try:
        files: list[Any] = [mx.load(str(file)) for file in folder.glob("*.safetensors")]
        model.load_weights([pair for file in files for pair in file.items()])
        return True
    except (OSError, RuntimeError, ValueError) as error:
        log.warning("%s cannot be used: %s", folder, error)
        return False


def save_part(model: Module, folder: Path) -> None:
    """Save the model's weights, which are in memory, as the part in `folder`, in place of all that
    is beside it; not where the disk would then be short of space. What fails is logged."""
    size = weights(model)
    beside = folder.parent
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(0o700, parents=True)
        if shutil.disk_usage(beside).free < 2 * size:
            raise OSError(f"{format_size(2 * size)} must be free")
        with TemporaryDirectory(dir=beside) as scratch:
            made = Path(scratch, "part")
            made.mkdir()
            _write(model, made)
            made.rename(folder)
        log.info("%s: this rank's part of the weights, %s", folder, format_size(size))
    except (OSError, RuntimeError) as error:  # MLX reports a failed write as RuntimeError
        log.warning("%s: %s; each start reads all weights of the model", folder, error)


def _write(model: Module, folder: Path) -> None:
    arrays: Any = tree_flatten(model.parameters())
    with progress("Saving this rank's part of the weights") as report:
        for first in range(0, len(arrays), ARRAYS):
            file = folder / f"{first}.safetensors"
            mx.save_safetensors(str(file), dict(arrays[first : first + ARRAYS]))
            flush_file(file)
            report(first, len(arrays))

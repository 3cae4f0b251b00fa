"""What a start found out about a model, kept for the next start: its layout and its step times.

Rule: a cache file is named by a fingerprint of the model's files, the software, the machine and the
settings. A file that is damaged is ignored.
"""

import logging
import os
import platform
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from pydantic import BaseModel, ValidationError

from mlxspec import __version__, blas
from mlxspec.cache.disk import fingerprint
from mlxspec.config import Config
from mlxspec.files import write_atomic
from mlxspec.kernels.verify import KERNELS
from mlxspec.model.hub import cache_of
from mlxspec.model.layout import LayoutChoice
from mlxspec.speculate.controller import Costs

log = logging.getLogger("mlxspec")

Kernels = list[tuple[str, str, int, int]]  # (case, version, fewest rows, most rows)


class WarmupCache(BaseModel):
    """`prefill_seconds` are those of a warm-up prompt, 0: not measured. `costs` were measured with
    `kernels` in use."""

    layout: LayoutChoice
    prefill_seconds: float = 0.0
    costs: Costs | None = None
    kernels: Kernels = []

    @classmethod
    def load(cls, file: Path) -> "WarmupCache | None":
        """None where the file is missing or damaged."""
        try:
            return cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None

    def save(self, file: Path) -> None:
        """Failures are logged: the next start is slower. A layout that may be due to a lack of
        memory is not kept."""
        try:
            if self.layout.sure:
                write_atomic(file, self.model_dump_json().encode())
        except OSError as error:
            log.warning("%s: %s; the next start measures again", file, error.strerror)


def cache_file(model: Path, config: Config) -> Path:
    """The file for `model` under these settings."""
    package = Path(__file__).parents[1]
    sources = sorted(package.glob("*/*.py"))
    code = blake2b(b"".join(each.read_bytes() for each in sources))  # changes between releases too
    facts = versions() | {
        "mlxspec": __version__ + code.hexdigest(),
        "settings": f"{config.layout} {config.kv_bits} {config.block_size}",
        "machine": f"{platform.platform()} {platform.processor()} {mx.default_device()}",
        "blas": f"{blas.load()}, {os.cpu_count()} CPUs",
    }
    return cache_of(config) / "costs" / f"known-{fingerprint(model, facts)}.json"


def versions() -> dict[str, str]:
    """Those of what computes."""
    return {name: version(name) for name in ("mlx", "mlx-lm")}


def kernels_in_use() -> Kernels:
    used = [(name, v.way, v.least, v.most) for name, v in KERNELS.verdicts.items() if v.way]
    return sorted(used)
